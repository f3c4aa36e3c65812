"""The rivals of `tiercel bench reconfigure`: their load, their figures, what is refused before they run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tiercel.bench.metrics import Moments, Outputs
from tiercel.bench.reconfigure_report import write_report
from tiercel.bench.rivals.choice import choose_rivals
from tiercel.bench.rivals.file_load import FileLoad, InputFiles
from tiercel.bench.rivals.flink import flink_python, read_results
from tiercel.bench.rivals.rival import RIVALS, figures, longest_gap_ms, row_of
from tiercel.bench.scenarios.reconfigure import COLUMNS
from tiercel.errors import UserError

MS = 1_000_000


def outputs_with_a_gap(gap_ms: int) -> Outputs:
    """A tuple every 10 ms for 20 s that takes 1 ms, but those due in the gap, which come at its end."""
    due = np.arange(0, 20_000, 10, dtype=np.int64) * MS
    emitted = due + MS
    stopped = (due >= 10_000 * MS) & (due < (10_000 + gap_ms) * MS)
    emitted[stopped] = (10_000 + gap_ms) * MS
    return Outputs(np.arange(len(due)) % 7, due, emitted)


AT = Moments(2_000 * MS, 10_000 * MS, 11_000 * MS, 19_000 * MS)


def test_the_longest_gap_is_seen_from_outputs_alone() -> None:
    outputs = outputs_with_a_gap(700)
    assert longest_gap_ms(outputs.emitted_ns, AT.request_ns, AT.over_ns) == pytest.approx(700, abs=12)
    assert longest_gap_ms(outputs.emitted_ns, AT.steady_ns, AT.request_ns) == pytest.approx(10, abs=2)


def test_lost_and_doubled_tuples_of_a_rival_are_counted() -> None:
    outputs = outputs_with_a_gap(700)
    sent = set(zip(outputs.sensor.tolist(), outputs.due_ns.tolist(), strict=True))
    twice = Outputs(*(np.append(column, column[:3]) for column in vars(outputs).values()))
    found = figures(twice, AT, sent | {(3, -5), (4, -5)}, 7)
    assert (found["lost"], found["doubled"]) == (2, 3)
    assert found["stoppage_p50_ms"] == pytest.approx(650, abs=60)


def test_a_row_of_a_rival_has_the_columns_of_a_strategy() -> None:
    row = row_of("flink-adaptive", COLUMNS, {"gap_ms": 1.0, "repeat": 1})
    assert set(COLUMNS) <= row.keys()
    assert row["bytes_moved"] is None


def test_the_load_hands_over_every_row_once_as_files(tmp_path: Path) -> None:
    load = FileLoad(InputFiles(tmp_path), keys=50, rate=2_000)
    load.start()
    time.sleep(0.4)
    load.stop()
    lines = [line for path in sorted(tmp_path.glob("*.csv")) for line in path.read_text().splitlines()]
    sent = load.sent_before(1 << 62)
    assert len(lines) == len(load.sensor) == len(sent) > 300
    assert {tuple(map(int, line.split(",")[0:3:2])) for line in lines} == sent
    for sensor in range(3):
        mine = [int(line.split(",")[1]) for line in lines if line.startswith(f"{sensor},")]
        assert mine == list(range(1, len(mine) + 1))


def test_only_committed_files_of_flink_are_read(tmp_path: Path) -> None:
    (tmp_path / "part-a-0").write_text('3,1,5000000,1,1024,"1970-01-01 00:00:00.007"\n', encoding="ascii")
    (tmp_path / ".part-a-1.inprogress").write_text("9,9,9,9,9,x\n", encoding="ascii")
    found = read_results(tmp_path, 2 * MS)
    assert (found.sensor.tolist(), found.due_ns.tolist()) == ([3], [5 * MS])
    assert found.emitted_ns.tolist() == [5 * MS]


def test_rivals_are_chosen_by_name() -> None:
    assert choose_rivals("", "") == []
    assert choose_rivals("spark-repartition", "") == ["spark-repartition"]
    with pytest.raises(UserError, match="unknown 'storm'"):
        choose_rivals("storm", "")


def test_a_python_without_flink_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="has no PyFlink"):
        flink_python(sys.executable)
    with pytest.raises(UserError, match="no such program"):
        choose_rivals("all", "/no/such/python")


def test_a_report_is_drawn_with_rivals_that_have_no_recording(tmp_path: Path) -> None:
    lines = [row_of(name, COLUMNS, {"repeat": 1, "gap_ms": 900.0, "gap_floor_ms": 100.0}) for name in RIVALS]
    write_report(tmp_path, lines, [1, 2], {"keys": 2})
    assert "flink-savepoint" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert pq.read_table(tmp_path / "repeats.parquet")["gap_ms"].to_pylist() == [900.0] * 3
