"""Producers and subscribers against a router and an instance that really run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from deployment_in_process import (
    INPUT,
    OPERATOR,
    OUTPUT,
    SITE,
    assert_once_and_in_order,
    instance_host,
    make_place,
    payloads,
    router_host,
    rows,
    running,
    until,
)
from tiercel.core.model.log import StreamEntry
from tiercel.errors import UserError
from tiercel.runtime.client import producer as client
from tiercel.runtime.client import subscriber as subscriber_module
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber, stream_range
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net import peers, wire


def collect(subscriber: Subscriber, count: int) -> list[StreamEntry]:
    """Entries until so many rows have come, and whatever else comes right behind them."""
    entries: list[StreamEntry] = []
    while sum(len(entry.outputs) for entry in entries) < count:
        got = subscriber.poll(20.0)
        assert got, f"only {sum(len(entry.outputs) for entry in entries)} of {count} rows have come"
        entries += got
    return entries + subscriber.poll(0.1)


def test_rows_come_through_once_and_in_order(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with (
        running(router_host(place), instance_host(place)),
        Producer(place, INPUT, name="p") as producer,
        Subscriber(place, OUTPUT, after=0) as subscriber,
    ):
        for n in range(0, 5_000, 100):
            producer.send(rows(n, 100))
        producer.flush()
        assert producer.acknowledged == producer.submitted <= 50
        found = collect(subscriber, 5_000)
        assert subscriber.offset == found[-1].offset
        assert subscriber.range() == stream_range(place, OUTPUT) == (1, found[-1].offset)
        assert_once_and_in_order(payloads(found), 5_000)


def test_long_send_is_split_and_short_sends_are_gathered_into_frames(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with (
        running(router_host(place), instance_host(place)),
        Producer(place, INPUT, name="p") as producer,
        Subscriber(place, OUTPUT, after=0) as subscriber,
    ):
        assert producer.send([]) == 0
        long = 2 * client.FRAME_ROWS_MAX + 1_000
        assert producer.send(rows(0, long)) == 3
        for n in range(long, long + 2_000):
            producer.send(rows(n, 1))
        producer.flush()
        assert producer.submitted < 3 + 2_000
        assert_once_and_in_order(payloads(collect(subscriber, long + 2_000)), long + 2_000)


def test_nothing_is_lost_or_doubled_when_the_router_is_started_again_elsewhere(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    router = router_host(place)
    with running(instance_host(place)), running(router) as (first,):
        before = place.registry.find(SITE)
        with Producer(place, INPUT, name="p") as producer, Subscriber(place, OUTPUT, after=0) as subscriber:
            stop = threading.Event()
            sent = [0]

            def feed() -> None:
                while not stop.is_set():
                    producer.send(rows(sent[0], 20))
                    sent[0] += 20
                    time.sleep(0.001)

            feeder = threading.Thread(target=feed)
            feeder.start()
            entries = collect(subscriber, 500)
            first.end()
            time.sleep(0.1)
            with running(router_host(place)):
                after = place.registry.find(SITE)
                assert before is not None
                assert after is not None
                assert before.port != after.port
                entries += collect(subscriber, 500)
                stop.set()
                feeder.join()
                producer.flush()
                seen = sum(len(entry.outputs) for entry in entries)
                entries += collect(subscriber, sent[0] - seen) if seen < sent[0] else []
                producer.close()
        assert_once_and_in_order(payloads(entries), sent[0])
        assert [entry.offset for entry in entries] == list(range(1, len(entries) + 1))


def test_restarted_producer_knows_its_acknowledged_frames(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with running(router_host(place), instance_host(place)):
        with Producer(place, INPUT, name="p") as producer:
            for seq in (1, 2, 3):
                producer.send_frame(seq, rows(10 * (seq - 1), 10))
        with Producer(place, INPUT, name="p") as producer, Subscriber(place, OUTPUT, after=0) as subscriber:
            assert producer.acknowledged == producer.submitted == 3
            for seq in (2, 3, 4):  # it does not know better, and says some of it again
                producer.send_frame(seq, rows(10 * (seq - 1), 10))
            producer.send_frame(4, rows(30, 10))
            assert producer.send(rows(40, 10)) == 5
            with pytest.raises(UserError, match="frame 9 of producer 'p' comes too early"):
                producer.send_frame(9, rows(50, 10))
            producer.flush()
            assert_once_and_in_order(payloads(collect(subscriber, 50)), 50)


@pytest.mark.parametrize(
    ("joins", "event_time", "in_the_log"),
    [(True, "", [1]), (False, "", [40]), (True, "at", [40])],
    ids=["may join", "may not", "has event time"],
)
def test_rows_of_a_key_are_joined_only_where_allowed_and_all_are_counted(
    tmp_path: Path, joins: bool, event_time: str, in_the_log: list[int]
) -> None:
    place = make_place(tmp_path)
    manifest = place.manifest()
    facts = msgspec.structs.replace(manifest.streams[INPUT], event_time=event_time)
    place.write(msgspec.structs.replace(manifest, streams={**manifest.streams, INPUT: facts}))
    router = router_host(place)
    with running(router):
        with Producer(place, INPUT, name="p", joins=joins) as producer:
            producer.send_frame(1, [(b"k", 0, msgspec.msgpack.encode((n,))) for n in range(40)])
            producer.flush()
        inbox = router.machine.inboxes[OPERATOR]  # type: ignore[attr-defined]
        assert inbox.backlog_rows == 40
        entries = router._store.read_log(OPERATOR, 0, 10)  # type: ignore[union-attr]
    assert [len(rows) for entry in entries for rows in entry.parts.values()] == in_the_log


def test_send_waits_while_the_router_does_not_acknowledge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FRAME_ROWS_MAX", 4_000)
    place = make_place(tmp_path, backlog_rows_max=100)  # and nobody processes them
    with running(router_host(place)):
        producer = Producer(place, INPUT, name="p")
        sent = [0]

        def feed() -> None:
            while sent[0] < 100_000:
                producer.send(rows(sent[0], 500))
                sent[0] += 500

        feeder = threading.Thread(target=feed)
        feeder.start()
        until(lambda: sent[0] >= 10_000)
        stuck = -1
        while stuck != sent[0]:
            stuck = sent[0]
            time.sleep(0.3)
        assert stuck < 100_000
        assert producer.submitted - producer.acknowledged == client.UNACKED_FRAMES_MAX
        with pytest.raises(UserError, match="are not acknowledged after"):
            producer.flush(0.1)
        with running(instance_host(place)), Subscriber(place, OUTPUT, after=0) as subscriber:
            entries = collect(subscriber, 100_000)
            feeder.join()
            producer.close()
        assert_once_and_in_order(payloads(entries), 100_000)


def test_a_subscriber_that_does_not_poll_is_not_flooded(tmp_path: Path) -> None:
    place = make_place(tmp_path, publish_entries_max=16)
    with (
        running(router_host(place), instance_host(place)),
        Producer(place, INPUT, name="p") as producer,
        Subscriber(place, OUTPUT, after=0) as subscriber,
    ):
        for n in range(1_000):
            producer.send_frame(n + 1, rows(n, 1))
        producer.flush()
        last = 0
        while (now := stream_range(place, OUTPUT)[1]) != last:
            last = now
            time.sleep(0.2)
        kept = len(subscriber._machine.entries)
        assert kept < subscriber_module.BUFFERED_ENTRIES_MAX + 16
        assert_once_and_in_order(payloads(collect(subscriber, 1_000)), 1_000)


def test_subscriber_begins_after_the_given_offset(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with running(router_host(place), instance_host(place)), Producer(place, INPUT, name="p") as producer:
        with Subscriber(place, OUTPUT, after=0) as everything:
            for n in range(10):
                producer.send(rows(n, 1))
                collect(everything, 1)
        first, last = stream_range(place, OUTPUT)
        assert (first, last) == (1, 10)
        with Subscriber(place, OUTPUT, after=7) as later, Subscriber(place, OUTPUT) as from_now:
            assert (later.offset, from_now.offset) == (7, 10)
            assert [entry.offset for entry in collect(later, 3)] == [8, 9, 10]
            assert from_now.poll(0.1) == []
            producer.send(rows(10, 1))
            assert [entry.offset for entry in collect(from_now, 1)] == [11]
            assert from_now.offset == 11
        with pytest.raises(UserError, match=r"entries after 99 .* do not exist yet: it holds 1 to 11"):
            Subscriber(place, OUTPUT, after=99)


def test_named_subscription_continues_behind_what_its_last_program_has_processed(tmp_path: Path) -> None:
    place = make_place(tmp_path, stream_entries_max=5, stream_tail_max=3)
    with running(router_host(place), instance_host(place)), Producer(place, INPUT, name="p") as producer:
        with Subscriber(place, OUTPUT, after=0, subscription="billing") as reader:
            for n in range(4):
                producer.send(rows(n, 1))
                collect(reader, 1)
            assert reader.poll(0.1) == []  # the fourth is processed
            until(lambda: reader._machine.processed == 4, "it never counts as processed")
        for n in range(4, 20):
            producer.send(rows(n, 1))
            producer.flush()
        with Subscriber(place, OUTPUT, subscription="billing") as again:
            assert [entry.offset for entry in collect(again, 16)] == list(range(5, 21))
            again.end_subscription()
            producer.send(rows(20, 1))
            collect(again, 1)
            until(lambda: stream_range(place, OUTPUT)[0] > 1, "it still holds the log")


def test_trimmed_offset_is_refused_with_the_available_range(tmp_path: Path) -> None:
    place = make_place(tmp_path, stream_entries_max=5, stream_tail_max=3)
    with running(router_host(place), instance_host(place)), Producer(place, INPUT, name="p") as producer:
        with Subscriber(place, OUTPUT) as subscriber:
            for n in range(20):
                producer.send(rows(n, 1))
                collect(subscriber, 1)
        first, last = stream_range(place, OUTPUT)
        with pytest.raises(UserError, match=f"no longer kept: it holds {first} to {last}"):
            Subscriber(place, OUTPUT, after=3)
        with Subscriber(place, OUTPUT, after=first - 1) as subscriber:
            assert [entry.offset for entry in collect(subscriber, 5)] == list(range(first, last + 1))


def test_iterator_returns_single_entries_and_ends_at_close(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with (
        running(router_host(place), instance_host(place)),
        Producer(place, INPUT, name="p") as producer,
        Subscriber(place, OUTPUT, after=0) as subscriber,
    ):
        for seq in range(1, 6):
            producer.send_frame(seq, rows(seq - 1, 1))
        seen = []
        for entry in subscriber:
            seen.append(entry)
            assert subscriber.offset == entry.offset
            if len(payloads(seen)) >= 3:
                break
        rest = collect(subscriber, 5 - len(payloads(seen))) if len(payloads(seen)) < 5 else []
        assert_once_and_in_order(payloads(seen + rest), 5)
        threading.Timer(0.1, subscriber.close).start()
        assert list(subscriber) == []


def test_asyncio_clients_send_and_receive_once_and_in_order(tmp_path: Path) -> None:
    place = make_place(tmp_path)

    async def scenario() -> None:
        async with Producer(place, INPUT, name="p") as producer, Subscriber(place, OUTPUT) as subscriber:
            seen: list[StreamEntry] = []

            async def read() -> None:
                async for entry in subscriber:
                    seen.append(entry)
                    if len(payloads(seen)) == 20_000:
                        return

            reading = asyncio.create_task(read())
            for n in range(0, 20_000, 100):
                await producer.send_async(rows(n, 100))
            await producer.flush_async()
            await asyncio.wait_for(reading, 20)
            assert_once_and_in_order(payloads(seen), 20_000)
            assert await subscriber.range_async() == (1, subscriber.offset)
            await producer.send_frame_async(producer.submitted + 1, rows(20_000, 1))
            assert len(payloads(await subscriber.poll_async(20.0))) == 1
            assert await subscriber.poll_async(0.01) == []

    with running(router_host(place), instance_host(place)):
        asyncio.run(scenario())


def test_asyncio_send_waits_without_blocking_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FRAME_ROWS_MAX", 4_000)
    place = make_place(tmp_path, backlog_rows_max=100)

    async def scenario() -> None:
        producer = Producer(place, INPUT, name="p")

        async def feed() -> None:
            for n in range(0, 100_000, 500):
                await producer.send_async(rows(n, 500))

        feeding = asyncio.create_task(feed())
        while producer.submitted - producer.acknowledged < client.UNACKED_FRAMES_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not feeding.done()
        instance = instance_host(place)
        serving = asyncio.create_task(instance.run())
        await feeding
        await producer.close_async()
        assert producer.acknowledged == producer.submitted
        instance.end("over")
        await serving

    with running(router_host(place)):
        asyncio.run(scenario())


def test_producer_reports_another_program_with_its_name(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with running(router_host(place)):
        first = Producer(place, INPUT, name="p")
        first.send(rows(0, 1))
        first.flush()
        with Producer(place, INPUT, name="p") as second:
            with pytest.raises(UserError, match="started later has connected as 'p'"):
                until(lambda: not first.send(rows(2, 1)))
            second.send(rows(1, 1))
            second.flush()
        with pytest.raises(UserError, match="started later has connected as 'p'"):
            first.close()


def test_reconnecting_producer_reports_that_another_program_used_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    monkeypatch.setattr(peers, "DIAL_S", 1.0)  # time enough for the other one
    with running(router_host(place)):
        first = Producer(place, INPUT, name="p")
        with Producer(place, INPUT, name="p"):
            pass
        with pytest.raises(UserError, match="another program sends as producer 'p'"):
            until(lambda: not first.send(rows(0, 1)))
        with pytest.raises(UserError, match="another program sends as producer 'p'"):
            first.close()
        with Producer(place, INPUT, name="p") as third:
            third.send(rows(0, 1))


def test_wrong_client_arguments_raise_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place(tmp_path)
    with pytest.raises(UserError, match="holds no deployment"):
        Producer(DeploymentDir(tmp_path / "elsewhere"), INPUT, name="p")
    with pytest.raises(UserError, match="no stream 'raedings'"):
        Producer(place, "raedings", name="p")
    with pytest.raises(UserError, match="written by the operator 'count'"):
        Producer(place, OUTPUT, name="p")
    with pytest.raises(UserError, match="takes no rows at site 'edge'"):
        Producer(place, INPUT, name="p", site="edge")
    for name in ("", SITE, "count@cloud#1", "controller"):
        with pytest.raises(UserError, match="cannot be the name of a producer"):
            Producer(place, INPUT, name=name)
    with pytest.raises(UserError, match="the stream 'readings' has no log"):
        Subscriber(place, INPUT)
    with pytest.raises(UserError, match=r"has not answered for 0\.1 s"):
        stream_range(place, OUTPUT, timeout_s=0.1)
    with (
        running(router_host(place)),
        Producer(place, INPUT, name="p") as producer,
        pytest.raises(UserError, match="'key' is no row"),
    ):
        producer.send(["key"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="p is closed"):
        producer.send(rows(0, 1))


def test_large_rows_gather_into_frames_that_stay_below_the_limit(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with (
        running(router_host(place)),
        Producer(place, INPUT, name="p") as producer,
    ):
        large = [(b"key", 0, "x" * 300_000)] * 10
        assert producer.send(large) == 4
        producer.flush()
        for _ in range(300):
            producer.send(large[:1])
        producer.flush()
        assert producer.acknowledged >= 4 + 100


def test_oversized_row_is_refused_and_not_retried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    with running(router_host(place)):
        producer = Producer(place, INPUT, name="p")
        monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 10_000)
        producer.send_frame(1, [(b"key", 0, "x" * 20_000)])
        with pytest.raises(UserError, match="a frame has at most 10000"):
            producer.flush()
        with pytest.raises(UserError, match="a frame has at most 10000"):
            producer.close()


LEFT_OPEN = """
import atexit, sys, threading
from pathlib import Path
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.deployment import DeploymentDir

def left() -> None:  # asked after all that is registered later
    print([t.name for t in threading.enumerate() if t.name.startswith("tiercel-")])

atexit.register(left)
place = DeploymentDir(sys.argv[1])
subscriber, producer = Subscriber(place, "counts", after=0), Producer(place, "readings", name="p")
producer.send([(b"key", 0, n) for n in range(10)])
print(len(subscriber.poll(30.0)) > 0)
"""


def test_clients_left_open_end_at_interpreter_exit(tmp_path: Path) -> None:
    """A loop that ran on while the interpreter went has crashed it once."""
    place = make_place(tmp_path)
    with running(router_host(place), instance_host(place)):
        program = [sys.executable, "-c", LEFT_OPEN, str(tmp_path)]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n[]\n", "")


def test_timed_out_wait_leaves_no_waiter_behind(tmp_path: Path) -> None:
    place = make_place(tmp_path)

    async def scenario() -> None:
        async with Subscriber(place, OUTPUT) as subscriber:
            for _ in range(20):
                assert await subscriber.poll_async(0.001) == []
            assert not subscriber._waiters._futures

    with running(router_host(place)):
        asyncio.run(scenario())
