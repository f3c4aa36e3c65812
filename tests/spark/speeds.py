"""Hand-made records of a demonstration: the input of its cars, and the expected output."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tiercel.demo.speed_monitor import LIMIT_KMH
from tiercel.demo.traffic import car_name, kmh, write_file

CARS, SEQS = (0, 1, 10), 8
COLUMNS = ("car", "seq", "n", "mean", "alert", "due_ns")

Output = tuple[str, int, int, float, bool, int]


def right_outputs() -> list[Output]:
    """By hand, not by the operator: the audit must not agree with it by construction."""
    found = []
    for seq in range(SEQS):
        for car in CARS:
            mean = sum(kmh(car, s) for s in range(seq + 1)) / (seq + 1)
            found.append((car_name(car), seq, seq + 1, mean, mean > LIMIT_KMH, 0))
    return found


def write_inputs(directory: Path) -> None:
    write_file(directory / "all.parquet", [(c, s, kmh(c, s), 0) for s in range(SEQS) for c in CARS])


def write_outputs(directory: Path, outputs: list[Output]) -> None:
    table = pa.table(dict(zip(COLUMNS, map(list, zip(*outputs, strict=True)), strict=True)))
    pq.write_table(table, directory / "part-0.parquet")
