"""Which rivals a benchmark runs, and whether they can run here.

Responsible for: the names as a user gives them, refused before anything is measured.
Not responsible for: running them (spark.py, flink.py).
"""

from __future__ import annotations

from tiercel.bench.rivals.flink import flink_python as check_python
from tiercel.bench.rivals.rival import RIVALS
from tiercel.errors import UserError


def choose_rivals(names: str, flink_python: str) -> list[str]:
    """The rivals of a comma-separated list, or all."""
    chosen = list(dict.fromkeys(part.strip() for part in names.split(","))) if names else []
    if names == "all":
        chosen = list(RIVALS)
    for name in chosen:
        if name not in RIVALS:
            raise UserError(f"--rivals: unknown {name!r}", expected=f"one of: {', '.join(RIVALS)}, all")
    if any(name.startswith("flink") for name in chosen):
        check_python(flink_python)
    elif flink_python:
        raise UserError("--flink-python without Flink", expected="--rivals flink-savepoint,flink-adaptive")
    return chosen
