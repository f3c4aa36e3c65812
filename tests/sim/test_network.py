"""The simulated network: order, loss, partitions, clogs."""

from __future__ import annotations

from simulated_process import LATENCY_MS, RecordingEndpoint, pair
from tiercel.core.machine.events import (
    Connected,
    Disconnected,
    Received,
)
from tiercel.sim.engine.network import Network
from tiercel.sim.engine.scheduler import Scheduler


def test_messages_of_one_direction_arrive_in_order_after_at_least_the_latency() -> None:
    scheduler, network, _, b = pair()
    for n in range(200):
        scheduler.call_at(60 + n * 0.05, network.send, "a", "b", (n, 60 + n * 0.05))
    scheduler.run()
    assert [n for n, _ in b.messages] == list(range(200))
    incoming_moves = [(at_ms, event.message[1]) for at_ms, event in b.events if isinstance(event, Received)]
    assert all(LATENCY_MS <= at_ms - sent_ms < 2 * LATENCY_MS for at_ms, sent_ms in incoming_moves)
    assert network.messages_delivered == 200
    assert network.messages_lost == 0


def test_bandwidth_lets_messages_queue_behind_each_other() -> None:
    scheduler, network, _, b = pair(bandwidth_bytes_per_ms=32.0)
    for n in range(10):
        network.send("a", "b", n)  # 64 bytes each: 2 ms
    scheduler.run()
    took_ms = b.events[-1][0] - 50
    assert 10 * 2 + LATENCY_MS <= took_ms < 10 * 2 + 2 * LATENCY_MS
    assert network.bytes_delivered == 640


def test_both_sides_see_a_connection_before_anything_arrives_on_it() -> None:
    for seed in range(50):
        scheduler = Scheduler(seed)
        network = Network(scheduler)
        network.declare("a", "b", 0.001)
        a, b = RecordingEndpoint(scheduler, network, "a"), RecordingEndpoint(scheduler, network, "b")
        for n in range(100):
            scheduler.call_at(n * 0.05, network.send, "a", "b", n)
        scheduler.run()
        assert a.events[0][1] == Connected("b")
        assert b.events[0][1] == Connected("a")
        assert b.messages == list(range(100 - len(b.messages), 100))  # dropped before, none after


def test_messages_to_undeclared_or_absent_peers_are_lost() -> None:
    scheduler, network, a, b = pair()
    network.send("a", "nobody", 1)
    b.die()
    scheduler.run(until_ms=100)
    network.send("a", "b", 2)
    network.send("b", "a", 3)
    scheduler.run()
    assert a.connection_events == [Connected("b"), Disconnected("b")]
    assert (a.messages, b.messages, network.messages_lost) == ([], [], 3)


def test_broken_connection_loses_messages_in_flight_and_reconnects() -> None:
    scheduler, network, a, b = pair()
    network.send("a", "b", "lost")
    network.send("b", "a", "lost")
    network.break_connection("a", "b")
    network.send("a", "b", "lost: not connected yet")
    scheduler.run(until_ms=150)
    network.send("a", "b", "arrives")
    scheduler.run()
    assert (a.messages, b.messages, network.messages_lost) == ([], ["arrives"], 3)
    assert a.connection_events == [Connected("b"), Disconnected("b"), Connected("b")]
    assert b.connection_events == [Connected("a"), Disconnected("a"), Connected("a")]


def test_message_to_an_earlier_incarnation_never_arrives() -> None:
    for seed in range(50):
        scheduler, network, a, b = pair(seed)
        network.send("a", "b", "for the old one")
        b.die()
        reborn = RecordingEndpoint(scheduler, network, "b")
        scheduler.run(until_ms=100)
        network.send("a", "b", "for the new one")
        scheduler.run()
        assert b.messages == []
        assert reborn.messages == ["for the new one"]
        assert a.connection_events == [Connected("b"), Disconnected("b"), Connected("b")]


def test_messages_of_a_dying_process_arrive_only_before_its_disconnect() -> None:
    endings = set()
    for seed in range(50):
        scheduler, network, a, b = pair(seed, bandwidth_bytes_per_ms=512.0)
        for n in range(8):  # the last leaves after 1 ms: later than some news
            network.send("b", "a", n)
        b.die()
        reborn = RecordingEndpoint(scheduler, network, "b")
        scheduler.run()
        assert a.messages == list(range(len(a.messages)))
        seen = [event for _, event in a.events]
        assert seen[-2:] == [Disconnected("b"), Connected("b")]
        assert reborn.connection_events == [Connected("a")]
        endings.add(len(a.messages))
    assert {0, 8} < endings


def test_final_messages_are_lost_if_the_peer_has_not_seen_the_connection() -> None:
    """Found by seed 627: a router received the Attach of a dead instance, and never a disconnect."""
    received = set()
    for seed in range(200):
        scheduler = Scheduler(seed)
        network = Network(scheduler)
        network.declare("a", "b", 0.001)
        a, b = RecordingEndpoint(scheduler, network, "a"), RecordingEndpoint(scheduler, network, "b")
        for n in range(100):  # the first that leaves does so when `b` has just seen the connection
            scheduler.call_at(n * 0.05, network.send, "b", "a", n)
        scheduler.call_at(2.0, b.die)
        scheduler.run()
        assert a.connection_events in ([], [Connected("b"), Disconnected("b")])
        kinds = [type(event) for _, event in a.events]
        assert kinds in ([], [Connected, *[Received] * len(a.messages), Disconnected])
        received.add(len(a.messages) > 0)
    assert received == {False, True}


def test_dead_process_receives_no_final_messages() -> None:
    for seed in range(50):
        scheduler, network, a, b = pair(seed)
        network.send("b", "a", "last words")
        b.die()
        a.die()
        scheduler.run()
        assert (a.messages, network.messages_lost) == ([], 1)


def test_partition_cuts_both_directions_until_it_heals() -> None:
    scheduler, network, a, b = pair()
    network.partition(["a"], ["b"], for_ms=200)
    network.send("a", "b", 1)
    network.send("b", "a", 1)
    scheduler.run(until_ms=249)
    assert a.connection_events == [Connected("b"), Disconnected("b")]
    assert b.connection_events == [Connected("a"), Disconnected("a")]
    scheduler.run()
    assert network.connected("a", "b")
    assert (a.messages, b.messages) == ([], [])


def test_one_way_partition_lets_the_other_direction_through_until_the_time_out() -> None:
    scheduler, network, a, b = pair()
    network.partition(["b"], ["a"], for_ms=300, one_way=True)
    network.send("a", "b", "received")
    network.send("b", "a", "unheard")
    scheduler.run(until_ms=55)
    assert (a.messages, b.messages) == ([], ["received"])
    assert network.connected("a", "b")  # neither knows
    scheduler.run(until_ms=349)
    assert a.connection_events == [Connected("b"), Disconnected("b")]
    assert b.connection_events == [Connected("a"), Disconnected("a")]
    scheduler.run()
    assert network.connected("a", "b")
    assert a.messages == []


def test_one_way_partition_shorter_than_the_time_out_only_delays() -> None:
    scheduler, network, a, _ = pair()
    network.partition(["b"], ["a"], for_ms=10, one_way=True)
    network.send("b", "a", "late")
    scheduler.run(until_ms=60)
    network.send("b", "a", "later")
    scheduler.run()
    assert a.messages == ["late", "later"]
    assert a.connection_events == [Connected("b")]


def test_clog_delays_messages_in_order_and_loses_none() -> None:
    scheduler, network, a, b = pair()
    network.send("a", "b", 0)
    network.clog("a", "b", for_ms=30)
    network.clog("b", "a", for_ms=20)  # ends earlier: changes nothing
    for n in range(1, 20):
        scheduler.call_at(50 + n * 3, network.send, "a", "b", n)
    scheduler.run(until_ms=79)
    assert b.messages == []
    scheduler.run()
    assert b.messages == list(range(20))
    assert min(at_ms for at_ms, event in b.events if isinstance(event, Received)) == 80
    assert a.connection_events == [Connected("b")]


def test_one_way_clog_leaves_the_other_direction_free() -> None:
    scheduler, network, a, b = pair()
    network.clog("a", "b", for_ms=30, one_way=True)
    network.send("a", "b", 1)
    network.send("b", "a", 2)
    scheduler.run(until_ms=60)
    assert (a.messages, b.messages) == ([2], [])


def test_a_swizzle_ends_with_everything_delivered_in_order() -> None:
    for seed in range(20):
        scheduler = Scheduler(seed)
        network = Network(scheduler)
        names = ["a", "b", "c", "d"]
        for name in names:
            network.declare(name, "hub", LATENCY_MS)
        hub, *_ = [RecordingEndpoint(scheduler, network, name) for name in ["hub", *names]]
        scheduler.run(until_ms=50)
        network.swizzle(names, for_ms=40)
        for n in range(40):
            for name in names:
                scheduler.call_at(50 + n, network.send, name, "hub", (name, n))
        scheduler.run(until_ms=90 + 2 * LATENCY_MS)
        for name in names:
            assert [n for sender, n in hub.messages if sender == name] == list(range(40))


def test_healing_ends_every_partition_and_clog() -> None:
    scheduler, network, a, b = pair()
    network.clog("a", "b", for_ms=10_000)
    network.send("a", "b", "held")
    scheduler.run(until_ms=60)
    network.heal()
    assert b.messages == ["held"]
    network.partition(["a"], ["b"], for_ms=10_000)
    scheduler.run(until_ms=200)
    network.heal()
    scheduler.run(until_ms=250)
    assert network.connected("a", "b")
    assert a.connection_events == [Connected("b"), Disconnected("b"), Connected("b")]
