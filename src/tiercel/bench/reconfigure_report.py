"""Pictures and page of `tiercel bench reconfigure`, from the recordings of its repeats.

Responsible for: latency over time with the phases of the move, stoppage beside its floor, the distribution of
    latencies; one page that shows them with the table.
Not responsible for: measuring (scenarios/reconfigure.py), the figures (metrics.py).
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiercel.bench.metrics import Outputs, read_outputs
from tiercel.bench.report import Line

BEFORE_S, AFTER_S = 2.0, 8.0  # of the timeline, around the request
BINS = 500
LATENCY_MS_MIN = 0.05  # of the logarithmic axis
SHOWN = ("stoppage_p50_ms", "stoppage_p99_ms", "floor_p99_ms", "gap_ms", "gap_floor_ms", "beyond_backlog_ms")
MORE = (
    "peak_ms",
    "disruption_ms",
    "stabilise_ms",
    "duration_ms",
    "bytes_moved",
    "lost",
    "doubled",
    "reordered",
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tiercel bench reconfigure</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; color: #222; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .2rem .6rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }} tr:nth-child(even) {{ background: #f3f3f3; }}
img {{ max-width: 100%; }} code {{ background: #f3f3f3; }}
</style></head><body>
<h1>Moves of keys, by strategy</h1>
<p>{settings}</p>
{table}
<h2>Latency of the moved keys around the request</h2>
<p>Median and p99 of the outputs by due time; lines are phases of the move.</p>
<img src="timeline.png" alt="timeline">
<h2>Stoppage beside its floor</h2>
<p>The largest excess of a key's tuples, p99 over the keys. The floor is the same measure without a move.</p>
<img src="stoppage.png" alt="stoppage">
<h2>Distribution of latencies from the request on</h2><img src="cdf.png" alt="cdf">
</body></html>
"""


def write_report(
    place: Path, every: Sequence[Line], moved: Collection[int], settings: Mapping[str, Any]
) -> None:
    """Draw the pictures into the directory of the recordings, and write `report.html` beside them."""
    strategies = list(dict.fromkeys(line["strategy"] for line in every))
    recorded = [s for s in strategies if (place / f"{s}-1.outputs.parquet").exists()]  # rivals have none
    records = {s: _mine(read_outputs(place / f"{s}-1.outputs.parquet"), moved) for s in recorded}
    first = {s: next(line for line in every if line["strategy"] == s) for s in strategies}
    draw_stoppage(place / "stoppage.png", every)
    if records:
        draw_timeline(place / "timeline.png", records, first)
        draw_cdf(place / "cdf.png", records, first)
    write_repeats(place / "repeats.parquet", every)
    given = {k: v for k, v in settings.items() if k not in ("out", "strategies") and v not in (None, 0, 0.0)}
    page = PAGE.format(
        settings=html.escape(", ".join(f"{k} {v}" for k, v in given.items())), table=_table(every)
    )
    (place / "report.html").write_text(page, encoding="utf-8")


def write_repeats(path: Path, every: Sequence[Line]) -> None:
    """The figures of every repeat as a table: one column for each number, and the name of the strategy."""
    names = list(dict.fromkeys(name for line in every for name, v in line.items() if _is_figure(name, v)))
    columns = {name: [line.get(name) for line in every] for name in names}
    pq.write_table(pa.table({"strategy": [line["strategy"] for line in every]} | columns), path)


def _is_figure(name: str, value: object) -> bool:
    return name != "strategy" and isinstance(value, int | float) and not isinstance(value, bool)


def _mine(outputs: Outputs, moved: Collection[int]) -> Outputs:
    chosen = np.isin(outputs.sensor, list(moved))
    return Outputs(outputs.sensor[chosen], outputs.due_ns[chosen], outputs.emitted_ns[chosen])


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, figsize=(10, height), squeeze=False, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_timeline(path: Path, records: Mapping[str, Outputs], first: Mapping[str, Line]) -> None:
    """One strip for each strategy: latency by due time, logarithmic, with the phases of the move."""
    figure, axes = _figure(len(records), 2.2 * len(records) + 0.6)
    for axis, (strategy, outputs) in zip(axes[:, 0], records.items(), strict=True):
        request_ns = first[strategy]["request_ns"]
        at_s = (outputs.due_ns - request_ns) / 1e9
        until_s = max(AFTER_S, min(first[strategy]["duration_ms"] / 1e3 * 1.2, at_s.max(initial=0.0)))
        edges = np.linspace(-BEFORE_S, until_s, BINS + 1)
        places = np.digitize(at_s, edges) - 1
        middle = (edges[:-1] + edges[1:]) / 2
        for share, label, width in ((50, "median", 1.2), (99, "p99", 0.8)):
            values = [
                np.percentile(outputs.latency_ms[places == n], share) if (places == n).any() else np.nan
                for n in range(BINS)
            ]
            axis.plot(middle, np.maximum(values, LATENCY_MS_MIN), lw=width, label=label)
        for phase, ms in first[strategy]["phases_ms"].items():
            if ms / 1e3 <= until_s:
                axis.axvline(ms / 1e3, color="0.6", lw=0.6)
            if phase in ("flipped", "done") and ms / 1e3 <= until_s:
                axis.annotate(
                    phase, (ms / 1e3, 0.97), xycoords=("data", "axes fraction"), fontsize=7, va="top"
                )
        axis.axvline(0.0, color="0.2", lw=0.8, ls="--")
        axis.set_yscale("log")
        axis.set_ylabel("latency, ms")
        axis.set_title(strategy, loc="left", fontsize=10)
        axis.set_xlim(-BEFORE_S, until_s)
    axes[0, 0].legend(loc="upper right", fontsize=8)
    axes[-1, 0].set_xlabel("seconds after the request, by due time")
    _save(figure, path)


def draw_stoppage(path: Path, every: Sequence[Line]) -> None:
    """Bars of the p99 stoppage and the gap of each strategy, each beside its floor; dots are repeats."""
    strategies = list(dict.fromkeys(line["strategy"] for line in every))
    figure, axes = _figure(1, 4.2)
    axis = axes[0, 0]
    names = [("stoppage_p99_ms", "stoppage p99"), ("floor_p99_ms", "its floor")]
    names += [("gap_ms", "gap"), ("gap_floor_ms", "its floor ")]
    for n, (name, label) in enumerate(names):
        values = [
            [line[name] for line in every if line["strategy"] == s and line[name] is not None]
            for s in strategies
        ]
        heights = [max(float(np.median(v)), LATENCY_MS_MIN) if v else 0.0 for v in values]
        at = np.arange(len(strategies)) + 0.2 * (n - 1.5)
        bars = axis.bar(at, heights, 0.18, label=label, color=f"C{n // 2}", alpha=0.35 if n % 2 else 0.9)
        axis.bar_label(bars, [f"{h:.3g}" if h else "" for h in heights], fontsize=7)
        for x, repeats in zip(at, values, strict=True):
            axis.plot([x] * len(repeats), np.maximum(repeats, LATENCY_MS_MIN), "k.", ms=3)
    axis.set_xticks(range(len(strategies)), strategies, rotation=25 if len(strategies) > 6 else 0, fontsize=8)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.legend(fontsize=8)
    _save(figure, path)


def draw_cdf(path: Path, records: Mapping[str, Outputs], first: Mapping[str, Line]) -> None:
    """The share of tuples, due from the request on, whose latency is above a value."""
    figure, axes = _figure(1, 3.6)
    axis = axes[0, 0]
    for strategy, outputs in records.items():
        latency = np.sort(outputs.latency_ms[outputs.due_ns >= first[strategy]["request_ns"]])
        above = 1.0 - np.arange(len(latency)) / max(1, len(latency))
        axis.plot(np.maximum(latency, LATENCY_MS_MIN), above, label=strategy, lw=1.2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("latency, ms")
    axis.set_ylabel("share of tuples above it")
    axis.legend(fontsize=7, ncols=2, loc="upper right")
    axis.grid(alpha=0.3)
    _save(figure, path)


def _table(every: Sequence[Line]) -> str:
    names = [*SHOWN, *MORE]
    rows = [
        "<tr><th>strategy</th>" + "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names) + "</tr>"
    ]
    for line in every:
        cells = "".join(f"<td>{_cell(line[name])}</td>" for name in names)
        rows.append(f"<tr><td>{html.escape(line['strategy'])} {line['repeat']}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
