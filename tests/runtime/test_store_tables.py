"""Whatever the core writes, the store gives back: all tables, by real traffic and real moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiercel.core
from playing import Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.effects import ReadLog
from tiercel.core.records import Entry, KeySet, StreamEntry
from tiercel.core.router import Router
from tiercel.core.topology import Stream
from tiercel.runtime.packed import encoder
from tiercel.runtime.store import Store
from tiercel.runtime.tables import TABLES

A, B = "op@a#0", "op@b#0"
CORE = Path(tiercel.core.__file__).parent
OF_INSTANCES = {"state", "move", "cursor"}
OF_DRIVERS = {"schema"}  # what is written before an instance begins


def encoded(value: Any) -> bytes:
    """Equal for what the store holds equal: payloads have no types of their own there."""
    return encoder.encode(value)


# -- scenes that write every table ---------------------------------------------------------------


def traffic(stage: Stage) -> Stage:
    stage.tell("a", m.Hello("p", "a life"), "p")
    for n in range(5):
        stage.produce("a", *((key_in(slot, i), n, n) for slot in range(4) for i in range(2)), watermark_ms=n)
        stage.produce("b", (key_in(0), n, n), producer="q")
    return stage


def after_moves() -> Stage:
    """A slot has moved, a key has moved and the operator was restarted."""
    stage = traffic(Stage().start())
    stage.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    stage.pass_ms(3_000)
    stage.move(KeySet(keys=frozenset({key_in(3)})), B, A, "pause", "m2")
    stage.pass_ms(3_000)
    stage.move(KeySet(slots=frozenset({1})), A, B, "restart", "m3")
    stage.pass_ms(200)
    return traffic(stage)


def in_the_middle() -> Stage:
    """A live move whose destination has shadow entries; the source is about to say where it stops."""
    stage = traffic(Stage().start())
    stage.withholds = lambda sender, to, message: (
        isinstance(message, m.Said | m.LaneReceipt)
        and isinstance(getattr(message, "message", message), m.Cut | m.LaneReceipt)
    )
    stage.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    stage.pass_ms(20)
    return traffic(stage)


def not_settled() -> Stage:
    """The destination emits for keys that are not yet ordinary keys of its own."""
    stage = traffic(Stage().start())
    stage.withholds = lambda sender, to, message: isinstance(getattr(message, "message", None), m.Settled)
    stage.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    stage.pass_ms(2_000)
    return traffic(stage)


def one_retired() -> Stage:
    """An instance that came, got nothing and went."""
    stage = traffic(Stage().start())
    stage.start("op@b#1")
    stage.tell("b", m.Retirement("op@b#1"), "controller")
    return traffic(stage)


def one_succeeded() -> Stage:
    """An instance that died, and one that shall take over from it."""
    stage = traffic(Stage().start())
    stage.stop(A)
    stage.tell("a", m.Succession("r1", A, ("op@a#1",)), "controller")
    return traffic(stage)


def with_dead_letters() -> Stage:
    return traffic(Stage(topology(kind="choosy"), kind="choosy").start())


def with_event_time() -> Stage:
    facts = topology(kind="windows")
    facts.streams["in"] = Stream("in", "a", logged=False, producers={"p": "a", "q": "b"})
    return traffic(Stage(facts, kind="windows").start())


SCENES: list[Callable[[], Stage]] = [
    after_moves,
    in_the_middle,
    not_settled,
    one_retired,
    one_succeeded,
    with_dead_letters,
    with_event_time,
]


@pytest.fixture(params=SCENES, ids=lambda scene: scene.__name__)
def stage(request: pytest.FixtureRequest) -> Stage:
    played: Stage = request.param()
    return played


@pytest.fixture
def stored(stage: Stage, tmp_path: Path) -> Iterator[dict[str, Store]]:
    """Every machine's writes, in order, in a store of its own that was closed and opened again."""
    names = ["a", "b", A, B]
    for number, name in enumerate(names):
        store = Store(tmp_path / str(number), "os")
        for write in stage.writes[name]:
            if write.seq <= store.written:  # of the machine's next life
                store.close()
                store = Store(tmp_path / str(number), "os")
            store.add(write)
            store.commit()
        store.close()
    stores = {name: Store(tmp_path / str(number), "os") for number, name in enumerate(names)}
    yield stores
    for store in stores.values():
        store.close()


# -- promises ------------------------------------------------------------------------------------


def test_the_store_knows_every_table_that_the_core_writes_and_no_other() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CORE.rglob("*.py")))
    written = set(re.findall(r"step\.put\(\s*\(\s*\"(\w+)\"", source))
    assert written | OF_INSTANCES | OF_DRIVERS == set(TABLES)


def test_the_scenes_write_every_table() -> None:
    stages = [scene() for scene in SCENES]
    written = {key[0] for s in stages for writes in s.writes.values() for w in writes for key in w.puts}
    assert written | OF_DRIVERS == set(TABLES)


def test_all_that_a_machine_wrote_is_found_by_its_next_life(stage: Stage, stored: dict[str, Store]) -> None:
    for name, store in stored.items():
        expected = {k: v for k, v in stage.disks[name].items() if k[0] != "inbox"}
        found = store.items()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert type(found[key]) is type(value), key
            assert encoded(found[key]) == encoded(value), key


def test_a_log_of_either_kind_comes_back_as_what_it_is(stage: Stage, stored: dict[str, Store]) -> None:
    for site in ("a", "b"):
        logs = {k[1] for k in stage.disks[site] if k[0] == "inbox"}
        assert "op" in logs
        for name in logs:
            expected = stage.read(site, ReadLog(name, 0, 10_000, ""))
            found = stored[site].read_log(name, 0, 10_000)
            assert {type(e) for e in found} == {Entry if name == "op" else StreamEntry}
            assert encoded(found) == encoded(expected)
            if len(expected) > 2:
                after, limit = expected[0].offset, len(expected) - 2
                assert encoded(stored[site].read_log(name, after, limit)) == encoded(expected[1:-1])


def test_a_router_that_begins_from_the_store_is_the_one_that_wrote_it(
    stage: Stage, stored: dict[str, Store]
) -> None:
    for site in ("a", "b"):
        old: Router = stage.machines[site]
        new = Router(site, stage.topology, stage.settings, 2, stored[site].items())
        for name, inbox in old.inboxes.items():
            again = new.inboxes[name]
            assert (again.offset, again.time_ms, again.watermark_ms, again.trimmed) == (
                inbox.offset,
                inbox.time_ms,
                inbox.watermark_ms,
                inbox.trimmed,
            )
            assert again.table.slots == inbox.table.slots
            assert again.table.overrides == inbox.table.overrides
            assert {k: v for k, v in again.marks.items() if v} == {k: v for k, v in inbox.marks.items() if v}
            assert (again.counts, again.readers, again.emitted) == (
                inbox.counts,
                inbox.readers,
                inbox.emitted,
            )
            assert again.pauses == inbox.pauses
        for name, stream in old.streams.items():
            assert (new.streams[name].offset, new.streams[name].received) == (stream.offset, stream.received)
        assert new.producers.marks == old.producers.marks
        assert {k: sorted(lane.frames) for k, lane in new.lanes.items() if lane.frames} == {
            k: sorted(lane.frames) for k, lane in old.lanes.items() if lane.frames
        }
        assert {k: d.phase for k, d in new.departures.items()} == {
            k: d.phase for k, d in old.departures.items()
        }
        assert (new.ended, new.merged) == (old.ended, old.merged)
