"""`tiercel bench recover --sweep`: how the checkpoint interval, the log and the source bear on recovery.

Responsible for: the same death with checkpoints every 1, 5, 10, 30 s; with none, so that the whole log is
    replayed (upstream backup); and from the source, which feeds a fresh deployment from its beginning.
    The picture of it.
Not responsible for: load, death and measures (recover.py).

An instance is killed when most of an interval has passed since its last checkpoint: about the worst case.
The source's deployment runs and waits already: what it takes is the feeding, without any start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tiercel.bench import recover
from tiercel.bench.recover import Steady, Tell
from tiercel.bench.recover_systems import VICTIM, System, Tiercel
from tiercel.bench.report import Line
from tiercel.runtime.place import Place
from tiercel.runtime.store import StoreView

NEVER_S = 1e6
LATE = 0.85  # of an interval has passed when the instance is killed
AGED_S = 30.0  # of load, before a death that no checkpoint helps
FIRST, NORMAL = "#0b6e4f", "#c9720a"


def measure(intervals_s: Sequence[int], size_mb: int, rate: int, tell: Tell) -> list[Line]:
    """One row for each way to recover."""
    rows = []
    for interval in intervals_s:
        tell(f"a checkpoint every {interval} s")
        rows.append({"how": "checkpoint", "checkpoint_s": interval, **_one(interval, size_mb, rate)})
    tell("no checkpoint: the whole log is replayed")
    rows.append({"how": "replay", "checkpoint_s": None, **_one(NEVER_S, size_mb, rate)})
    tell("from the source")
    rows.append({"how": "source", "checkpoint_s": None, **_from_the_source(size_mb, rate)})
    return rows


def _one(interval_s: float, size_mb: int, rate: int) -> Line:
    facts = {"checkpoint_ms": interval_s * 1e3, "backup": False}
    with recover.running(Tiercel, size_mb, rate, **facts) as (system, load):
        assert isinstance(system, Tiercel)
        age_s = [0.0]

        def kill() -> int:
            age_s[0] = _wait_until_late(system, interval_s)
            return system.kill("worker")

        line = recover.death(system, load, kill)
        return {"replayed_s": round(age_s[0], 1), **line}


def _wait_until_late(system: System, interval_s: float) -> float:
    """Until its last checkpoint is nearly an interval old; returns how old it is."""
    if interval_s >= NEVER_S:
        time.sleep(AGED_S)
        return AGED_S + recover.STEADY_S + recover.WARM_S
    place = Place(system.setup.place / "storage")
    while True:
        with contextlib.closing(StoreView(place.process(VICTIM))) as view:
            cursor = view.get(("cursor",))
        age_s = time.time() - cursor.time_ms / 1e3 if cursor is not None else 0.0
        if LATE * interval_s <= age_s <= interval_s:
            return age_s
        time.sleep(0.02 * min(interval_s, 5.0))


def _from_the_source(size_mb: int, rate: int) -> Line:
    """The dead instance's log and state are of no use: all that ever came in is fed again, elsewhere."""
    with (
        recover.running(Tiercel, size_mb, rate, backup=False) as (system, load),
        recover.started(Tiercel, backup=False) as fresh,
    ):
        begin_ns = monotonic_ns()
        time.sleep(AGED_S)
        killed_ns = system.kill("worker")
        steady = Steady.of(system.outputs(), begin_ns, killed_ns)
        load.begin_again(fresh)
        line = recover.until_normal(fresh, load, killed_ns, steady)
        return {"replayed_s": round(AGED_S + recover.WARM_S, 1), **line}


# -- the picture -------------------------------------------------------------------------------------------


def draw(rows: Sequence[Line], path: Path) -> None:
    """Bars in the order of the rows: until the first output, and until all was normal."""
    figure = Figure(figsize=(8, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [_name(row) for row in rows]
    kinds: tuple[tuple[str, str, str, Callable[[int], float]], ...] = (
        ("first_output_s", "first output", FIRST, lambda i: i - 0.2),
        ("normal_s", "latency is normal", NORMAL, lambda i: i + 0.2),
    )
    for column, label, colour, place in kinds:
        heights = [row[column] or 0.0 for row in rows]
        places = [place(i) for i in range(len(rows))]
        axes.bar(places, heights, 0.38, label=label, color=colour)
        for x, height in zip(places, heights, strict=True):
            axes.text(x, height, f"{height:.1f}" if height else "never", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), names, fontsize=8)
    axes.set_ylabel("s after kill -9")
    axes.set_title("Recovery of a killed instance by what it begins with", fontsize=10)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _name(row: Line) -> str:
    if row["how"] == "checkpoint":
        return f"checkpoint\nevery {row['checkpoint_s']} s"
    what = "whole log\nreplayed" if row["how"] == "replay" else "fed again\nby the source"
    return f"{what}, {row['replayed_s']:.0f} s"
