"""Applications on Spark: a small run of each equals its oracle, and a comparison notices every fault."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pyspark.sql import SparkSession

from documented import EVERY_FILE, fields
from tiercel.apps.app import POSITION, Output
from tiercel.apps.catalogue import find_app
from tiercel.apps.run import Run, run
from tiercel.apps.verdict import compare
from tiercel.bench.scenarios.applications import app, word_recovery

SMALL: dict[str, tuple[dict[str, Any], int, list[str]]] = {  # options, rate, changes
    "traffic": ({"cars": 50, "segments": 5, "state_bytes": 100}, 300, ["segment", "scale"]),
    "wordcount": ({"words": 60, "window_s": 1}, 100, ["kill"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_output_row_of_an_application_is_what_its_oracle_expects(
    name: str, spark: SparkSession
) -> None:
    options, rate, during = SMALL[name]
    found = run(Run(find_app(name), options, seed=5, rate=rate, seconds=3, during=during), spark=spark)
    assert found.good, found.outputs
    assert [change.kind for change in found.changes] == during
    assert sum(one.expected for one in found.outputs.values()) > 100


def test_benchmark_of_an_application_has_the_documented_fields_and_the_verdict(spark: SparkSession) -> None:
    options = app.Options(find_app("keycount"), {"keys": 40, "skew": "zipf"}, 400, 0.06, ["none", "move"], 5)
    rows, facts = app.measure(options, lambda step: None, spark)
    assert set().union(*rows) == fields("app")
    assert facts.keys() < fields(EVERY_FILE)
    assert facts["verdict"] == "every row is what the oracle expects"
    *_, none, move, judged = rows
    assert (none["during"], none["keys"]) == ("none", 0)
    assert (move["during"], facts["keys"]) == ("move", 40)
    assert 0 < move["keys"] < 40
    assert judged["expected"] == judged["found"] == facts["events"] >= 1_440


ROWS = [("a", 1, 0.5), ("a", 2, 1.0), ("b", 1, 3.0)]
SCHEMA = "key string, n int, mean double"


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        (ROWS, {}),
        ([("a", 1, 0.5 + 1e-12), *ROWS[1:]], {}),
        (ROWS[1:], {"lost": 1}),
        ([*ROWS, ROWS[2]], {"doubled": 1}),
        ([*ROWS, ("c", 1, 0.0)], {"invented": 1}),
        ([*ROWS[:2], ("b", 1, 3.1)], {"wrong": 1}),
        ([*ROWS[:2], ("b", 1, None)], {"wrong": 1}),
        ([ROWS[1], ROWS[0], ROWS[2]], {"reordered": 1}),
    ],
    ids=["none", "rounding", "lost", "doubled", "invented", "wrong", "null", "reordered"],
)
def test_a_comparison_notices_every_fault(
    spark: SparkSession, rows: list[tuple[Any, ...]], faults: dict[str, int]
) -> None:
    found = spark.createDataFrame([(*row, n) for n, row in enumerate(rows)], f"{SCHEMA}, {POSITION} long")
    judged = compare(spark.createDataFrame(ROWS, SCHEMA), found, Output(("key", "n"), order="n"), ("key",))
    names = ("lost", "doubled", "invented", "wrong", "reordered")
    assert {name: getattr(judged, name) for name in names if getattr(judged, name)} == faults
    assert (judged.expected, judged.found) == (3, len(rows))


@pytest.mark.long
def test_benchmark_of_recovery_gives_every_way_and_counts_every_word() -> None:
    options = word_recovery.Options([60], word_recovery.WAYS, rate=100, seconds=2, seed=3)
    command = [sys.executable, "-c", RECOVERY.format(options=options)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (row,) = json.loads(ended.stdout)
    assert row.keys() == fields("word-recovery")
    assert row["faults"] == 0
    assert min(row[f"{way}_s"] for way in ("floor", "checkpoint", "replay", "source")) > 0


RECOVERY = """
import json
from tiercel.bench.scenarios.applications.word_recovery import Options, measure
print(json.dumps(measure({options}, lambda step: None)))
"""
