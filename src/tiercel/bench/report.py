"""The results of a benchmark: a table for people, JSON for programs.

Responsible for: the facts every results file carries (commit, machine, Python, seed, settings, and the
    CPU that other programs used), percentiles, the form of the output, whether its directory is writable.
Not responsible for: measuring (scenarios/).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tiercel.errors import UserError

Line = dict[str, Any]  # one row of results: column -> value

COLUMNS_MAX = 14  # of a table that stands
LOOK_S = 2.0  # between two samples of CPU use


def commit() -> str:
    """The commit of the source tree, marked when the tree differs from it."""
    here = Path(__file__).resolve().parent
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def machine() -> Line:
    return {
        "host": platform.machine(),
        "system": platform.release(),
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2),
    }


class Cpu:
    """CPU that this process with all its descendants, and everyone else, uses from now on.

    Spark's workers end without a parent that would count them: they are looked at while they live.
    """

    def __init__(self) -> None:
        self._began, self._all = time.monotonic(), _all_ticks()
        self._before = _our_ticks()
        self._seen = dict(self._before)
        threading.Thread(target=self._look, name="tiercel-cpu", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._seen |= _our_ticks()

    def _ours(self) -> int:
        self._seen |= _our_ticks()
        return sum(self._seen.values()) - sum(self._before.values())

    def line(self) -> Line:
        """Cores, on average. Empty where there is no /proc."""
        if not self._all:
            return {}
        second = os.sysconf("SC_CLK_TCK") * max(time.monotonic() - self._began, 1e-9)
        everyone, ours = _all_ticks() - self._all, self._ours()
        return {
            "our_cores": round(ours / second, 2),
            "others_cores": round(max(0, everyone - ours) / second, 2),
        }


def process_cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of each process, to the nanosecond: sampled ticks are blind to work in step with them."""
    used = {}
    for name, pid in pids.items():
        threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
        used[name] = sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9
    return used


def _all_ticks() -> int:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split()[1:8]
    except OSError:
        return 0
    user, nice, system, _idle, _waiting, irq, softirq = map(int, fields)
    return user + nice + system + irq + softirq


def our_cpu_s() -> float:
    """CPU seconds of this process and the descendants that it has now."""
    return sum(_our_ticks().values()) / os.sysconf("SC_CLK_TCK")


def _our_ticks() -> dict[int, int]:
    """CPU ticks of each process of our tree."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:13]))
    ours = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= grown
    return {pid: used[pid] for pid in ours if pid in used}


def check_drawing() -> None:
    """Refuse before a long run if its picture cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "matplotlib is not installed",
            expected="the tools of demo, bench and chaos",
            hint="pip install 'tiercel[lab]'",
        )


def percentile(ordered: Sequence[float] | npt.NDArray[np.float64], share: float) -> float:
    """Nearest rank of a sorted sequence; nan if it is empty."""
    if not len(ordered):
        return float("nan")
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    return round(statistics.median(values), 4)


def median_line(lines: Sequence[Line]) -> Line:
    """Each number by its median over the lines that have it; what is no number as in the first line.

    None where most lines have none: what mostly did not happen has no median.
    """
    out: Line = {}
    for name, first in lines[0].items():
        numbers = [line[name] for line in lines if _is_number(line[name])]
        if len(numbers) > len(lines) / 2:
            out[name] = median(numbers)
        else:
            out[name] = first if isinstance(first, str) else None
    return out


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def document(name: str, rows: list[Line], settings: Line, **more: Any) -> Line:
    """A results file. `more` are facts of one benchmark: seed, repeats, CPU of other programs."""
    return {
        "bench": name,
        "rows": rows,
        "commit": commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "python": platform.python_version(),
        "settings": settings,
        **more,
    }


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turns an OSError of writing into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror}",
            expected="a directory, or where one can be made",
            hint="give another directory: --out DIR",
        ) from error


def check_place(out: Path) -> None:
    """Make the directory, and see that files can be: before anything starts, not when all is measured."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


def print_results(found: Line, *, as_json: bool, out: Path | None) -> None:
    """Print the results as asked, and keep them where asked."""
    encoded = msgspec.json.format(msgspec.json.encode(found), indent=2)
    if as_json:
        print(encoded.decode())
    else:
        _print_table(found["bench"], found["rows"])
    if out is not None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{found['bench']}-{stamp}.json").write_bytes(encoded)


def _print_table(name: str, lines: list[Line]) -> None:
    """Rows of the same columns share a table; a row is then one line, however many kinds there are."""
    console = Console(width=None if Console().is_terminal else 160)
    for columns in dict.fromkeys(tuple(line) for line in lines):
        table = Table(title=name)
        if len(columns) > COLUMNS_MAX:
            _print_lying(console, table, columns, [line for line in lines if tuple(line) == columns])
            continue
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for line in lines:
            if tuple(line) == columns:
                table.add_row(*(_shown(line[column]) for column in columns))
        console.print(table)


def _print_lying(console: Console, table: Table, columns: Sequence[str], lines: list[Line]) -> None:
    """A table of many columns lies down: one line for each figure, one column for each row."""
    table.add_column(columns[0])
    for line in lines:
        table.add_column(_shown(line[columns[0]]), justify="right")
    for column in columns[1:]:
        table.add_row(column, *(_shown(line[column]) for line in lines))
    console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
