"""The audit of the demonstration notices every kind of fault, in records made by hand."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from speeds import CARS, SEQS, Output, right_outputs, write_inputs, write_outputs

from tiercel.bench.traffic import car_name, write_file
from tiercel.spark.audit import Audit
from tiercel.spark.speed import audit


def audited(spark: SparkSession, place: Path, outputs: list[Output]) -> Audit:
    inputs, sink = place / "inputs", place / "outputs"
    inputs.mkdir()
    sink.mkdir()
    write_inputs(inputs)
    write_outputs(sink, outputs)
    return audit(spark, [inputs], sink)


def test_a_right_run_has_no_faults(spark: SparkSession, tmp_path: Path) -> None:
    count = SEQS * len(CARS)
    assert audited(spark, tmp_path, right_outputs()) == Audit(count, count, 0, 0, 0, 0, 0)


def test_a_lost_output_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    found = audited(spark, tmp_path, right_outputs()[1:])
    assert (found.lost, found.faults) == (1, 1)


def test_a_doubled_output_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    outputs = right_outputs()
    found = audited(spark, tmp_path, [outputs[0], *outputs])
    assert (found.doubled, found.faults) == (1, 1)


def test_an_output_that_was_overtaken_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    first, *others = right_outputs()
    found = audited(spark, tmp_path, [*others, first])
    assert (found.reordered, found.faults) == (1, 1)


def test_a_wrong_mean_and_a_wrong_alert_are_noticed(spark: SparkSession, tmp_path: Path) -> None:
    outputs = right_outputs()
    car, seq, n, mean, alert, due = outputs[3]
    outputs[3] = (car, seq, n, mean + 1, alert, due)
    car, seq, n, mean, alert, due = outputs[4]
    outputs[4] = (car, seq, n, mean, not alert, due)
    found = audited(spark, tmp_path, outputs)
    assert (found.wrong, found.faults) == (2, 2)


def test_an_output_of_no_input_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    found = audited(spark, tmp_path, [*right_outputs(), (car_name(2), 0, 1, 60.0, False, 0)])
    assert (found.invented, found.faults) == (1, 1)


def test_no_output_at_all_is_everything_lost(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "inputs").mkdir()
    write_file(tmp_path / "inputs" / "all.parquet", [(0, 0, 60, 0)])
    assert audit(spark, [tmp_path / "inputs"], tmp_path / "empty").lost == 1
