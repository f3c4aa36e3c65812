"""The command line: `tiercel sim`, `demo`, `app`, `bench`, `chaos`, `policy`, `state`.

Responsible for: the commands, and turning a UserError into a message and exit code 2.
Not responsible for: what the commands do (sim.py, demo.py, app.py, bench.py, chaos.py, policy.py, and
    state.py).

Exit codes: 0 success; 1 a promise was broken; 2 the command could not run as requested.
"""

from __future__ import annotations

import sys

import typer

from tiercel.cli import bench_orders, bench_transfer  # noqa: F401
from tiercel.cli.app import app as applications
from tiercel.cli.bench_mobility import bench
from tiercel.cli.chaos import chaos
from tiercel.cli.demo import demo
from tiercel.cli.policy import policy
from tiercel.cli.sim import sim
from tiercel.cli.state import state
from tiercel.core.errors import InvalidRequest
from tiercel.errors import UserError

app = typer.Typer(
    name="tiercel",
    help="Move keys of a running PySpark StatefulProcessor between Spark tasks, without stopping them.\n\n"
    "Example: tiercel demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Show a live move on Spark in one minute; --simulated: without Spark.")(demo)
app.command(short_help="Simulate deployments with faults, and check every promise.")(sim)
app.command(short_help="Inject faults into a deployment on Spark, and check every row.")(chaos)
app.add_typer(applications, short_help="Run an application of a paper, and check every row.")
app.add_typer(bench, short_help="Measure a deployment on this machine.")
app.add_typer(policy, short_help="Try policies, and see what those of a deployment decided.")
app.add_typer(state, short_help="Inspect, back up, restore, split and merge stored state.")


@app.callback()
def tiercel() -> None:
    """Makes a group of the commands, also if there is only one."""


def message_of(error: UserError | InvalidRequest) -> str:
    """The message of an error: what is wrong, what is expected, a hint; one line each."""
    if isinstance(error, UserError):
        return str(error)
    return "\n".join(part for part in (error.what, error.expected, error.hint) if part)


def run_app(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        app(arguments, prog_name="tiercel")
    except (UserError, InvalidRequest) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return 2
    except SystemExit as end:  # typer ends every command this way
        return end.code if isinstance(end.code, int) else 0
    return 0


def main() -> None:
    """Entry point of the `tiercel` command."""
    sys.exit(run_app(sys.argv[1:]))
