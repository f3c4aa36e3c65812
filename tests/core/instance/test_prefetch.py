"""Prefetch of evicted keys: an instance names the state that an event needs, and gets it before the event."""

from __future__ import annotations

from typing import Any

import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.events import Event, Received, StateRead, TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Compare, Entry, Row, Tick
from tiercel.core.settings import Settings

ME, OTHER = "op@a#0", "op@a#1"
KEYS = [key_in(slot, number) for slot in (0, 1) for number in range(6)]  # of this instance
FIRST = KEYS[0]


class Play:
    """Two instances of one site; the first has processed a row of each key, and has evicted all of them."""

    def __init__(self, kind: str = "chained", **settings: Any) -> None:
        limits = Settings(**{"memory_bytes_max": 1, "checkpoint_ms": 1e6, "slice_keys": 100} | settings)
        self.driver = SmallDeployment(topology(["a"], kind, instances=(ME, OTHER)), limits, kind).start()
        self.driver.produce("a", *[self.row(key) for key in KEYS])
        self.fire(TimerKind.CHECKPOINT)
        while (ME, Timer(TimerKind.SLICE)) in self.driver.timers:
            self.fire(TimerKind.SLICE)
        assert set(self.machine.space.evicted) == set(KEYS)

    @staticmethod
    def row(key: bytes) -> Row:
        return (key, 0, ("x", 1))

    def fire(self, kind: TimerKind) -> None:
        self.driver.timers.pop((ME, Timer(kind)), None)
        self.driver.handle(ME, TimerFired(Timer(kind)))

    @property
    def machine(self) -> Instance:
        found: Instance = self.driver.machines[ME]
        return found

    def dispatch(self, *parts: list[Row], control: Any = None, time_ms: int = 2_000) -> Received:
        """The next entries of the inbox, and a control record behind them."""
        at = self.machine.applied + 1
        entries = [Entry(at + n, time_ms, {ME: rows}) for n, rows in enumerate(parts)]
        if control is not None:
            entries.append(Entry(at + len(parts), time_ms, {}, control))
        return Received("a", m.Dispatch(entries))

    def missing(self, event: Event) -> set[bytes]:
        return {place[2] for place in self.machine.missing_state(event)}

    def read(self, places: tuple[StorageKey, ...]) -> None:
        assert self.machine.on_event(StateRead(self.driver.versions(ME, places)), self.driver.now_ms) == []

    def handle(self, event: Event) -> list[Any]:
        return self.machine.on_event(event, self.driver.now_ms)


def test_an_event_of_an_evicted_key_is_handled_after_its_state_was_read() -> None:
    play = Play()
    event = play.dispatch([play.row(FIRST)])
    missing = play.machine.missing_state(event)
    assert [place[2] for place in missing] == [FIRST]
    play.read(missing)
    play.handle(event)
    assert set(play.machine.space.keys) == {FIRST}


def test_handling_an_event_whose_state_was_not_read_raises() -> None:
    play = Play()
    with pytest.raises(CoreBug, match="is not in memory"):
        play.handle(play.dispatch([play.row(FIRST)]))


def test_asking_for_missing_state_changes_nothing() -> None:
    play = Play("sessions")
    event = play.dispatch([play.row(FIRST)], control=Tick(), time_ms=60_000)
    assert play.machine.missing_state(event) == play.machine.missing_state(event)
    assert set(play.machine.space.evicted) == set(KEYS)
    assert play.machine.space.memory_limit.reads == 0


def test_a_dispatch_misses_the_keys_of_all_its_rows_once_each() -> None:
    play = Play()
    event = play.dispatch([play.row(FIRST), play.row(KEYS[1])], [play.row(FIRST), play.row(b"new")])
    assert sorted(place[2] for place in play.machine.missing_state(event)) == sorted(KEYS[:2])


def test_replayed_rows_need_no_state() -> None:
    play = Play()
    replayed = Received("a", m.Dispatch([Entry(play.machine.applied, 2_000, {ME: [play.row(FIRST)]})]))
    assert play.missing(replayed) == set()


def test_a_tick_misses_the_keys_whose_timers_it_makes_due_and_no_others() -> None:
    play = Play("sessions")
    due_ms = min(expiry for expiry, _ in play.machine.space._heap)
    assert play.missing(play.dispatch(control=Tick(), time_ms=due_ms - 1)) == set()
    assert play.missing(play.dispatch(control=Tick(), time_ms=due_ms)) == set(KEYS)


def test_nothing_is_missing_while_no_key_is_evicted() -> None:
    play = Play(memory_bytes_max=1)
    play.driver.produce("a", *[play.row(key) for key in KEYS])
    assert not play.machine.space.evicted
    assert play.machine.missing_state(play.dispatch([play.row(FIRST)])) == ()


def test_prefetched_state_is_dropped_after_the_next_event() -> None:
    play = Play()
    event = play.dispatch([play.row(FIRST)])
    play.read(play.machine.missing_state(event))
    play.handle(Received("a", m.Confirmed(play.machine.incarnation, 0, 0)))
    with pytest.raises(CoreBug, match="is not in memory"):
        play.handle(event)


def test_no_key_is_evicted_between_two_entries_of_a_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that an entry starts may evict keys, and a later entry of the dispatch may need them."""
    play = Play()
    event = play.dispatch([play.row(FIRST)], [play.row(KEYS[1])])
    play.read(play.machine.missing_state(event))
    space, evicted = play.machine.space, list[bool]()
    original = play.machine.processing.process

    def process(step: Any, entry: Entry) -> None:
        original(step, entry)
        evicted.append(space.memory_limit.make_room(100, dict.fromkeys(KEYS, 1)))

    monkeypatch.setattr(play.machine.processing, "process", process)
    play.handle(event)
    assert evicted == [False, False]


# -- moves -----------------------------------------------------------------------------------------


def capturing(**settings: Any) -> Play:
    """A live move of the first slot, of which nothing is captured yet."""
    play = Play(**settings)
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.Captured)
    play.driver.move(KeySet(slots=frozenset({0})), ME, OTHER)
    assert play.machine.senders["m1"].queue
    return play


def test_a_capture_misses_about_as_many_keys_as_its_next_chunk_takes() -> None:
    play = capturing(chunk_keys_max=2)
    sender = play.machine.senders["m1"]
    assert sender.queue is not None
    assert (
        play.missing(TimerFired(Timer(TimerKind.CAPTURE, "m1")))
        == set(sender.queue.ahead(2))
        <= set(KEYS[:6])
    )
    assert len(sender.queue.ahead(2)) == 2
    assert play.missing(TimerFired(Timer(TimerKind.CAPTURE, "unknown"))) == set()


def test_a_capture_ends_its_chunk_before_a_key_that_was_not_read() -> None:
    play = capturing(chunk_keys_max=4)
    missing = play.machine.missing_state(TimerFired(Timer(TimerKind.CAPTURE, "m1")))
    assert len(missing) == 4
    play.read(missing[:3])
    play.handle(TimerFired(Timer(TimerKind.CAPTURE, "m1")))
    sender = play.machine.senders["m1"]
    assert set(sender.captured_at) == {place[2] for place in missing[:3]}
    assert sender.queue is not None
    assert len(sender.queue.ahead(100)) == 3
    assert set(play.machine.space.evicted) == set(KEYS), "a capture leaves keys evicted"


def test_a_comparison_misses_the_keys_that_changed_since_their_capture() -> None:
    play = capturing()
    sender = play.machine.senders["m1"]
    sender.touched = {FIRST, b"unknown"}
    assert play.missing(play.dispatch(control=Compare("m1"))) == {FIRST}


@pytest.mark.parametrize("strategy", ["pause", "restart"])
def test_a_move_that_flips_first_reads_its_keys_chunk_by_chunk(strategy: str) -> None:
    play = Play()
    seen: list[set[bytes]] = []
    original = play.driver.read_state

    def read_state(name: str, event: Event) -> None:
        if name == ME and (missing := play.machine.missing_state(event)):
            seen.append({place[2] for place in missing})
        original(name, event)

    play.driver.read_state = read_state  # type: ignore[method-assign]
    play.driver.move(KeySet(slots=frozenset({0})), ME, OTHER, strategy)
    play.driver.advance_ms(5_000)
    assert play.driver.owner_of(FIRST, at="a") == OTHER
    assert set.union(*seen) >= set(KEYS[:6])
    assert {key for key in KEYS[:6] if play.driver.has_state(OTHER, key)} == set(KEYS[:6])


@pytest.mark.parametrize("strategy", ["live", "pause", "restart"])
def test_a_restarted_source_sets_aside_keys_that_have_moved(strategy: str) -> None:
    """Its keys are known from `CheckpointLoaded` on, and its role retains them in the same event."""
    play = Play(retry_ms=1e6)
    withheld = m.Forget | m.DestinationCheckpointed
    play.driver.withholds = lambda sender, to, message: isinstance(
        getattr(message, "message", message), withheld
    )
    play.driver.move(KeySet(slots=frozenset({0})), ME, OTHER, strategy)
    play.driver.advance_ms(2_000)
    assert play.machine.senders
    play.driver.restart(ME)
    (sender,) = play.machine.senders.values()
    assert set(sender.retained_state) == set(KEYS[:6])
    assert not any(play.machine.space.has(key) for key in KEYS[:6])
    assert not sender.captured_at, "no key is read before its chunk is sent"


def test_a_restarted_source_keeps_keys_that_moved_back() -> None:
    """Their route is newer than the move that left, so their stored epochs decide: these are read."""
    play = Play()
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.Forget) and message.move == "m1"
    play.driver.move(KeySet(slots=frozenset({0})), ME, OTHER)
    play.driver.advance_ms(3_000)
    play.driver.move(KeySet(slots=frozenset({0})), OTHER, ME, name="m2")
    play.driver.advance_ms(3_000)
    play.fire(TimerKind.CHECKPOINT)
    play.driver.advance_ms(100)
    assert all(play.machine.space.has(key) for key in KEYS)
    play.driver.restart(ME)
    play.driver.advance_ms(100)
    assert all(play.machine.space.has(key) for key in KEYS)
