"""The picture and the HTML page of a demonstration.

Responsible for: the latency timeline as PNG; a self-contained HTML page with figures, tasks and timeline.
Not responsible for: the figures (bench/metrics.py, run.py).
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tiercel.demo.run import Change, Demonstration
from tiercel.demo.side_by_side import SideBySide

WINDOW_S = 0.1
ZOOM_S = 0.4  # shown before and after a change
DOTS_MAX = 20_000  # more are one blot
FLOOR_MS = 0.05  # of the logarithmic axis
CHANGE_COLOURS = ("#d97706", "#7c3aed")
MOVING_COLOUR, OTHER_COLOUR, SPARK_COLOUR = "#2563eb", "#9ca3af", "#dc2626"

Floats = npt.NDArray[np.float64]


class Timeline:
    """Latency over time, in the terms of a picture."""

    def __init__(self, found: Demonstration) -> None:
        outputs = found.outputs
        shown = outputs.due_ns >= found.begun_ns
        self._begun_ns = found.begun_ns
        self.at_s: Floats = (outputs.due_ns[shown] - found.begun_ns) / 1e9
        self.latency_ms: Floats = np.maximum(outputs.latency_ms[shown], FLOOR_MS)
        self.cars = outputs.sensor[shown]

    def seconds(self, at_ns: int) -> float:
        return (at_ns - self._begun_ns) / 1e9

    def windows(self, share: float) -> tuple[Floats, Floats]:
        """(middle of the window, percentile of the latencies due in it)."""
        place = (self.at_s // WINDOW_S).astype(np.int64)
        found = [(w, np.quantile(self.latency_ms[place == w], share)) for w in np.unique(place)]
        return np.array([(w + 0.5) * WINDOW_S for w, _ in found]), np.array([v for _, v in found])


def draw_timeline(found: Demonstration, path: Path) -> None:
    """The whole run above, each change from near below."""
    timeline = Timeline(found)
    heights = [1.15, 1] if found.beside is None else [1.15, 1, 1.15]
    figure = Figure(figsize=(12, 3.5 * sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), len(found.changes), height_ratios=heights)
    _whole(figure.add_subplot(grid[0, :]), timeline, found.changes)
    for n, change in enumerate(found.changes):
        _near(figure.add_subplot(grid[1, n]), timeline, change, CHANGE_COLOURS[n])
    if found.beside is not None:
        _beside(figure.add_subplot(grid[2, :]), found.beside)
    figure.suptitle("Latency of each output: from the due time of its position until a subscriber has it")
    figure.savefig(path)


def _beside(axes: Axes, found: SideBySide) -> None:
    """Both pipelines over time: a saw of micro-batches, and the rows that waited for the rescaling."""
    for each, colour in zip(found.pipelines, (SPARK_COLOUR, MOVING_COLOUR), strict=True):
        floor, stopped = each.figures["floor_ms"], each.figures["stoppage_ms"]
        label = each.name
        if stopped is not None:
            label += f": stoppage {stopped:,.0f} ms above its floor"
        axes.plot(each.due_s, np.array(each.latency_ms) / 1e3, color=colour, linewidth=1.4, label=label)
        axes.axhline(floor / 1e3, color=colour, linestyle=":", linewidth=1.0)
        axes.axvspan(found.change_s, found.change_s + each.changed_s, color=colour, alpha=0.10)
    axes.axvline(found.change_s, color="#111111", linewidth=1.2, label="both are rescaled")
    axes.set_title(
        "one load to one sink, side by side: from due to committed (dotted: the floor)", fontsize=11
    )
    axes.set_xlabel("due, s")
    axes.set_ylabel("latency, s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, found.end_s)
    axes.grid(visible=True, alpha=0.35)
    axes.legend(loc="upper left", fontsize=8.5, framealpha=0.9)


def _axes(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_yscale("log")
    axes.set_ylabel("latency, ms (log scale)")
    axes.grid(visible=True, which="major", alpha=0.35)
    axes.yaxis.set_major_formatter("{x:g}")


def _whole(axes: Axes, timeline: Timeline, changes: Sequence[Change]) -> None:
    steps = ((1.0, "slowest", 0.9), (0.99, "p99", 1.4), (0.5, "median", 1.8))
    colours = ("#fca5a5", "#dc2626", "#1e3a8a")
    for (share, name, width), colour in zip(steps, colours, strict=True):
        axes.plot(
            *timeline.windows(share), label=f"{name} of {WINDOW_S * 1e3:g} ms", color=colour, linewidth=width
        )
    for change, colour in zip(changes, CHANGE_COLOURS, strict=True):
        begin, end = timeline.seconds(change.at.request_ns), timeline.seconds(change.at.end_ns)
        axes.axvspan(begin, end, color=colour, alpha=0.18)
        axes.axvline(
            begin, color=colour, linewidth=1.5, label=f"{change.name}: {(end - begin) * 1e3:,.0f} ms"
        )
    _axes(axes, "the whole run, all cars of the producer")
    axes.set_xlim(0, float(timeline.at_s.max(initial=1.0)))
    axes.set_xlabel("due, s after the warm-up")
    axes.legend(loc="upper left", ncols=5, fontsize=8.5, framealpha=0.9)
    _leave_room(axes, 3.0)


def _leave_room(axes: Axes, factor: float) -> None:
    """Leave room for the legend above the data."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * factor)


def _near(axes: Axes, timeline: Timeline, change: Change, colour: str) -> None:
    request, end = timeline.seconds(change.at.request_ns), timeline.seconds(change.at.end_ns)
    near = (timeline.at_s >= request - ZOOM_S) & (timeline.at_s <= end + ZOOM_S)
    moving = np.isin(timeline.cars, list(change.cars))
    for chosen, name, dots in (
        (near & ~moving, "cars that stay", OTHER_COLOUR),
        (near & moving, "cars that move", MOVING_COLOUR),
    ):
        step = max(1, int(chosen.sum()) // DOTS_MAX)
        after_ms = (timeline.at_s[chosen][::step] - request) * 1e3
        axes.scatter(after_ms, timeline.latency_ms[chosen][::step], s=5, color=dots, label=name, linewidths=0)
    axes.axvspan(0, (end - request) * 1e3, color=colour, alpha=0.18, label="from request to end")
    for phase, ms in change.phases_ms.items():
        if phase in ("flipped", "done"):
            axes.axvline(ms, color=colour, linestyle=":", linewidth=1.5, label=phase)
    _axes(axes, f"{change.name}: every output")
    axes.set_xlabel("due, ms after the request")
    axes.legend(loc="upper center", ncols=3, fontsize=8.5, markerscale=2.5, framealpha=0.9)
    _leave_room(axes, 5.0)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tiercel: demonstration</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #111 }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: .5rem 0 1.5rem }}
th, td {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
th {{ background: #f3f4f6 }} img {{ max-width: 100% }} .good {{ color: #15803d }} .bad {{ color: #b91c1c }}
footer {{ color: #555; font-size: 13px }}
</style></head><body>
<h1>Tiercel: demonstration</h1>
<p class="{tone}"><strong>{verdict}</strong></p>
{tables}
<h2>Timeline</h2>
<img alt="Latency over time, with the move and the scale-out marked" src="data:image/png;base64,{picture}">
<footer><p>{facts}</p></footer>
</body></html>
"""


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<h2>{html.escape(title)}</h2><table>{line(head, 'th')}{body}</table>"


def write_page(
    path: Path, picture: Path, *, good: bool, verdict: str, tables: Sequence[str], facts: str
) -> None:
    """Write one self-contained file."""
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    page = PAGE.format(
        tone="good" if good else "bad",
        verdict=html.escape(verdict),
        tables="\n".join(tables),
        picture=encoded,
        facts=html.escape(facts),
    )
    path.write_text(page, encoding="utf-8")
