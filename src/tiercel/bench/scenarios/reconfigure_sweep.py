"""`tiercel bench reconfigure --sweep`: the same moves with one setting after the other, and a picture of it.

Responsible for: what a sweep changes, rows with the swept value, the picture.
Not responsible for: one measurement (reconfigure.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiercel.bench.report import Line
from tiercel.bench.scenarios import reconfigure
from tiercel.bench.scenarios.reconfigure import Options, ShowProgress
from tiercel.errors import UserError
from tiercel.runtime.net.emulated_link import Link

SWEEPS = {"state-mb": "MB of state", "keys": "keys", "latency-ms": "latency of the link, ms"}
HINT = "--sweep state-mb=1,10,50"
STOPPAGE_MS_MIN = 0.1  # of the logarithmic axis


class Sweep(NamedTuple):
    """A setting, and its values in turn."""

    name: str
    values: tuple[float, ...]


def parse_sweep(text: str) -> Sweep | None:
    """`keys=100,1000`: the name of a setting, and numbers."""
    if not text:
        return None
    name, _, listed = text.partition("=")
    if name not in SWEEPS:
        raise UserError(f"--sweep {text}", expected=f"one of: {', '.join(SWEEPS)}, with numbers", hint=HINT)
    try:
        values = tuple(float(part) for part in listed.split(","))
    except ValueError:
        values = ()
    if not values or min(values) <= 0:
        raise UserError(f"--sweep {text}", expected="numbers above 0, comma-separated", hint=HINT)
    return Sweep(name, values)


def changed(options: Options, name: str, value: float) -> Options:
    """The options with one value of the sweep."""
    if name == "state-mb":
        return dataclasses.replace(options, state_bytes=max(1, round(value * 1e6 / options.keys)))
    if name == "keys":
        return dataclasses.replace(options, keys=round(value), move=round(value))
    mbit = None if options.link is None else options.link.mbit
    return dataclasses.replace(options, sites=2, link=Link(latency_ms=value, mbit=mbit))


def measure(options: Options, sweep: Sweep, show_progress: ShowProgress) -> tuple[list[Line], list[Line]]:
    """Rows by the median, and every repeat, each with the swept value."""
    rows: list[Line] = []
    every: list[Line] = []
    for value in sweep.values:

        def show(what: str, value: float = value) -> None:
            show_progress(f"{sweep.name} {value:g}: {what}")

        found, repeats = reconfigure.measure(changed(options, sweep.name, value), show)
        rows += [{"swept": sweep.name, "value": value} | row for row in found]
        every += [{"swept": sweep.name, "value": value} | line for line in repeats]
    if options.out is not None:
        draw(options.out / f"sweep-{sweep.name}.png", rows, sweep)
    return rows, every


def draw(path: Path, rows: Sequence[Line], sweep: Sweep) -> None:
    """Stoppage above its floor, and duration, against the swept value; one line for each strategy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, lasted) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        at = [row["value"] for row in mine]
        stoppage = [(row["stoppage_p99_ms"] or 0.0) - (row["floor_p99_ms"] or 0.0) for row in mine]
        above.plot(at, [max(s, STOPPAGE_MS_MIN) for s in stoppage], "o-", label=strategy, ms=4)
        lasted.plot(at, [row["duration_ms"] for row in mine], "o-", label=strategy, ms=4)
    for axis, what in ((above, "stoppage p99 above its floor, ms"), (lasted, "duration, ms")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(SWEEPS[sweep.name])
        axis.set_ylabel(what)
        axis.grid(alpha=0.3)
    above.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
