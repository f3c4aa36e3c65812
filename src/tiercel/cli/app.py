"""`tiercel app`: lists and runs the applications of published papers.

Responsible for: the options, the live view on stderr, the result on stdout, exit codes.
Not responsible for: running one (apps/run.py), the applications (apps/).

Exit codes: 0 every output row is what the oracle expects; 1 some are not; 2 the command could not run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiercel.errors import UserError

if TYPE_CHECKING:
    from tiercel.apps.run import Progress, Result

app = typer.Typer(
    name="app",
    help="Run applications of published papers, and check every output row against an oracle.\n\n"
    "Example: tiercel app run wordcount --during move,kill",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")]
FAULTS = ("lost", "doubled", "invented", "wrong", "reordered")
SHOWN_S = 0.5


@app.command("list", short_help="All applications and their options.")
def list_apps(as_json: AsJson = False) -> None:
    """Print all applications with their options.

    Example: tiercel app list
    """
    from tiercel.apps.app import described_options
    from tiercel.apps.catalogue import all_apps

    found = all_apps()
    if as_json:
        listed = {one.name: {"about": one.about, "options": described_options(one)} for one in found}
        print(msgspec.json.format(msgspec.json.encode(listed), indent=2).decode())
        return
    for one in found:
        print(f"{one.name:<12} {one.about}")
        for name, text in described_options(one).items():
            print(f"{'':<12}   --set {name}={text}")


@app.command(short_help="Run one application, and compare every row with its oracle.")
def run(
    name: Annotated[str, typer.Argument(help="The application: tiercel app list.")],
    seed: Annotated[int, typer.Option(help="Random seed of the generator.")] = 1,
    rate: Annotated[int, typer.Option(help="Events a second; 0: as fast as possible.")] = 1_000,
    seconds: Annotated[float, typer.Option(help="Seconds of load.")] = 20.0,
    during: Annotated[
        str,
        typer.Option(help="Changes while it runs, comma-separated: none, move, half, scale, restart, kill."),
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the application, as name=value; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an application on an embedded Spark session, and compare every output row with its oracle.

    The generator sends events at the rate. Changes come evenly inside the run: `move` moves half of the keys
    of an instance live, `half` all of them, `scale` adds an instance, `kill` ends an instance with SIGKILL.
    At the end a Spark batch job computes the expected rows from all events.

    Exit code 1: a row was lost, doubled, invented, wrong or out of order.

    Example: tiercel app run wordcount --seconds 10 --during move,scale,kill
    """
    from tiercel.apps.catalogue import find_app
    from tiercel.apps.run import Run
    from tiercel.apps.run import run as run_app

    wanted = Run(find_app(name), parse_settings(settings or []), seed, rate, seconds, parse_list(during))
    wanted.check()
    with shown() as show:
        found = run_app(wanted, show)
    if as_json:
        document = {"good": found.good, **msgspec.to_builtins(found)}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        show_result(found)
    if not found.good:
        raise typer.Exit(1)


@app.command(short_help="Run every application with a move, a scale-out and a kill inside.")
def check(
    only: Annotated[str, typer.Option("--apps", help="Comma-separated; nothing: all of them.")] = "",
    seed: Annotated[int, typer.Option(help="Random seed of the generators.")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds of load of each.")] = 8.0,
    as_json: AsJson = False,
) -> None:
    """Run each form of each application, small, with a live move, a scale-out and a kill -9 inside the run.

    Every output row is compared with the oracle's. All of them take some minutes.

    Exit code 1: a row was lost, doubled, invented, wrong or out of order.

    Example: tiercel app check --apps nexmark,toll
    """
    from tiercel.apps.catalogue import find_app
    from tiercel.apps.check import CHANGES, chosen, line
    from tiercel.apps.check import check as check_apps
    from tiercel.apps.run import Run

    forms = chosen(parse_list(only))
    for form in forms:
        Run(find_app(form.app), form.options, seed, form.rate, seconds, CHANGES).check()
    console = Console(stderr=True, highlight=False)
    with console.status("starting Spark") as status:

        def show(step: str) -> None:
            status.update(step)
            if not console.is_terminal:
                print(f"{time.strftime('%H:%M:%S')} {step}", file=sys.stderr)

        rows = [line(*one) for one in check_apps(forms, seed, seconds, show)]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"rows": rows}), indent=2).decode())
    else:
        cells = [[row.get(column, "") for column in rows[0]] for row in rows]
        Console(highlight=False, width=None if console.is_terminal else 150).print(
            _table(tuple(rows[0]), cells)
        )
    if not all(row["good"] for row in rows):
        raise typer.Exit(1)


def parse_settings(given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise UserError(f"--set {one!r}", expected="name=value", hint="tiercel app list shows the names")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# -- the live view -------------------------------------------------------------------------------


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """On a terminal a table that changes; otherwise a line for each new step."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last = [""]

        def print_step(progress: Progress) -> None:
            if progress.step != last[0] and not progress.step.startswith("waiting"):
                last[0] = progress.step
                print(f"{time.strftime('%H:%M:%S')} {progress.step}", file=sys.stderr)

        yield print_step
        return
    with Live(console=console, refresh_per_second=4, transient=True) as view:
        steps: list[str] = []
        rates = _Rates()

        def draw(progress: Progress) -> None:
            if not steps or steps[-1] != progress.step:
                steps.append(progress.step)
            view.update(_panel(progress, steps, rates))

        yield draw


class _Rates:
    """Rows a second, over the last seconds."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int, float]] = {}

    def of(self, name: str, count: int) -> float:
        now = time.monotonic()
        at, before, rate = self._before.get(name, (now, count, 0.0))
        if now - at >= SHOWN_S:
            rate = (count - before) / (now - at)
            self._before[name] = (now, count, rate)
        elif name not in self._before:
            self._before[name] = (now, count, 0.0)
        return rate


def _panel(progress: Progress, steps: Sequence[str], rates: _Rates) -> Group:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("stream", "rows", "rows/s"):
        table.add_column(column, justify="left" if column == "stream" else "right")
    table.add_row("events", f"{progress.sent:,}", f"{rates.of('', progress.sent):,.0f}")
    for name, count in progress.received.items():
        table.add_row(name, f"{count:,}", f"{rates.of(name, count):,.0f}")
    recent = sorted(progress.recent_ms)
    latency = ""
    if recent:
        p50, p99 = recent[len(recent) // 2], recent[int(len(recent) * 0.99)]
        latency = f"latency p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"
    lines: list[RenderableType] = [Text(f"{progress.seconds:6.1f} s  {progress.step}"), table, Text(latency)]
    lines += [Text(f"  {step}", style="dim") for step in steps[:-1] if "took" in step]
    if progress.findings:
        lines.append(Text(f"{progress.found:,} findings, the last ones:"))
        lines += [Text(f"  {text}", style="cyan") for text in progress.findings]
    return Group(*lines)


# -- the result ----------------------------------------------------------------------------------


def show_result(found: Result) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 120))
    console.print(
        f"{found.app}: {found.events:,} events, {found.events_per_s:,.0f} a second, seed {found.seed}, "
        f"{', '.join(f'{name}={value}' for name, value in found.options.items())}",
        soft_wrap=True,
    )
    for change in found.changes:
        console.print(f"  {change.kind}, {change.seconds:.2f} s: {change.about}", soft_wrap=True)
    console.print(
        _table(
            ("change", "phase", "seconds", "rows", "rows/s", "p50 ms", "p99 ms", "max ms"),
            [
                [p.change, p.name, p.seconds, p.rows, p.rows_per_s, p.p50_ms, p.p99_ms, p.max_ms]
                for p in found.phases
            ],
        )
    )
    for text in found.findings:
        console.print(f"  {text}", style="cyan", markup=False)
    console.print(
        _table(
            ("output", "expected", "found", *FAULTS),
            [
                [name, one.expected, one.found, *(getattr(one, fault) for fault in FAULTS)]
                for name, one in found.outputs.items()
            ],
        )
    )
    for name, one in found.outputs.items():
        for example in one.examples:
            console.print(f"{name}: {example}", style="red", markup=False, soft_wrap=True)
    verdict = "every row is what the oracle expects" if found.good else f"{found.faults:,} faults"
    if not found.good and not found.faults:
        verdict = "the oracle expects no row: nothing was checked"
    console.print(verdict, style="green" if found.good else "bold red")


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for n, column in enumerate(head):
        table.add_column(column, justify="right" if n > 1 else "left")
    for row in rows:
        table.add_row(*map(_shown, row))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
