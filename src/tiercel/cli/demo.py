"""`tiercel demo`: a demonstration: traffic, a live move, a scale-out, an audit, and plain Spark beside it.

Responsible for: the command, progress on stderr, tables on stdout, the report and the picture.
Not responsible for: the run (demo/run.py), the form of picture and page (demo/plots.py), the simulated
    demonstration (demo_simulated.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercel.cli.demo_simulated import tour
from tiercel.errors import UserError

if TYPE_CHECKING:
    from tiercel.demo.run import Demonstration, ShowProgress

SECONDS_MIN, SECONDS_MAX = 2.0, 600.0

FIGURES = {  # column -> figure of metrics.py; all in ms
    "steady p50": "steady_p50_ms",
    "steady p99": "steady_p99_ms",
    "stoppage p50": "moved_p50_ms",
    "stoppage p99": "moved_p99_ms",
    "stoppage max": "moved_max_ms",
    "peak": "peak_ms",
    "duration": "duration_ms",
}
AUDITED = ("inputs", "outputs", "lost", "doubled", "reordered", "wrong", "invented")
BESIDE = {  # column -> figure of demo/side_by_side.py
    "steady p50": "steady_p50_ms",
    "floor": "floor_ms",
    "slowest": "slowest_ms",
    "stoppage above floor": "stoppage_ms",
    "rescaling took": "rescaling_ms",
}
INTRODUCTION = (
    "Cars sent their positions to a speed monitor, an operator with state for each car, on Spark. While they "
    "kept sending, 100 cars moved live to another instance; then a third instance joined."
)
TASK = ("name", "kind", "state", "stage", "attempt", "task", "executor", "pid", "slots")

Shown = tuple[str, Sequence[str], list[list[str]]]  # title, head, rows


def demo(
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Run in the simulator, without Spark.")
    ] = False,
    edges: Annotated[
        bool, typer.Option("--edges", help="Cars drive between two Spark applications; keys follow them.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="Seconds of steady traffic before the move; half of it after each change.")
    ] = 8.0,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Then one load through plain Spark and through Tiercel, both rescaled: 30 s more",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory for the report, the picture and the recorded traffic.")
    ] = Path("out/demo"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON on stdout, and nothing else.")
    ] = False,
) -> None:
    """Run a speed monitor on Spark, move a hundred cars live, scale out, and check every output.

    Takes about a minute and writes an HTML report. Needs the extra: pip install 'tiercel[lab]'.

    Exit code 1: an output was lost, doubled, out of order or wrong.

    Example: tiercel demo --seconds 5 --out out/demo

    Edges: tiercel demo --edges --seconds 30
    """
    if simulated:
        if not tour():
            raise typer.Exit(1)
        return
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise UserError(
            f"--seconds {seconds:g} is out of range", expected=f"from {SECONDS_MIN:g} to {SECONDS_MAX:g}"
        )
    if edges:
        _edges(seconds, as_json)
        return
    from tiercel.bench.report import check_drawing
    from tiercel.demo.run import run  # Spark is imported only here: it takes seconds

    check_drawing()

    with phases() as show_progress:
        found = run(out, seconds, show_progress, beside=beside)
        show_progress("drawing the timeline and writing the report")
        results = write_results(found, out, seconds)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        show(found, out)
    if not found.good:
        raise typer.Exit(1)


def _edges(seconds: float, as_json: bool) -> None:
    """Cars drive between the applications of two sites."""
    from tiercel.demo.edges import run_edges

    with phases() as show_progress:
        found = run_edges(seconds, show_progress)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        table = Table(
            "figure", "value", title="Two Spark applications, and cars between them", box=box.SIMPLE
        )
        for name, value in msgspec.to_builtins(found).items():
            shown = f"{len(value)} moves" if name == "hand_overs" else str(value)
            table.add_row(name.replace("_", " "), shown)
        console = Console(highlight=False)
        console.print(table)
        for one in found.hand_overs[-5:]:
            console.print(one, soft_wrap=True)
    if not found.good:
        raise typer.Exit(1)


@contextmanager
def phases() -> Iterator[ShowProgress]:
    """Show phases with their times on stderr: a spinner on a terminal, otherwise a line each."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(f"{time.monotonic() - begun:6.1f} s  {text}", soft_wrap=True)
        return
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def show_progress(text: str) -> None:
            _finish(progress)
            progress.add_task(text, total=1)

        yield show_progress
        _finish(progress)


def _finish(progress: Progress) -> None:
    for task in progress.tasks:
        if not task.finished:
            progress.update(task.id, completed=1)


# -- tables --------------------------------------------------------------------------------------------


def verdict(found: Demonstration) -> str:
    audit = found.audit
    if not audit.inputs:
        return "nothing was sent"
    faults = ", ".join(f"{getattr(audit, name):,} {name}" for name in AUDITED[2:] if getattr(audit, name))
    result = faults or "each once, in order, with the right mean"
    return f"{audit.outputs:,} outputs of {audit.inputs:,} positions: {result}"


def tables(found: Demonstration) -> list[Shown]:
    changes = [
        [
            change.name,
            f"{len(change.cars)}",
            *(_milliseconds(change.figures[f]) for f in FIGURES.values()),
        ]
        for change in found.changes
    ]
    tasks = [[str(getattr(process, field)) for field in TASK] for process in found.processes]
    beside = [] if found.beside is None else found.beside.pipelines
    systems = [
        [each.name, *(_milliseconds(each.figures[f]) for f in BESIDE.values()), f"{each.wrong:,}"]
        for each in beside
    ]
    side_by_side: Shown = (
        "One load by plain Spark and by Tiercel, rescaled: 2 to 3 partitions, 1 to 2 instances; in ms",
        ["pipeline", *BESIDE, "rows wrong"],
        systems,
    )
    return [
        *([side_by_side] if systems else []),
        ("Latency before and during each change, in ms", ["change", "cars moved", *FIGURES], changes),
        (
            "Audit: every output compared with every input, by a Spark batch job",
            AUDITED,
            [[f"{getattr(found.audit, name):,}" for name in AUDITED]],
        ),
        ("Routers and instances: each is a long-running Spark task", TASK, tasks),
    ]


def _milliseconds(value: float | None) -> str:
    """A stoppage below the noise may be negative: no output was slower than usual."""
    return "" if value is None else f"{max(0.0, value):,.1f}"


def about(found: Demonstration) -> str:
    from tiercel.bench.report import commit, machine

    cpu = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in found.cpu.items())
    facts = machine()
    return (
        "Side by side, latency is from due to committed in the sink; the floor is the slowest row before the "
        "rescaling. Steady: before the change. Stoppage: how much longer than the steady median the slowest "
        f"output of a moved car took during the change. Spark {found.spark}, commit {commit()}, "
        f"{facts['cores']} cores ({cpu or 'use unknown'}), "
        f"{found.took_s:.0f} s."
    )


def show(found: Demonstration, out: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 130))
    console.print(INTRODUCTION, soft_wrap=True)
    for title, head, rows in tables(found):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for n, column in enumerate(head):
            table.add_column(column, justify="right" if n else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(verdict(found), style="green" if found.good else "bold red")
    console.print(about(found), style="dim", soft_wrap=True)
    console.print(f"report: {out / 'report.html'}   picture: {out / 'latency.png'}", soft_wrap=True)


# -- files ---------------------------------------------------------------------------------------------


def write_results(found: Demonstration, out: Path, seconds: float) -> dict[str, Any]:
    """Write picture, page and JSON; returns the content of the JSON."""
    from tiercel.bench.report import document
    from tiercel.demo.plots import draw_timeline, html_table, write_page

    picture, page = out / "latency.png", out / "report.html"
    draw_timeline(found, picture)
    write_page(
        page,
        picture,
        good=found.good,
        verdict=verdict(found),
        tables=[html_table(*table) for table in tables(found)],
        facts=about(found),
    )
    rows = [
        {
            "change": c.name,
            "cars": len(c.cars),
            **c.figures,
            "bytes_moved": c.bytes_moved,
            "phases_ms": c.phases_ms,
        }
        for c in found.changes
    ]
    results = document(
        "demo",
        rows,
        {"seconds": seconds},
        good=found.good,
        beside=[] if found.beside is None else [each.figures for each in found.beside.pipelines],
        audit=msgspec.to_builtins(found.audit),
        alerts=found.alerts,
        tasks=[msgspec.to_builtins(process) for process in found.processes],
        took_s=round(found.took_s, 1),
        report=str(page),
        picture=str(picture),
        recorded=str(out / "recorded"),
        **found.cpu,
    )
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    return results
