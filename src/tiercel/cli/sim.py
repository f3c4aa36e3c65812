"""`tiercel sim`: seeds, crash points, mutants, the large scenario, the fleet, and the replay of one seed.

Responsible for: checking the options, progress on stderr, results on stdout, exit codes.
Not responsible for: the runs (sim/explore).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.strategies import PRINCIPAL, STRATEGIES
from tiercel.errors import UserError
from tiercel.sim.check import checkers
from tiercel.sim.explore.campaign import (
    Failure,
    Summary,
    jobs_available,
    run_crash_points,
    run_seeds,
    scenario_of,
)
from tiercel.sim.explore.crash_points import CRASH_POINTS
from tiercel.sim.explore.mutants import MUTANTS, check_names, hunt, options_of
from tiercel.sim.explore.planting import planted
from tiercel.sim.explore.run import Result, run
from tiercel.sim.explore.shrink import render, shrink
from tiercel.sim.explore.walks import WALKS, missed
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.features import DRAWN_FEATURES, FEATURES
from tiercel.sim.scenario.fleet import run_fleet
from tiercel.sim.scenario.large import Report, run_large
from tiercel.sim.scenario.scenario import FAULTS, Options

SEED_MAX = 2**31
SHRUNK_MAX = 2  # failing seeds that are shortened; each takes some seconds
SHOWN_MAX = 10  # violations that are printed
LISTS = (
    "strategies",
    "faults",
    "features",
    "checkers",
    "mutants",
    "points",
    "sites",
    "operators",
    "instances",
)

errors = Console(stderr=True)


def sim(
    seeds: Annotated[int, typer.Option(help="Number of seeds to run.")] = 200,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run only this seed.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --seed: print every event and effect.")
    ] = False,
    strategy: Annotated[str, typer.Option(help="Strategies of the moves, comma-separated.")] = ",".join(
        PRINCIPAL
    ),
    faults: Annotated[str, typer.Option(help="Faults, comma-separated; or all, none.")] = "all",
    with_: Annotated[
        str, typer.Option("--with", help="Features to draw that are off by default, comma-separated; or all.")
    ] = "",
    without: Annotated[str, typer.Option(help="Features not to draw, comma-separated; or all.")] = "",
    walks: Annotated[
        bool,
        typer.Option("--walks", help="With --seeds: count rare paths; one that no seed walks is an error."),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Parallel processes; 0: one per core.")] = 0,
    points: Annotated[bool, typer.Option("--points", help="Crash at every step of every protocol.")] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Plant each known bug; the checkers must find all.")
    ] = False,
    mutant: Annotated[str | None, typer.Option(help="Name of one planted bug.")] = None,
    large: Annotated[
        bool, typer.Option("--large", help="Run the large scenario: 50 sites, 20,000 keys, 200 moves.")
    ] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Run the fleet: 200 sites, 124,000 keys, cars that travel.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    list_: Annotated[str | None, typer.Option("--list", help=f"List {', '.join(LISTS)}.")] = None,
) -> None:
    """Simulate deployments with moves and faults, and check every promise in each run. Needs no Spark.

    The seed determines everything in a run: a seed that fails, fails again.

    Example: tiercel sim --seeds 5000

    More examples:

      tiercel sim --seeds 500 --strategy live --faults crash,step

      tiercel sim --seeds 500 --without all --with dead-for-good

      tiercel sim --seeds 500 --walks

      tiercel sim --seed 42 --trace

      tiercel sim --mutants --mutant timers-not-moved
    """
    _check_number("--seeds", seeds, 1, 10_000_000)
    _check_number("--first", first, 0, SEED_MAX)
    _check_number("--jobs", jobs, 0, 256)
    if seed is not None:
        _check_number("--seed", seed, 0, SEED_MAX)
    if trace and seed is None:
        what = "--trace prints one run"
        raise UserError(what, expected="--seed as well", hint="tiercel sim --seed 42 --trace")
    if sum((points, mutants, large, fleet, seed is not None, list_ is not None)) > 1:
        what = "--seed, --points, --mutants, --large, --fleet and --list are different commands"
        raise UserError(what, expected="at most one of them", hint="tiercel sim --help")
    chosen = _names("strategy", strategy, tuple(STRATEGIES), "strategies")
    if mutant:
        check_names([mutant])
        options = options_of(mutant)
    else:
        options = Options(
            strategies=chosen,
            faults=_faults(faults),
            sites_max=6,
            scales=True,
            features=_features(with_, without),
            walks=walks,
        )
    jobs = jobs or jobs_available()
    if list_ is not None:
        _print_list(list_)
    elif seed is not None:
        _end(_replay(seed, options, trace, as_json))
    elif points:
        _end(_points(chosen, jobs, as_json))
    elif mutants:
        _end(_mutants([mutant] if mutant else list(MUTANTS), seeds, first, jobs, as_json))
    elif large:
        _end(_large(as_json))
    elif fleet:
        _end(_fleet(as_json))
    else:
        _end(_seeds(range(first, first + seeds), options, jobs, as_json))


def _end(good: bool) -> None:
    if not good:
        raise typer.Exit(1)


# -- options -------------------------------------------------------------------------------------------


def _check_number(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        what = f"{option} {value} is out of range"
        raise UserError(what, expected=f"a whole number from {least} to {most}", hint="tiercel sim --help")


def _names(kind: str, text: str, allowed: tuple[str, ...], listed: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in allowed:
            raise InvalidRequest.unknown(kind, name, allowed, f"tiercel sim --list {listed}")
    return names


def _faults(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    if text == "all":
        return FAULTS
    return _names("fault", text, FAULTS, "faults")


def _features(added: str, removed: str) -> tuple[str, ...]:
    """The features that campaigns draw, without the removed and with the added ones."""
    known = tuple(FEATURES)
    gone = () if not removed else known if removed == "all" else _names("feature", removed, known, "features")
    more = () if not added else known if added == "all" else _names("feature", added, known, "features")
    return tuple(n for n in known if n in more or (n in DRAWN_FEATURES and n not in gone))


def checker_names() -> dict[str, str]:
    """Checker -> its promise, from the table in the docstring of the checkers."""
    lines = re.findall(r"^    ([a-z-]+)  +(.+)$", checkers.__doc__ or "", re.MULTILINE)
    own = {
        "core-bug": "no machine breaks its own invariants",
        "simulator": "the run itself does not fail",
    }
    return {**dict(lines), **own}


def _print_list(kind: str) -> None:
    match kind:
        case "strategies":
            _print_pairs({name: strategy.summary for name, strategy in STRATEGIES.items()})
        case "faults":
            print("\n".join(FAULTS))
        case "features":
            off = {name for name, feature in FEATURES.items() if not feature.by_default}
            pairs = {name: feature.summary for name, feature in FEATURES.items()}
            _print_pairs({n: f"(off) {text}" if n in off else text for n, text in pairs.items()})
        case "checkers":
            _print_pairs(checker_names())
        case "mutants":
            _print_pairs({n: f"{x.rule}: {x.what}" for n, x in MUTANTS.items()})
        case "points":
            print("\n".join(map(str, CRASH_POINTS)))
        case "sites" | "operators" | "instances":
            _print_deployment(kind)
        case _:
            raise InvalidRequest.unknown("list", kind, LISTS, "tiercel sim --help")


def _print_deployment(kind: str) -> None:
    """The deployment of the first seed; `--seed S --trace` shows that of another."""
    topology = scenario_of(0, Options(sites_max=6, scales=True)).topology
    operators = topology.operators.values()
    match kind:
        case "sites":
            print("\n".join(topology.sites))
        case "operators":
            _print_pairs(
                {o.name: f"slots 0 to {o.slots - 1}, over {', '.join(o.instances)}" for o in operators}
            )
        case _:
            print("\n".join(i for o in operators for i in o.instances))


def _first_line(thing: object) -> str:
    return (type(thing).__doc__ or "").partition("\n")[0]


def _print_pairs(pairs: dict[str, str]) -> None:
    width = max(map(len, pairs))
    for name, text in pairs.items():
        print(f"{name:{width}}  {text}")


# -- progress ------------------------------------------------------------------------------------------


@contextmanager
def progress(text: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while a terminal is there; gives a function that takes the amount done so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def counting(text: str, total: int) -> Iterator[Callable[[Result], None]]:
    """A progress bar with the number of failed runs."""
    with progress(text, total) as show:
        done = 0

        def count(result: Result) -> None:
            nonlocal done
            done += 1
            show(done)
            if result.violations:
                errors.print(
                    f"seed {result.seed}: {result.violations[0].checker}", style="red", highlight=False
                )

        yield count


# -- commands ------------------------------------------------------------------------------------------


def replay_command(seed: int, options: Options) -> str:
    """The command that repeats this run."""
    parts = [f"tiercel sim --seed {seed}"]
    if options.strategies != (Options().strategies if options.mutant else PRINCIPAL):
        parts.append(f"--strategy {','.join(options.strategies)}")
    if options.faults != FAULTS:
        parts.append(f"--faults {','.join(options.faults) or 'none'}")
    if options.mutant:
        parts.append(f"--mutant {options.mutant}")
        return " ".join([*parts, "--trace"])
    gone = [name for name in DRAWN_FEATURES if name not in options.features]
    more = [name for name in options.features if name not in DRAWN_FEATURES]
    if gone:
        parts.append(f"--without {'all' if gone == list(DRAWN_FEATURES) else ','.join(gone)}")
    if more:
        parts.append(f"--with {','.join(more)}")
    return " ".join([*parts, "--trace"])


def _seeds(seeds: range, options: Options, jobs: int, as_json: bool) -> bool:
    with counting("seeds", len(seeds)) as count:
        summary = run_seeds(seeds, options, min(jobs, len(seeds)), count)
    unwalked = missed(summary.walked) if options.walks else []
    if as_json:
        _print_json(summary, {s: replay_command(s, options) for s in summary.failed_seeds})
        return not summary.violations and not unwalked
    for failure in _first_of_each(summary.violations)[:SHOWN_MAX]:
        print(f"seed {failure.seed}: {failure.violation.checker}: {failure.violation.text}")
        print(f"  replay: {replay_command(failure.seed, options)}")
    for seed in summary.failed_seeds[:SHRUNK_MAX]:
        _print_short(seed, options)
    if options.walks:
        print("\n".join(f"{summary.walked[name]:7} {name}" for name in WALKS))
        print(f"walked by no seed: {', '.join(unwalked)}" if unwalked else "every rare path was walked")
    print(summary.line)
    return not summary.violations and not unwalked


def _first_of_each(failures: Iterable[Failure]) -> list[Failure]:
    """One violation per run and checker."""
    return list({(f.seed, f.point, f.violation.checker): f for f in reversed(list(failures))}.values())[::-1]


def _print_short(seed: int, options: Options) -> None:
    short = shrink(scenario_of(seed, options))
    if short is not None:
        print(f"\nseed {seed}, shortened in {short.runs} runs; it still breaks {short.checker}: {short.text}")
        print("\n".join(f"  {line}" for line in render(short.scenario).splitlines()) + "\n")


def _replay(seed: int, options: Options, trace: bool, as_json: bool) -> bool:
    scenario = scenario_of(seed, options)
    with planted(options.mutant):
        deployment = Deployment(scenario, keep_story=trace)
        result = run(scenario, deployment=deployment)
    if as_json:
        print(msgspec.json.encode(result).decode())
        return not result.violations
    print(render(scenario))
    if deployment.scheduler.story is not None:
        print("\n".join(["", *deployment.scheduler.story]))
    print()
    for violation in result.violations:
        print(f"{violation.checker}: {violation.text}")
    moves = " ".join(f"{state}={count}" for state, count in sorted(result.moves.items()))
    print(f"seed={seed} {moves} faults={result.faults} virtual_ms={result.virtual_ms:.0f}")
    print(f"trace={result.trace_hash} violations={len(result.violations)}")
    return not result.violations


def _points(strategies: tuple[str, ...], jobs: int, as_json: bool) -> bool:
    wanted = [point for point in CRASH_POINTS if point.strategy in strategies]
    hit: set[tuple[str, str, str, bool]] = set()
    with progress("crash points", len(wanted)) as show:

        def count(result: Result) -> None:
            hit.update(result.points_hit)
            show(len(hit.intersection(wanted)))

        summary = run_crash_points(jobs, count, strategies)
    if as_json:
        _print_json(summary, {})
    else:
        for failure in _first_of_each(summary.violations)[:SHOWN_MAX]:
            print(f"{failure.point}: {failure.violation.checker}: {failure.violation.text}")
        missed = [str(point) for point in wanted if point not in summary.points_hit]
        print(f"missed: {', '.join(missed)}" if missed else f"all {len(wanted)} crash points were hit")
        print(summary.line)
    return not summary.violations and summary.points_hit.issuperset(wanted)


def _mutants(names: list[str], seeds_max: int, first: int, jobs: int, as_json: bool) -> bool:
    kills = {}
    for name in names:
        with progress(name, seeds_max) as show:
            done = 0

            def on_seed(show: Callable[[float], None] = show) -> None:
                nonlocal done
                done += 1
                show(done)

            kills[name] = hunt(name, seeds_max, min(jobs, seeds_max), first, on_seed)
        kill = kills[name]
        if not as_json:
            how = f"{kill.checker} at seed {kill.seed}" if kill else f"SURVIVED {seeds_max} seeds"
            print(f"{name:28} {how}", flush=True)
            if kill is not None:
                options = Options(faults=FAULTS, mutant=name)
                print(f"{'':28} replay: {replay_command(kill.seed, options)}")
    killed = sum(kill is not None for kill in kills.values())
    if as_json:
        found = {name: kill._asdict() if kill else None for name, kill in kills.items()}
        print(msgspec.json.encode({"mutants": found, "killed": killed, "total": len(names)}).decode())
    else:
        print(f"killed {killed}/{len(names)}")
    return killed == len(names)


def _large(as_json: bool) -> bool:
    with progress("percent of the script", 100) as show:
        report = run_large(on_progress=lambda at_ms, end_ms: show(round(100 * at_ms / end_ms)))
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print_large(report)
    return not report.result.violations


def _fleet(as_json: bool) -> bool:
    with progress("percent of the drive", 100) as show:
        report = run_fleet(on_progress=lambda at_ms, end_ms: show(min(100, round(100 * at_ms / end_ms))))
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        table = Table("figure", "value")
        for name, value in msgspec.to_builtins(report).items():
            shown = f"{value:.1f}" if isinstance(value, float) else str(value)
            table.add_row(name, shown)
        Console(width=None if Console().is_terminal else 120).print(table)
    return not report.faults


def print_large(report: Report) -> None:
    print(
        f"{report.sites} sites, {report.keys} keys, {report.rows} rows, {report.moves} moves: "
        f"{report.virtual_s:.1f} s of virtual time in {report.elapsed_s:.0f} s; steady latency p50 "
        f"{report.steady_p50_ms:.1f} ms"
    )
    table = Table(
        "strategy", "done", "undone", "keys", "link p50", "stoppage p50", "p99", "max", "duration p50", "max"
    )
    for line in report.lines:
        times = (
            line.link_p50_ms, line.stoppage_p50_ms, line.stoppage_p99_ms, line.stoppage_max_ms,
            line.duration_p50_ms, line.duration_max_ms,
        )  # fmt: skip
        counts = (line.done, line.undone, line.keys_probed)
        shown = ["-" if ms is None else f"{ms:.1f}" for ms in times]
        table.add_row(line.strategy, *map(str, counts), *shown)
    Console(width=None if Console().is_terminal else 120).print(table)
    for violation in report.result.violations[:SHOWN_MAX]:
        print(f"{violation.checker}: {violation.text}")
    print(f"violations={len(report.result.violations)} trace={report.result.trace_hash}")


def _print_json(summary: Summary, replays: dict[int, str]) -> None:
    found = {
        "seeds": summary.seeds,
        "moves": summary.moves,
        "faults": summary.faults,
        "crash_points_hit": len(summary.points_hit),
        "crash_points": len(CRASH_POINTS),
        "walked": summary.walked,
        "violations": summary.violations,
        "replays": {str(seed): command for seed, command in replays.items()},
        "elapsed_s": round(summary.elapsed_s, 3),
    }
    print(msgspec.json.encode(found).decode())
