"""Batch tasks: rows of a user's micro-batch are appended once, and each attempt reads the same outputs."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from machines_in_memory import SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.batch_client import BatchClient
from tiercel.core.logs.batches import BatchTable
from tiercel.core.machine.events import Connected
from tiercel.core.machine.names import TimerKind
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Output, Row

QUERY = "q"
INSTANCES = ("op@a#0", "op@a#1")


def deployment() -> SmallDeployment:
    return SmallDeployment(topology(("a",), instances=INSTANCES)).start()


class Task:
    """One attempt of a batch task."""

    def __init__(
        self, site: SmallDeployment, batch: int, partition: int = 0, name: str = "task", query: str = QUERY
    ) -> None:
        self.site, self.name = site, name
        self.client = BatchClient("a", "out")
        site.machines[name] = self.client
        site.handle(name, Connected("a"))
        site.handle("a", Connected(name))
        self.do(self.client.begin(m.BatchTask(query, batch, partition), "in"))

    def do(self, effects: list) -> None:
        self.site.perform(self.name, effects)
        self.site.run()

    def send(self, *frames: list[Row]) -> Task:
        for rows in frames:
            self.do(self.client.submit("in", rows, repr(rows).encode()))
        return self

    def end(self) -> list[Output]:
        self.do(self.client.end())
        return self.outputs()

    def outputs(self) -> list[Output]:
        outputs, effects = self.client.take()
        self.do(effects)
        return outputs


def rows(*values: int, slot: int = 0) -> list[Row]:
    return [(key_in(slot), 0, value) for value in values]


def values(outputs: list[Output]) -> list[int]:
    """Which inputs have come out."""
    return sorted(o.row[2][0] if isinstance(o.row[2], list | tuple) else o.row[2] for o in outputs)


def log_rows(site: SmallDeployment) -> int:
    return sum(len(part) for entry in site.log("a") for part in entry.parts.values())


def test_a_task_gets_the_outputs_of_its_own_rows() -> None:
    site = deployment()
    one, two = Task(site, 0, 0, "one"), Task(site, 0, 1, "two")
    one.send(rows(1, 2))
    two.send(rows(3, slot=3), rows(4))
    one.send(rows(5, slot=3))
    site.produce("a", *rows(6))
    first, second = one.end(), two.end()
    assert one.client.done
    assert two.client.done
    assert len(first) == 3
    assert len(second) == 2
    offsets = {o.offset for o in first}
    assert not offsets & {o.offset for o in second}


def test_a_second_attempt_appends_nothing_and_reads_the_same_outputs() -> None:
    site = deployment()
    first = Task(site, 0).send(rows(1, 2), rows(3)).end()
    before = log_rows(site)
    again = Task(site, 0, name="again").send(rows(1, 2), rows(3))
    assert again.end() == first
    assert log_rows(site) == before
    frames = [msg for _, _, msg in site.sent if isinstance(msg, m.BatchFrame)]
    assert [bool(frame.rows) for frame in frames] == [True, True, False, False], "known rows are not sent"


def test_an_attempt_that_died_half_way_is_continued() -> None:
    site = deployment()
    Task(site, 0).send(rows(1, 2))
    site.stop("task")
    outputs = Task(site, 0, name="again").send(rows(1, 2), rows(3)).end()
    assert len(outputs) == 3
    assert log_rows(site) == 3


def test_copies_of_a_task_that_run_at_once_have_the_same_outputs() -> None:
    site = deployment()
    one, two = Task(site, 0, name="one"), Task(site, 0, name="two")
    one.send(rows(1))
    two.send(rows(1), rows(2))
    one.send(rows(2))
    assert one.end() == two.end()
    assert log_rows(site) == 2


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ([rows(1, 9), rows(3)], "frame 0 has other rows than at its first attempt"),
        ([rows(1, 2)], "1 frames of rows instead of 2"),
    ],
)
def test_other_rows_in_a_second_attempt_are_found_and_named(again: list[list[Row]], said: str) -> None:
    site = deployment()
    Task(site, 0, 7).send(rows(1, 2), rows(3)).end()
    second = Task(site, 0, 7, name="again").send(*again)
    second.end()
    assert said in second.client.refused
    assert "batch 0 of query q, partition 7" in second.client.refused
    assert log_rows(site) == 3


def test_a_batch_that_is_over_and_a_second_query_are_refused() -> None:
    site = deployment()
    Task(site, 0).send(rows(1)).end()
    Task(site, 4).send(rows(2)).end()
    assert "batch 0 of query q is over: batch 4 has begun" in Task(site, 0, name="late").client.refused
    other = Task(site, 0, name="other", query="z").client.refused
    assert "query z sends rows that query q sends already" in other


def test_a_query_that_comes_from_another_deployment_is_refused() -> None:
    refused = Task(deployment(), 5).client.refused
    assert "query q is at batch 5, and this deployment holds none before it" in refused
    assert "storage= belongs to checkpointLocation" in refused


def test_a_restarted_router_knows_the_batch() -> None:
    site = deployment()
    first = Task(site, 0).send(rows(1, 2), rows(3)).end()
    site.stop("task")
    site.restart("a")
    again = Task(site, 0, name="again").send(rows(1, 2), rows(3))
    assert again.end() == first
    assert log_rows(site) == 3


def test_the_next_batch_forgets_the_frames_of_the_last() -> None:
    site = deployment()
    Task(site, 0, 0).send(rows(1), rows(2)).end()
    Task(site, 1, 1, name="next").send(rows(3)).end()
    known = sorted(key for key in site.disks["a"] if key[0] in ("batch_task", "batch_frame"))
    assert known == [("batch_frame", "in", 1, 0), ("batch_task", "in", 1)]


def test_a_task_waits_for_an_instance_that_is_down() -> None:
    site = deployment()
    site.stop("op@a#1")
    keys = [key_in(slot) for slot in range(SLOTS)]
    lost = [key for key in keys if site.owner_of(key) == "op@a#1"]
    task = Task(site, 0).send([(key, 0, n) for n, key in enumerate(keys)])
    assert lost
    assert task.end() == []
    assert not task.client.done
    site.start("op@a#1")
    assert len(task.outputs()) == SLOTS
    assert task.client.done


def test_a_task_waits_for_what_the_destination_of_a_move_withholds() -> None:
    site = deployment()
    Task(site, 0).send(rows(1)).end()
    source = site.owner_of(key_in(0))
    to = next(name for name in INSTANCES if name != source)
    site.withholds = lambda sender, receiver, message: isinstance(message, m.EmitFrom)
    site.move(KeySet(slots=frozenset((0,))), source, to)
    for _ in range(20):
        site.fire_timers([key for key in site.timers if key[1].kind is not TimerKind.TICK])
        if site.withheld:
            break
    assert site.withheld, "the move has flipped, and its destination may not emit yet"
    task = Task(site, 1, name="moved").send(rows(2))
    assert task.end() == []
    assert not task.client.done
    site.release_withheld()
    assert len(task.outputs()) == 1
    assert task.client.done


def test_dead_letters_of_a_task_are_logged_once() -> None:
    site = deployment()
    for name in ("one", "two"):
        task = Task(site, 0, name=name).send(rows(1))
        task.do(task.client.submit("dead", [(b"k", 0, ("no", b"k", 1, b""))], b"d"))
        assert len(task.end()) == 1
    assert len(site.outputs("dead")) == 1


class Anchor:
    """What the anchor of a query with timers asks before a batch, and yields in it."""

    def __init__(self, site: SmallDeployment) -> None:
        self.site, self.planned, self.asked = site, 0, 0

    def last(self) -> int:
        """The last place with outputs of timers, between two batches."""
        self.asked += 1
        name = f"planner-{self.asked}"
        self.site.send("a", m.TimerQuery("in", self.planned, settled=True), name)
        replies: list[m.TimerPlaces] = self.site.messages("a", name, m.TimerPlaces)
        return replies[-1].last if replies else self.planned

    def read(self, batch: int, until: int, name: str) -> list[Output]:
        client = BatchClient("a", "out")
        self.site.machines[name] = client
        self.site.handle(name, Connected("a"))
        self.site.handle("a", Connected(name))
        task = m.BatchTask(QUERY, batch, -1)
        self.site.perform(name, client.begin(task, "in", (self.planned, until)))
        self.site.run()
        self.site.perform(name, client.end())
        self.site.run()
        outputs, effects = client.take()
        self.site.perform(name, effects)
        assert client.done, client.refused
        self.site.stop(name)
        return outputs


def with_timers() -> SmallDeployment:
    facts = topology(("a",), kind="sessions", instances=INSTANCES)
    facts.streams["out"] = msgspec.structs.replace(facts.streams["out"], in_query=True)
    return SmallDeployment(facts, kind="sessions").start()


def test_a_batch_yields_no_outputs_of_timers_that_came_after_it_was_planned() -> None:
    """Two instances fire timers at one tick; their outputs are two entries of the log, planned one by one."""
    site, anchor = with_timers(), Anchor(with_timers())
    anchor.site = site
    anchor.read(0, 0, "anchor-0")
    keys = [next(key_in(s) for s in range(SLOTS) if site.owner_of(key_in(s)) == i) for i in INSTANCES]
    task = Task(site, 0).send([(key, 0, n) for n, key in enumerate(keys)])
    rows_out = task.end()
    site.advance_ms(60_000)
    site.advance_ms(60_000)
    last = anchor.last()
    assert last >= 2, "each instance has made an entry"
    yielded = []
    for n in range(1, last + 1):
        yielded.append(anchor.read(n, n, f"anchor-{n}"))
        anchor.planned = n
    every = [(o.key, o.offset, o.n) for found in [rows_out, *yielded] for o in found]
    assert len(every) == len(set(every)) == len(site.outputs())


def timers_come_once(seed: int) -> None:
    """Rows set timers; ticks fire them between and during batches; processes restart, keys move."""
    random = Random(seed)
    site, anchor = with_timers(), Anchor(with_timers())
    anchor.site = site
    yielded: list[Output] = []
    moves = 0
    for batch in range(14):
        until = anchor.last()
        if batch and until > anchor.planned:
            for attempt in range(random.randint(0, 2)):
                again = anchor.read(batch, until, f"anchor-{batch}-{attempt}")
                assert again == anchor.read(batch, until, f"anchor-{batch}-{attempt}-again")
        if until > anchor.planned or not batch:
            yielded += anchor.read(batch, until, f"anchor-{batch}")
            anchor.planned = until
        frames = [
            [(key_in(random.randrange(SLOTS)), 0, n)] for n in range(random.randint(0, 3) * (batch < 8))
        ]
        task = Task(site, batch, 0, f"task-{batch}").send(*frames)
        what = random.random()
        if what < 0.2:
            site.restart("a")
            site.handle(task.name, Connected("a"))
        elif what < 0.4:
            site.restart(random.choice(INSTANCES))
        elif what < 0.6:
            slot = random.randrange(SLOTS)
            source = site.owner_of(key_in(slot))
            moves += 1
            to = next(i for i in INSTANCES if i != source)
            site.move(KeySet(slots=frozenset((slot,))), source, to, "live", f"m{moves}")
        site.advance_ms(random.choice([1, 150, 1_000]))
        found = task.end()
        for _ in range(100):
            if task.client.done:
                break
            site.advance_ms(250)
            found += task.outputs()
        assert task.client.done
        yielded += found
        site.stop(task.name)
        site.advance_ms(random.choice([1, 150, 3_000]))
    for batch in range(14, 17):
        site.advance_ms(3_000)
        until = anchor.last()
        yielded += anchor.read(batch, until, f"anchor-{batch}")
        anchor.planned = until
    ids = [(o.key, o.epoch, o.offset, o.n) for o in yielded]
    assert len(ids) == len(set(ids))
    assert sorted(ids) == sorted((o.key, o.epoch, o.offset, o.n) for o in site.outputs())
    assert anchor.planned > 0, "some outputs are of timers"


@pytest.mark.parametrize("seed", range(30))
def test_outputs_of_timers_come_once_with_a_later_batch(seed: int) -> None:
    timers_come_once(seed)


@pytest.mark.parametrize(
    ("rule", "instead"),
    [
        ("are_of_rows", lambda self, after, through: True),
        ("add_timers", lambda self, step, entry, offsets: None),
        ("forget_timers", lambda self, step, through: self.timers.clear()),
    ],
)
def test_outputs_of_timers_are_lost_without_each_rule_about_their_places(
    rule: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchTable, rule, instead)
    with pytest.raises((AssertionError, IndexError)):
        list(map(timers_come_once, range(10)))


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_exactly_once_through_moves_restarts_and_attempts(seed: int) -> None:
    """Three partitions a batch; any process may restart, keys move, tasks die and are tried again."""
    random = Random(seed)
    site = deployment()
    yielded: list[Output] = []
    number = moves = 0
    for batch in range(6):
        for partition in range(3):
            frames: list[list[Row]] = []
            for _ in range(random.randint(0, 3)):
                frames.append([])
                for _ in range(random.randint(1, 4)):
                    number += 1
                    frames[-1].append((key_in(random.randrange(SLOTS)), 0, number))
            for attempt in range(random.randint(1, 3)):
                name = f"task-{batch}-{partition}-{attempt}"
                task = Task(site, batch, partition, name)
                sent = frames if attempt == 0 else frames[: random.randint(0, len(frames))]
                for frame in sent:
                    task.send(frame)
                    what = random.random()
                    if what < 0.1:
                        site.restart("a")
                        site.handle(name, Connected("a"))
                    elif what < 0.25:
                        site.restart(random.choice(INSTANCES))
                    elif what < 0.5:
                        slot = random.randrange(SLOTS)
                        source = site.owner_of(key_in(slot))
                        to = next(i for i in INSTANCES if i != source)
                        moves += 1
                        strategy = random.choice(["live", "pause"])
                        site.move(KeySet(slots=frozenset((slot,))), source, to, strategy, f"m{moves}")
                    elif what < 0.8:
                        site.advance_ms(random.choice([1, 250, 2_000]))
                site.stop(name)
            last = Task(site, batch, partition, f"task-{batch}-{partition}-last").send(*frames)
            found = last.end()
            for _ in range(200):
                if last.client.done:
                    break
                site.advance_ms(250)
                found += last.outputs()
            assert last.client.done, last.client.refused or "the task never ends"
            assert len(found) == sum(map(len, frames))
            yielded += found
            site.stop(last.name)
    ids = [(o.key, o.epoch, o.offset, o.n) for o in yielded]
    assert len(ids) == len(set(ids)) == number
    assert sorted(ids) == sorted((o.key, o.epoch, o.offset, o.n) for o in site.outputs())
