"""`tiercel bench` on Spark, as small as possible: it detects planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from documented import EVERY_FILE, fields, named, section
from tiercel.bench.loadgen.load import PROBE_TICKS
from tiercel.bench.scenarios.recover_systems import VICTIM

ROOT = Path(__file__).resolve().parent.parent.parent
FACTS = ("bench", "rows", "commit", "at", "machine", "python", "settings", "seed", "cpu")
PLANTED_MS = 300
KEYS = 80
MOVED = 30  # one piece of a live move: all of its probes wait for the same destination at the same time


def measured(out: Path, arguments: str) -> dict[str, Any]:
    """What a command has told on stdout and kept in `out`, which must be the same."""
    command = [
        sys.executable,
        "-m",
        "tiercel",
        "bench",
        *arguments.split(),
        "--json",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=out.parent, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    (kept,) = out.glob(f"{found['bench']}-*.json")
    assert json.loads(kept.read_text(encoding="utf-8")) == found
    assert set(FACTS) <= found.keys() <= fields(EVERY_FILE)
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["commit"]
    return found


def test_benchmark_detects_a_planted_pause_during_a_move(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = measured(
        out,
        f"reconfigure --keys {KEYS} --move {MOVED} --state-bytes 100 --rate 500 --seconds 4 --repeats 1 "
        f"--strategies live --plant-stop {PLANTED_MS} --seed 7",
    )
    assert found["seed"] == 7
    asked = {"keys": KEYS, "move": MOVED, "strategies": ["live"], "plant_stop_ms": PLANTED_MS}
    assert found["settings"].items() >= asked.items()
    (row,) = found["rows"]
    (repeat,) = found["repeats"]
    assert row.keys() == fields("reconfigure")
    assert row.keys() < repeat.keys() <= named(section("reconfigure"))
    assert repeat["keys_moved"] == MOVED
    # Probes are due every few ms: the one that came next when the destination fell asleep waited longest.
    assert row["stoppage_max_ms"] >= PLANTED_MS - PROBE_TICKS
    assert row["peak_ms"] > row["stoppage_max_ms"]
    assert [row[fault] for fault in ("lost", "doubled", "reordered")] == [0, 0, 0]

    (records,) = out.glob("reconfigure-*/")
    inputs, outputs = (pq.read_table(records / f"live-1.{name}.parquet") for name in ("inputs", "outputs"))
    assert inputs.column_names == ["sensor", "n", "due_ns"]
    assert outputs.column_names == ["at", "sensor", "n", "due_ns", "emitted_ns"]
    sent, came = (table.select(["sensor", "n"]).to_pandas() for table in (inputs, outputs))
    assert sorted(map(tuple, came.to_numpy().tolist())) == sorted(map(tuple, sent.to_numpy().tolist()))
    assert set(sent["sensor"]) == set(range(KEYS))


@pytest.mark.long  # most of a minute in which nothing but waiting is done
def test_recover_benchmark_measures_from_kill_to_outputs(tmp_path: Path) -> None:
    found = measured(
        tmp_path / "results", "recover --what worker --sizes 1 --instances 1 --local-disk yes --no-spark"
    )
    (row,) = found["rows"]
    (line,) = found["measured"]
    assert row.keys() == fields("recover")
    assert line.keys() <= named(section("recover"))
    assert (row["size_mb"], row["what"], row["local_disk"], row["instances"]) == (1, "worker", True, 1)
    assert line["died"] == [VICTIM]
    assert 0 < row["tiercel_s"] == line["first_output_s"]
    assert row["tiercel_normal_s"] is None or row["tiercel_normal_s"] >= row["tiercel_s"]
    assert [row[name] for name in ("spark_s", "ratio", "spark_normal_s", "normal_ratio")] == [None] * 4
