"""`tiercel bench` of policies on Spark, as short as possible: documented fields, and no row is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documented import fields, named, section

pytestmark = pytest.mark.long  # each starts Spark and waits for a policy

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = ("lost", "doubled", "reordered", "wrong", "invented")


def rows_of(out: Path, arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tiercel", "bench", *arguments.split(), "--json", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(ended.stdout)["rows"]
    assert not [row for row in found if any(row.get(fault) for fault in FAULTS)]
    return found


def test_keys_of_a_busy_edge_go_there_and_return(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "offload --modes cloud,offload --seconds 40")
    cloud, offload = rows
    assert all(row.keys() == fields("offload") for row in rows)
    assert (cloud["keys_at_edge_at_top"], cloud["edge_seconds"]) == (0, 0)
    assert offload["keys_at_edge_at_top"] > 30
    assert offload["keys_at_edge_at_end"] == 0
    assert offload["top_p50_ms"] < cloud["top_p50_ms"]
    assert list(tmp_path.glob("offload-*.png"))


def test_a_hot_slot_is_split(tmp_path: Path) -> None:
    before, after = rows_of(tmp_path, "skew --kinds slot --seconds 8")
    assert before.keys() == fields("skew")
    assert after["changes"] > 0
    assert after["busiest"] < before["busiest"]


def test_a_soak_ends_with_as_many_instances_as_needed(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "soak --minutes 0.5")
    assert row.keys() == fields("soak")
    assert row["wrong_instances"] == 0
    assert row["faults_injected"] > 0
    assert list(tmp_path.glob("soak-*.png"))


def test_the_word_count_is_scaled_under_a_ramp_and_every_row_is_right(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "elastic --app wordcount --modes rate --seconds 25 --high 6000")
    assert row.keys() <= fields("elastic") | named(section("elastic"))
    assert row["changes"] > 0
    assert row["expected"] > 0


def test_every_process_says_what_its_gauges_cost(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "gauges --seconds 5 --rate 5000")
    assert all(row.keys() == fields("gauges") for row in rows)
    assert {row["kind"] for row in rows} == {"router", "instance"}
