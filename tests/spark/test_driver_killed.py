"""A driver that is killed in the middle of its batches, and started again, loses and doubles nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import driver
from driver import chained
from oracle import until
from pyspark.sql import SparkSession

FILES, ROWS_PER_FILE, CARS = 24, 50, 7


def write_files(directory: Path) -> list[tuple[str, int, int, str]]:
    """The input, and the reference: what comes out when nothing fails."""
    directory.mkdir()
    state: dict[str, tuple[int, str]] = {}
    expected = []
    for n in range(FILES):
        lines = []
        for seq in range(n * ROWS_PER_FILE, (n + 1) * ROWS_PER_FILE):
            car = f"car-{seq % CARS}"
            count, chain = state.get(car, (0, ""))
            state[car] = count + 1, chained(chain, seq)
            expected.append((car, seq, *state[car]))
            lines.append(json.dumps({"car": car, "seq": seq}))
        path = directory / f"{n:03}.json"
        path.write_text("\n".join(lines), encoding="utf-8")
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # Spark reads the oldest first
    return sorted(expected)


def numbers(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.glob("*") if path.name.isdecimal()}


def mid_batch(checkpoint: Path, after: int) -> Callable[[], bool]:
    """A batch above this number has begun, and has not ended."""

    def found() -> bool:
        return any(n > after for n in numbers(checkpoint / "offsets") - numbers(checkpoint / "commits"))

    return found


def start(directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "driver.log").open("ab") as log:
        arguments = [sys.executable, driver.__file__, str(directory), str(FILES * ROWS_PER_FILE)]
        return subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)


def test_the_sink_holds_each_row_once_and_in_order(spark: SparkSession, tmp_path: Path) -> None:
    expected = write_files(tmp_path / "files")
    moments = [
        mid_batch(tmp_path / "feed", 2),
        mid_batch(tmp_path / "out", 4),
        lambda: mid_batch(tmp_path / "feed", 9)() and mid_batch(tmp_path / "out", 7)(),
    ]
    for moment in moments:
        process = start(tmp_path)
        until(
            lambda moment=moment, process=process: moment() or process.poll() is not None, lambda: "no moment"
        )
        assert process.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
        os.killpg(process.pid, signal.SIGKILL)  # the driver and its JVM
        process.wait()
        assert len(numbers(tmp_path / "feed" / "commits")) < FILES, "there was work left"
    process = start(tmp_path)
    assert process.wait() == 0, (tmp_path / "driver.log").read_text()[-3000:]
    found = spark.read.schema(driver.OUTPUT).parquet(str(tmp_path / "sink")).collect()
    assert sorted(map(tuple, found)) == expected
