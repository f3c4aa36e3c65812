"""`tiercel bench`: throughput, latency, reconfigure, elastic, idle, recover, checkpoint, memory and others.

Responsible for: checking the options, progress on stderr, results on stdout and in files.
Not responsible for: measuring (bench/), the meaning of the figures (docs/benchmarks.md).

Exit codes: 0 measured; 1 measured, and a tuple was lost, doubled, out of order or met the wrong state;
2 the command could not run as requested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiercel.core.migration.strategies import STRATEGIES
from tiercel.errors import UserError

bench = typer.Typer(
    name="bench",
    help="Measure a deployment on this machine; docs/benchmarks.md explains every figure.\n\n"
    "Example: tiercel bench latency --seconds 5 --repeats 1",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DURABILITIES = ("os", "disk", "replica")
PROCESSORS = ("key-count", "running-average")
FORMS = ("processor", "fold")
INTERVALS_S = (1, 5, 10, 30)
DEATHS = ("worker", "executor", "application")
FAULTS = ("faults", "lost", "doubled", "reordered", "wrong_state", "invented", "wrong")

errors = Console(stderr=True)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON on stdout, and nothing else.")
]
Out = Annotated[Path | None, typer.Option(help="Directory for the results file and recordings.")]
Seed = Annotated[int, typer.Option(help="Random seed: the order of keys, and which keys move.")]
Keys = Annotated[int, typer.Option(help="Number of keys.")]


@bench.command(short_help="Events a second, next to Spark's transformWithState.")
def throughput(
    seconds: Annotated[float, typer.Option(help="Seconds of sustained load for each processor.")] = 30.0,
    durability: Annotated[
        str, typer.Option(help="When a write is acknowledged: os, disk or replica.")
    ] = "os",
    processors: Annotated[str, typer.Option(help="Processors, comma-separated.")] = ",".join(PROCESSORS),
    forms: Annotated[str, typer.Option(help="Forms of each processor, comma-separated.")] = ",".join(FORMS),
    spark_rows: Annotated[
        str, typer.Option(help="Rows per micro-batch of Spark, comma-separated; none: without Spark.")
    ] = "20000,100000,500000",
    spark_batches: Annotated[
        int, typer.Option(help="Measured micro-batches of each size, after 3 for warm-up.")
    ] = 3,
    keys: Annotated[
        str, typer.Option(help="Numbers of keys, comma-separated; each has its own rows of the result.")
    ] = "1000",
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure events a second from a producer to a subscriber, next to Spark's own transformWithState.

    Example: tiercel bench throughput --keys 1000,100000 --seconds 5 --spark-rows 20000 --spark-batches 1
    """
    _check("--seconds", seconds, 1, 3_600)
    _check("--spark-batches", spark_batches, 1, 1_000)
    counts = _numbers("--keys", keys, 1, 1_000_000)
    _check("--seed", seed, 0, 2**31)
    _choose("--durability", [durability], DURABILITIES)
    chosen = _choose("--processors", _parts(processors), PROCESSORS)
    written = _choose("--forms", _parts(forms), FORMS)
    rows = [] if spark_rows == "none" else _numbers("--spark-rows", spark_rows, 100, 10_000_000)
    from tiercel.bench.scenarios import throughput as bench_throughput

    options = bench_throughput.Options(
        chosen,
        written,
        durability,  # type: ignore[arg-type]
        seconds,
        counts,
        rows,
        spark_batches,
        seed,
    )
    with _measuring("throughput", as_json, out, seed) as run:
        run.settings = {
            "durability": durability,
            "seconds": seconds,
            "keys": counts,
            "batch": bench_throughput.BATCH,
            "backlog_rows_max": bench_throughput.BACKLOG_ROWS_MAX,
            "spark_rows": rows,
            "spark_batches": spark_batches,
        }
        run.rows, run.more = bench_throughput.measure(options, run.show_progress)


@bench.command(short_help="Latency of a tuple, next to an echo over the same hops.")
def latency(
    rates: Annotated[str, typer.Option(help="Tuples a second, comma-separated.")] = "1000,10000,50000",
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 10.0,
    repeats: Annotated[int, typer.Option(help="Repeats of everything; the result is the median.")] = 5,
    keys: Keys = 1_000,
    durabilities: Annotated[
        str, typer.Option(help="When a write is acknowledged, comma-separated: os, disk, replica.")
    ] = "os,disk",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the latency of a tuple at given rates, next to an echo over the same hops.

    Example: tiercel bench latency --rates 10000 --seconds 3 --repeats 1
    """
    wanted = _numbers("--rates", rates, 1, 1_000_000)
    _check("--seconds", seconds, 0.5, 3_600)
    _check("--repeats", repeats, 1, 1_000)
    _check("--keys", keys, 1, 1_000_000)
    kinds = [kind.strip() for kind in durabilities.split(",")]
    _choose("--durabilities", kinds, DURABILITIES)
    from tiercel.bench.scenarios import latency as bench_latency

    with _measuring("latency", as_json, out, None) as run:
        run.settings = {"rates": wanted, "seconds": seconds, "repeats": repeats, "keys": keys}
        measured = bench_latency.measure(wanted, seconds, repeats, keys, run.show_progress, kinds)  # type: ignore[arg-type]
        run.rows, run.more["repeats"] = measured


@bench.command(short_help="Effect of a move on latency and rate, per strategy.")
def reconfigure(
    keys: Keys = 1_000,
    state_bytes: Annotated[
        int, typer.Option("--bytes-per-key", "--state-bytes", help="Bytes of state per key.")
    ] = 1_024,
    move: Annotated[int | None, typer.Option(help="Keys to move; by default all of one instance.")] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the source's keys that moves, in place of --move.")
    ] = None,
    rate: Annotated[int, typer.Option(help="Tuples a second, without the probes.")] = 5_000,
    seconds: Annotated[
        float, typer.Option(help="Seconds of each repeat: before, during and after the move.")
    ] = 30.0,
    repeats: Annotated[int, typer.Option(help="Repeats of each strategy; the result is the median.")] = 5,
    strategies: Annotated[str, typer.Option(help="Strategies, comma-separated; or all.")] = "all",
    workload: Annotated[
        str,
        typer.Option(help="running-average, key-count, or key-count-zipf with 0.5, 1.0 or 1.5 behind it."),
    ] = "running-average",
    service_us: Annotated[float, typer.Option(help="Time that user code takes for a row, in us.")] = 0.0,
    overload: Annotated[
        float,
        typer.Option(
            help="Send the source this many times what it can process, and the destination nothing."
        ),
    ] = 0.0,
    warm: Annotated[float, typer.Option(help="Seconds of load before the steady time.")] = 3.0,
    sites: Annotated[int, typer.Option(help="1: inside a site; 2: from the cloud to an edge.")] = 1,
    link: Annotated[str, typer.Option(help="Emulated link between the two sites: LATENCY_MS,MBIT.")] = "",
    rivals: Annotated[
        str,
        typer.Option(
            help="Other systems beside: spark-repartition, flink-savepoint, flink-adaptive; or all."
        ),
    ] = "",
    sweep: Annotated[
        str, typer.Option(help="Measure for each value: state-mb=1,10 or keys=100,1000 or latency-ms=1,40.")
    ] = "",
    flink_python: Annotated[
        str, typer.Option(help="A Python with apache-flink, for Flink; by default this one.")
    ] = "",
    plant_stop: Annotated[
        float,
        typer.Option(
            help="Check of the measurement: let the destination sleep this many ms at the takeover."
        ),
    ] = 0.0,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure how a move of keys affects latency and rate, for each strategy.

    Example: tiercel bench reconfigure --seconds 8 --repeats 1 --strategies live,pause
    """
    _check("--keys", keys, 2, 1_000_000)
    _check("--state-bytes", state_bytes, 0, 10_000_000)
    move = keys if move is None else move
    _check("--move", move, 1, keys)
    _check("--rate", rate, 1, 1_000_000)
    _check("--seconds", seconds, 2, 3_600)
    _check("--repeats", repeats, 1, 1_000)
    _check("--plant-stop", plant_stop, 0, 10_000)
    _check("--seed", seed, 0, 2**31)
    _check("--service-us", service_us, 0, 1_000_000)
    _check("--overload", overload, 0, 100)
    _check("--warm", warm, 0, 3_600)
    _check("--sites", sites, 1, 2)
    if share is not None:
        _check("--share", share, 0.001, 1)
    every = tuple(STRATEGIES)
    at_once = tuple(name for name, strategy in STRATEGIES.items() if not strategy.awaits_rows)
    chosen = at_once if strategies == "all" else _choose("--strategies", _parts(strategies), every)
    from tiercel.bench.baselines.machine_noise import machine_stalls
    from tiercel.bench.report import check_drawing
    from tiercel.bench.rivals.choice import choose_rivals
    from tiercel.bench.scenarios import reconfigure as bench_reconfigure
    from tiercel.bench.scenarios import reconfigure_sweep

    _choose("--workload", [workload], bench_reconfigure.WORKLOADS)
    beside, swept = choose_rivals(rivals, flink_python), reconfigure_sweep.parse_sweep(sweep)
    options = bench_reconfigure.Options(
        *(keys, state_bytes, move, rate, seconds, repeats, chosen, seed, plant_stop, out),
        workload=workload,
        share=share,
        service_us=service_us,
        overload=overload,
        warm_s=warm,
        sites=sites,
        link=bench_reconfigure.parse_link(link),
        rivals=beside,
        flink_python=flink_python,
    )
    options.check()
    if out is not None:
        check_drawing()
    with _measuring("reconfigure", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k not in ("out", "seed")}
        if swept is not None:
            run.rows, run.more["repeats"] = reconfigure_sweep.measure(options, swept, run.show_progress)
        else:
            run.rows, run.more["repeats"] = bench_reconfigure.measure(options, run.show_progress)
        run.show_progress("measuring the noise of this machine")
        run.more["machine_stalls"] = machine_stalls()


@bench.command(short_help="Overhead of migration support while nothing moves.")
def idle(
    pairs: Annotated[
        int, typer.Option(help="Pairs of measurements: with and without migration support.")
    ] = 10,
    seconds: Annotated[float, typer.Option(help="Seconds of each half of a pair.")] = 20.0,
    keys: Keys = 1_000,
    standby: Annotated[
        bool, typer.Option("--standby", help="Measure what standbys cost, instead of migration support.")
    ] = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the overhead of migration support, or of standbys, while no migration runs.

    Example: tiercel bench idle --pairs 2 --seconds 3
    """
    _check("--pairs", pairs, 1, 1_000)
    _check("--seconds", seconds, 0.5, 3_600)
    _check("--keys", keys, 1, 1_000_000)
    from tiercel.bench.scenarios import idle_overhead as bench_idle

    with _measuring("idle", as_json, out, None) as run:
        run.settings = {"pairs": pairs, "seconds": seconds, "keys": keys, "standby": standby}
        run.rows = bench_idle.measure(pairs, seconds, keys, run.show_progress, standby)
        run.more["idle_ratio"] = run.rows[-1]["idle_ratio"]


@bench.command(short_help="Time from kill -9 until outputs flow again.")
def recover(
    sizes: Annotated[str, typer.Option(help="Sizes of the state in MB, comma-separated.")] = "1,50,500",
    what: Annotated[str, typer.Option(help="What is killed, comma-separated.")] = ",".join(DEATHS),
    local_disk: Annotated[
        str, typer.Option(help="Whether the local disk survives: yes, no, or yes,no.")
    ] = "yes,no",
    instances: Annotated[
        str, typer.Option(help="Number of successors if the disk is lost, comma-separated.")
    ] = "1,3",
    rate: Annotated[int, typer.Option(help="Tuples a second.")] = 500,
    read_mb_s: Annotated[
        float, typer.Option(help="Read rate from the backup in MB a second per reader; 0: no limit.")
    ] = 50.0,
    sweep: Annotated[
        bool,
        typer.Option(help="Compare checkpoint intervals, replay of the whole log, and the source instead."),
    ] = False,
    spark: Annotated[bool, typer.Option(help="Also kill and restart Spark's own query.")] = True,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the time from kill -9 until outputs flow again, next to Spark's own transformWithState.

    Example: tiercel bench recover --sizes 1 --what worker --local-disk yes --instances 1
    """
    wanted = _numbers("--sizes", sizes, 1, 100_000)
    chosen = _choose("--what", _parts(what), DEATHS)
    disks = [part == "yes" for part in _choose("--local-disk", _parts(local_disk), ("yes", "no"))]
    several = _numbers("--instances", instances, 1, 16)
    _check("--rate", rate, 1, 100_000)
    _check("--read-mb-s", read_mb_s, 0, 100_000)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios import recover as bench_recover

    if sweep:
        _sweep(wanted[0], rate, as_json, out)
        return
    options = bench_recover.Options(wanted, chosen, several, disks, rate, read_mb_s, spark, seed)
    with _measuring("recover", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k != "seed"}
        run.rows, run.more = bench_recover.measure(options, run.show_progress)


@bench.command(short_help="Cost of state that is larger than the memory limit.")
def memory(
    state_mb: Annotated[int, typer.Option(help="MB of state of both instances together.")] = 200,
    times: Annotated[float, typer.Option(help="Ratio of the state to the memory limit.")] = 4,
    state_bytes: Annotated[int, typer.Option(help="Bytes of state per key.")] = 2_048,
    rate: Annotated[int, typer.Option(help="Tuples a second for the latency.")] = 2_000,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 10.0,
    repeats: Annotated[int, typer.Option(help="Repeats of everything; the result is the median.")] = 3,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the cost of state that is larger than the memory limit, next to the same without a limit.

    Example: tiercel bench memory --state-mb 40 --seconds 3 --repeats 1
    """
    _check("--state-mb", state_mb, 1, 100_000)
    _check("--times", times, 1, 1_000)
    _check("--state-bytes", state_bytes, 16, 10_000_000)
    _check("--rate", rate, 1, 1_000_000)
    _check("--seconds", seconds, 0.5, 3_600)
    _check("--repeats", repeats, 1, 1_000)
    from tiercel.bench.scenarios import memory as bench_memory

    options = bench_memory.Options(state_mb, times, state_bytes, rate, seconds, repeats)
    _check("--state-mb / --state-bytes", options.keys, 100, 10_000_000)
    with _measuring("memory", as_json, out, None) as run:
        run.settings = {**vars(options), "keys": options.keys, "memory_bytes_max": options.limit_bytes}
        run.rows, run.more["repeats"] = bench_memory.measure(options, run.show_progress)


def _sweep(size_mb: int, rate: int, as_json: bool, out: Path | None) -> None:
    from tiercel.bench.report import check_drawing
    from tiercel.bench.scenarios import recover_sweep

    if out is not None:
        check_drawing()

    with _measuring("recover-sweep", as_json, out, None) as run:
        run.settings = {"size_mb": size_mb, "rate": rate, "intervals_s": INTERVALS_S}
        run.rows = recover_sweep.measure(INTERVALS_S, size_mb, rate, run.show_progress)
    if out is not None:
        picture = out / "recover-sweep.png"
        recover_sweep.draw(run.rows, picture)
        errors.print(f"{picture}", markup=False, highlight=False)


@bench.command(short_help="Cost of checkpoints, in throughput and latency.")
def checkpoint(
    size: Annotated[int, typer.Option(help="MB of state.")] = 100,
    state_bytes: Annotated[int, typer.Option(help="Bytes of state per key.")] = 10_000,
    every: Annotated[float, typer.Option(help="Seconds between two checkpoints.")] = 1.0,
    rate: Annotated[int, typer.Option(help="Tuples a second for the latency.")] = 5_000,
    hot: Annotated[
        str, typer.Option(help="Numbers of keys that get tuples, comma-separated.")
    ] = "1000,10000",
    pairs: Annotated[int, typer.Option(help="Pairs of measurements: with and without checkpoints.")] = 5,
    seconds: Annotated[
        float, typer.Option(help="Seconds of each half of a pair, for throughput and for latency.")
    ] = 5.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the cost of checkpoints: throughput and latency with and without them.

    Example: tiercel bench checkpoint --size 10 --pairs 1 --seconds 3
    """
    _check("--size", size, 1, 10_000)
    _check("--state-bytes", state_bytes, 1, 10_000_000)
    busy = _numbers("--hot", hot, 1, 10_000_000)
    _check("--every", every, 0.01, 3_600)
    _check("--rate", rate, 1, 1_000_000)
    _check("--pairs", pairs, 1, 1_000)
    _check("--seconds", seconds, 0.5, 3_600)
    from tiercel.bench.scenarios import checkpoint as bench_checkpoint

    options = bench_checkpoint.Options(size, state_bytes, every, rate, busy, pairs, seconds)
    with _measuring("checkpoint", as_json, out, None) as run:
        run.settings = dict(vars(options))
        run.rows = bench_checkpoint.measure(options, run.show_progress)


@bench.command(short_help="Memory and CPU without traffic, and memory for each key.")
def footprint(
    keys: Annotated[str, typer.Option(help="Numbers of keys, comma-separated.")] = "10000,100000",
    seconds: Annotated[float, typer.Option(help="Seconds without traffic.")] = 20.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure what a deployment costs that has nothing to do, and what a key costs in memory.

    Example: tiercel bench footprint --keys 10000 --seconds 10
    """
    counts = _numbers("--keys", keys, 1, 10_000_000)
    _check("--seconds", seconds, 1, 3_600)
    from tiercel.bench import footprint as bench_footprint

    with _measuring("footprint", as_json, out, None) as run:
        run.settings = {"keys": counts, "seconds": seconds}
        run.rows = bench_footprint.measure(counts, seconds, run.show_progress)


@bench.command(short_help="An application before, during and after changes, with its oracle's verdict.")
def app(
    name: Annotated[str, typer.Option("--app", help="The application: tiercel app list.")] = "traffic",
    during: Annotated[
        str,
        typer.Option(help="Changes while it runs, comma-separated: none, move, half, scale, restart, kill."),
    ] = "none,move,scale,kill",
    minutes: Annotated[float, typer.Option(help="Minutes of load; changes come evenly inside.")] = 2.0,
    rate: Annotated[int, typer.Option(help="Events a second; 0: as fast as possible.")] = 2_000,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the application, as name=value; repeatable.")
    ] = None,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure an application before, during and after changes, and compare every row with its oracle.

    Example: tiercel bench app --app traffic --during none,move,scale,kill --minutes 1
    """
    from tiercel.apps.catalogue import find_app
    from tiercel.bench.scenarios.applications import app as bench_app
    from tiercel.cli.app import parse_list, parse_settings

    options = bench_app.Options(
        find_app(name), parse_settings(settings or []), rate, minutes, parse_list(during), seed
    )
    chosen = options.run.check()
    with _measuring("app", as_json, out, seed) as run:
        run.settings = {
            "app": name,
            "during": options.during,
            "minutes": minutes,
            "rate": rate,
            **msgspec.to_builtins(chosen),
        }
        run.rows, run.more = bench_app.measure(options, run.show_progress)


def _rates(given: str, half: str) -> list[int | str]:
    """Numbers, and perhaps `half` at the end; or none."""
    parts = [] if given == "none" else _parts(given)
    numbers = [part for part in parts if part != half]
    found: list[int | str] = list(_numbers("--rates", ",".join(numbers), 10, 1_000_000) if numbers else ())
    return found + [half] * (half in parts)


@bench.command(short_help="One DataFrame to one sink, by plain Spark and by the drop-in operator.")
def pipeline(
    keys: Annotated[str, typer.Option(help="Numbers of keys, comma-separated.")] = "1000,50000",
    rates: Annotated[
        str,
        typer.Option(help="Rows a second, comma-separated; half: of Spark's highest; none: only the highest"),
    ] = "2000,10000,half",
    sink: Annotated[str, typer.Option(help="Sinks, comma-separated: noop, parquet.")] = "noop,parquet",
    batches: Annotated[
        str, typer.Option(help="Rows of a batch for the highest rate, comma-separated; none: without it.")
    ] = "20000,100000,400000",
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 60.0,
    changes: Annotated[
        bool, typer.Option(help="Once more with a live move, and once with a scale-out, inside.")
    ] = True,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure one processor from one streaming DataFrame to one sink, in plain Spark and with Tiercel.

    Example: tiercel bench pipeline --keys 1000 --rates 2000 --sink noop --batches 20000 --seconds 10
    """
    from tiercel.bench.scenarios import pipeline as bench_pipeline

    options = bench_pipeline.Options(
        _numbers("--keys", keys, 1, 1_000_000),
        _rates(rates, bench_pipeline.HALF),
        _choose("--sink", _parts(sink), bench_pipeline.SINKS),
        [] if batches == "none" else _numbers("--batches", batches, 100, 10_000_000),
        seconds,
        changes,
    )
    _check("--seconds", seconds, 2, 3_600)
    with _measuring("pipeline", as_json, out, None) as run:
        run.settings = {"warm_s": bench_pipeline.WARM_S, **vars(options)}
        run.rows, run.more = bench_pipeline.measure(options, run.show_progress)


@bench.command("largest-load", short_help="The highest rate of an application with every answer in time.")
def largest_load(
    name: Annotated[str, typer.Option("--app", help="The application: tiercel app list.")] = "toll",
    limit: Annotated[float, typer.Option(help="Seconds within which every answer must come.")] = 5.0,
    rate: Annotated[int, typer.Option(help="Events a second of the first run; then twice as many.")] = 1_000,
    rate_max: Annotated[int, typer.Option(help="Do not try more than this.")] = 50_000,
    steps: Annotated[int, typer.Option(help="Steps that halve the distance behind the doubling.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds of load at each rate.")] = 60.0,
    during: Annotated[
        str, typer.Option(help="Changes inside each run, comma-separated, as in `bench app`; empty: none.")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the application, as name=value; repeatable.")
    ] = None,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Search for the highest rate of an application at which every answer comes in time.

    Linear Road's measure: the largest load factor with every answer within 5 s.

    Example: tiercel bench largest-load --app toll --set expressways=0 --limit 5 --seconds 60
    """
    from tiercel.apps.catalogue import find_app
    from tiercel.bench.scenarios.applications import largest_load as bench_load
    from tiercel.cli.app import parse_list, parse_settings

    _check("--limit", limit, 0.001, 3600)
    _check("--steps", steps, 0, 10)
    _check("--rate", rate, 1, rate_max)
    given = parse_settings(settings or [])
    options = bench_load.Options(
        find_app(name), given, rate, rate_max, steps, limit, seconds, parse_list(during), seed
    )
    chosen = options.run_at(rate_max).check()
    with _measuring("largest-load", as_json, out, seed) as run:
        run.settings = {
            "app": name,
            "limit_s": limit,
            "seconds": seconds,
            "during": list(options.during),
            **msgspec.to_builtins(chosen),
        }
        run.rows = bench_load.measure(options, run.show_progress)


@bench.command("word-recovery", short_help="Recovery of SEEP's word count, by size of state.")
def word_recovery(
    entries: Annotated[str, typer.Option(help="Numbers of words, comma-separated.")] = "100,10000,100000",
    ways: Annotated[
        str,
        typer.Option(
            help="What it begins with, comma-separated: none (no death), checkpoint, replay, source."
        ),
    ] = "none,checkpoint,replay,source",
    rate: Annotated[int, typer.Option(help="Sentences of 12 words a second.")] = 500,
    seconds: Annotated[float, typer.Option(help="Seconds of load before the death.")] = 10.0,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the recovery of SEEP's word count: by checkpoint, by replay of the log, and from the source.

    Example: tiercel bench word-recovery --entries 100 --ways none,checkpoint --seconds 3
    """
    from tiercel.bench.scenarios.applications import word_recovery as bench_words

    wanted = _numbers("--entries", entries, 1, 1_000_000)
    chosen = _choose("--ways", _parts(ways), bench_words.WAYS)
    _check("--rate", rate, 1, 10_000)
    _check("--seconds", seconds, 1, 600)
    _check("--seed", seed, 0, 2**31)
    options = bench_words.Options(wanted, chosen, rate, seconds, seed)
    with _measuring("word-recovery", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k != "seed"}
        run.settings["checkpoint_ms"] = bench_words.CHECKPOINT_MS
        run.rows = bench_words.measure(options, run.show_progress)


@bench.command(short_help="NEXMark's queries beside the same in plain PySpark Structured Streaming.")
def nexmark(
    queries: Annotated[str, typer.Option(help="Comma-separated: q1 to q8, q7-drrs, q8-drrs.")] = "q1,q5,q8",
    events: Annotated[int, typer.Option(help="Events that each query reads.")] = 100_000,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Run NEXMark's queries on Tiercel and in plain PySpark, on the same events, as fast as each can.

    Two runs of each, in turn; the better one counts. All results are compared with a batch job.

    Example: tiercel bench nexmark --queries q5,q8 --events 100000
    """
    from tiercel.apps.nexmark.beside import BATCH, BATCHES, EVENTS_MAX
    from tiercel.apps.nexmark.queries import QUERIES
    from tiercel.bench.scenarios.applications import nexmark as bench_nexmark

    chosen = _choose("--queries", _parts(queries), list(QUERIES))
    _check("--events", events, BATCH, EVENTS_MAX)
    with _measuring("nexmark", as_json, out, seed) as run:
        run.settings = {"queries": chosen, "events": events, "batches": list(BATCHES)}
        run.rows = bench_nexmark.measure(bench_nexmark.Options(chosen, events, seed), run.show_progress)


@bench.command("edge-footprint", short_help="Memory and CPU of a site of its own, and of a producer.")
def edge_footprint(
    rate: Annotated[int, typer.Option(help="Events a second of the load.")] = 1_000,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 20.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure what a site that is a Spark application of its own uses, idle and under load; and a producer.

    The site has one router and one instance. The producer is a Python program without a JVM.

    Example: tiercel bench edge-footprint --rate 1000 --seconds 20
    """
    _check("--rate", rate, 100, 100_000)
    _check("--seconds", seconds, 1, 600)
    from tiercel.bench.scenarios.mobility import edge_footprint as bench_footprint

    with _measuring("edge-footprint", as_json, out, None) as run:
        run.settings = {"rate": rate, "seconds": seconds, "keys": bench_footprint.CARS}
        run.rows = bench_footprint.measure(bench_footprint.Options(rate, seconds), run.show_progress)


# -- around every measurement ------------------------------------------------------------------


class Run:
    """One measurement: its settings and its results."""

    def __init__(self, progress: Progress) -> None:
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def show_progress(self, what: str) -> None:
        """Show what happens now: one changing line on a terminal, otherwise one line each."""
        self._progress.update(self._task, description=what)
        if not errors.is_terminal:
            errors.print(f"{time.strftime('%H:%M:%S')} {what}", markup=False, highlight=False)


@contextmanager
def _measuring(name: str, as_json: bool, out: Path | None, seed: int | None) -> Iterator[Run]:
    from tiercel.bench.report import Cpu, check_place, document, print_results

    if out is not None:
        check_place(out)
    columns = (SpinnerColumn(), TextColumn(f"{name}: {{task.description}}"), TimeElapsedColumn())
    cpu = Cpu()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        run = Run(progress)
        yield run
    found = document(name, run.rows, run.settings, seed=seed, cpu=cpu.line(), **run.more)
    print_results(found, as_json=as_json, out=out)
    broken = sum(row.get(fault) or 0 for row in run.rows for fault in FAULTS)
    if broken:
        errors.print(f"{broken} tuples lost, doubled, out of order or with the wrong state", style="red")
        raise typer.Exit(1)


# -- options -------------------------------------------------------------------------------------


def _check(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        what = f"{option} {value:g} is out of range"
        raise UserError(what, expected=f"a number from {least:,} to {most:,}", hint="tiercel bench --help")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    numbers = []
    for part in _parts(text):
        if not part.isdecimal():
            what = f"{option} {text!r}: {part!r} is not a number"
            raise UserError(what, expected="whole numbers with commas between them")
        _check(option, int(part), least, most)
        numbers.append(int(part))
    return numbers


def _choose(option: str, names: Sequence[str], allowed: Sequence[str]) -> list[str]:
    for name in names:
        if name not in allowed:
            raise UserError(f"{option}: unknown {name!r}", expected=f"one of: {', '.join(allowed)}")
    return list(names)
