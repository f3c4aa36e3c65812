"""Promises of the simulated world: time, network, disk and processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tiercel.core.effects import (
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
    Write,
)
from tiercel.core.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.core.records import Entry
from tiercel.sim.disk import Disk, StoredValueChanged
from tiercel.sim.network import Endpoint, Network
from tiercel.sim.process import MachineFailed, Process
from tiercel.sim.world import NotQuiet, World

LATENCY_MS = 1.0


class Ear:
    """An endpoint that only remembers what it is told."""

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world, self.network, self.name = world, network, name
        self.events: list[tuple[float, Event]] = []
        self.endpoint: Endpoint = network.attach(name, self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append((self.world.now_ms, event))

    def die(self) -> None:
        self.network.detach(self.endpoint)

    @property
    def messages(self) -> list[Any]:
        return [event.message for _, event in self.events if isinstance(event, Received)]

    @property
    def connection_story(self) -> list[Event]:
        return [event for _, event in self.events if not isinstance(event, Received)]


class Puppet:
    """A machine that does what the test says and remembers what it is told."""

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


class Stage:
    """One process `p` with a puppet in it, and a peer `q` that only listens."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.network.declare("p", "q", LATENCY_MS)
        self.disk = Disk(self.world, sync_ms=2.0, check_aliasing=True)
        self.lives: list[Puppet] = []
        self.process = Process(self.world, self.network, "p", self._make, self.disk, **options)
        self.process.start()
        self.peer = Ear(self.world, self.network, "q")
        self.world.run(until_ms=50)
        assert self.network.connected("p", "q")

    def _make(self, incarnation: int, items: dict[StorageKey, Any]) -> Puppet:
        self.lives.append(Puppet(incarnation, items))
        return self.lives[-1]

    def order(self, *effects: Effect) -> None:
        """Have the current machine ask for these effects now."""
        self.lives[-1].orders = list(effects)
        self.process.deliver(TimerFired("order"))

    def pass_ms(self, duration_ms: float) -> None:
        self.world.run(until_ms=self.world.now_ms + duration_ms)


def pair(seed: int = 1, **link: Any) -> tuple[World, Network, Ear, Ear]:
    world = World(seed)
    network = Network(world)
    network.declare("a", "b", LATENCY_MS, **link)
    ears = Ear(world, network, "a"), Ear(world, network, "b")
    world.run(until_ms=50)
    assert network.connected("a", "b")
    return world, network, *ears


def batch(seq: int, **puts: Any) -> Write:
    return Write(seq, {("t", name): value for name, value in puts.items()})


def log_batch(seq: int, *offsets: int, trim: Sequence[int] = ()) -> Write:
    return Write(
        seq,
        {("inbox", "i", offset): entry(offset) for offset in offsets},
        tuple(("inbox", "i", offset) for offset in trim),
    )


def entry(offset: int) -> Entry:
    return Entry(offset=offset, time_ms=0, parts={})


# -- time ------------------------------------------------------------------------------------


def test_calls_run_in_order_of_time_and_ties_in_order_of_insertion() -> None:
    world, seen = World(1), []
    world.call_at(2.0, seen.append, "late")
    world.call_at(1.0, seen.append, "first")
    world.call_after(1.0, seen.append, "second")
    world.call_at(-5.0, seen.append, "overdue")
    assert world.run() == 4
    assert seen == ["overdue", "first", "second", "late"]


def test_run_stops_at_the_given_time_and_goes_on_later() -> None:
    world, seen = World(1), []
    world.call_at(1.0, seen.append, 1)
    world.call_at(3.0, seen.append, 3)
    world.run(until_ms=2.0)
    assert (seen, world.now_ms) == ([1], 2.0)
    world.run(until_ms=4.0)
    assert (seen, world.now_ms, world.steps) == ([1, 3], 4.0, 2)


def test_a_world_that_never_rests_is_reported_with_its_seed() -> None:
    world = World(77)

    def again() -> None:
        world.call_after(1.0, again)

    again()
    with pytest.raises(NotQuiet, match=r"seed 77: .*100\.000 ms after 100 steps") as failure:
        world.run(steps_max=100)
    assert (failure.value.seed, failure.value.steps, failure.value.at_ms) == (77, 100, 100.0)


def test_a_story_is_told_only_when_asked_for_and_does_not_change_the_fingerprint() -> None:
    silent, telling = World(1), World(1, tell=True)
    for world in (silent, telling):
        world.trace("crash", "router", 3)
    assert silent.story is None
    assert telling.story == ["     0.000 crash router 3"]
    assert silent.trace_hash() == telling.trace_hash()


# -- network ---------------------------------------------------------------------------------


def test_messages_of_one_direction_arrive_in_order_after_at_least_the_latency() -> None:
    world, network, _, b = pair()
    for n in range(200):
        world.call_at(60 + n * 0.05, network.send, "a", "b", (n, 60 + n * 0.05))
    world.run()
    assert [n for n, _ in b.messages] == list(range(200))
    arrivals = [(at_ms, event.message[1]) for at_ms, event in b.events if isinstance(event, Received)]
    assert all(LATENCY_MS <= at_ms - sent_ms < 2 * LATENCY_MS for at_ms, sent_ms in arrivals)
    assert network.messages_delivered == 200
    assert network.messages_lost == 0


def test_bandwidth_lets_messages_queue_behind_each_other() -> None:
    world, network, _, b = pair(bandwidth_bytes_per_ms=32.0)
    for n in range(10):
        network.send("a", "b", n)  # 64 bytes each: 2 ms
    world.run()
    took_ms = b.events[-1][0] - 50
    assert 10 * 2 + LATENCY_MS <= took_ms < 10 * 2 + 2 * LATENCY_MS
    assert network.bytes_delivered == 640


def test_both_sides_are_told_of_a_connection_before_anything_arrives_on_it() -> None:
    for seed in range(50):
        world = World(seed)
        network = Network(world)
        network.declare("a", "b", 0.001)
        a, b = Ear(world, network, "a"), Ear(world, network, "b")
        for n in range(100):
            world.call_at(n * 0.05, network.send, "a", "b", n)
        world.run()
        assert a.events[0][1] == Connected("b")
        assert b.events[0][1] == Connected("a")
        assert b.messages == list(range(100 - len(b.messages), 100))  # dropped before, none after


def test_undeclared_or_absent_peers_get_nothing() -> None:
    world, network, a, b = pair()
    network.send("a", "nobody", 1)
    b.die()
    world.run(until_ms=100)
    network.send("a", "b", 2)
    network.send("b", "a", 3)
    world.run()
    assert a.connection_story == [Connected("b"), Disconnected("b")]
    assert (a.messages, b.messages, network.messages_lost) == ([], [], 3)


def test_a_break_loses_what_is_in_flight_both_ways_and_then_reconnects() -> None:
    world, network, a, b = pair()
    network.send("a", "b", "lost")
    network.send("b", "a", "lost")
    network.break_connection("a", "b")
    network.send("a", "b", "lost: not told yet")
    world.run(until_ms=150)
    network.send("a", "b", "arrives")
    world.run()
    assert (a.messages, b.messages, network.messages_lost) == ([], ["arrives"], 3)
    assert a.connection_story == [Connected("b"), Disconnected("b"), Connected("b")]
    assert b.connection_story == [Connected("a"), Disconnected("a"), Connected("a")]


def test_a_message_for_a_process_that_has_restarted_since_never_arrives() -> None:
    for seed in range(50):
        world, network, a, b = pair(seed)
        network.send("a", "b", "for the old one")
        b.die()
        reborn = Ear(world, network, "b")
        world.run(until_ms=100)
        network.send("a", "b", "for the new one")
        world.run()
        assert b.messages == []
        assert reborn.messages == ["for the new one"]
        assert a.connection_story == [Connected("b"), Disconnected("b"), Connected("b")]


def test_what_a_dying_process_has_sent_may_arrive_but_only_before_the_news_of_its_death() -> None:
    endings = set()
    for seed in range(50):
        world, network, a, b = pair(seed, bandwidth_bytes_per_ms=512.0)
        for n in range(8):  # the last leaves after 1 ms: later than some news
            network.send("b", "a", n)
        b.die()
        reborn = Ear(world, network, "b")
        world.run()
        assert a.messages == list(range(len(a.messages)))
        heard = [event for _, event in a.events]
        assert heard[-2:] == [Disconnected("b"), Connected("b")]
        assert reborn.connection_story == [Connected("a")]
        endings.add(len(a.messages))
    assert {0, 8} < endings


def test_who_was_not_told_of_a_connection_hears_no_last_words_on_it() -> None:
    """Found by seed 627: a router heard the Attach of a dead instance, and never of its death."""
    heard = set()
    for seed in range(200):
        world = World(seed)
        network = Network(world)
        network.declare("a", "b", 0.001)
        a, b = Ear(world, network, "a"), Ear(world, network, "b")
        for n in range(100):  # the first that leaves does so when `b` has just been told
            world.call_at(n * 0.05, network.send, "b", "a", n)
        world.call_at(2.0, b.die)
        world.run()
        assert a.connection_story in ([], [Connected("b"), Disconnected("b")])
        kinds = [type(event) for _, event in a.events]
        assert kinds in ([], [Connected, *[Received] * len(a.messages), Disconnected])
        heard.add(len(a.messages) > 0)
    assert heard == {False, True}


def test_the_dead_hear_no_last_words() -> None:
    for seed in range(50):
        world, network, a, b = pair(seed)
        network.send("b", "a", "last words")
        b.die()
        a.die()
        world.run()
        assert (a.messages, network.messages_lost) == ([], 1)


def test_a_partition_cuts_both_ways_until_it_heals() -> None:
    world, network, a, b = pair()
    network.partition(["a"], ["b"], for_ms=200)
    network.send("a", "b", 1)
    network.send("b", "a", 1)
    world.run(until_ms=249)
    assert a.connection_story == [Connected("b"), Disconnected("b")]
    assert b.connection_story == [Connected("a"), Disconnected("a")]
    world.run()
    assert network.connected("a", "b")
    assert (a.messages, b.messages) == ([], [])


def test_a_one_way_partition_lets_the_other_way_through_until_the_connection_times_out() -> None:
    world, network, a, b = pair()
    network.partition(["b"], ["a"], for_ms=300, one_way=True)
    network.send("a", "b", "heard")
    network.send("b", "a", "unheard")
    world.run(until_ms=55)
    assert (a.messages, b.messages) == ([], ["heard"])
    assert network.connected("a", "b")  # neither knows
    world.run(until_ms=349)
    assert a.connection_story == [Connected("b"), Disconnected("b")]
    assert b.connection_story == [Connected("a"), Disconnected("a")]
    world.run()
    assert network.connected("a", "b")
    assert a.messages == []


def test_a_one_way_partition_shorter_than_the_time_out_only_delays() -> None:
    world, network, a, _ = pair()
    network.partition(["b"], ["a"], for_ms=10, one_way=True)
    network.send("b", "a", "late")
    world.run(until_ms=60)
    network.send("b", "a", "later")
    world.run()
    assert a.messages == ["late", "later"]
    assert a.connection_story == [Connected("b")]


def test_a_clog_delays_keeps_the_order_and_loses_nothing() -> None:
    world, network, a, b = pair()
    network.send("a", "b", 0)
    network.clog("a", "b", for_ms=30)
    network.clog("b", "a", for_ms=20)  # ends earlier: changes nothing
    for n in range(1, 20):
        world.call_at(50 + n * 3, network.send, "a", "b", n)
    world.run(until_ms=79)
    assert b.messages == []
    world.run()
    assert b.messages == list(range(20))
    assert min(at_ms for at_ms, event in b.events if isinstance(event, Received)) == 80
    assert a.connection_story == [Connected("b")]


def test_a_one_way_clog_leaves_the_other_way_free() -> None:
    world, network, a, b = pair()
    network.clog("a", "b", for_ms=30, one_way=True)
    network.send("a", "b", 1)
    network.send("b", "a", 2)
    world.run(until_ms=60)
    assert (a.messages, b.messages) == ([2], [])


def test_a_swizzle_ends_with_everything_delivered_in_order() -> None:
    for seed in range(20):
        world = World(seed)
        network = Network(world)
        names = ["a", "b", "c", "d"]
        for name in names:
            network.declare(name, "hub", LATENCY_MS)
        hub, *_ = [Ear(world, network, name) for name in ["hub", *names]]
        world.run(until_ms=50)
        network.swizzle(names, for_ms=40)
        for n in range(40):
            for name in names:
                world.call_at(50 + n, network.send, name, "hub", (name, n))
        world.run(until_ms=90 + 2 * LATENCY_MS)
        for name in names:
            assert [n for sender, n in hub.messages if sender == name] == list(range(40))


def test_healing_ends_every_partition_and_clog() -> None:
    world, network, a, b = pair()
    network.clog("a", "b", for_ms=10_000)
    network.send("a", "b", "held")
    world.run(until_ms=60)
    network.heal()
    assert b.messages == ["held"]
    network.partition(["a"], ["b"], for_ms=10_000)
    world.run(until_ms=200)
    network.heal()
    world.run(until_ms=250)
    assert network.connected("a", "b")
    assert a.connection_story == [Connected("b"), Disconnected("b"), Connected("b")]


# -- disk ------------------------------------------------------------------------------------


def test_a_batch_is_seen_at_once_and_durable_after_a_sync() -> None:
    world, durable = World(1), []
    disk = Disk(world, sync_ms=2.0)
    disk.write(batch(1, x=1), durable.append)
    assert disk.items() == {("t", "x"): 1}
    assert (disk.copy_durable(), durable) == ({}, [])
    world.run()
    assert (disk.copy_durable(), durable) == ({("t", "x"): 1}, [1])
    assert 1.0 <= world.now_ms <= 3.0
    disk.write(Write(2, {}, (("t", "x"), ("t", "never there"))), durable.append)
    assert (disk.items(), disk.copy_durable()) == ({}, {("t", "x"): 1})
    world.run()
    assert (disk.copy_durable(), durable) == ({}, [1, 2])


def test_one_sync_covers_all_batches_that_waited_when_it_started() -> None:
    world, durable = World(1), []
    disk = Disk(world, sync_ms=2.0)
    for seq in range(1, 6):
        disk.write(batch(seq, x=seq), durable.append)  # the first starts a sync, four wait for the next
    world.run()
    assert (durable, disk.syncs) == ([1, 5], 2)
    assert disk.copy_durable() == {("t", "x"): 5}


def test_a_power_loss_keeps_what_was_reported_durable_and_a_prefix_of_the_rest() -> None:
    survivors = set()
    for seed in range(100):
        world, durable = World(seed), []
        disk = Disk(world, sync_ms=2.0)
        for seq in range(1, 11):
            world.call_at(seq * 0.7, disk.write, batch(seq, **{f"k{seq}": seq}), durable.append)
        world.run(until_ms=7.0)
        disk.crash(lose_unsynced=True)
        kept = len(disk.items())
        assert disk.items() == {("t", f"k{seq}"): seq for seq in range(1, kept + 1)}
        assert kept >= max(durable, default=0)
        assert disk.copy_durable() == disk.items()
        reported = list(durable)
        world.run()
        assert durable == reported  # nothing is reported after the crash
        survivors.add(kept - max(durable, default=0))
    assert len(survivors) > 3


def test_a_process_crash_without_power_loss_keeps_every_batch() -> None:
    world = World(1)
    disk = Disk(world, sync_ms=2.0)
    disk.write(batch(1, x=1), print)
    disk.write(batch(2, y=2), print)
    disk.crash(lose_unsynced=False)
    assert disk.copy_durable() == {("t", "x"): 1, ("t", "y"): 2}


def test_os_durability_is_reported_almost_at_once() -> None:
    world, durable = World(1), []
    disk = Disk(world, sync_ms=2.0, durability="os")
    disk.write(batch(1, x=1), durable.append)
    world.run(until_ms=0.1)
    assert durable == [1]


def test_a_full_disk_keeps_batches_and_goes_on_afterwards() -> None:
    world, durable = World(1), []
    disk = Disk(world, sync_ms=2.0)
    disk.full(for_ms=100)
    for seq in (1, 2, 3):
        disk.write(batch(seq, x=seq), durable.append)
    world.run(until_ms=99)
    assert (durable, disk.copy_durable(), disk.items()) == ([], {}, {("t", "x"): 3})
    world.run()
    assert durable == [1, 3]


def test_a_slow_disk_takes_longer_for_a_while() -> None:
    world, durable = World(1), []
    disk = Disk(world, sync_ms=2.0)
    disk.slow(factor=10, for_ms=5)
    disk.write(batch(1), durable.append)
    world.run(until_ms=9)
    assert durable == []
    world.run()
    disk.write(batch(2), durable.append)
    world.run(until_ms=world.now_ms + 3)
    assert durable == [1, 2]


def test_a_log_is_read_in_order_between_trim_and_end_also_when_not_durable() -> None:
    disk = Disk(World(1), sync_ms=2.0)
    disk.write(log_batch(1, *range(5, 15)), print)
    disk.write(log_batch(2, 15, 16, trim=range(5, 8)), print)

    def read(after: int, limit: int = 100) -> list[int]:
        return [found.offset for found in disk.read_log("i", after, limit)]

    assert read(-1) == list(range(8, 17))
    assert read(10) == list(range(11, 17))
    assert read(10, limit=2) == [11, 12]
    assert read(16) == []
    assert disk.read_log("unknown", 0, 10) == []
    disk.write(log_batch(3, trim=range(8, 17)), print)
    assert read(-1) == []
    disk.write(log_batch(4, 17), print)
    assert read(-1) == [17]


def test_a_log_after_a_power_loss_is_the_log_of_the_surviving_batches() -> None:
    for seed in range(20):
        world = World(seed)
        disk = Disk(world, sync_ms=2.0)
        for seq in range(10):
            disk.write(log_batch(seq, seq, trim=[seq - 3]), print)
        disk.crash(lose_unsynced=True)
        found = [read.offset for read in disk.read_log("i", -1, 100)]
        assert found == sorted(key[2] for key in disk.items())
        assert len(found) <= 3


def test_a_stored_value_that_is_changed_later_is_noticed() -> None:
    disk = Disk(World(1), sync_ms=2.0, check_aliasing=True)
    value = [1]
    disk.write(batch(1, x=value), print)
    assert disk.items() == {("t", "x"): [1]}
    value.append(2)
    with pytest.raises(StoredValueChanged, match=r"written as \[1\], now \[1, 2\]"):
        disk.items()


# -- processes -------------------------------------------------------------------------------


def test_every_effect_is_performed_in_order() -> None:
    hooks: list[Any] = []
    stage = Stage(
        on_launch=lambda name: hooks.append(("launch", name)),
        on_retire=lambda name: hooks.append(("retire", name)),
        on_exit=lambda process, reason: hooks.append((process.name, reason)),
    )
    stage.world.story = []
    stage.order(
        Send("q", "hello"),
        log_batch(1, 1, 2),
        ReadLog("i", 1, 10, "reader"),
        LoadCheckpoint(),
        SetTimer("t", 60.0),
        Note("a line"),
        Launch("new"),
        Retire("old"),
    )
    stage.pass_ms(20)
    (life,) = stage.lives
    assert stage.peer.messages == ["hello"]
    assert life.events[2:] == [
        LogRead("i", "reader", [entry(2)]),
        CheckpointLoaded({}, life.events[3].shelf),  # the batch was not durable yet
        Durable(1),
        TimerFired("t"),
    ]
    assert any(line.endswith("note p a line") for line in stage.world.story)
    stage.order(batch(2, x=1), Exit("done"), Send("q", "never sent"))
    stage.pass_ms(20)
    assert hooks == [("launch", "new"), ("retire", "old"), ("p", "done")]
    assert not stage.process.up
    assert stage.disk.copy_durable()[("t", "x")] == 1  # a clean end loses nothing
    assert stage.peer.messages == ["hello"]
    assert stage.peer.connection_story == [Connected("p"), Disconnected("p")]


def test_a_timer_set_again_replaces_the_first_whether_earlier_or_later() -> None:
    stage = Stage()
    (life,) = stage.lives
    for first_ms, second_ms in ((60.0, 80.0), (120.0, 100.0)):
        stage.order(SetTimer("t", first_ms))
        stage.order(SetTimer("t", second_ms))
        stage.world.run(until_ms=second_ms - 0.001)
        assert TimerFired("t") not in life.events
        stage.world.run(until_ms=second_ms)
        assert life.events.pop() == TimerFired("t")
    stage.pass_ms(100)
    assert TimerFired("t") not in life.events


def test_timers_follow_the_skewed_clock_of_the_process_and_are_never_early() -> None:
    for seed in range(20):
        offset_ms, drift = seed / 3, (seed - 10) / 997
        stage = Stage(seed, clock_offset_ms=offset_ms, drift=drift)
        (life,) = stage.lives
        for n in range(50):
            due_ms = stage.world.now_ms * (1 + drift) + offset_ms + 7 + n / 7
            stage.order(SetTimer("t", due_ms))
            stage.pass_ms(20)
            assert life.events[-1] == TimerFired("t")
            assert due_ms <= life.clock[-1] < due_ms + 1e-6


def test_a_restarted_process_has_the_next_incarnation_and_what_the_disk_kept() -> None:
    stage = Stage()
    stage.order(batch(1, x=1))
    stage.pass_ms(10)
    stage.order(batch(2, y=2), SetTimer("t", 65.0))
    stage.process.crash(lose_unsynced=False)
    stage.process.restart_after(3)
    stage.process.restart_after(5)  # the earlier one wins
    stage.pass_ms(50)
    first, second = stage.lives
    assert (second.incarnation, second.items) == (2, {("t", "x"): 1, ("t", "y"): 2})
    assert Durable(2) not in first.events + second.events
    assert TimerFired("t") not in first.events + second.events
    assert stage.peer.connection_story == [Connected("p"), Disconnected("p"), Connected("p")]


def test_a_stopped_process_is_not_restarted() -> None:
    stage = Stage()
    stage.process.crash()
    stage.process.restart_after(5)
    stage.process.stop()
    stage.pass_ms(50)
    assert not stage.process.up


@pytest.mark.parametrize("crash_at", [0, 1, 2, 3])
def test_a_crash_can_be_put_before_and_after_every_effect(crash_at: int) -> None:
    def strike(process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        return crash_at if len(effects) == 3 else None

    stage = Stage(before_effect=strike, on_crash=lambda process: process.restart_after(10))
    launched: list[str] = []
    stage.process.on_launch = launched.append
    stage.order(Launch("1"), Launch("2"), Launch("3"))
    assert launched == ["1", "2", "3"][:crash_at]
    assert not stage.process.up
    stage.pass_ms(50)
    assert stage.process.incarnation == 2
    assert stage.network.connected("p", "q")


def test_with_turns_a_machine_takes_what_has_come_in_as_few_steps_as_it_likes() -> None:
    together: list[int] = []
    stage = Stage(
        turn_ms=4.0, before_effect=lambda process, event, effects: together.append(process.together)
    )
    (life,) = stage.lives
    stage.pass_ms(10)
    life.events.clear()
    together.clear()
    for n in range(5):
        stage.process.deliver(TimerFired(str(n)))
    assert life.events == []
    stage.pass_ms(4)
    assert life.events == [TimerFired(str(n)) for n in range(5)]
    assert len(set(life.clock[-5:])) == 1
    assert together == [3, 2]


def test_a_crash_within_a_turn_loses_what_still_waited() -> None:
    def strike(process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        return 1 if process.together > 1 else None

    stage = Stage(turn_ms=4.0, before_effect=strike, on_crash=lambda process: process.restart_after(10))
    launched: list[str] = []
    stage.process.on_launch = launched.append
    stage.lives[0].orders = [Launch("1"), Launch("2")]
    for n in range(5):
        stage.process.deliver(TimerFired(str(n)))
    stage.pass_ms(50)
    first, second = stage.lives
    assert launched == ["1"]
    assert first.events[-3:] == [TimerFired(str(n)) for n in range(3)]
    assert not any(isinstance(event, TimerFired) for event in second.events)


def test_a_zombie_is_still_heard_after_its_successor_has_connected() -> None:
    stage = Stage()
    stage.process.fork_zombie(for_ms=100)
    stage.pass_ms(30)
    zombie, successor = stage.lives
    story = [Connected("p"), Disconnected("p"), Connected("p")]
    assert stage.peer.connection_story == story

    life = stage.process.zombies[0]
    zombie.orders = [Send("q", "from the zombie"), batch(7, z=7)]
    life.take(TimerFired("order"))
    stage.order(Send("q", "from the successor"))
    stage.network.send("q", "p", "to p")
    stage.pass_ms(20)
    assert sorted(stage.peer.messages) == ["from the successor", "from the zombie"]
    assert (zombie.messages, successor.messages) == ([], ["to p"])
    assert Durable(7) in zombie.events
    assert stage.disk.items() == {}  # what a zombie writes nobody else sees

    stage.pass_ms(100)
    zombie.orders = [Send("q", "from beyond")]
    life.take(TimerFired("order"))
    stage.pass_ms(20)
    assert "from beyond" not in stage.peer.messages
    assert stage.process.zombies == []
    assert stage.peer.connection_story == story  # its end is nobody's business


def test_a_zombie_keeps_the_batches_it_had_under_way() -> None:
    stage = Stage()
    stage.order(batch(1, x=1))
    stage.process.fork_zombie(for_ms=100)
    stage.pass_ms(20)
    zombie, successor = stage.lives
    assert Durable(1) in zombie.events
    assert Durable(1) not in successor.events
    assert successor.items in ({}, {("t", "x"): 1})


def test_what_a_machine_raises_comes_with_process_event_seed_and_time() -> None:
    class Broken(Puppet):
        def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]:
            raise KeyError("oops")

    class Invalid(Puppet):
        def validate(self) -> None:
            raise AssertionError("one owner")

    for machine, cause in ((Broken, KeyError), (Invalid, AssertionError)):
        world = World(5)
        network, disk = Network(world), Disk(world, sync_ms=1.0)
        process = Process(world, network, "p", machine, disk, validate=True)
        process.start()
        world.run(until_ms=3)
        with pytest.raises(
            MachineFailed, match=r"seed 5, 3\.000 ms: p#1 failed taking TimerFired"
        ) as failure:
            process.deliver(TimerFired("t"))
        assert isinstance(failure.value.__cause__, cause)
        assert failure.value.event == TimerFired("t")


# -- everything together ---------------------------------------------------------------------


class Gossip:
    """Passes numbers around, writes them, and re-arms a timer: busy, but bounded by time."""

    def __init__(self, name: str, peers: list[str], draw: Callable[[], float]) -> None:
        self.name, self.peers, self.draw, self.seq = name, peers, draw, 0

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=peer):
                return [Send(peer, 0), SetTimer("tick", now_ms + 5)]
            case Received(sender=sender, message=n):
                self.seq += 1
                return [Write(self.seq, {("n", self.name): n}), Send(sender, n + 1)]
            case TimerFired():
                to = self.peers[int(self.draw() * len(self.peers))]
                return [Send(to, 0), SetTimer("tick", now_ms + 5), Note("tick")]
        return []


def chaos(seed: int, **options: Any) -> str:
    world = World(seed, **options)
    network = Network(world)
    names = [f"n{i}" for i in range(5)]
    processes = []
    for i, name in enumerate(names):
        for other in names[:i]:
            network.declare(name, other, 0.5 + i)
        peers = [other for other in names if other != name]

        def make(_: int, __: object, name: str = name, peers: list[str] = peers) -> Gossip:
            return Gossip(name, peers, world.rng.random)

        disk = Disk(world, sync_ms=2.0, check_aliasing=True)
        processes.append(Process(world, network, name, make, disk, drift=i / 1000))
        processes[-1].on_crash = lambda process: process.restart_after(world.drawn_ms(20))
        processes[-1].start()
    for _ in range(40):
        victim = world.rng.choice(processes)
        one, *others = world.rng.sample(names, 3)
        at_ms = world.rng.uniform(20, 400)
        fault = world.rng.choice(
            [
                victim.crash,
                lambda victim=victim: victim.fork_zombie(30),
                lambda one=one, other=others[0]: network.break_connection(one, other),
                lambda one=one, others=others: network.partition([one], others, 60),
                lambda one=one, others=others: network.partition([one], others, 60, one_way=True),
                lambda one=one, others=others: network.swizzle([one, *others], 30),
                lambda victim=victim: victim.disk.full(20),
            ]
        )
        world.call_at(at_ms, fault)
    world.run(until_ms=500, steps_max=500_000)
    network.heal()
    world.run(until_ms=700, steps_max=500_000)
    assert all(network.connected(a, b) for a in names for b in names if a < b)
    assert network.messages_delivered > 1000
    assert network.messages_lost > 0
    return world.trace_hash()


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    hashes = [chaos(seed) for seed in range(10)]
    assert hashes == [chaos(seed) for seed in range(10)]
    assert len(set(hashes)) == 10
    assert chaos(3, tell=True) == hashes[3]
    assert chaos(3, hash_events=True) == chaos(3, hash_events=True)


def test_every_side_sees_connections_begin_and_end_in_turn_and_each_connection_in_order() -> None:
    for seed in range(30):
        world, network, a, b = pair(seed)
        for n in range(400):
            world.call_at(50 + n, network.send, "a", "b", n)
        for _ in range(10):
            at_ms = world.rng.uniform(50, 450)
            world.call_at(
                at_ms,
                world.rng.choice(
                    [
                        lambda network=network: network.break_connection("a", "b"),
                        lambda network=network: network.clog("a", "b", 20),
                        lambda network=network: network.partition(["a"], ["b"], 50, one_way=True),
                        lambda network=network: network.partition(["a"], ["b"], 10),
                    ]
                ),
            )
        world.run()
        for ear, peer in ((a, "b"), (b, "a")):
            turns = [Connected(peer), Disconnected(peer)] * len(ear.connection_story)
            assert ear.connection_story == turns[: len(ear.connection_story)]
            assert ear.connection_story[-1] == Connected(peer)
        up, gapless, last = False, False, -1
        for _, event in b.events:
            if isinstance(event, Received):
                assert up
                assert event.message == last + 1 or not gapless
                assert event.message > last
                last, gapless = event.message, True
            else:
                up, gapless = isinstance(event, Connected), False
