"""`tiercel state`: show, backup, restore, history, checkpoint, split, merge, export, import, moves.

Responsible for: checking the options, tables and JSON.
Not responsible for: the operations (tiercel.admin, spark/state), keys as users write them (spark/sources).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tiercel.errors import UserError

state = typer.Typer(
    name="state",
    help="Inspect, back up, restore, split, merge, export and import the state of a deployment.\n\n"
    "Example: tiercel state show /data/tiercel",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MOVE_COLUMNS = (
    *("move", "source", "destination", "strategy", "state"),
    *("keys", "bytes_moved", "duration_ms"),
)
FILE_WIDTH = 240  # of a table that is not printed to a terminal

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Storage = Annotated[Path, typer.Argument(help="The storage directory of a deployment.")]
Where = Annotated[str, typer.Argument(metavar="LOCATION", help="A directory, or a URL that fsspec can open.")]


@state.command(short_help="Show what each process stores, or the state of one key.")
def show(
    storage: Storage,
    operator: Annotated[str, typer.Option(help="With --key: the operator.")] = "",
    key: Annotated[
        str, typer.Option(help="Show the state of this key; several key columns as a JSON array.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show what each process stores and how recent its backup is; or the state of one key.

    Example: tiercel state show /data/tiercel --operator average --key 17
    """
    if bool(operator) != bool(key):
        raise UserError("only one of --operator and --key was given", expected="both, or none of them")
    if key:
        _print(_of_key(storage, operator, key), as_json)
        return
    from tiercel.admin import show as look

    lines = [msgspec.structs.asdict(kept) for kept in look(storage)]
    for line in lines:
        age = line["backup_age_s"]
        line["backup_age_s"] = None if age is None else round(age, 1)
    _print(lines, as_json)


@state.command(short_help="List the moves of a deployment, with phases and predictions.")
def moves(
    storage: Storage,
    last: Annotated[int, typer.Option(help="Only so many, the latest.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the moves that have ended, oldest first, also those under earlier drivers.

    Example: tiercel state moves /data/tiercel --last 5
    """
    from tiercel.runtime.deployment import DeploymentDir
    from tiercel.spark.move_history import MoveHistory

    if last < 1:
        raise UserError(f"--last {last}", expected="a number above 0")
    place = DeploymentDir(storage)
    place.manifest()  # a clear error if there is no deployment
    lines = []
    for report in MoveHistory(place.directory).reports()[-last:]:
        line = msgspec.to_builtins(report) | {"duration_ms": report.duration_ms}
        if not as_json:
            names = (
                "move",
                "source",
                "destination",
                "strategy",
                "state",
                "keys",
                "bytes_moved",
                "duration_ms",
            )
            line = {name: line[name] for name in names}
        lines.append(line)
    _print(lines, as_json)


def _of_key(storage: Path, operator: str, text: str) -> list[dict[str, Any]]:
    from tiercel.runtime.deployment import DeploymentDir
    from tiercel.runtime.recovery.read_only import stored_keys
    from tiercel.spark.sources.state_source import key_codec, variables

    place = DeploymentDir(storage)
    manifest = place.manifest()
    if operator not in manifest.topology.operators:
        names = ", ".join(sorted(manifest.topology.operators))
        raise UserError(f"no operator {operator!r} in {place.directory}", expected=f"one of: {names}")
    columns = key_codec(manifest, operator)
    lines = []
    for stored in stored_keys(place, operator, _key_of(columns, text)):
        where = {"instance": stored.instance, "slot": stored.slot, "offset": stored.image.at}
        timers = list(stored.image.timers)
        for variable, map_key, value in variables(stored.image):
            lines.append(
                {"variable": variable, "map_key": map_key, "value": value, "timers": timers, **where}
            )
    return lines


def _key_of(columns: Any, text: str) -> bytes:
    """A key as typed: as text or as JSON, whichever fits the columns."""
    refusal: UserError | None = None
    for values in _readings(text, len(columns.names)):
        try:
            found: bytes = columns.key_of(values)
        except UserError as error:
            refusal = refusal or error
        else:
            return found
    raise refusal or UserError(
        f"--key {text!r}", expected=f"values of {', '.join(columns.names)}", hint="""as in --key '["a", 1]'"""
    )


def _readings(text: str, count: int) -> Iterable[Sequence[Any]]:
    if count == 1:
        yield [text]
    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return
    if count == 1:
        yield [value]
    if isinstance(value, list) and len(value) == count:
        yield value


@state.command(short_help="Make every instance take a checkpoint now.")
def checkpoint(storage: Storage, as_json: AsJson = False) -> None:
    """Make every instance of a running deployment take a checkpoint now.

    Example: tiercel state checkpoint /data/tiercel
    """
    from tiercel.admin import checkpoint as take

    _print([{"instance": name, "position": at} for name, at in take(storage).items()], as_json)


@state.command(short_help="Copy a deployment, stopped or running.")
def backup(storage: Storage, location: Where, as_json: AsJson = False) -> None:
    """Copy a whole deployment, stopped or running, to a backup location.

    Example: tiercel state backup /data/tiercel s3://backups/tiercel
    """
    from tiercel.admin import backup as copy

    _print([copied._asdict() for copied in copy(storage, location)], as_json)


@state.command(short_help="Create a storage directory from a backup.")
def restore(
    location: Where,
    storage: Annotated[Path, typer.Argument(help="A directory that does not exist yet, or is empty.")],
    up_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROCESS=N", help="Restore this process up to file N, and the others as of that moment."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a storage directory from a backup.

    Example: tiercel state restore s3://backups/tiercel /data/tiercel
    """
    numbers = {}
    for up_to_process in up_to or []:
        process, _, number = up_to_process.rpartition("=")
        if not process or not number.isdecimal():
            raise UserError(f"--up-to {up_to_process!r}", expected="PROCESS=N, as average@cloud#1=41")
        numbers[process] = int(number)
    from tiercel.admin import restore as bring_back

    _print([restored._asdict() for restored in bring_back(location, storage, numbers)], as_json)


@state.command(short_help="List the past states that a backup can restore.")
def history(
    location: Where,
    process: Annotated[str, typer.Option(help="Only this router, instance or controller.")] = "",
    as_json: AsJson = False,
) -> None:
    """List every past state that a backup can restore, with numbers for --up-to and asOf.

    Example: tiercel state history s3://backups/tiercel --process average@cloud#1
    """
    from tiercel.admin import history as list_states

    _print([msgspec.structs.asdict(found) for found in list_states(location, process)], as_json)


@state.command(short_help="Write the state of an operator as parquet.")
def export(
    storage: Storage,
    location: Annotated[str, typer.Argument(help="A new directory, or a URL that Spark can write.")],
    operator: Annotated[str, typer.Option(help="The operator.")],
    as_of: Annotated[str, typer.Option(help="A time, or INSTANCE=N of the backup. Default: now.")] = "",
    backup_location: Annotated[
        str, typer.Option("--backup", help="Read from this backup. Default: the backup of the deployment.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write the state of an operator as parquet: one row per key, one column per state variable.

    Example: tiercel state export /data/tiercel /exports/monday --operator average
    """
    from tiercel.spark.api.export_import import export_state

    about = export_state(storage, operator, location, as_of=as_of, backup=backup_location)
    _print([{"operator": about.operator, "keys": about.keys, "variables": ", ".join(about.state)}], as_json)


@state.command("import", short_help="Load an export into a stopped deployment.")
def import_(
    location: Annotated[str, typer.Argument(help="A directory written by `tiercel state export`.")],
    storage: Storage,
    operator: Annotated[str, typer.Option(help="The operator; it must have no state yet.")],
    as_json: AsJson = False,
) -> None:
    """Load an export into a stopped deployment.

    For a new deployment use initial_state=tiercel.read_exported_state(...).

    Example: tiercel state import /exports/monday /data/tiercel --operator average
    """
    from tiercel.spark.api.export_import import import_state

    _print([{"operator": operator, "keys": import_state(location, storage, operator)}], as_json)


@state.command(short_help="Give some slots of an instance to a new one.")
def split(
    storage: Storage,
    instance: Annotated[str, typer.Argument(help="The instance to split.")],
    slots: Annotated[
        str, typer.Option(help="Slots for the new instance, as 8-15,20. Default: the upper half.")
    ] = "",
    into: Annotated[str, typer.Option(help="Name of the new instance. Default: the next free one.")] = "",
    as_json: AsJson = False,
) -> None:
    """Give some slots of an instance to a new one, in a stopped deployment.

    Example: tiercel state split /data/tiercel average@cloud#1
    """
    from tiercel.admin import split as divide

    found = divide(storage, instance, _slots(slots) if slots else None, into or None)
    _print([msgspec.structs.asdict(found)], as_json)


@state.command(short_help="Give all of one instance to another.")
def merge(
    storage: Storage,
    source: Annotated[str, typer.Argument(help="The instance that is removed.")],
    destination: Annotated[str, typer.Argument(help="The instance that gets its slots and state.")],
    as_json: AsJson = False,
) -> None:
    """Give all slots and state of one instance to another, in a stopped deployment.

    Example: tiercel state merge /data/tiercel average@cloud#2 average@cloud#1
    """
    from tiercel.admin import merge as unite

    _print([msgspec.structs.asdict(unite(storage, source, destination))], as_json)


def _slots(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UserError(
                f"--slots {text!r}: {part!r} is not a slot", expected="numbers and ranges, as 8-15,20"
            )
        found += range(int(first), int(last or first) + 1)
    return found


def _print(lines: list[dict[str, Any]], as_json: bool) -> None:
    """Print a table, or JSON."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode())
        return
    table = Table(*(lines[0] if lines else ["nothing"]), box=None)
    for line in lines:
        table.add_row(*("" if value is None else str(value) for value in line.values()))
    width = None if sys.stdout.isatty() else FILE_WIDTH
    Console(width=width).print(table, markup=False, highlight=False)
