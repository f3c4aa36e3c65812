"""Chaos on real Spark, and its judge on records made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tiercel.chaos.judge import judge
from tiercel.chaos.ledger import frames, reference
from tiercel.chaos.plan import Kind
from tiercel.chaos.record import Inputs, Output, Outputs
from tiercel.spark.audit import Audit

ROOT = Path(__file__).resolve().parent.parent.parent


def recorded(place: Path) -> list[Output]:
    """Inputs of a chunk on disk; the right outputs, made without the operator."""
    chunk = frames(1, 0, 0)
    Inputs(place / "inputs", "p").add(0, chunk)
    rows = [row for frame in chunk for row in frame]
    right = {
        (account, n): (account, n, count, chain)
        for key in {account for account, _, _ in rows}
        for account, n, count, chain in reference(row for row in rows if row[0] == key)
    }
    return [(n + 1, 0, *right[account, n]) for account, n, _ in rows]


def renumbered(rows: list[Output]) -> list[Output]:
    return [(n, 0, *row[2:]) for n, row in enumerate(rows, 1)]


@pytest.mark.parametrize("fault", ["none", "lost", "doubled", "reordered", "wrong", "invented"])
def test_the_judge_notices_each_kind_of_fault(spark: SparkSession, tmp_path: Path, fault: str) -> None:
    right = recorded(tmp_path)
    account = right[0][2]
    same = next(n for n, row in enumerate(right) if n and row[2] == account)
    given = {
        "none": right,
        "lost": right[1:],
        "doubled": renumbered([right[0], *right]),
        "reordered": renumbered([*right[1 : same + 1], right[0], *right[same + 1 :]]),
        "wrong": [(*right[0][:4], 17, 4), *right[1:]],
        "invented": [*right, (len(right) + 1, 0, 1, 10**9, 1, 1)],
    }[fault]
    Outputs(tmp_path / "outputs").add(given)
    found = judge(spark, tmp_path)
    expected = dict.fromkeys(("lost", "doubled", "reordered", "wrong", "invented"), 0)
    if fault != "none":
        expected[fault] = 1
    assert found == Audit(inputs=len(right), outputs=len(given), **expected)


@pytest.mark.longest  # three minutes, and mostly waiting: beside all others
def test_three_minutes_with_every_kind_of_fault_keep_every_promise(tmp_path: Path) -> None:
    """Exit code 2 means: all is well, but this machine was too busy for as many faults as there should be."""
    out = tmp_path / "chaos"
    command = [sys.executable, "-m", "tiercel.cli", "chaos", "--minutes", "3", "--durability", "replica"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [*command, "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert ended.returncode in (0, 2), ended.stdout + ended.stderr[-6000:]
    found = json.loads(ended.stdout)
    assert found["good"] is True
    assert bool(found["too_few"]) == (ended.returncode == 2)
    audit = found["audit"]
    assert audit["inputs"] == audit["outputs"] > 0
    assert set(found["faults"]) == set(Kind)
    assert sum(found["faults"].values()) >= 3
    assert found == json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    recorded_faults = json.loads((out / "faults.json").read_text(encoding="utf-8"))["faults"]
    assert len(recorded_faults) == sum(found["faults"].values())
