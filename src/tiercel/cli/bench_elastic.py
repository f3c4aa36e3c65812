"""`tiercel bench elastic|offload|skew|soak|gauges`: policies under loads that change, and what gauges cost.

Responsible for: checking the options of these commands.
Not responsible for: what is around every measurement, other benchmarks (bench.py), measuring (bench/).
"""

from __future__ import annotations

from typing import Annotated

import typer

from tiercel.cli.bench import (
    AsJson,
    Keys,
    Out,
    Seed,
    _check,
    _choose,
    _measuring,
    _parts,
    bench,
)

__all__ = ["bench"]  # with these commands

ServiceUs = Annotated[float, typer.Option(help="Time that a row takes; the operator waits.")]
Most = Annotated[int, typer.Option("--max", help="Instances at most.")]


@bench.command(short_help="An operator under a load that rises and falls, scaled by a policy.")
def elastic(
    modes: Annotated[str, typer.Option(help="fixed, rate, spares, restart; comma-separated.")] = (
        "fixed,rate,spares,restart"
    ),
    app: Annotated[
        str, typer.Option(help="wordcount or toll instead of a running average; tiercel app list.")
    ] = "",
    low: Annotated[int, typer.Option(help="Tuples a second at the beginning and at the end.")] = 500,
    high: Annotated[int, typer.Option(help="Tuples a second at the top.")] = 5_000,
    seconds: Annotated[float, typer.Option(help="Seconds of each mode.")] = 60.0,
    service_us: ServiceUs = 200.0,
    keys: Keys = 1_000,
    state_bytes: Annotated[int, typer.Option(help="Bytes of state per key.")] = 1_024,
    most: Most = 4,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure an operator under a ramp: scaled by the policy `rate`, with a spare, by restart, or not.

    With --out, a picture is drawn too. With --app the load is that of an application, every row is compared
    with its oracle, and --keys and --state-bytes have no meaning.

    Example: tiercel bench elastic --modes fixed,rate --seconds 40
    """
    _check("--low", low, 1, 1_000_000)
    _check("--high", high, low, 1_000_000)
    _check("--seconds", seconds, 10, 3_600)
    _check("--service-us", service_us, 0, 1_000_000)
    _check("--keys", keys, 2, 1_000_000)
    _check("--state-bytes", state_bytes, 0, 10_000_000)
    _check("--max", most, 1, 64)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios.elasticity import app_ramp as bench_app
    from tiercel.bench.scenarios.elasticity import ramp as bench_elastic

    chosen = _choose("--modes", _parts(modes), bench_elastic.MODES)
    options = bench_elastic.Options(
        chosen, low, high, seconds, service_us, keys, state_bytes, most, seed, out
    )
    if app:
        _choose("--app", [app], bench_app.APPS)
    with _measuring("elastic", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k not in ("out", "seed")}
        if app:
            run.settings["app"] = app
            run.rows, more = bench_app.measure(app, options, run.show_progress)
        else:
            run.rows, more = bench_elastic.measure(options, run.show_progress)
        run.more.update(more)


@bench.command(short_help="Demand at one of four edges rises and falls: its keys go there and come back.")
def offload(
    modes: Annotated[str, typer.Option(help="cloud, edges, offload; comma-separated.")] = (
        "cloud,edges,offload"
    ),
    low: Annotated[int, typer.Option(help="Rows a second at a quiet edge.")] = 30,
    high: Annotated[int, typer.Option(help="Rows a second at the busy edge, at its top.")] = 600,
    seconds: Annotated[float, typer.Option(help="Seconds of each mode.")] = 60.0,
    cost: Annotated[float, typer.Option(help="Rows a second that are worth an instance at an edge.")] = 200.0,
    cars: Annotated[int, typer.Option(help="Keys of each edge.")] = 40,
    latency_ms: Annotated[float, typer.Option(help="One way between an edge and the cloud.")] = 40.0,
    service_us: ServiceUs = 200.0,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the policy `offload` between a cloud and four edges, against all in the cloud and all at edges.

    `edge_seconds` is what the edges cost: edges that own keys, times seconds. With --out, a picture is drawn.

    Example: tiercel bench offload --modes cloud,offload --seconds 40
    """
    _check("--low", low, 1, 100_000)
    _check("--high", high, low + 1, 100_000)
    _check("--seconds", seconds, 20, 3_600)
    _check("--cost", cost, 1, 1_000_000)
    _check("--cars", cars, 1, 10_000)
    _check("--latency-ms", latency_ms, 0, 10_000)
    _check("--service-us", service_us, 0, 1_000_000)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios.elasticity import offload as bench_offload

    chosen = _choose("--modes", _parts(modes), bench_offload.MODES)
    options = bench_offload.Options(chosen, low, high, seconds, cost, cars, latency_ms, service_us, seed, out)
    with _measuring("offload", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k not in ("out", "seed")}
        run.rows, more = bench_offload.measure(options, run.show_progress)
        run.more.update(more)


@bench.command(short_help="One slot, or one key, with half of the load: before and after `hot_keys`.")
def skew(
    kinds: Annotated[str, typer.Option(help="What is hot: slot, key; comma-separated.")] = "slot,key",
    rate: Annotated[int, typer.Option(help="Tuples a second.")] = 2_700,
    seconds: Annotated[float, typer.Option(help="Seconds before, and after.")] = 15.0,
    service_us: ServiceUs = 500.0,
    keys: Keys = 20_000,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure two instances of which one has a slot or a key with half of the load, before and after.

    Example: tiercel bench skew --kinds slot --seconds 10
    """
    _check("--rate", rate, 1, 1_000_000)
    _check("--seconds", seconds, 5, 3_600)
    _check("--service-us", service_us, 0, 1_000_000)
    _check("--keys", keys, 100, 1_000_000)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios.elasticity import skew as bench_skew

    chosen = _choose("--kinds", _parts(kinds), bench_skew.KINDS)
    options = bench_skew.Options(chosen, rate, seconds, service_us, keys, seed)
    with _measuring("skew", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k != "seed"}
        run.rows, more = bench_skew.measure(options, run.show_progress)
        run.more.update(more)


@bench.command(
    short_help="A load that changes all the time, kills and stops beneath it, a policy that scales."
)
def soak(
    minutes: Annotated[float, typer.Option(help="Minutes of the changing load; two holds follow.")] = 3.0,
    high: Annotated[int, typer.Option(help="Rows a second at most.")] = 2_400,
    service_us: ServiceUs = 1_000.0,
    most: Most = 4,
    faults: Annotated[bool, typer.Option(help="Kill and stop instances and routers.")] = True,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Run an operator under a load that changes all the time, with kills and stops beneath it.

    At the end the load is held high, then low, without faults: the number of instances must fit each time.
    With --out, a picture is drawn. Exit code 1: a row was lost, doubled, out of order or wrong, or the number
    of instances does not fit.

    Example: tiercel bench soak --minutes 30 --seed 7
    """
    _check("--minutes", minutes, 0.2, 24 * 60)
    _check("--high", high, 10, 100_000)
    _check("--service-us", service_us, 100, 1_000_000)
    _check("--max", most, 2, 64)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios.elasticity import soak as bench_soak

    options = bench_soak.Options(minutes, high, service_us, most, faults, seed, out)
    with _measuring("soak", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k not in ("out", "seed")}
        run.rows, more = bench_soak.measure(options, run.show_progress)
        run.more.update(more)
    if run.rows[0]["wrong_instances"]:
        raise typer.Exit(1)


@bench.command(short_help="What the gauges of every process cost, as shares of its time.")
def gauges(
    rate: Annotated[int, typer.Option(help="Tuples a second.")] = 10_000,
    seconds: Annotated[float, typer.Option(help="Seconds that count.")] = 20.0,
    keys: Keys = 1_000,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the share of its time that each process spends on gauges, under load.

    Example: tiercel bench gauges --rate 20000 --seconds 10
    """
    _check("--rate", rate, 1, 1_000_000)
    _check("--seconds", seconds, 3, 3_600)
    _check("--keys", keys, 1, 1_000_000)
    _check("--seed", seed, 0, 2**31)
    from tiercel.bench.scenarios.elasticity import gauge_cost as bench_gauges

    options = bench_gauges.Options(rate, seconds, keys, seed)
    with _measuring("gauges", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k != "seed"}
        run.rows, more = bench_gauges.measure(options, run.show_progress)
        run.more.update(more)
