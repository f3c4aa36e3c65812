"""`tiercel state`: show, backup, restore, history, checkpoint, split, merge, export, import.

Responsible for: checking what was asked for, tables and JSON.
Not responsible for: doing it (state/), and keys as users write them (spark/state_source.py).
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
    help="What a deployment keeps: look at it, copy it, bring it back, divide it.\n\n"
    "Example: tiercel state show /data/tiercel",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FILE_WIDTH = 240  # of a table that no terminal limits

AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
Storage = Annotated[Path, typer.Argument(help="The storage directory of a deployment.")]
Where = Annotated[str, typer.Argument(metavar="LOCATION", help="A directory, or a URL of fsspec.")]


@state.command()
def show(
    storage: Storage,
    operator: Annotated[str, typer.Option(help="With --key: of this operator.")] = "",
    key: Annotated[str, typer.Option(help="The state of this key; of several columns as a JSON array.")] = "",
    as_json: AsJson = False,
) -> None:
    """What each process keeps, by kind, and how far its copies are; or the state of one key.

    Example: tiercel state show /data/tiercel --operator average --key 17
    """
    if bool(operator) != bool(key):
        raise UserError("only one of --operator and --key was given", expected="both, or none of them")
    if key:
        _tell(_of_key(storage, operator, key), as_json)
        return
    from tiercel.state import show as look

    lines = [msgspec.structs.asdict(kept) for kept in look(storage)]
    for line in lines:
        age = line["backup_age_s"]
        line["backup_age_s"] = None if age is None else round(age, 1)
    _tell(lines, as_json)


def _of_key(storage: Path, operator: str, text: str) -> list[dict[str, Any]]:
    from tiercel.runtime.place import Place
    from tiercel.runtime.stored_state import stored_keys
    from tiercel.spark.state_source import key_columns, variables

    place = Place(storage)
    manifest = place.manifest()
    if operator not in manifest.topology.operators:
        names = ", ".join(sorted(manifest.topology.operators))
        raise UserError(f"no operator {operator!r} in {place.directory}", expected=f"one of: {names}")
    columns = key_columns(manifest, operator)
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
    """A key as it was typed: text, or what JSON makes of it, whichever fits the columns."""
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


@state.command()
def checkpoint(storage: Storage, as_json: AsJson = False) -> None:
    """Every instance of a running deployment takes a checkpoint now.

    Example: tiercel state checkpoint /data/tiercel
    """
    from tiercel.state import checkpoint as take

    _tell([{"instance": name, "position": at} for name, at in take(storage).items()], as_json)


@state.command()
def backup(storage: Storage, location: Where, as_json: AsJson = False) -> None:
    """A full copy of a deployment, stopped or running.

    Example: tiercel state backup /data/tiercel s3://backups/tiercel
    """
    from tiercel.state import backup as copy

    _tell([copied._asdict() for copied in copy(storage, location)], as_json)


@state.command()
def restore(
    location: Where,
    storage: Annotated[Path, typer.Argument(help="A directory that does not exist yet, or is empty.")],
    up_to: Annotated[
        list[str] | None,
        typer.Option(metavar="PROCESS=N", help="Use files up to this number; all others as of that moment."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a storage directory out of a backup, on this machine.

    Example: tiercel state restore s3://backups/tiercel /data/tiercel
    """
    numbers = {}
    for wish in up_to or []:
        process, _, number = wish.rpartition("=")
        if not process or not number.isdecimal():
            raise UserError(f"--up-to {wish!r}", expected="PROCESS=N, as average@cloud#1=41")
        numbers[process] = int(number)
    from tiercel.state import restore as bring_back

    _tell([restored._asdict() for restored in bring_back(location, storage, numbers)], as_json)


@state.command()
def history(
    location: Where,
    process: Annotated[str, typer.Option(help="Only of this router, instance or controller.")] = "",
    as_json: AsJson = False,
) -> None:
    """Every past state that a backup can restore: numbers for --up-to and asOf, with their times.

    Example: tiercel state history s3://backups/tiercel --process average@cloud#1
    """
    from tiercel.state import history as list_states

    _tell([msgspec.structs.asdict(found) for found in list_states(location, process)], as_json)


@state.command()
def export(
    storage: Storage,
    location: Annotated[str, typer.Argument(help="A new directory, or a URL that Spark can write.")],
    operator: Annotated[str, typer.Option(help="Whose state.")],
    as_of: Annotated[str, typer.Option(help="A time, or INSTANCE=N of the backup; now if not said.")] = "",
    backup_location: Annotated[
        str, typer.Option("--backup", help="Out of this backup; the deployment's own if not said.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """An operator's state as parquet: a row per key, a column per state variable, timers and expiries.

    Example: tiercel state export /data/tiercel /exports/monday --operator average
    """
    from tiercel.spark.kept_state import export_state

    about = export_state(storage, operator, location, as_of=as_of, backup=backup_location)
    _tell([{"operator": about.operator, "keys": about.keys, "variables": ", ".join(about.state)}], as_json)


@state.command("import")
def import_(
    location: Annotated[str, typer.Argument(help="What `tiercel state export` has written.")],
    storage: Storage,
    operator: Annotated[str, typer.Option(help="Whose state it shall be; it must not have any yet.")],
    as_json: AsJson = False,
) -> None:
    """An export into a stopped deployment. A new one takes it as initial_state=tiercel.exported(...).

    Example: tiercel state import /exports/monday /data/tiercel --operator average
    """
    from tiercel.spark.kept_state import import_state

    _tell([{"operator": operator, "keys": import_state(location, storage, operator)}], as_json)


@state.command()
def split(
    storage: Storage,
    instance: Annotated[str, typer.Argument(help="Whose slots are divided.")],
    slots: Annotated[str, typer.Option(help="These go, as 8-15,20; the upper half if not said.")] = "",
    into: Annotated[str, typer.Option(help="Name of the new instance; the next free one if not said.")] = "",
    as_json: AsJson = False,
) -> None:
    """Give some slots of an instance to a new one. The deployment must be stopped.

    Example: tiercel state split /data/tiercel average@cloud#1
    """
    from tiercel.state import split as divide

    found = divide(storage, instance, _slots(slots) if slots else None, into or None)
    _tell([msgspec.structs.asdict(found)], as_json)


@state.command()
def merge(
    storage: Storage,
    source: Annotated[str, typer.Argument(help="The instance that goes.")],
    destination: Annotated[str, typer.Argument(help="The instance that takes everything.")],
    as_json: AsJson = False,
) -> None:
    """Give everything of one instance to another one. The deployment must be stopped.

    Example: tiercel state merge /data/tiercel average@cloud#2 average@cloud#1
    """
    from tiercel.state import merge as unite

    _tell([msgspec.structs.asdict(unite(storage, source, destination))], as_json)


def _slots(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UserError(
                f"--slots {text!r}: {part!r} is no slot", expected="numbers and ranges, as 8-15,20"
            )
        found += range(int(first), int(last or first) + 1)
    return found


def _tell(lines: list[dict[str, Any]], as_json: bool) -> None:
    """A table for people, JSON for everything else."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode())
        return
    table = Table(*(lines[0] if lines else ["nothing"]), box=None)
    for line in lines:
        table.add_row(*("" if value is None else str(value) for value in line.values()))
    width = None if sys.stdout.isatty() else FILE_WIDTH
    Console(width=width).print(table, markup=False, highlight=False)
