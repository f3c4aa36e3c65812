"""`tiercel bench transfer`: the memory that a move of much state takes.

Responsible for: checking the options of this command.
Not responsible for: what is around every measurement, other benchmarks (bench.py), measuring (bench/).
"""

from __future__ import annotations

from typing import Annotated

import typer

from tiercel.cli.bench import AsJson, Out, _check, _choose, _measuring, _parts, bench
from tiercel.core.migration.strategies import STRATEGIES


@bench.command(short_help="Memory that a move of much state takes beyond the state.")
def transfer(
    state_mb: Annotated[int, typer.Option(help="MB of state that moves.")] = 500,
    state_bytes: Annotated[int, typer.Option(help="Bytes of state per key.")] = 20_000,
    strategies: Annotated[str, typer.Option(help="Strategies, comma-separated.")] = "live,pause",
    repeats: Annotated[int, typer.Option(help="Repeats of each; the result is the median.")] = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the memory of both sides of a move beyond the state that moves.

    Example: tiercel bench transfer --state-mb 100 --strategies live
    """
    _check("--state-mb", state_mb, 1, 100_000)
    _check("--state-bytes", state_bytes, 16, 10_000_000)
    _check("--repeats", repeats, 1, 1_000)
    chosen = tuple(_choose("--strategies", _parts(strategies), tuple(STRATEGIES)))
    from tiercel.bench.scenarios import transfer as bench_transfer

    options = bench_transfer.Options(state_mb, state_bytes, chosen, repeats)
    _check("--state-mb / --state-bytes", options.keys, 100, 10_000_000)
    with _measuring("transfer", as_json, out, None) as run:
        run.settings = {**vars(options), "keys": options.keys}
        run.rows, run.more["repeats"] = bench_transfer.measure(options, run.show_progress)
