"""How a benchmark tells its results: a table for people, JSON for everything else.

Responsible for: the facts every results file carries (commit, machine, Python, settings, load).
Not responsible for: what was measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

Line = dict[str, Any]  # one row of results: column -> value


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


def machine() -> dict[str, Any]:
    return {
        "host": platform.machine(),
        "system": platform.release(),
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2),  # what others used meanwhile is in here
    }


def options(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark understands."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the JSON into this directory")
    return parser


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of a sorted sequence; nan if it is empty."""
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def tell(name: str, lines: list[Line], settings: Any, given: argparse.Namespace) -> None:
    """Print the results as asked, and keep them where asked."""
    document = {
        "bench": name,
        "rows": lines,
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "settings": settings,
    }
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    if given.json:
        print(encoded.decode())
    else:
        _print_table(name, lines)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        (given.out / f"{name}-{stamp}.json").write_bytes(encoded)


def _print_table(name: str, lines: list[Line]) -> None:
    """Rows of the same columns share a table; a row is then one line, however many kinds there are."""
    console = Console(width=None if Console().is_terminal else 160)
    for columns in dict.fromkeys(tuple(line) for line in lines):
        table = Table(title=name)
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for line in lines:
            if tuple(line) == columns:
                table.add_row(*(_shown(line[column]) for column in columns))
        console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
