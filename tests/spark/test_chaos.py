"""Chaos on Spark, and its verdict on hand-made records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tiercel.chaos.plan import Kind, plan
from tiercel.chaos.recording import Inputs, Output, Outputs
from tiercel.chaos.supervisor import kinds_of
from tiercel.chaos.verdict import judge
from tiercel.chaos.workload import frames, reference
from tiercel.cli.chaos import MASTER
from tiercel.demo.audit import Audit

ROOT = Path(__file__).resolve().parent.parent.parent


def recorded(deployment: Path) -> list[Output]:
    """Inputs of a chunk on disk; the right outputs, made without the operator."""
    chunk = frames(1, 0, 0)
    Inputs(deployment / "inputs", "p").add(0, chunk)
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
def test_verdict_detects_each_kind_of_fault(spark: SparkSession, tmp_path: Path, fault: str) -> None:
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


SEED = 7554  # its first faults, one of each kind, are such as the next test says


def test_plan_of_a_three_minute_run_covers_every_kind_of_fault() -> None:
    """However slow a machine is: the first fault of each kind is always done, and none of them is in vain."""
    faults = list(islice(plan(SEED, kinds_of(MASTER, "replica")), len(Kind)))
    assert {fault.kind for fault in faults} == set(Kind)
    assert not any(fault.overlap for fault in faults)  # all is well before the next one: it finds its victim
    (n,) = (n for n, fault in enumerate(faults) if fault.kind is Kind.APPLICATION)
    killed = faults[n].change
    assert faults[n].in_move
    assert killed is not None
    assert killed.strategy == "restart"  # instances start again: it lasts until long after the kill
    assert not any(
        fault.change and fault.change.what == "scale" for fault in faults[:n]
    )  # two to choose from
    assert sum(fault.in_move for fault in faults) >= 5
    assert any(fault.change and fault.change.what == "scale" for fault in faults)


@pytest.mark.longest  # three minutes, and mostly waiting: beside all others
def test_three_minute_chaos_run_has_no_violation(tmp_path: Path) -> None:
    """Exit code 2 means: all is well, but this machine was too busy for as many faults as there should be."""
    out = tmp_path / "chaos"
    arguments = ["--minutes", "3", "--seed", str(SEED), "--master", MASTER, "--durability", "replica"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [sys.executable, "-m", "tiercel", "chaos", *arguments, "--out", str(out), "--json"],
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
    assert found == json.loads((out / "verdict.json").read_text(encoding="utf-8"))

    told = json.loads((out / "faults.json").read_text(encoding="utf-8"))
    kinds = [fault["kind"] for fault in told["faults"]]
    assert {kind: kinds.count(kind) for kind in Kind} == found["faults"]
    planned = list(islice(plan(SEED, kinds_of(MASTER, "replica")), len(Kind)))
    assert kinds[: len(Kind)] == [fault.kind for fault in planned]
    assert not [line for line in found["too_few"] if "of kind" in line]
    assert found["starts"] - found["failed_starts"] == 1 + found["faults"][Kind.APPLICATION]
    assert found["during_moves"][Kind.APPLICATION] >= 1
    assert found["changes"].get("done", 0) >= 1
