"""A driver that is killed between its batches and restarted loses and doubles nothing."""

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

FILES, ROWS_PER_FILE, CARS = 10, 50, 7
STARTS_MAX = 5


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
        lines.insert(n, json.dumps({"seq": -n}))  # its key is missing
        path = directory / f"{n:03}.json"
        path.write_text("\n".join(lines), encoding="utf-8")
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # Spark reads the oldest first
    return sorted(expected)


def numbers(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.glob("*") if path.name.isdecimal()}


def mid_batch(checkpoint: Path, nth: int) -> Callable[[], bool]:
    """The n-th batch that nobody had begun before has begun, or one behind it, and has not ended."""
    wanted = max(numbers(checkpoint / "offsets"), default=-1) + nth

    def found() -> bool:
        return any(n >= wanted for n in numbers(checkpoint / "offsets") - numbers(checkpoint / "commits"))

    return found


def start(directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "driver.log").open("ab") as log:
        arguments = [sys.executable, driver.__file__, str(directory), str(FILES * ROWS_PER_FILE)]
        return subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)


def run(directory: Path, moment: Callable[[], bool]) -> subprocess.Popen[bytes]:
    """A driver until that moment, or its good end.

    One that fails by itself is started again: on a busy machine Spark gives a Python worker up that needs
    more than ten seconds to start.
    """
    for _ in range(STARTS_MAX):
        process = start(directory)
        try:
            until(lambda process=process: moment() or process.poll() is not None, lambda: "no moment")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.poll() in (None, 0):
            return process
    raise AssertionError((directory / "driver.log").read_text(encoding="utf-8")[-3000:])


def test_sink_has_each_row_once_in_order_after_the_driver_was_killed(
    tmp_path: Path,
) -> None:
    expected = write_files(tmp_path / "files")
    for checkpoint, nth in (("feed", 2), ("out", 2)):
        process = run(tmp_path, mid_batch(tmp_path / checkpoint, nth))
        assert process.poll() is None, "there was work left"
        os.killpg(process.pid, signal.SIGKILL)  # the driver and its JVM
        process.wait()
    process = run(tmp_path, lambda: False)
    assert process.returncode == 0
    found = json.loads((tmp_path / driver.FOUND).read_text(encoding="utf-8"))
    assert sorted(map(tuple, found)) == expected
    letters = json.loads((tmp_path / driver.LETTERS).read_text(encoding="utf-8"))
    reason = "column car: None (NoneType)\nexpected: string not null"
    assert sorted([found, key, row] for found, key, _, row, _, _ in letters) == sorted(
        [reason, None, f'{{"car":null,"seq":{-n}}}'] for n in range(FILES)
    )
    for _, _, offset, row, _, _ in letters:  # a batch is one file; after a kill Spark may take two together
        deployment = 1 - json.loads(row)["seq"]
        assert offset % (ROWS_PER_FILE + 1) == deployment
    assert len({(batch, partition, offset) for _, _, offset, _, batch, partition in letters}) == FILES
