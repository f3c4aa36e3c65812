"""The command line: `tiercel sim`, `tiercel demo`, `tiercel bench`, `tiercel chaos`, `tiercel state`.

Responsible for: the commands, and turning an error a user can mend into a message and exit code 2.
Not responsible for: what the commands do (cli_sim.py, cli_demo.py, cli_bench.py, cli_chaos.py, cli_state.py).

Exit codes: 0 all is well; 1 a promise was broken; 2 the request could not be carried out as asked.
"""

from __future__ import annotations

import sys

import typer

from tiercel.cli_bench import bench
from tiercel.cli_chaos import chaos
from tiercel.cli_demo import demo
from tiercel.cli_sim import sim
from tiercel.cli_state import state
from tiercel.core.faults import InvalidRequest
from tiercel.errors import UserError

app = typer.Typer(
    name="tiercel",
    help="Live reconfiguration of stateful stream processing.\n\nExample: tiercel demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(sim)
app.command()(demo)
app.command()(chaos)
app.add_typer(bench)
app.add_typer(state)


@app.callback()
def tiercel() -> None:
    """Live reconfiguration of stateful stream processing.

    Example: tiercel sim --seeds 200
    """


def message_of(error: UserError | InvalidRequest) -> str:
    """What was wrong, what is allowed, what to run; one line each."""
    if isinstance(error, UserError):
        return str(error)
    return "\n".join(part for part in (error.what, error.expected, error.hint) if part)


def run_app(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        app(arguments)
    except (UserError, InvalidRequest) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return 2
    except SystemExit as end:  # how typer ends a command, also one that it refused
        return end.code if isinstance(end.code, int) else 0
    return 0


def main() -> None:
    """Entry point of the `tiercel` command."""
    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
