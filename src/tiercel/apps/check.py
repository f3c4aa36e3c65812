"""Every application and each of its forms, small, with a live move, a scale-out and a `kill -9` inside.

Responsible for: which forms there are, a run of each on one session, a line for each.
Not responsible for: running one (run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tiercel
from tiercel import UserError
from tiercel.apps.catalogue import all_apps, find_app
from tiercel.apps.run import SLOTS, Result, Run, run
from tiercel.apps.verdict import HEAP

CHANGES = ("move", "scale", "kill")


@dataclass(frozen=True)
class Form:
    """An application with options, and a rate that fills its windows within seconds."""

    app: str
    options: dict[str, Any] = field(default_factory=dict)
    rate: int = 500


FORMS = (
    Form("traffic", {"cars": 2_000, "state_bytes": 200}),
    Form("toll", {"speed": 100, "segments": 4, "queries_percent": 10}, 1_000),
    *(
        Form("nexmark", {"query": query, "speed": 20}, 600)
        for query in ("q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8", "q7-drrs", "q8-drrs")
    ),
    Form("wordcount", {"words": 500, "window_s": 1}, 200),
    Form("keycount", {"skew": "uniform"}),
    Form("keycount", {"skew": "zipf"}),
    *(
        Form("riot", {"dataflow": dataflow, "dataset": dataset}, 300)
        for dataflow in ("etl", "stats", "pred")
        for dataset in ("city", "taxi")
    ),
    *(
        Form("riot", {"dataflow": dataflow, "dataset": dataset, "tasks": "chained"}, 2_000)
        for dataflow in ("etl", "stats")
        for dataset in ("city", "taxi")
    ),
)


def chosen(names: Sequence[str]) -> list[Form]:
    """The forms of these applications; of all, if none is named."""
    known = [one.name for one in all_apps()]
    for name in names:
        if name not in known:
            raise UserError(f"unknown application {name!r}", expected=f"some of: {', '.join(known)}")
    return [form for form in FORMS if not names or form.app in names]


def check(
    forms: Sequence[Form], seed: int, seconds: float, show: Callable[[str], None]
) -> Iterator[tuple[Form, Result]]:
    """Run one form after the other."""
    spark = tiercel.session("tiercel-check", slots=SLOTS, config=HEAP)
    spark.sparkContext.setLogLevel("OFF")  # Spark prints the loss of each worker
    try:
        for n, form in enumerate(forms, 1):
            show(f"{n} of {len(forms)}: {form.app} {' '.join(map(str, form.options.values()))}")
            wanted = Run(find_app(form.app), form.options, seed, form.rate, seconds, CHANGES)
            yield form, run(wanted, spark=spark)
    finally:
        spark.stop()


def line(form: Form, found: Result) -> dict[str, Any]:
    """For a table."""
    took = {f"{change.kind}_s": round(change.seconds, 2) for change in found.changes}
    outputs = found.outputs.values()
    return {
        "application": form.app,
        "options": " ".join(f"{name}={value}" for name, value in form.options.items()),
        "events": found.events,
        **took,
        "expected": sum(one.expected for one in outputs),
        "found": sum(one.found for one in outputs),
        "faults": found.faults,
        "good": found.good,
    }
