"""`tiercel bench orders`: the orders of a transfer beside the optimum.

Responsible for: checking the options; results on stdout and in files.
Not responsible for: the theory (control/transfer_theory.py), the other benchmarks (bench.py).
"""

from __future__ import annotations

from typing import Annotated

import typer

from tiercel.cli.bench import AsJson, Out, Seed, bench
from tiercel.cli.bench import _check as check_range
from tiercel.cli.bench import _measuring as measuring
from tiercel.cli.bench import _numbers as numbers_of
from tiercel.cli.bench import _parts as parts_of
from tiercel.errors import UserError


@bench.command(short_help="Orders of a transfer beside the best of all orders.")
def orders(
    units: Annotated[str, typer.Option(help="Numbers of units, comma-separated; at most 9.")] = "4,6,8",
    zipf: Annotated[str, typer.Option(help="Skews of the rows, comma-separated.")] = "0.5,1.0,1.5",
    cases: Annotated[int, typer.Option(help="Drawn cases of each.")] = 30,
    seed: Seed = 1,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Compare the orders in which state can be sent with the optimum, found by trying all orders.

    `mean_ratio` is the wait of all rows, as a multiple of the optimum's. No Spark is needed.

    Example: tiercel bench orders --units 6 --zipf 1.0 --cases 20
    """
    from tiercel.bench.scenarios import transfer_orders
    from tiercel.control.transfer_theory import UNITS_MAX

    counts = numbers_of("--units", units, 1, UNITS_MAX)
    check_range("--cases", cases, 1, 100_000)
    check_range("--seed", seed, 0, 2**31)
    try:
        skews = [float(part) for part in parts_of(zipf)]
    except ValueError:
        raise UserError(f"--zipf {zipf!r}", expected="numbers with commas between them") from None
    with measuring("orders", as_json, out, seed) as run:
        run.settings = {"units": counts, "zipf": skews, "cases": cases}
        run.rows = transfer_orders.measure(counts, skews, cases, seed)
