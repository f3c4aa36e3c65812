"""The demonstration as `make demo` runs it, only shorter, and its verdict on wrong records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from speeds import right_outputs, write_inputs, write_outputs

from tiercel.bench.metrics import Moments, Outputs, judge
from tiercel.cli import main as cli
from tiercel.demo import run as demo
from tiercel.demo.audit import Audit

ROOT = Path(__file__).resolve().parent.parent.parent


def test_demonstration_has_no_fault_and_writes_its_report(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [
        sys.executable,
        "-m",
        "tiercel",
        "demo",
        "--seconds",
        "2",
        "--out",
        str(out),
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    audit = found["audit"]
    assert audit["inputs"] == audit["outputs"] > 0
    assert [audit[k] for k in ("lost", "doubled", "reordered", "wrong", "invented")] == [0] * 5
    assert [row["change"] for row in found["rows"]] == [
        "live move of 100 cars",
        "scale-out, 2 to 3 instances",
    ]
    assert found["rows"][0]["cars"] == 100
    assert all(row["moved_max_ms"] is not None for row in found["rows"])
    assert [task["kind"] for task in found["tasks"]] == ["router", "instance", "instance", "instance"]
    assert all(task["state"] == "running" and task["stage"] >= 0 for task in found["tasks"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert all(f"<td>{task['pid']}</td>" in page for task in found["tasks"])
    assert (out / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert "moving 100 cars live" in ended.stderr


# -- what is not right -----------------------------------------------------------------------------------

S = 1_000_000_000
FAULTS = ("lost", "doubled", "reordered", "wrong", "invented")


def records(fault: str) -> list[Any]:
    """What came out of a run in which one thing went wrong."""
    first, *others = right = right_outputs()
    return {
        "none": right,
        "lost": others,
        "doubled": [first, *right],
        "reordered": [*others, first],
        "wrong": [(*first[:3], first[3] + 1, *first[4:]), *others],
        "invented": [*right, ("car-299", 0, 1, 60.0, False, 0)],
    }[fault]


def demonstrated(recorded: Path, fault: str) -> demo.Demonstration:
    """A run of twelve seconds whose inputs and outputs are on disk; nobody has judged them yet."""
    write_inputs(recorded / "produced")
    write_outputs(recorded / "outputs", records(fault))
    due = np.arange(0, 12 * S, S // 100)
    outputs = Outputs(np.zeros_like(due), due, due + 1_000_000)
    cars = frozenset({0})
    changes = [
        demo.Change(name, at, cars, judge(outputs, at, cars, cars), 100, {})
        for name, at in (
            ("move", Moments(0, 5 * S, 6 * S, 8 * S)),
            ("scale-out", Moments(6 * S, 8 * S, 9 * S, 12 * S)),
        )
    ]
    unknown = Audit(0, 0, 0, 0, 0, 0, 0)
    return demo.Demonstration(outputs, 0, changes, unknown, 0, [], 0, 1, {}, "4")


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_demonstration_with_a_wrong_output_exits_with_1(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fault: str,
) -> None:
    """Judged, told and kept by the command itself; only the traffic is not real."""
    session = SimpleNamespace(read=spark.read, sql=spark.sql, stop=lambda: None)  # others still need it
    monkeypatch.setattr(demo, "open_session", lambda name, **options: session)
    monkeypatch.setattr(demo, "start", lambda session, sites: nullcontext())
    monkeypatch.setattr(demo, "_deploy_and_run", lambda live, recorded, *_: demonstrated(recorded, fault))
    code = cli.run_app(["demo", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert code == (0 if fault == "none" else 1)
    assert kept["good"] is (fault == "none")
    assert {name: kept["audit"][name] for name in FAULTS} == {name: int(name == fault) for name in FAULTS}
    verdict = "each once, in order, with the right mean" if fault == "none" else f"1 {fault}"
    assert verdict in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert verdict in capsys.readouterr().out
