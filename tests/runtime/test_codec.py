"""Whatever the core writes, the store gives back: all tables, by real traffic and real moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tiercel.core
from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.machine.effects import ReadLog
from tiercel.core.machine.stored import TABLES
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Entry, Output, OutputFence, StreamEntry
from tiercel.core.model.topology import Stream
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.runtime.net.lazy_outputs import encoder
from tiercel.runtime.storage.store import Store

A, B = "op@a#0", "op@b#0"
CORE = Path(tiercel.core.__file__).parent
OF_INSTANCES = {"state", "move", "checkpoint"}
OF_DRIVERS = {"schema"}  # what is written before an instance begins


def encoded(value: Any) -> bytes:
    """Equal for what the store holds equal: payloads have no types of their own there."""
    return encoder.encode(value)


# -- scenes that write every table ---------------------------------------------------------------


def traffic(driver: SmallDeployment) -> SmallDeployment:
    driver.send("a", m.Hello("p", "an incarnation"), "p")
    for n in range(5):
        driver.produce("a", *((key_in(slot, i), n, n) for slot in range(4) for i in range(2)), watermark_ms=n)
        driver.produce("b", (key_in(0), n, n), producer="q")
    return driver


def after_moves() -> SmallDeployment:
    """A slot has moved, a key has moved and the operator was restarted."""
    driver = traffic(SmallDeployment().start())
    driver.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    driver.advance_ms(3_000)
    driver.move(KeySet(keys=frozenset({key_in(3)})), B, A, "pause", "m2")
    driver.advance_ms(3_000)
    driver.move(KeySet(slots=frozenset({1})), A, B, "restart", "m3")
    driver.advance_ms(200)
    return traffic(driver)


def in_the_middle() -> SmallDeployment:
    """A live move whose destination has shadow entries; the source is about to say where it stops."""
    driver = traffic(SmallDeployment().start())
    driver.withholds = lambda sender, to, message: (
        isinstance(message, m.FromInstance | m.SiteFrameReceipt)
        and isinstance(getattr(message, "message", message), m.SourceStopped | m.SiteFrameReceipt)
    )
    driver.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    driver.advance_ms(20)
    return traffic(driver)


def not_settled() -> SmallDeployment:
    """The destination emits for keys that are not yet ordinary keys of its own."""
    driver = traffic(SmallDeployment().start())
    driver.withholds = lambda sender, to, message: isinstance(
        getattr(message, "message", None), m.DestinationCheckpointed
    )
    driver.move(KeySet(slots=frozenset({0})), A, B, "live", "m1")
    driver.advance_ms(2_000)
    return traffic(driver)


def one_retired() -> SmallDeployment:
    """An instance that came, got nothing and went."""
    driver = traffic(SmallDeployment().start())
    driver.start("op@b#1")
    driver.send("b", m.Retirement("op@b#1"), "controller")
    return traffic(driver)


def one_succeeded() -> SmallDeployment:
    """An instance that died, and one that shall take over from it."""
    driver = traffic(SmallDeployment().start())
    driver.stop(A)
    driver.send("a", m.TakeoverRequest("r1", A, ("op@a#1",)), "controller")
    return traffic(driver)


def with_dead_letters() -> SmallDeployment:
    return traffic(SmallDeployment(topology(kind="choosy"), kind="choosy").start())


def with_event_time() -> SmallDeployment:
    facts = topology(kind="windows")
    facts.streams["in"] = Stream("in", "a", logged=False, producers={"p": "a", "q": "b"})
    return traffic(SmallDeployment(facts, kind="windows").start())


def with_batch_tasks() -> SmallDeployment:
    driver = SmallDeployment(topology(("a",))).start()
    task = m.BatchTask("query", 0, 3)
    driver.send("a", m.BatchBegin(task, "in"), "task")
    for n in range(2):
        driver.send("a", m.BatchFrame(task, n, "in", b"%d" % n, [(b"k", 0, n)]), "task")
    return driver


def with_timers_in_a_query() -> SmallDeployment:
    facts = topology(("a",), kind="sessions")
    facts.streams["out"] = msgspec.structs.replace(facts.streams["out"], in_query=True)
    driver = SmallDeployment(facts, kind="sessions").start()
    task = m.BatchTask("query", 0, 3)
    driver.send("a", m.BatchBegin(task, "in"), "task")
    driver.send("a", m.BatchFrame(task, 0, "in", b"0", [(b"k", 0, 1)]), "task")
    for _ in range(10):
        driver.advance_ms(500)
    driver.send("a", m.BatchFrame(task, 1, "in", b"1", [(b"k", 0, 2)]), "task")
    return driver


def with_feeds() -> SmallDeployment:
    """One batch is published, one half of the next, and one is staged."""
    driver = SmallDeployment(topology(("a",)), Settings(backlog_rows_max=2)).start()
    for batch in range(3):
        task = m.BatchTask("query", batch, 3, f"attempt-{batch}")
        driver.send("a", m.BatchBegin(task, "in"), "task")
        for n in range(5):
            driver.send("a", m.BatchFrame(task, n, "in", b"", [(b"k", 0, n)]), "task")
        if batch == 1:
            driver.stop("op@a#0")
        if batch < 2:
            commit = m.FeedCommit(m.BatchTask("query", batch, -1), "in", [m.StagedPart(task.attempt, 5)])
            driver.send("a", commit, "driver")
    return driver


def with_a_named_subscription() -> SmallDeployment:
    driver = SmallDeployment(settings=Settings(stream_entries_max=2, trim_entries_max=2)).start()
    driver.send("a", m.Subscribe("out", 0, "billing"), "reader")
    traffic(driver)
    driver.send("a", m.Consumed("out", 5, 5), "reader")
    return traffic(driver)


def with_forgotten_numbers() -> SmallDeployment:
    """More keys have gone to the other site than may be numbered."""
    return traffic(SmallDeployment(settings=Settings(numbered_keys_max=1)).start())


def with_a_broadcast_stream() -> SmallDeployment:
    facts = topology(broadcast="prices")
    facts.streams["prices"] = Stream("prices", "a", logged=False)
    driver = SmallDeployment(facts).start()
    driver.produce("a", (b"k", 0, b"1"), stream="prices")
    return traffic(driver)


def with_a_standby() -> SmallDeployment:
    driver = traffic(SmallDeployment(topology(("a", "b"), instances=(A, "op@a#1", B))).start())
    driver.send("a", m.SetStandby(A, "op@a#1"), "controller")
    return traffic(driver)


def with_devices() -> SmallDeployment:
    facts = topology()
    facts.streams["in"] = Stream("in", "a", logged=False, gap_ms=1_000, dead_letters="dead")
    driver = SmallDeployment(facts).start()
    for n in range(1, 5):
        keys = [key_in(slot) for slot in range(4)]
        driver.produce("a", *((key, 0, b"%d" % n) for key in keys), numbers=(n,) * 4)
    return driver


def behind_a_fence() -> SmallDeployment:
    """Outputs of a moved key that wait at the home for those of its source."""
    driver = traffic(SmallDeployment().start())
    output = Output(1, b"k", 1, 0, (b"k", 0, b"1"))
    driver.send("a", m.SiteFrame("out", "z@1", 1, [], None, [output], OutputFence("y@1", 9)), "b")
    return driver


SCENES: list[Callable[[], SmallDeployment]] = [
    after_moves,
    in_the_middle,
    not_settled,
    one_retired,
    one_succeeded,
    with_dead_letters,
    with_event_time,
    with_batch_tasks,
    with_feeds,
    with_timers_in_a_query,
    with_a_named_subscription,
    with_forgotten_numbers,
    with_a_broadcast_stream,
    with_a_standby,
    with_devices,
    behind_a_fence,
]


@pytest.fixture(params=SCENES, ids=lambda scene: scene.__name__)
def driver(request: pytest.FixtureRequest) -> SmallDeployment:
    played: SmallDeployment = request.param()
    return played


@pytest.fixture
def stored(driver: SmallDeployment, tmp_path: Path) -> Iterator[dict[str, Store]]:
    """Every machine's writes, in order, in a store of its own that was closed and opened again."""
    names = ["a", "b", A, B]
    for number, name in enumerate(names):
        store = Store(tmp_path / str(number), "os")
        for write in driver.writes[name]:
            if write.seq <= store.written:  # of the machine's next incarnation
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


def test_scenarios_write_every_table() -> None:
    stages = [scene() for scene in SCENES]
    written = {key[0] for s in stages for writes in s.writes.values() for w in writes for key in w.puts}
    assert written | OF_DRIVERS == set(TABLES)


def test_next_incarnation_finds_everything_that_a_machine_wrote(
    driver: SmallDeployment, stored: dict[str, Store]
) -> None:
    for name, store in stored.items():
        expected = {k: v for k, v in driver.disks[name].items() if k[0] != "inbox"}
        found = store.items()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert type(found[key]) is type(value), key
            assert encoded(found[key]) == encoded(value), key


def test_inbox_and_output_log_are_read_back_as_their_own_kind(
    driver: SmallDeployment, stored: dict[str, Store]
) -> None:
    for site in driver.topology.sites:
        logs = {k[1] for k in driver.disks[site] if k[0] == "inbox"}
        assert "op" in logs
        for name in logs:
            expected = driver.read(site, ReadLog(name, 0, 10_000, ""))
            found = stored[site].read_log(name, 0, 10_000)
            assert {type(e) for e in found} == {
                Entry if name == "op" or name.startswith("staged|") else StreamEntry
            }
            assert encoded(found) == encoded(expected)
            if len(expected) > 2:
                after, limit = expected[0].offset, len(expected) - 2
                assert encoded(stored[site].read_log(name, after, limit)) == encoded(expected[1:-1])


def test_router_recovered_from_its_store_equals_the_original(
    driver: SmallDeployment, stored: dict[str, Store]
) -> None:
    for site in driver.topology.sites:
        old: Router = driver.machines[site]
        new = Router(site, driver.topology, driver.settings, 2, stored[site].items())
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
            assert {k: v for k, v in again.sequencer.marks.items() if v} == {
                k: v for k, v in inbox.sequencer.marks.items() if v
            }
            assert (again.sequencer.counts, again.readers, again.emitted) == (
                inbox.sequencer.counts,
                inbox.readers,
                inbox.emitted,
            )
            assert again.pauses == inbox.pauses
        for name, stream in old.streams.items():
            assert (new.streams[name].offset, new.streams[name].received) == (stream.offset, stream.received)
        assert new.state.producers.marks == old.state.producers.marks
        assert {k: sorted(outbox.frames) for k, outbox in new.outboxes.items() if outbox.frames} == {
            k: sorted(outbox.frames) for k, outbox in old.outboxes.items() if outbox.frames
        }
        assert {k: d.phase for k, d in new.outgoing_moves.items()} == {
            k: d.phase for k, d in old.outgoing_moves.items()
        }
        assert new.migration.ended == old.migration.ended
