"""The load: its rate, its bytes, and its checks."""

from __future__ import annotations

from tiercel.bench.loadgen.load import Load, due_in_tick
from tiercel.bench.operators import INPUT_SCHEMA, OUTPUT_SCHEMA, SITE
from tiercel.core import messages
from tiercel.core.machine.events import Received, TimerFired
from tiercel.core.model.log import Output, StreamEntry
from tiercel.spark.rows.row_codec import RowCodec


def test_ticks_of_a_second_add_up_to_the_rate() -> None:
    for rate in (1, 999, 1_000, 1_500, 50_000):
        assert sum(due_in_tick(tick, rate) for tick in range(3_000)) == 3 * rate


def test_load_sends_the_same_bytes_as_a_public_producer() -> None:
    load = Load(10)
    load.start_open_loop(5_000)
    load._next_tick_ns = 1  # long due
    rows = load.on_event(TimerFired("tick"), 0.0)[0].message.rows  # type: ignore[union-attr]
    pack = RowCodec(INPUT_SCHEMA, "sensor").pack
    sensors = list(load.record.in_sensor)[:5]
    assert rows == [pack((sensor, 1, 1, 1.0)) for sensor in sensors]


def test_hot_keys_get_half_of_the_tuples_and_all_others_the_rest() -> None:
    load = Load(1_000)
    load.hot = [7, 8]
    taken = load._take(300) + load._take(300)
    assert len(taken) == 600
    assert sum(sensor in (7, 8) for sensor in taken) in range(300, 304)
    assert len(set(taken)) > 290


def test_load_counts_lost_doubled_and_wrong_outputs() -> None:
    load = Load(3)
    pack = RowCodec(OUTPUT_SCHEMA, "sensor").pack

    def publish(*rows: tuple[int, int, int, float, int]) -> None:
        outputs = [Output(1, b"", 1, 0, pack(row)) for row in rows]
        entry = StreamEntry(1, outputs)
        load.on_event(Received(SITE, messages.Publish("averages", [entry])), 0.0)

    publish((0, 1, 1, 1.0, 5), (0, 2, 2, 1.5, 5))
    assert load.faults.total == 0
    publish((1, 3, 3, 2.0, 5))
    assert load.faults.lost == 2
    publish((0, 2, 2, 1.5, 5))
    assert load.faults.doubled_or_reordered == 1
    publish((2, 1, 2, 1.0, 5))
    assert load.faults.wrong_state == 1
    assert len(load.record.sensor) == 5
