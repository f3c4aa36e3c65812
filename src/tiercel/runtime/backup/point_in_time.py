"""The state of an operator as of a past moment, from a backup.

Responsible for: the file of each instance's backup that a moment selects; listing the moments.
Not responsible for: the files (process_backup.py), reading a store (storage/state_reader.py).

    2026-11-16T05:30:00Z     every instance as its backup was by then (without a zone: UTC)
    average@cloud#1=41       that instance as of its file 41, the others as of the same moment
    41                       the same, where the backup has one instance of the operator
    latest                   the newest state of every instance

Local disks have only the last checkpoint. Older ones are in the backup, as far back as its `keep` allows. A
key that moved is never missing: its source drops it after the backup of the destination has it.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.backup.deployment_backup import MANIFEST, read_manifest
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.restore import processes_in, restore
from tiercel.runtime.backup.segment_file import Header
from tiercel.runtime.deployment import Manifest

LATEST = "latest"
SHOWN_MAX = 6  # numbers in a message


class PastState(msgspec.Struct, frozen=True):
    """A complete state of one process that a backup can restore."""

    process: str
    number: int
    written: str
    kind: str  # of its last file


def manifest_of_backup(location: Location) -> Manifest:
    """The manifest of the deployment in a backup; a clear error if there is none."""
    try:
        return read_manifest(location)
    except FileNotFoundError as error:
        what = f"{location.url} holds no backup of a deployment"
        raise UserError(what, expected=f"a location with a {MANIFEST}") from error


def history(location: str, process: str = "") -> list[PastState]:
    """Every state that a backup can restore, of one process or of all of them."""
    source = Location(location)
    manifest = manifest_of_backup(source)
    names = processes_in(source)
    if process and process not in names:
        raise UserError(f"no backup of {process!r} in {location}", expected=f"one of: {', '.join(names)}")
    return [
        PastState(name, state.number, _written(state), state.kind)
        for name in names
        if name == process or not process
        for state in ProcessBackup(source, manifest.id, name).states()
    ]


def numbers_as_of(location: Location, manifest: Manifest, operator: str, as_of: str) -> dict[str, int]:
    """Instance -> the number of its state as of a moment; an error that lists the states if there is none."""
    states = {
        name: ProcessBackup(location, manifest.id, name).states()
        for name in processes_in(location)
        if operator_of(name) == operator
    }
    states = {name: of_instance for name, of_instance in states.items() if of_instance}
    if not states:
        raise UserError(
            f"{location.url} holds no complete state of {operator!r}",
            expected="a backup of one of its instances",
        )
    if as_of == LATEST:
        return {name: of_instance[-1].number for name, of_instance in states.items()}
    instance, equals, number = as_of.rpartition("=")
    if equals or number.isdecimal():
        moment_ms, fixed = _of_number(states, instance, number, as_of)
    else:
        moment_ms, fixed = _parsed(as_of, states), {}
    found = {name: _number_by(of_instance, moment_ms, name) for name, of_instance in states.items()}
    numbers = {name: number for name, number in found.items() if number is not None} | fixed
    if not numbers:
        raise UserError(
            f"asOf {as_of!r} is before the first state in {location.url}", expected=_available(states)
        )
    return numbers


def _of_number(
    states: Mapping[str, list[Header]], instance: str, number: str, as_of: str
) -> tuple[int, dict[str, int]]:
    if not instance and len(states) == 1:
        instance = next(iter(states))
    headers = {header.number: header for header in states.get(instance, ())}
    if not number.isdecimal() or int(number) not in headers:
        what = f"asOf {as_of!r}: the backup has no such state"
        raise UserError(what, expected=_available(states), hint="tiercel state history LOCATION lists them")
    return headers[int(number)].written_ms, {instance: int(number)}


def _parsed(as_of: str, states: Mapping[str, list[Header]]) -> int:
    try:
        moment = datetime.datetime.fromisoformat(as_of)
    except ValueError:
        raise UserError(f"asOf {as_of!r}", expected=f"a time in ISO 8601, or {_available(states)}") from None
    zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
    return int(zoned.timestamp() * 1000)


def _number_by(headers: list[Header], moment_ms: int, name: str) -> int | None:
    """The newest state that was written by then; None: the instance did not exist yet."""
    numbers = [header.number for header in headers if header.written_ms <= moment_ms]
    if numbers:
        return max(numbers)
    if headers[0].number > 1:
        what = f"the backup of {name} does not go back that far"
        raise UserError(what, expected=f"a moment from {_written(headers[0])} on", hint="see keep of backup=")
    return None


def _available(states: Mapping[str, list[Header]]) -> str:
    described = []
    for name, headers in states.items():
        numbers = [str(header.number) for header in headers]
        if len(numbers) > SHOWN_MAX:
            numbers = [*numbers[: SHOWN_MAX // 2], "...", *numbers[-SHOWN_MAX // 2 :]]
        described.append(f"{name}={'|'.join(numbers)} ({_written(headers[0])} to {_written(headers[-1])})")
    return "; ".join(described)


def _written(header: Header) -> str:
    moment = datetime.datetime.fromtimestamp(header.written_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextlib.contextmanager
def processes_as_of(location: Location, deployment: str, numbers: Mapping[str, int]) -> Iterator[Path]:
    """A directory with the storage of these processes as of these numbers; every file is checked."""
    with tempfile.TemporaryDirectory(prefix="tiercel-") as temporary:
        for process, number in numbers.items():
            restore(ProcessBackup(location, deployment, process), Path(temporary) / process, number)
        yield Path(temporary)
