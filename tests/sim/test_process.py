"""The simulated process: effects, timers, crashes, zombies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from simulated_process import LATENCY_MS, RecordingEndpoint, batch, entry, log_batch
from tiercel.core.machine.effects import (
    Effect,
    Exit,
    Launch,
    LoadCheckpoint,
    Note,
    ReadLog,
    Retire,
    Send,
    SetTimer,
    StorageKey,
)
from tiercel.core.machine.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.sim.engine.disk import Disk
from tiercel.sim.engine.network import Network
from tiercel.sim.engine.process import MachineFailed, Process
from tiercel.sim.engine.scheduler import Scheduler


class ScriptedMachine:
    """A machine that performs the orders of the test and records its events."""

    def __init__(self, incarnation: int = 1, items: dict[StorageKey, Any] | None = None) -> None:
        self.incarnation, self.items = incarnation, items or {}
        self.events: list[Event] = []
        self.clock: list[float] = []
        self.orders: list[Effect] = []  # asked for at the next event

    def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]:
        self.events.append(event)
        self.clock.append(now_ms)
        orders, self.orders = self.orders, []
        return orders

    def on_events(self, waiting: deque[Event], now_ms: float) -> Sequence[Effect]:
        """With turns: three at a time."""
        effects: list[Effect] = []
        for _ in range(min(3, len(waiting))):
            effects += self.on_event(waiting.popleft(), now_ms)
        return effects

    @property
    def messages(self) -> list[Any]:
        return [event.message for event in self.events if isinstance(event, Received)]


class ProcessUnderTest:
    """One process `p` with a puppet in it, and a peer `q` that only listens."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.network.declare("p", "q", LATENCY_MS)
        self.disk = Disk(self.scheduler, sync_ms=2.0, check_aliasing=True)
        self.incarnations: list[ScriptedMachine] = []
        self.process = Process(self.scheduler, self.network, "p", self._make, self.disk, **options)
        self.process.start()
        self.peer = RecordingEndpoint(self.scheduler, self.network, "q")
        self.scheduler.run(until_ms=50)
        assert self.network.connected("p", "q")

    def _make(self, incarnation: int, items: dict[StorageKey, Any]) -> ScriptedMachine:
        self.incarnations.append(ScriptedMachine(incarnation, items))
        return self.incarnations[-1]

    def order(self, *effects: Effect) -> None:
        """Have the current machine ask for these effects now."""
        self.incarnations[-1].orders = list(effects)
        self.process.deliver(TimerFired("order"))

    def advance_ms(self, duration_ms: float) -> None:
        self.scheduler.run(until_ms=self.scheduler.now_ms + duration_ms)


def test_every_effect_is_performed_in_order() -> None:
    hooks: list[Any] = []
    under_test = ProcessUnderTest(
        on_launch=lambda name: hooks.append(("launch", name)),
        on_retire=lambda name: hooks.append(("retire", name)),
        on_exit=lambda process, reason: hooks.append((process.name, reason)),
    )
    under_test.scheduler.story = []
    under_test.order(
        Send("q", "hello"),
        log_batch(1, 1, 2),
        ReadLog("i", 1, 10, "reader"),
        LoadCheckpoint(),
        SetTimer("t", 60.0),
        Note("a line"),
        Launch("new"),
        Retire("old"),
    )
    under_test.advance_ms(20)
    (incarnation,) = under_test.incarnations
    assert under_test.peer.messages == ["hello"]
    assert incarnation.events[2:] == [
        LogRead("i", "reader", [entry(2)]),
        CheckpointLoaded({}),  # the batch was not durable yet
        Durable(1),
        TimerFired("t"),
    ]
    assert any(line.endswith("note p a line") for line in under_test.scheduler.story)
    under_test.order(batch(2, x=1), Exit("done"), Send("q", "never sent"))
    under_test.advance_ms(20)
    assert hooks == [("launch", "new"), ("retire", "old"), ("p", "done")]
    assert not under_test.process.up
    assert under_test.disk.copy_durable()[("t", "x")] == 1  # a clean end loses nothing
    assert under_test.peer.messages == ["hello"]
    assert under_test.peer.connection_events == [Connected("p"), Disconnected("p")]


def test_a_timer_set_again_replaces_the_first_whether_earlier_or_later() -> None:
    under_test = ProcessUnderTest()
    (incarnation,) = under_test.incarnations
    for first_ms, second_ms in ((60.0, 80.0), (120.0, 100.0)):
        under_test.order(SetTimer("t", first_ms))
        under_test.order(SetTimer("t", second_ms))
        under_test.scheduler.run(until_ms=second_ms - 0.001)
        assert TimerFired("t") not in incarnation.events
        under_test.scheduler.run(until_ms=second_ms)
        assert incarnation.events.pop() == TimerFired("t")
    under_test.advance_ms(100)
    assert TimerFired("t") not in incarnation.events


def test_timers_follow_the_skewed_clock_of_the_process_and_are_never_early() -> None:
    for seed in range(20):
        offset_ms, drift = seed / 3, (seed - 10) / 997
        under_test = ProcessUnderTest(seed, clock_offset_ms=offset_ms, drift=drift)
        (incarnation,) = under_test.incarnations
        for n in range(50):
            due_ms = under_test.scheduler.now_ms * (1 + drift) + offset_ms + 7 + n / 7
            under_test.order(SetTimer("t", due_ms))
            under_test.advance_ms(20)
            assert incarnation.events[-1] == TimerFired("t")
            assert due_ms <= incarnation.clock[-1] < due_ms + 1e-6


def test_restarted_process_has_the_next_incarnation_and_the_content_of_its_disk() -> None:
    under_test = ProcessUnderTest()
    under_test.order(batch(1, x=1))
    under_test.advance_ms(10)
    under_test.order(batch(2, y=2), SetTimer("t", 65.0))
    under_test.process.crash(lose_unsynced=False)
    under_test.process.restart_after(3)
    under_test.process.restart_after(5)  # the earlier one wins
    under_test.advance_ms(50)
    first, second = under_test.incarnations
    assert (second.incarnation, second.items) == (2, {("t", "x"): 1, ("t", "y"): 2})
    assert Durable(2) not in first.events + second.events
    assert TimerFired("t") not in first.events + second.events
    assert under_test.peer.connection_events == [Connected("p"), Disconnected("p"), Connected("p")]


def test_a_stopped_process_is_not_restarted() -> None:
    under_test = ProcessUnderTest()
    under_test.process.crash()
    under_test.process.restart_after(5)
    under_test.process.stop()
    under_test.advance_ms(50)
    assert not under_test.process.up


@pytest.mark.parametrize("crash_at", [0, 1, 2, 3])
def test_crash_can_be_injected_before_and_after_every_effect(crash_at: int) -> None:
    def crash(process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        return crash_at if len(effects) == 3 else None

    under_test = ProcessUnderTest(before_effect=crash, on_crash=lambda process: process.restart_after(10))
    launched: list[str] = []
    under_test.process.on_launch = launched.append
    under_test.order(Launch("1"), Launch("2"), Launch("3"))
    assert launched == ["1", "2", "3"][:crash_at]
    assert not under_test.process.up
    under_test.advance_ms(50)
    assert under_test.process.incarnation == 2
    assert under_test.network.connected("p", "q")


def test_with_turns_a_machine_handles_several_waiting_events_in_one_step() -> None:
    events_in_step: list[int] = []
    under_test = ProcessUnderTest(
        turn_ms=4.0,
        before_effect=lambda process, event, effects: events_in_step.append(process.events_in_step),
    )
    (incarnation,) = under_test.incarnations
    under_test.advance_ms(10)
    incarnation.events.clear()
    events_in_step.clear()
    for n in range(5):
        under_test.process.deliver(TimerFired(str(n)))
    assert incarnation.events == []
    under_test.advance_ms(4)
    assert incarnation.events == [TimerFired(str(n)) for n in range(5)]
    assert len(set(incarnation.clock[-5:])) == 1
    assert events_in_step == [3, 2]


def test_crash_within_a_turn_loses_the_waiting_events() -> None:
    def crash(process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        return 1 if process.events_in_step > 1 else None

    under_test = ProcessUnderTest(
        turn_ms=4.0, before_effect=crash, on_crash=lambda process: process.restart_after(10)
    )
    launched: list[str] = []
    under_test.process.on_launch = launched.append
    under_test.incarnations[0].orders = [Launch("1"), Launch("2")]
    for n in range(5):
        under_test.process.deliver(TimerFired(str(n)))
    under_test.advance_ms(50)
    first, second = under_test.incarnations
    assert launched == ["1"]
    assert first.events[-3:] == [TimerFired(str(n)) for n in range(3)]
    assert not any(isinstance(event, TimerFired) for event in second.events)


def test_messages_of_a_zombie_arrive_after_its_successor_has_connected() -> None:
    under_test = ProcessUnderTest()
    under_test.process.fork_zombie(for_ms=100)
    under_test.advance_ms(30)
    zombie, successor = under_test.incarnations
    story = [Connected("p"), Disconnected("p"), Connected("p")]
    assert under_test.peer.connection_events == story

    incarnation = under_test.process.zombies[0]
    zombie.orders = [Send("q", "from the zombie"), batch(7, z=7)]
    incarnation.take(TimerFired("order"))
    under_test.order(Send("q", "from the successor"))
    under_test.network.send("q", "p", "to p")
    under_test.advance_ms(20)
    assert sorted(under_test.peer.messages) == ["from the successor", "from the zombie"]
    assert (zombie.messages, successor.messages) == ([], ["to p"])
    assert Durable(7) in zombie.events
    assert under_test.disk.items() == {}  # what a zombie writes nobody else sees

    under_test.advance_ms(100)
    zombie.orders = [Send("q", "from beyond")]
    incarnation.take(TimerFired("order"))
    under_test.advance_ms(20)
    assert "from beyond" not in under_test.peer.messages
    assert under_test.process.zombies == []
    assert under_test.peer.connection_events == story  # its end is nobody's business


def test_zombie_keeps_its_unsynced_batches() -> None:
    under_test = ProcessUnderTest()
    under_test.order(batch(1, x=1))
    under_test.process.fork_zombie(for_ms=100)
    under_test.advance_ms(20)
    zombie, successor = under_test.incarnations
    assert Durable(1) in zombie.events
    assert Durable(1) not in successor.events
    assert successor.items in ({}, {("t", "x"): 1})


def test_failure_of_a_machine_names_process_event_seed_and_time() -> None:
    class Broken(ScriptedMachine):
        def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]:
            raise KeyError("oops")

    class Invalid(ScriptedMachine):
        def validate(self) -> None:
            raise AssertionError("one owner")

    for machine, cause in ((Broken, KeyError), (Invalid, AssertionError)):
        scheduler = Scheduler(5)
        network, disk = Network(scheduler), Disk(scheduler, sync_ms=1.0)
        process = Process(scheduler, network, "p", machine, disk, validate=True)
        process.start()
        scheduler.run(until_ms=3)
        with pytest.raises(
            MachineFailed, match=r"seed 5, 3\.000 ms: p#1 failed taking TimerFired"
        ) as failure:
            process.deliver(TimerFired("t"))
        assert isinstance(failure.value.__cause__, cause)
        assert failure.value.event == TimerFired("t")
