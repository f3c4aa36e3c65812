"""The demonstration, as `make demo` runs it, only shorter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_demonstration_keeps_every_promise_and_leaves_its_report(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "tiercel.cli", "demo", "--seconds", "2", "--out", str(out), "--json"]
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
