"""Rows as parquet files that appear at a steady rate, for pipelines that read a directory as a stream.

Responsible for: a file every 100 ms with the rows that are due, each with the time at which it was due.
Not responsible for: reading them (Spark's file source), the figures (scenarios/pipeline.py).

    python -m tiercel.bench.loadgen.files DIRECTORY KEYS RATE SECONDS      a process of its own
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

CREATED = "sensor bigint, value double, created_us bigint"
FILE_S = 0.1
STRIDE = 7919  # a prime: neighbours in time are no neighbours by key


def table(first: int, count: int, keys: int, begin_us: float, step_us: float) -> pa.Table:
    """Rows `first` to `first + count`: every key in turn, evenly in time."""
    numbers = np.arange(first, first + count)
    return pa.table(
        {
            "sensor": (numbers * STRIDE) % keys,
            "value": (numbers // keys + 1).astype(float),
            "created_us": (begin_us + (numbers - first) * step_us).astype(np.int64),
        }
    )


def keys_of(first: int, count: int, keys: int) -> npt.NDArray[np.int64]:
    """How often each key is among these rows."""
    return np.bincount((np.arange(first, first + count) * STRIDE) % keys, minlength=keys)


def write(directory: Path, number: int, rows: pa.Table) -> None:
    """Whole from the first moment that Spark can see it, and younger than all files before it."""
    draft = directory / f".{number}.draft"
    pq.write_table(rows, draft)
    os.utime(draft, (1_700_000_000 + number, 1_700_000_000 + number))
    draft.rename(directory / f"part-{number:07}.parquet")


def generate(directory: Path, keys: int, rate: int, seconds: float) -> int:
    """Write files for that long; returns the number of rows."""
    began, made, number = time.time(), 0, 0
    while number * FILE_S < seconds:
        number += 1
        due = round(number * FILE_S * rate)
        rest = began + number * FILE_S - time.time()
        if rest > 0:
            time.sleep(rest)
        if due > made:
            write(directory, number, table(made, due - made, keys, (began + made / rate) * 1e6, 1e6 / rate))
            made = due
    return made


def start(directory: Path, keys: int, rate: int, seconds: float) -> subprocess.Popen[bytes]:
    arguments = [str(directory), str(keys), str(rate), str(seconds)]
    return subprocess.Popen([sys.executable, "-m", "tiercel.bench.loadgen.files", *arguments])


if __name__ == "__main__":
    generate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
