"""What the benchmarks compute, from records with known answers."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from small import running
from small import until as wait_until
from tiercel.bench import bare, idle, measures, own_code
from tiercel.bench.averages import INPUT, INPUT_SCHEMA, OUTPUT, OUTPUT_SCHEMA, SITE, plan, topology
from tiercel.bench.echo import echoing, frame_sizes
from tiercel.bench.load import PRODUCER, Load, Record, due_in_tick
from tiercel.bench.loader import until, until_quiet, write_record
from tiercel.bench.measures import Moments, Outputs, judge
from tiercel.bench.processors import READING
from tiercel.bench.reader import Reader, _averaged, _counted
from tiercel.bench.records import read_outputs
from tiercel.bench.report import Cpu, document, median_line, percentile
from tiercel.bench.spark_batches import best
from tiercel.bench.throughput import PROCESSORS, readings
from tiercel.core import inbox, instance, messages, processing, router, traffic
from tiercel.core.events import Received, TimerFired
from tiercel.core.records import Output, StreamEntry
from tiercel.core.settings import Settings
from tiercel.runtime.host import Host
from tiercel.runtime.place import Manifest, Place, StreamFacts
from tiercel.spark.border import InputPlan, OperatorPlan
from tiercel.spark.ddl import parse_ddl
from tiercel.spark.ends import RowProducer, RowSubscriber
from tiercel.spark.hosting import build_host
from tiercel.spark.schema import Columns

MS, S = 1_000_000, 1_000_000_000
REQUEST, END, OVER = 10 * S, 10 * S + 200 * MS, 30 * S
AT = Moments(0, REQUEST, END, OVER)
PROBES, MOVED, ALL = range(2), range(5), range(10)


def steady(stop_ms: float = 0.0, keys: range = MOVED, at_ns: int = REQUEST + 100 * MS) -> Outputs:
    """Each of ten keys every 5 ms, 1 ms latency; at `at_ns` some keys stand still for a while."""
    due = np.repeat(np.arange(0, OVER, 5 * MS), len(ALL))
    sensor = np.tile(np.arange(len(ALL)), len(due) // len(ALL))
    emitted = due + MS
    resumes = at_ns + int(stop_ms * MS)
    stopped = np.isin(sensor, list(keys)) & (due >= at_ns) & (due < resumes)
    emitted[stopped] = resumes + MS
    return Outputs(sensor, due, emitted)


# -- measures --------------------------------------------------------------------------------


def test_a_steady_record_has_no_stoppage_no_disruption_and_no_dip() -> None:
    found = judge(steady(), AT, PROBES, MOVED)
    assert (found["steady_p50_ms"], found["steady_p99_ms"]) == (1.0, 1.0)
    assert (found["stoppage_p50_ms"], found["stoppage_p99_ms"], found["stoppage_max_ms"]) == (0.0, 0.0, 0.0)
    assert (found["others_p99_ms"], found["disruption_ms"]) == (0.0, 0.0)
    assert (found["peak_ms"], found["jitter_ms"]) == (1.0, 0.0)
    assert (found["stabilise_ms"], found["throughput_dip"]) == (0.0, 0.0)
    assert found["duration_ms"] == 200.0


def test_a_planted_stop_is_found_in_the_keys_that_it_stopped_and_in_no_others() -> None:
    found = judge(steady(stop_ms=50), AT, PROBES, MOVED)
    assert found["stoppage_p50_ms"] == found["stoppage_max_ms"] == 50.0
    assert found["moved_p99_ms"] == 50.0
    assert found["others_p99_ms"] == 0.0
    assert (found["peak_ms"], found["jitter_ms"]) == (51.0, 50.0)
    assert found["disruption_ms"] == 50.0  # the one window in which tuples waited
    assert found["stabilise_ms"] == 250.0  # all windows but the first are as before


def test_a_stop_after_the_end_of_the_move_is_not_its_stoppage() -> None:
    found = judge(steady(stop_ms=50, at_ns=END + 100 * MS), AT, PROBES, MOVED)
    assert found["stoppage_max_ms"] == 0.0
    assert found["disruption_ms"] == 50.0


def test_a_stop_of_everything_is_a_dip_of_the_rate_and_delays_stabilisation() -> None:
    found = judge(steady(stop_ms=1_000, keys=ALL, at_ns=REQUEST), AT, PROBES, MOVED)
    assert found["throughput_dip"] == 1.0
    assert found["disruption_ms"] == 1_000.0
    assert found["stabilise_ms"] == 1_000.0
    assert found["stoppage_max_ms"] == 1_000.0


def test_what_never_becomes_stable_says_so() -> None:
    slow = steady(stop_ms=40_000, keys=range(1), at_ns=REQUEST)
    found = judge(slow, AT, PROBES, MOVED)
    assert found["stabilise_ms"] is None
    assert found["peak_ms"] > 19_000


def test_nobody_else_means_no_figure_for_the_others() -> None:
    assert judge(steady(), AT, PROBES, ALL)["others_p99_ms"] is None


def test_windows_are_whole_and_empty_ones_are_known() -> None:
    outputs = Outputs(np.array([0, 0]), np.array([10, 260]) * MS, np.array([12, 270]) * MS)
    assert measures.window_p99(outputs, 0, 1_100 * MS, 250 * MS) == [2.0, 10.0, None, None]
    assert list(measures.window_rates(outputs, 0, 1_100 * MS, 250 * MS)) == [4.0, 4.0, 0.0, 0.0]


# -- report ----------------------------------------------------------------------------------


def test_percentiles_and_medians() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert np.isnan(percentile([], 0.5))
    lines = [{"a": "x", "n": n, "rare": None, "phases": {}} for n in (1.0, 9.0, 2.0)]
    lines[0]["rare"] = 7.0
    assert median_line(lines) == {"a": "x", "n": 2.0, "rare": None, "phases": None}


def test_a_results_file_has_what_makes_it_comparable() -> None:
    cpu = Cpu()
    found = document("idle", [], {"keys": 1}, seed=7, cpu=cpu.line())
    assert {"commit", "machine", "python", "settings", "seed", "cpu", "at"} <= found.keys()
    assert found["cpu"]["others_cores"] >= 0
    assert msgspec.json.decode(msgspec.json.encode(found))["seed"] == 7


def test_spark_is_taken_at_its_best_and_at_its_best_below_two_seconds() -> None:
    lines = [
        {"events_per_s": 5, "batch_max_ms": 800},
        {"events_per_s": 9, "batch_max_ms": 1_900},
        {"events_per_s": 20, "batch_max_ms": 26_000},
    ]
    assert best(lines) == {"spark_events_per_s": 20, "spark_events_per_s_below_2s": 9}
    assert best(lines[2:])["spark_events_per_s_below_2s"] is None


# -- load ------------------------------------------------------------------------------------


def test_every_rate_comes_to_its_sum_each_second() -> None:
    for rate in (1, 999, 1_000, 1_500, 50_000):
        assert sum(due_in_tick(tick, rate) for tick in range(3_000)) == 3 * rate


def test_the_load_sends_what_a_producer_of_the_public_api_would() -> None:
    load = Load(10)
    load.start_open_loop(5_000)
    load._next_tick_ns = 1  # long due
    rows = load.on_event(TimerFired("tick"), 0.0)[0].message.rows  # type: ignore[union-attr]
    pack = Columns(INPUT_SCHEMA, "sensor").pack
    sensors = list(load.record.in_sensor)[:5]
    assert rows == [pack((sensor, 1, 1, 1.0)) for sensor in sensors]


def test_the_judge_counts_what_is_lost_doubled_or_computed_from_the_wrong_state() -> None:
    load = Load(3)
    pack = Columns(OUTPUT_SCHEMA, "sensor").pack

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


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record()
    for sensor in (3, 1):
        record.in_sensor.append(sensor)
        record.in_n.append(1)
        record.in_due_ns.append(10)
        record.sensor.append(sensor)
        record.n.append(1)
        record.due_ns.append(10)
        record.emitted_ns.append(10 + sensor)
    write_record(record, tmp_path / "in", tmp_path / "out")
    outputs = read_outputs(tmp_path / "out")
    assert outputs.sensor.tolist() == [3, 1]
    assert outputs.emitted_ns.tolist() == [13, 11]


# -- the subscriber --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_an_operator_costs_by_itself_grows_with_its_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts rows: a step that takes three times as long is seen as that."""
    spent = [0.0]
    monkeypatch.setattr(own_code, "time", SimpleNamespace(process_time=lambda: spent[0]))

    def cost(seconds: float, form: str) -> float:
        operator = PROCESSORS[name][0][form]()
        method = "step" if form == "fold" else "handleInputRows"
        real = getattr(operator, method)

        def slowly(*facts: Any) -> Any:
            spent[0] += seconds
            return real(*facts)

        monkeypatch.setattr(operator, method, slowly)
        return own_code.own_code_us(operator)

    assert cost(3e-5, "fold") == pytest.approx(30)
    assert cost(1e-5, "fold") == pytest.approx(10)
    assert cost(3e-5, "processor") == pytest.approx(30 / own_code.ROWS)  # once for the rows of a call


@pytest.mark.parametrize("form", ["processor", "fold"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_subscriber_of_the_throughput_counts_every_key_and_no_fault(
    name: str, form: str, tmp_path: Path
) -> None:
    forms, schema = PROCESSORS[name]
    place, operator = Place(tmp_path), topology(1).operators["average"]
    facts = {
        INPUT: StreamFacts(parse_ddl(READING).json(), ("sensor",), sites=(SITE,)),
        OUTPUT: StreamFacts(parse_ddl(schema).json(), (), written_by="average"),
    }
    place.write(Manifest("averages", topology(1), facts, Settings()))
    columns = Columns(READING, "sensor")
    counted = OperatorPlan(forms[form](), (InputPlan(columns),), columns.schema, Columns(schema))
    hosts = [build_host(place, SITE, None), build_host(place, operator.instances[0], counted)]
    order = [2, 0, 1]
    with running(*hosts), RowProducer(place, INPUT, name="p") as producer:
        reader = Reader(place, OUTPUT, len(order))
        for columns_of in islice(readings(order), 4):
            producer.send_columns(columns_of)
        wait_until(lambda: reader.received == 4_000, f"only {reader.received} came")
        assert reader.end() == [1_333, 1_333, 1_334]
        with RowSubscriber(place, OUTPUT, after=0) as rows, RowSubscriber(place, OUTPUT, after=0) as values:
            found, plain = [tuple(one.row) for one in rows.poll(10)], values.poll_values(10)
            both = min(len(found), len(plain))
            assert both > 0
            assert plain[:both] == found[:both]
    assert reader.faults == 0


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (_counted, [(0, 1), (0, 2), (1, 1)], [(0, 3), (0, 3), (1, 3)]),
        (_averaged, [(0, 1, 1.0), (0, 2, 1.5), (1, 1, 1.0)], [(0, 3, 2.5), (0, 3, 2.0), (1, 3, 2.0)]),
    ],
)
def test_the_subscriber_of_the_throughput_notices_every_fault(
    check: Callable[..., int], right: list[tuple[float, ...]], wrong: list[tuple[float, ...]]
) -> None:
    counts = [0, 0]
    assert check(right, counts) == 0
    assert counts == [2, 1]
    assert check(wrong, counts) == len(wrong) - (check is _counted)
    assert counts == [3, 3]


# -- echo ------------------------------------------------------------------------------------


def test_the_echo_sends_frames_of_real_sizes_through_two_processes_and_back() -> None:
    empty, row = frame_sizes()
    assert 20 < empty < 100
    assert 20 < row < 100
    with echoing() as echo:
        found = echo.open_loop(2_000, 0.3, 0.1)
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]


# -- the build without moves ----------------------------------------------------------------

ORIGINALS: list[tuple[Callable[..., object], Callable[..., object]]] = [
    (bare.BareInbox.append, inbox.Inbox.append),
    (bare.BareRouter._finish, router.Router._finish),
    (bare.BareRouter.on_outputs, traffic.Traffic.on_outputs),
    (bare.BareInstance.process, processing.Processing.process),
    (bare.BareInstance.flush, processing.Processing.flush),
    (bare.BareInstance._on_confirmed, instance.Instance._on_confirmed),
]
ABOUT_MOVES = re.compile(
    r"departure|arriv|leav|group|shadow|_moving|mutant|refused|retry|to_moves|admitted|suffix"
)
SAID_OTHERWISE = {
    "self._any_timers",
    "self.space",
}  # keys on their way have timers too; the bare ones have none


def uses(lines: list[str]) -> set[str]:
    """What these lines read, change and call."""
    return set(re.findall(r"\b(?:self|step|feed|inbox|message|entry)\.\w+", "\n".join(lines)))


@pytest.mark.parametrize(("stripped", "original"), ORIGINALS, ids=lambda m: m.__qualname__)
def test_the_bare_build_does_all_that_the_real_one_does_but_for_moves(
    stripped: Callable[..., object], original: Callable[..., object]
) -> None:
    """Whoever changes the real path changes the bare one too: else their ratio says nothing."""
    whole = inspect.getsource(original).splitlines()
    about_rows = [line for line in whole if not ABOUT_MOVES.search(line)]
    mine = uses(inspect.getsource(stripped).splitlines())
    assert uses(about_rows) - mine <= SAID_OTHERWISE
    assert mine - uses(whole) <= SAID_OTHERWISE


def test_the_bare_build_carries_tuples_exactly_once_and_in_order(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(Manifest("bare", topology(2), {}, Settings()))
    names = [SITE, *topology(2).operators["average"].instances]

    async def scenario() -> None:
        load = Load(50)
        hosts = [bare.bare_build(place, name, plan() if "@" in name else None) for name in names]
        hosts.append(Host(PRODUCER, load, place.registry, place.secret, dials=[SITE], listens=False))
        tasks = [asyncio.create_task(host.run()) for host in hosts]
        await until(lambda: load.connected, "no connection")
        load.closed_loop_max = 2_000
        hosts[-1].take(TimerFired("fill"))
        await until(lambda: load.received > 10_000, "nothing comes back")
        load.stop()
        await until_quiet(load)
        for host in hosts:
            host.end("over")
        await asyncio.gather(*tasks)
        assert load.faults.total == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


# -- turns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("swap", "order"), [(False, "ABBAAB"), (True, "BAABBA")])
def test_two_that_are_compared_take_turns_and_are_first_in_turn(swap: bool, order: str) -> None:
    """A machine that becomes slower all the time is no reason to find one of them slower."""
    taken: list[str] = []

    def half(name: str) -> Callable[[float], dict[str, Any]]:
        def run(seconds: float) -> dict[str, Any]:
            taken.append(name)
            return {"events_per_s": 100 - len(taken), "seconds": seconds}

        return run

    a, b = idle.take_turns([half("A"), half("B")], 3 * idle.SLICE_S, swap=swap)
    assert "".join(taken) == order
    assert idle.total(a, "seconds") == idle.total(b, "seconds") == 3 * idle.SLICE_S
    assert abs(idle.mean_rate(a) - idle.mean_rate(b)) < 1


def test_what_is_shorter_than_a_slice_is_one() -> None:
    taken = idle.take_turns([lambda seconds: {"seconds": seconds}] * 2, idle.SLICE_S / 4, swap=False)
    assert taken == [[{"seconds": idle.SLICE_S / 4}]] * 2
