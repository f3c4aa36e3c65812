"""The simulated disk: durability, crashes, logs."""

from __future__ import annotations

import pytest

from simulated_process import batch, log_batch
from tiercel.core.machine.effects import (
    Write,
)
from tiercel.sim.engine.disk import Disk, StoredValueChanged
from tiercel.sim.engine.scheduler import Scheduler


def test_a_batch_is_seen_at_once_and_durable_after_a_sync() -> None:
    scheduler, durable = Scheduler(1), []
    disk = Disk(scheduler, sync_ms=2.0)
    disk.write(batch(1, x=1), durable.append)
    assert disk.items() == {("t", "x"): 1}
    assert (disk.copy_durable(), durable) == ({}, [])
    scheduler.run()
    assert (disk.copy_durable(), durable) == ({("t", "x"): 1}, [1])
    assert 1.0 <= scheduler.now_ms <= 3.0
    disk.write(Write(2, {}, (("t", "x"), ("t", "never there"))), durable.append)
    assert (disk.items(), disk.copy_durable()) == ({}, {("t", "x"): 1})
    scheduler.run()
    assert (disk.copy_durable(), durable) == ({}, [1, 2])


def test_one_sync_covers_all_batches_that_waited_when_it_started() -> None:
    scheduler, durable = Scheduler(1), []
    disk = Disk(scheduler, sync_ms=2.0)
    for seq in range(1, 6):
        disk.write(batch(seq, x=seq), durable.append)  # the first starts a sync, four wait for the next
    scheduler.run()
    assert (durable, disk.syncs) == ([1, 5], 2)
    assert disk.copy_durable() == {("t", "x"): 5}


def test_a_power_loss_keeps_what_was_reported_durable_and_a_prefix_of_the_rest() -> None:
    survivors = set()
    for seed in range(100):
        scheduler, durable = Scheduler(seed), []
        disk = Disk(scheduler, sync_ms=2.0)
        for seq in range(1, 11):
            scheduler.call_at(seq * 0.7, disk.write, batch(seq, **{f"k{seq}": seq}), durable.append)
        scheduler.run(until_ms=7.0)
        disk.crash(lose_unsynced=True)
        kept = len(disk.items())
        assert disk.items() == {("t", f"k{seq}"): seq for seq in range(1, kept + 1)}
        assert kept >= max(durable, default=0)
        assert disk.copy_durable() == disk.items()
        reported = list(durable)
        scheduler.run()
        assert durable == reported  # nothing is reported after the crash
        survivors.add(kept - max(durable, default=0))
    assert len(survivors) > 3


def test_a_process_crash_without_power_loss_keeps_every_batch() -> None:
    scheduler = Scheduler(1)
    disk = Disk(scheduler, sync_ms=2.0)
    disk.write(batch(1, x=1), print)
    disk.write(batch(2, y=2), print)
    disk.crash(lose_unsynced=False)
    assert disk.copy_durable() == {("t", "x"): 1, ("t", "y"): 2}


def test_os_durability_is_reported_almost_at_once() -> None:
    scheduler, durable = Scheduler(1), []
    disk = Disk(scheduler, sync_ms=2.0, durability="os")
    disk.write(batch(1, x=1), durable.append)
    scheduler.run(until_ms=0.1)
    assert durable == [1]


def test_full_disk_keeps_batches_and_syncs_them_afterwards() -> None:
    scheduler, durable = Scheduler(1), []
    disk = Disk(scheduler, sync_ms=2.0)
    disk.full(for_ms=100)
    for seq in (1, 2, 3):
        disk.write(batch(seq, x=seq), durable.append)
    scheduler.run(until_ms=99)
    assert (durable, disk.copy_durable(), disk.items()) == ([], {}, {("t", "x"): 3})
    scheduler.run()
    assert durable == [1, 3]


def test_slow_disk_delays_syncs_for_the_given_time() -> None:
    scheduler, durable = Scheduler(1), []
    disk = Disk(scheduler, sync_ms=2.0)
    disk.slow(factor=10, for_ms=5)
    disk.write(batch(1), durable.append)
    scheduler.run(until_ms=9)
    assert durable == []
    scheduler.run()
    disk.write(batch(2), durable.append)
    scheduler.run(until_ms=scheduler.now_ms + 3)
    assert durable == [1, 2]


def test_a_log_is_read_in_order_between_trim_and_end_also_when_not_durable() -> None:
    disk = Disk(Scheduler(1), sync_ms=2.0)
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
        scheduler = Scheduler(seed)
        disk = Disk(scheduler, sync_ms=2.0)
        for seq in range(10):
            disk.write(log_batch(seq, seq, trim=[seq - 3]), print)
        disk.crash(lose_unsynced=True)
        found = [read.offset for read in disk.read_log("i", -1, 100)]
        assert found == sorted(key[2] for key in disk.items())
        assert len(found) <= 3


def test_change_of_a_stored_value_is_detected() -> None:
    disk = Disk(Scheduler(1), sync_ms=2.0, check_aliasing=True)
    value = [1]
    disk.write(batch(1, x=value), print)
    assert disk.items() == {("t", "x"): [1]}
    value.append(2)
    with pytest.raises(StoredValueChanged, match=r"written as \[1\], now \[1, 2\]"):
        disk.items()
