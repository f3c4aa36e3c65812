"""`tiercel demo`: Tiercel on this machine in about a minute: traffic, a move, a scale-out, an audit.

Responsible for: the command, progress on stderr, tables on stdout, the files that are left.
Not responsible for: the run (bench/demo.py), pictures and the page's form (bench/pictures.py), the
    simulator (cli_tour.py).
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

from tiercel.cli_tour import tour
from tiercel.errors import UserError

if TYPE_CHECKING:
    from tiercel.bench.demo import Demonstration, Tell

SECONDS_MIN, SECONDS_MAX = 2.0, 600.0

FIGURES = {  # column -> figure of measures.py; all in ms
    "steady p50": "steady_p50_ms",
    "steady p99": "steady_p99_ms",
    "stoppage p50": "moved_p50_ms",
    "stoppage p99": "moved_p99_ms",
    "stoppage max": "moved_max_ms",
    "peak": "peak_ms",
    "duration": "duration_ms",
}
AUDITED = ("inputs", "outputs", "lost", "doubled", "reordered", "wrong", "invented")
TASK = ("name", "kind", "state", "stage", "attempt", "task", "executor", "pid", "slots")

Shown = tuple[str, Sequence[str], list[list[str]]]  # title, head, rows


def demo(
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Show the simulator instead: no Spark.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="Of steady traffic before the move; half as long after each change.")
    ] = 8.0,
    out: Annotated[Path, typer.Option(help="Where report, picture and recorded traffic go.")] = Path(
        "out/demo"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The results on stdout, and nothing else.")] = False,
) -> None:
    """Run a speed monitor on Spark, move a hundred cars live, scale out, and check every output.

    Takes about a minute. Exit code 1 if anything was lost, doubled, out of order or wrong.

    Example: tiercel demo --seconds 5 --out out/demo
    """
    if simulated:
        if not tour():
            raise typer.Exit(1)
        return
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise UserError(
            f"--seconds {seconds:g} is out of range", expected=f"from {SECONDS_MIN:g} to {SECONDS_MAX:g}"
        )
    from tiercel.bench.demo import run  # Spark is loaded only when it is asked for

    with phases() as tell:
        found = run(out, seconds, tell)
        tell("drawing the timeline and writing the report")
        results = write_results(found, out, seconds)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        show(found, out)
    if not found.good:
        raise typer.Exit(1)


@contextmanager
def phases() -> Iterator[Tell]:
    """Phases with their times on stderr: a spinner for each on a terminal, else a line when one begins."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(f"{time.monotonic() - begun:6.1f} s  {text}", soft_wrap=True)
        return
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def tell(text: str) -> None:
            _finish(progress)
            progress.add_task(text, total=1)

        yield tell
        _finish(progress)


def _finish(progress: Progress) -> None:
    for task in progress.tasks:
        if not task.finished:
            progress.update(task.id, completed=1)


# -- what is shown -------------------------------------------------------------------------------------


def verdict(found: Demonstration) -> str:
    audit = found.audit
    if not audit.inputs:
        return "nothing was sent"
    faults = ", ".join(f"{getattr(audit, name):,} {name}" for name in AUDITED[2:] if getattr(audit, name))
    said = faults or "each once, in order, with the right mean"
    return f"{audit.outputs:,} outputs of {audit.inputs:,} positions: {said}"


def tables(found: Demonstration) -> list[Shown]:
    changes = [
        [
            change.name,
            f"{len(change.cars)}",
            *("" if change.figures[f] is None else f"{change.figures[f]:,.1f}" for f in FIGURES.values()),
        ]
        for change in found.changes
    ]
    tasks = [[str(getattr(process, field)) for field in TASK] for process in found.processes]
    return [
        ("Latency, ms", ["change", "cars moved", *FIGURES], changes),
        (
            "Every output against every input, by a Spark batch job",
            AUDITED,
            [[f"{getattr(found.audit, name):,}" for name in AUDITED]],
        ),
        ("Routers and instances are Spark tasks", TASK, tasks),
    ]


def about(found: Demonstration) -> str:
    from tiercel.bench.report import commit, machine

    cpu = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in found.cpu.items())
    facts = machine()
    return (
        f"Stoppage of a car: the largest excess over the steady median of its positions due between request "
        f"and end. Spark {found.spark}, commit {commit()}, {facts['cores']} cores ({cpu or 'use unknown'}), "
        f"{found.took_s:.0f} s."
    )


def show(found: Demonstration, out: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 130))
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


# -- what is left --------------------------------------------------------------------------------------


def write_results(found: Demonstration, out: Path, seconds: float) -> dict[str, Any]:
    """Picture, page and JSON; returns the latter."""
    from tiercel.bench.pictures import draw_timeline, html_table, write_page
    from tiercel.bench.report import document

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
