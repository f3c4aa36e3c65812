"""`tiercel bench nexmark`: NEXMark's queries beside the same in plain PySpark Structured Streaming.

Responsible for: a row for each query.
Not responsible for: running one on both (apps/nexmark/beside.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiercel.apps.nexmark import beside
from tiercel.bench.report import Line


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    queries: Sequence[str]
    events: int
    seed: int


def measure(options: Options, show_progress: Callable[[str], None]) -> list[Line]:
    """Rates of both, and how many of their rows differ from the batch job's."""
    rows: list[Line] = []
    for query in options.queries:
        found = beside.measure(query, options.events, options.seed, show_progress).line
        show_progress(", ".join(f"{name} {value}" for name, value in found.items()))
        rows.append(found)
    return rows
