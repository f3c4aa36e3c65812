"""`tiercel bench recover --sweep`: recovery by checkpoint interval, from the whole log, and from the source.

Responsible for: the same death with checkpoints every 1, 5, 10, 30 s; with none, so that the whole log is
    replayed (upstream backup); and from the source, which sends everything
    again to a fresh deployment. The picture.
Not responsible for: load, deaths and figures (recover.py).

The instance is killed when most of an interval has passed since its last checkpoint, about the worst case.
The fresh deployment of the source already runs: its time is that of sending, without a start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns

from tiercel.bench.report import Line
from tiercel.bench.scenarios import recover
from tiercel.bench.scenarios.recover import ShowProgress, Steady
from tiercel.bench.scenarios.recover_systems import VICTIM, System, Tiercel
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.storage.store import StoreView

NEVER_S = 1e6
LATE = 0.85  # of an interval has passed when the instance is killed
AGED_S = 30.0  # of load, before a death that no checkpoint helps
FIRST, NORMAL = "#0b6e4f", "#c9720a"


def measure(intervals_s: Sequence[int], size_mb: int, rate: int, show_progress: ShowProgress) -> list[Line]:
    """One row for each way to recover."""
    rows = []
    for interval in intervals_s:
        show_progress(f"a checkpoint every {interval} s")
        rows.append({"how": "checkpoint", "checkpoint_s": interval, **_one(interval, size_mb, rate)})
    show_progress("no checkpoint: the whole log is replayed")
    rows.append({"how": "replay", "checkpoint_s": None, **_one(NEVER_S, size_mb, rate)})
    show_progress("from the source")
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
    """Wait until its last checkpoint is nearly an interval old; returns its age."""
    if interval_s >= NEVER_S:
        time.sleep(AGED_S)
        return AGED_S + recover.STEADY_S + recover.WARM_S
    place = DeploymentDir(system.setup.place / "storage")
    while True:
        with contextlib.closing(StoreView(place.process(VICTIM))) as view:
            cursor = view.get(("checkpoint",))
        age_s = time.time() - cursor.time_ms / 1e3 if cursor is not None else 0.0
        if LATE * interval_s <= age_s <= interval_s:
            return age_s
        time.sleep(0.02 * min(interval_s, 5.0))


def _from_the_source(size_mb: int, rate: int) -> Line:
    """Without the log and the state: the source sends everything again to another deployment."""
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra `lab`
    from matplotlib.figure import Figure

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
    what = "whole log\nreplayed" if row["how"] == "replay" else "sent again\nby the source"
    return f"{what}, {row['replayed_s']:.0f} s"
