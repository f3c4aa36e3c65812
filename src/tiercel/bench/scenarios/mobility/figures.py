"""What a drive gave: faults by an oracle, interruption of hand-overs, latency by where the state was.

Responsible for: the definitions, a row of results for each mode, a picture.
Not responsible for: driving (drive.py, cars.py).

A car's rows are numbered, and its operator counts them: so the n-th output of a car must carry number and
count n. What does not is lost, doubled, reordered or of a wrong state.

The interruption of a hand-over, for a car that sends often: the highest latency of its rows that were due
from the request to shortly after the end, less what is normal for it: the larger of the medians before and
after. The floor is the same measure in a time without a hand-over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tiercel.bench.report import Line, percentile
from tiercel.bench.scenarios.mobility.cars import Car

AFTER_S = 0.5  # behind the end of a hand-over; rows of it may still be on their way
NORMAL_S = 2.0  # before and after, for the medians
ROWS_MIN = 5
CAR, SEQ, COUNT, DUE, GOT, READER = range(6)
COLOURS = {"home": "#059669", "ancestor": "#2563eb", "away": "#dc2626"}
Outputs = npt.NDArray[np.int64]


class Transfer(msgspec.Struct, frozen=True):
    """A hand-over as the benchmark noted it; times are seconds after the start of the drive."""

    cars: tuple[int, ...]
    source: str
    destination: str
    requested_s: float
    ended_s: float
    reason: str
    bytes_moved: int = 0


def count_faults(outputs: Outputs, sent: Sequence[int]) -> dict[str, int]:
    """Compare what came with what must come."""
    lost = doubled = reordered = wrong = 0
    by_car = outputs[np.argsort(outputs[:, CAR], kind="stable")]
    bounds = np.searchsorted(by_car[:, CAR], np.arange(len(sent) + 1))
    for car, count in enumerate(sent):
        mine = by_car[bounds[car] : bounds[car + 1]]
        numbers = mine[:, SEQ]
        distinct = np.unique(numbers)
        lost += int(count - len(distinct))
        doubled += len(numbers) - len(distinct)
        for reader in np.unique(mine[:, READER]):  # logs of different sites have no common order
            reordered += int(np.count_nonzero(np.diff(numbers[mine[:, READER] == reader]) < 0))
        wrong += int(np.count_nonzero(mine[:, COUNT] != numbers))
    return {"lost": lost, "doubled": doubled, "reordered": reordered, "wrong_state": wrong}


def latency_ms(outputs: Outputs) -> npt.NDArray[np.float64]:
    return (outputs[:, GOT] - outputs[:, DUE]) / 1e6


def interruptions(
    outputs: Outputs, began_ns: int, transfers: Sequence[Transfer], probes: int, *, shift_s: float = 0.0
) -> list[float]:
    """One value for each hand-over of a car that sends often. With `shift_s`, of the time so much earlier."""
    found = []
    for car in range(probes):
        mine = outputs[outputs[:, CAR] == car]
        due_s, late_ms = (mine[:, DUE] - began_ns) / 1e9, latency_ms(mine)
        own = [t for t in transfers if car in t.cars]
        for transfer in own:
            first = transfer.requested_s - shift_s
            last = transfer.ended_s + AFTER_S - shift_s
            if shift_s and any(t.requested_s < last and t.ended_s + AFTER_S > first for t in own):
                continue
            inside = late_ms[(due_s >= first) & (due_s < last)]
            before = late_ms[(due_s >= first - NORMAL_S) & (due_s < first)]
            after = late_ms[(due_s >= last) & (due_s < last + NORMAL_S)]
            if min(len(inside), len(before), len(after)) >= ROWS_MIN:
                normal = max(float(np.median(before)), float(np.median(after)))
                found.append(max(0.0, float(inside.max()) - normal))
    return found


def whereabouts(
    outputs: Outputs,
    began_ns: int,
    cars: Sequence[Car],
    transfers: Iterable[Transfer],
    parents: Mapping[str, str | None],
) -> npt.NDArray[np.str_]:
    """For each output, where the state of its car was when the row was due: home, ancestor or away."""
    owners: dict[int, list[tuple[float, str]]] = {n: [(0.0, car.route[0][1])] for n, car in enumerate(cars)}
    for transfer in sorted(transfers, key=lambda t: t.ended_s):
        for car in transfer.cars:
            owners[car].append((transfer.ended_s, transfer.destination))
    labels = np.empty(len(outputs), dtype="<U8")
    for car in np.unique(outputs[:, CAR]):
        places = np.flatnonzero(outputs[:, CAR] == car)
        due_s = (outputs[places, DUE] - began_ns) / 1e9
        owner = _at(owners[int(car)], due_s)
        site = _at(cars[int(car)].route, due_s)
        above = np.array([parents.get(s) for s in site])
        labels[places] = np.where(owner == site, "home", np.where(owner == above, "ancestor", "away"))
    return labels


def _at(since: Sequence[tuple[float, str]], at_s: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    times, names = np.array([t for t, _ in since]), np.array([name for _, name in since])
    return names[np.maximum(0, np.searchsorted(times, at_s, side="right") - 1)]


def spread(values: Sequence[float] | npt.NDArray[np.float64], name: str) -> Line:
    """p50 and p99 of some values."""
    if len(values) == 0:
        return {f"{name}_p50_ms": None, f"{name}_p99_ms": None}
    ordered = np.sort(np.array(values))
    return {f"{name}_p{q}_ms": round(percentile(ordered, q / 100), 1) for q in (50, 99)}


def draw(results: Mapping[str, Mapping[str, list[float]]], title: str, to: str, path: Path) -> None:
    """The distribution of latency `to` where outputs are read, by mode and by where the state was."""
    figure = Figure(figsize=(1.8 + 2.4 * max(1, len(results)), 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1)
    for place, by_label in enumerate(results.values()):
        for shift, (label, values) in enumerate(by_label.items()):
            if values:
                low, mid, high, top = np.percentile(values, (5, 50, 95, 99))
                at = place + (shift - 1) * 0.25
                axes.plot([at, at], [low, top], color=COLOURS[label], linewidth=1.5)
                axes.plot([at, at], [low, high], color=COLOURS[label], linewidth=6, solid_capstyle="butt")
                axes.plot([at], [mid], marker="o", color="white", markeredgecolor=COLOURS[label])
    names = {
        "home": "state is where the car is",
        "ancestor": "state is in the cloud",
        "away": "state is away",
    }
    for label, colour in COLOURS.items():
        axes.plot([], [], color=colour, linewidth=6, label=names[label])
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel(f"latency to {to}, ms (bar: 5 % to 95 %, line: to 99 %)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(title, fontsize=10)
    figure.savefig(path)
