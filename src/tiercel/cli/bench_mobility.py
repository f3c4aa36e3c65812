"""`tiercel bench mobility`: sources that travel between sites, and keys that follow them.

Responsible for: checking the options of this command.
Not responsible for: what is around every measurement, other benchmarks (bench.py), measuring (bench/).
"""

from __future__ import annotations

from typing import Annotated

import typer

from tiercel.cli.bench import AsJson, Out, Seed, _check, _choose, _measuring, _numbers, _parts
from tiercel.cli.bench_elastic import bench
from tiercel.core.migration.strategies import STRATEGIES

__all__ = ["bench"]  # with this command

GROWTH = {"latency": (0, 10_000), "edges": (2, 16), "keys": (1, 10_000), "state": (1, 10_000_000)}


@bench.command(short_help="Cars drive from edge to edge, and their keys follow them.")
def mobility(
    modes: Annotated[
        str, typer.Option(help="none, or strategies by which keys follow; comma-separated.")
    ] = "none,live,push,pause,restart",
    cars: Annotated[int, typer.Option(help="Number of cars.")] = 2_000,
    probes: Annotated[int, typer.Option(help="Cars that send often: interruptions of them are seen.")] = 40,
    rate: Annotated[float, typer.Option(help="Rows a second of each car.")] = 0.5,
    probe_rate: Annotated[float, typer.Option(help="Rows a second of a car that sends often.")] = 50.0,
    edges: Annotated[int, typer.Option(help="Number of edges; there is one cloud.")] = 4,
    latency_ms: Annotated[float, typer.Option(help="One-way latency between an edge and the cloud.")] = 40.0,
    state_bytes: Annotated[int, typer.Option(help="Bytes of state per car.")] = 1_024,
    stay_s: Annotated[float, typer.Option(help="Seconds at one edge, about.")] = 20.0,
    seconds: Annotated[float, typer.Option(help="Seconds of each drive.")] = 60.0,
    tuples: Annotated[int, typer.Option(help="Mobility threshold in tuples.")] = 3,
    elsewhere_s: Annotated[float, typer.Option(help="Mobility threshold in seconds.")] = 1.0,
    wait_s: Annotated[float, typer.Option(help="Wait threshold in seconds.")] = 5.0,
    direct: Annotated[bool, typer.Option("--direct", help="Keys skip the cloud.")] = False,
    outputs_at: Annotated[
        str, typer.Option(help="Where outputs are read: home (the cloud), or site (where they are made).")
    ] = "home",
    vary: Annotated[
        str,
        typer.Option(help="Move keys of cars that cross together, and vary latency, edges, keys or state."),
    ] = "",
    values: Annotated[str, typer.Option(help="With --vary: its values, comma-separated.")] = "",
    together: Annotated[int, typer.Option(help="With --vary: keys that move together.")] = 100,
    rounds: Annotated[int, typer.Option(help="With --vary: how often they cross.")] = 5,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure cars that drive over edges: interruption of hand-overs, latency before, meanwhile and after.

    One application with a site for the cloud and one for each edge, and emulated links between them. With
    --out, a picture is drawn too.

    Example: tiercel bench mobility --modes none,push --cars 200 --seconds 20

    Growth: tiercel bench mobility --modes push --vary latency --values 10,40,80,160
    """
    for name, value, low, high in (
        ("--cars", cars, 1, 1_000_000),
        ("--probes", probes, 0, 10_000),
        ("--rate", rate, 0.001, 1_000),
        ("--probe-rate", probe_rate, 0.001, 1_000),
        ("--edges", edges, 1, 32),
        ("--latency-ms", latency_ms, 0, 10_000),
        ("--state-bytes", state_bytes, 1, 10_000_000),
        ("--stay-s", stay_s, 1, 3_600),
        ("--seconds", seconds, 5, 3_600),
        ("--tuples", tuples, 1, 1_000_000),
        ("--elsewhere-s", elsewhere_s, 0.001, 3_600),
        ("--wait-s", wait_s, 0.001, 3_600),
        ("--together", together, 1, 10_000),
        ("--rounds", rounds, 1, 1_000),
        ("--seed", seed, 0, 2**31),
    ):
        _check(name, value, low, high)
    chosen = _choose("--modes", _parts(modes), ("none", *STRATEGIES))
    _choose("--outputs-at", [outputs_at], ("home", "site"))
    from tiercel.bench.scenarios.mobility import drive, growth

    options = drive.Options(
        *(chosen, cars, probes, rate, probe_rate, edges, latency_ms, state_bytes, stay_s, seconds),
        *(tuples, elsewhere_s, wait_s, direct, outputs_at, seed, out),
    )
    drive.check(options)
    varied: list[int] = []
    if vary:
        (what,) = _choose("--vary", [vary], tuple(GROWTH))
        varied = _numbers("--values", values, *GROWTH[what])
    with _measuring("mobility", as_json, out, seed) as run:
        run.settings = {k: v for k, v in vars(options).items() if k not in ("out", "seed")}
        if vary:
            run.settings |= {"vary": vary, "values": varied, "together": together, "rounds": rounds}
            run.rows = growth.measure(options, vary, varied, together, rounds, run.show_progress)
        else:
            run.rows, more = drive.measure(options, run.show_progress)
            run.more.update(more)
