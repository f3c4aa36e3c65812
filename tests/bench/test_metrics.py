"""Definitions of the figures, on records with known answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiercel.bench import metrics as measures
from tiercel.bench.loadgen.load import Record
from tiercel.bench.loadgen.process import write_record
from tiercel.bench.metrics import Moments, Outputs, judge, read_outputs

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


def test_record_that_never_stabilises_has_no_stabilisation_time() -> None:
    slow = steady(stop_ms=40_000, keys=range(1), at_ns=REQUEST)
    found = judge(slow, AT, PROBES, MOVED)
    assert found["stabilise_ms"] is None
    assert found["peak_ms"] > 19_000


def test_without_other_keys_there_is_no_figure_for_them() -> None:
    assert judge(steady(), AT, PROBES, ALL)["others_p99_ms"] is None


def noisy(stop_ms: float = 0.0, hiccup_ms: float = 30.0) -> Outputs:
    """The same, with a hiccup of the machine in each second: all keys stand still for a while."""
    outputs = steady(stop_ms)
    emitted = outputs.emitted_ns.copy()
    for second in range(30):
        begin, end = second * S + 400 * MS, second * S + int((400 + hiccup_ms) * MS)
        caught = (outputs.due_ns >= begin) & (outputs.due_ns < end)
        emitted[caught] = np.maximum(emitted[caught], end + MS)
    return Outputs(outputs.sensor, outputs.due_ns, emitted)


def test_hiccups_that_are_there_without_a_move_are_no_disruption_by_it() -> None:
    found = judge(noisy(), AT, PROBES, MOVED)
    assert (found["disruption_ms"], found["stabilise_ms"]) == (0.0, 0.0)
    assert (found["disruption_floor_ms"], found["stabilise_floor_ms"]) == (0.0, 0.0)


def test_a_planted_stop_above_the_hiccups_is_found_by_every_measure() -> None:
    found = judge(noisy(stop_ms=120), AT, PROBES, MOVED)
    assert found["disruption_ms"] == 100.0, (
        "the two windows of 50 ms whose tuples waited longer than a hiccup"
    )
    assert found["stabilise_ms"] == 250.0
    assert found["gap_ms"] == 121.0 - 1.0 + 5.0, "from the output before the stop to the first one after it"
    assert found["gap_floor_ms"] == 35.0
    assert found["stoppage_max_ms"] == 120.0


def test_a_gap_needs_nothing_but_outputs_and_counts_also_if_they_never_come_back() -> None:
    outputs = Outputs(np.array([1, 1, 2]), np.zeros(3, dtype=np.int64), np.array([10, 30, 45]) * MS)
    assert measures.gap_ms(outputs, 0, 100 * MS, [1]) == 70.0
    assert measures.gap_ms(outputs, 0, 100 * MS, [1, 2]) == 55.0
    assert measures.gap_ms(outputs, 0, 100 * MS, [3]) is None


def longer_way(extra_ms: int, stop_ms: float = 0.0) -> Outputs:
    """The moved keys are at another site from the middle of the move on."""
    outputs = steady(stop_ms, keys=ALL)
    farther = outputs.due_ns >= REQUEST + 100 * MS
    return Outputs(outputs.sensor, outputs.due_ns, outputs.emitted_ns + farther * extra_ms * MS)


def test_between_sites_the_larger_of_the_medians_is_the_reference() -> None:
    found = judge(longer_way(40), AT, PROBES, MOVED, between_sites=True)
    assert (found["stoppage_max_ms"], found["disruption_ms"]) == (0.0, 0.0)
    assert found["stabilise_ms"] == 250.0, "when the way becomes longer, nothing arrives for 40 ms"
    assert judge(longer_way(40), AT, PROBES, MOVED)["stoppage_max_ms"] == 40.0


def test_between_sites_a_planted_stop_is_found_too() -> None:
    found = judge(longer_way(40, stop_ms=50), AT, PROBES, MOVED, between_sites=True)
    assert (found["stoppage_max_ms"], found["disruption_ms"], found["stabilise_ms"]) == (50.0, 50.0, 250.0)


def test_behind_a_backlog_only_what_the_move_adds_counts() -> None:
    """All tuples wait 2 s; the moved ones wait 30 ms more for a while."""
    outputs = steady(stop_ms=30)
    waiting = Outputs(outputs.sensor, outputs.due_ns, outputs.emitted_ns + 2 * S)
    found = judge(waiting, AT, PROBES, MOVED, stays=range(5, 10))
    assert found["beyond_backlog_ms"] == 30.0
    assert judge(waiting, AT, PROBES, MOVED)["beyond_backlog_ms"] is None


def test_only_whole_windows_count_and_empty_ones_are_none() -> None:
    outputs = Outputs(np.array([0, 0]), np.array([10, 260]) * MS, np.array([12, 270]) * MS)
    assert measures.window_p99(outputs, 0, 1_100 * MS, 250 * MS) == [2.0, 10.0, None, None]
    assert list(measures.window_rates(outputs, 0, 1_100 * MS, 250 * MS)) == [4.0, 4.0, 0.0, 0.0]


def test_recording_reads_back_as_written(tmp_path: Path) -> None:
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
