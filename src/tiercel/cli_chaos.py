"""`tiercel chaos`: faults of every kind on real Spark, and a verdict on every row.

Responsible for: the command, progress on stderr, the summary on stdout, the files that are left.
Not responsible for: the run (chaos/supervisor.py), the verdict (chaos/judge.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercel.chaos.keeping import DEFAULT, DURABILITIES, check_durability
from tiercel.errors import UserError

if TYPE_CHECKING:
    from tiercel.chaos.judge import Verdict
    from tiercel.chaos.supervisor import Tell

MINUTES_MAX = 24 * 60.0
MASTER = "local-cluster[2,6,1024]"
AUDITED = ("inputs", "outputs", "lost", "doubled", "reordered", "wrong", "invented")


def chaos(
    minutes: Annotated[
        float,
        typer.Option(help="Of faults, at least one of each kind; starting and judging come on top."),
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="What the faults are drawn from.")] = 1,
    master: Annotated[
        str, typer.Option(help="Spark's; a local[N] has no executors that could be killed.")
    ] = MASTER,
    durability: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(DURABILITIES)}; executors have disks to lose with backup and replica."
        ),
    ] = DEFAULT,
    out: Annotated[
        Path | None, typer.Option(help="Where the record goes, a new directory. Default: out/chaos-SEED-TIME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The verdict on stdout, and nothing else.")] = False,
) -> None:
    """Kill, stop and fill the disk of a deployment at random, in the middle of moves, and judge every row.

    A ledger runs on Spark at two sites under load. Workers of instances and routers, executors with and
    without their disks, and the whole application are killed with SIGKILL, processes are stopped for
    seconds, the storage gets full; meanwhile keys move and instances come and go. At the end a Spark batch
    job compares all that came out with a sequential run over all that went in. Exit code 1 if anything was
    lost, doubled, out of order or wrong, or did not come back by itself; 2 if all is well, but fewer faults
    could be done than a run of this length must have (100 in 20 minutes, 5 of each kind, 30 during moves).

    Example: tiercel chaos --minutes 3 --seed 7
    """
    if not 0 < minutes <= MINUTES_MAX:
        raise UserError(
            f"--minutes {minutes:g} is out of range", expected=f"above 0, at most {MINUTES_MAX:g}"
        )
    from tiercel.chaos.child import QUICK_JVM
    from tiercel.chaos.judge import SLOTS, Verdict, judge  # Spark is loaded only when it is asked for
    from tiercel.chaos.supervisor import Supervisor, check_master, recording_place
    from tiercel.spark.session import open_session

    check_master(master)
    check_durability(durability)
    place = recording_place(out or Path("out") / f"chaos-{seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was mounted and started ends with us
    with progress() as tell:
        chronicle = Supervisor(place, seed, master, durability, tell).run(minutes * 60)
        (place / "faults.json").write_bytes(msgspec.json.encode(chronicle))
        tell("comparing every output with a sequential run, in a Spark batch job", 1.0)
        spark = open_session(
            "tiercel-chaos-judge", slots=SLOTS, config={"spark.driver.extraJavaOptions": QUICK_JVM}
        )
        try:
            audit = judge(spark, place / "recorded")
        finally:
            spark.stop()
    verdict = Verdict.of(seed, minutes, master, durability, chronicle, audit)
    found = {"good": verdict.good, **msgspec.to_builtins(verdict)}
    document = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    (place / "verdict.json").write_text(document, encoding="utf-8")
    if as_json:
        print(document)
    else:
        show(verdict, place)
    if not verdict.good:
        raise typer.Exit(1)
    if verdict.too_few:
        raise typer.Exit(2)


@contextmanager
def progress() -> Iterator[Tell]:
    """A line for each fault on stderr, below them how far the run is."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    columns = (TextColumn("chaos"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def tell(text: str, share: float) -> None:
            console.print(f"{time.monotonic() - begun:7.1f} s  {text}", soft_wrap=True, markup=False)
            bar.update(task, completed=share)

        yield tell


def show(verdict: Verdict, place: Path) -> None:
    console = Console(highlight=False)
    table = Table(title="Faults", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("kind", "faults", "during a move"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, count in verdict.faults.items():
        table.add_row(kind, f"{count}", f"{verdict.during_moves[kind]}")
    table.add_row(
        "all", f"{sum(verdict.faults.values())}", f"{sum(verdict.during_moves.values())}", style="bold"
    )
    console.print(table)
    changes = ", ".join(f"{count} {how}" for how, count in sorted(verdict.changes.items()))
    console.print(
        f"moves and scalings: {changes or 'none'}; {verdict.during_scaling} more faults while scaling; "
        f"{verdict.starts} starts of the application, of which {verdict.failed_starts} failed; "
        f"{verdict.continued} moves gone on with; full disk: {verdict.disk}",
        soft_wrap=True,
    )
    for line in (*verdict.unasked, *([f"stalled: {verdict.stalled}"] if verdict.stalled else [])):
        console.print(line, style="bold red", markup=False, soft_wrap=True)
    for line in verdict.too_few:
        console.print(f"too few: {line}", style="yellow", markup=False, soft_wrap=True)
    counted = ", ".join(f"{getattr(verdict.audit, name):,} {name}" for name in AUDITED)
    console.print(counted, style="green" if verdict.good else "bold red")
    if verdict.stalled:
        console.print("lost are also those that had not come out when the run was given up", style="bold red")
    console.print(f"record: {place}", style="dim", soft_wrap=True)
