"""`tiercel chaos`: faults of every kind on real Spark, and a verdict on every row.

Responsible for: the command, progress on stderr, the summary on stdout, the output files.
Not responsible for: the run (chaos/supervisor.py), the verdict (chaos/verdict.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercel.chaos.storage_options import DEFAULT, DURABILITIES, check_durability
from tiercel.errors import UserError

if TYPE_CHECKING:
    from tiercel.chaos.supervisor import ShowProgress
    from tiercel.chaos.verdict import Verdict

MINUTES_MAX = 24 * 60.0
APPLICATIONS_MAX = 4
CUT_S = 12.0
CUT_S_MAX, CLOCKS_S_MAX = 120.0, 20.0
MASTER = "local-cluster[2,6,1024]"
AUDITED = ("inputs", "outputs", "lost", "doubled", "reordered", "wrong", "invented")


def chaos(
    minutes: Annotated[
        float,
        typer.Option(help="Minutes of faults, at least one of each kind; start and verdict take longer."),
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Random seed of the faults.")] = 1,
    master: Annotated[str, typer.Option(help="Spark master; a local[N] has no executors to kill.")] = MASTER,
    durability: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(DURABILITIES)}; executors can lose their disks with backup and replica."
        ),
    ] = DEFAULT,
    applications: Annotated[
        int,
        typer.Option(help="1; or from 2 to 4: sites that are applications of their own, and faults between."),
    ] = 1,
    cut: Annotated[
        float, typer.Option(help="With --applications: seconds of the longest fault of a link.")
    ] = CUT_S,
    clocks: Annotated[
        float, typer.Option(help="With --applications: seconds that the clocks of the edges are ahead.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="New directory for the recording. Default: out/chaos-SEED-TIME")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON on stdout, and nothing else.")
    ] = False,
) -> None:
    """Inject random faults into a deployment on Spark while keys move, and check every row.

    A ledger runs on Spark at two sites under load. The command kills workers, executors (with and without
    their disks) and the whole application, stops processes for seconds, and fills the disk, while keys move
    and instances come and go. At the end a Spark batch job compares all outputs with a sequential run over
    all inputs.

    Exit code 1: a row was lost, doubled, out of order or wrong, or something did not recover by itself.

    Exit code 2: all is well, but there were fewer faults than the minimum (100 in 20 minutes, 5 of each kind,
    30 during moves).

    With --applications, sites are Spark applications of their own with a link between them that is cut, or
    heard one way only, while drivers, routers and instances are killed.

    Example: tiercel chaos --minutes 3 --seed 7

    Another one: tiercel chaos --applications 3 --minutes 3 --cut 20 --clocks 5
    """
    if not 0 < minutes <= MINUTES_MAX:
        raise UserError(
            f"--minutes {minutes:g} is out of range", expected=f"above 0, at most {MINUTES_MAX:g}"
        )
    from tiercel.chaos.application_handle import QUICK_JVM
    from tiercel.chaos.supervisor import Supervisor, check_master, recording_place
    from tiercel.chaos.verdict import SLOTS, Verdict, judge  # Spark is loaded only when it is asked for
    from tiercel.spark.cluster.session import open_session

    if not 1 <= applications <= APPLICATIONS_MAX:
        raise UserError(f"--applications {applications}", expected=f"from 1 to {APPLICATIONS_MAX}")
    if applications > 1 and (master, durability) != (MASTER, DEFAULT):
        raise UserError("--master or --durability with --applications", expected="one of them")
    if applications == 1 and (cut, clocks) != (CUT_S, 0.0):
        raise UserError("--cut or --clocks without --applications", expected="--applications 2 as well")
    for option, value, most in (("--cut", cut, CUT_S_MAX), ("--clocks", clocks, CLOCKS_S_MAX)):
        if not 0 <= value <= most:
            raise UserError(f"{option} {value:g} is out of range", expected=f"seconds from 0 to {most:g}")
    check_master(master)
    check_durability(durability)
    place = recording_place(out or Path("out") / f"chaos-{seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that mounts and children end with us
    if applications > 1:
        options = {"applications": applications, "cut_s": cut, "ahead_s": clocks}
        _between_applications(place, seed, minutes, options, as_json=as_json)
        return
    with progress() as show_progress:
        run_log = Supervisor(place, seed, master, durability, show_progress).run(minutes * 60)
        (place / "faults.json").write_bytes(msgspec.json.encode(run_log))
        show_progress("comparing every output with a sequential run, in a Spark batch job", 1.0)
        spark = open_session(
            "tiercel-chaos-judge", slots=SLOTS, config={"spark.driver.extraJavaOptions": QUICK_JVM}
        )
        try:
            audit = judge(spark, place / "recorded")
        finally:
            spark.stop()
    verdict = Verdict.of(seed, minutes, master, durability, run_log, audit)
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


def _between_applications(
    place: Path, seed: int, minutes: float, options: dict[str, Any], *, as_json: bool
) -> None:
    from tiercel.chaos.sites.run import SitesRun

    with progress() as show_progress:
        verdict = SitesRun(place, seed, show_progress, **options).run(minutes * 60)
    found = {"good": verdict.good, **options, **msgspec.to_builtins(verdict)}
    document = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    (place / "verdict.json").write_text(document, encoding="utf-8")
    if as_json:
        print(document)
    else:
        table = Table("", "", box=box.SIMPLE, show_header=False)
        for name, value in found.items():
            table.add_row(name, str(value))
        Console().print(table)
        Console().print(f"recorded in {place}", markup=False)
    if not verdict.good:
        raise typer.Exit(1)


@contextmanager
def progress() -> Iterator[ShowProgress]:
    """One line per fault on stderr, and a progress bar."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    columns = (TextColumn("chaos"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def show_progress(text: str, share: float) -> None:
            console.print(f"{time.monotonic() - begun:7.1f} s  {text}", soft_wrap=True, markup=False)
            bar.update(task, completed=share)

        yield show_progress


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
        f"{verdict.continued} moves resumed; full disk: {verdict.disk}",
        soft_wrap=True,
    )
    for line in (*verdict.unexpected, *([f"stalled: {verdict.stalled}"] if verdict.stalled else [])):
        console.print(line, style="bold red", markup=False, soft_wrap=True)
    for line in verdict.too_few:
        console.print(f"too few: {line}", style="yellow", markup=False, soft_wrap=True)
    counted = ", ".join(f"{getattr(verdict.audit, name):,} {name}" for name in AUDITED)
    console.print(counted, style="green" if verdict.good else "bold red")
    if verdict.stalled:
        console.print("`lost` includes rows that were not out when the run was given up", style="bold red")
    console.print(f"recording: {place}", style="dim", soft_wrap=True)
