"""The audit of the demonstration detects every kind of fault in hand-made records."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from speeds import CARS, SEQS, Output, right_outputs, write_inputs, write_outputs

from tiercel.demo.audit import Audit
from tiercel.demo.speed_monitor import audit
from tiercel.demo.traffic import car_name, write_file


def audited(spark: SparkSession, deployment: Path, outputs: list[Output]) -> Audit:
    inputs, sink = deployment / "inputs", deployment / "outputs"
    inputs.mkdir()
    sink.mkdir()
    write_inputs(inputs)
    write_outputs(sink, outputs)
    return audit(spark, [inputs], sink)


def test_audit_of_a_correct_run_has_no_faults(spark: SparkSession, tmp_path: Path) -> None:
    count = SEQS * len(CARS)
    assert audited(spark, tmp_path, right_outputs()) == Audit(count, count, 0, 0, 0, 0, 0)


def test_audit_detects_a_lost_output(spark: SparkSession, tmp_path: Path) -> None:
    found = audited(spark, tmp_path, right_outputs()[1:])
    assert (found.lost, found.faults) == (1, 1)


def test_audit_detects_a_doubled_output(spark: SparkSession, tmp_path: Path) -> None:
    outputs = right_outputs()
    found = audited(spark, tmp_path, [outputs[0], *outputs])
    assert (found.doubled, found.faults) == (1, 1)


def test_audit_detects_reordered_outputs(spark: SparkSession, tmp_path: Path) -> None:
    first, *others = right_outputs()
    found = audited(spark, tmp_path, [*others, first])
    assert (found.reordered, found.faults) == (1, 1)


def test_audit_detects_wrong_values(spark: SparkSession, tmp_path: Path) -> None:
    outputs = right_outputs()
    car, seq, n, mean, alert, due = outputs[3]
    outputs[3] = (car, seq, n, mean + 1, alert, due)
    car, seq, n, mean, alert, due = outputs[4]
    outputs[4] = (car, seq, n, mean, not alert, due)
    found = audited(spark, tmp_path, outputs)
    assert (found.wrong, found.faults) == (2, 2)


def test_audit_detects_an_output_without_input(spark: SparkSession, tmp_path: Path) -> None:
    found = audited(spark, tmp_path, [*right_outputs(), (car_name(2), 0, 1, 60.0, False, 0)])
    assert (found.invented, found.faults) == (1, 1)


def test_audit_reports_everything_lost_without_outputs(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "inputs").mkdir()
    write_file(tmp_path / "inputs" / "all.parquet", [(0, 0, 60, 0)])
    assert audit(spark, [tmp_path / "inputs"], tmp_path / "empty").lost == 1
