"""The checkpoint loader: it fills an instance from its last checkpoint.

Responsible for: choosing the stored versions that count, restoring the instance from them.
Not responsible for: the contents and the writing of a checkpoint (checkpoint_writer.py), requesting it and
    the reply of the router (instance.py).

Of a key, the newest version that is not newer than the checkpoint's cursor counts. The next checkpoint
deletes all others.
"""

from __future__ import annotations

from typing import Any, Protocol

from tiercel.core.instance.checkpoint_writer import KEYED, CheckpointPort, CheckpointWriter
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.model.keys import Key, StoredKeyInfo
from tiercel.core.model.routing import RoutingTable, slot_of


class LoadPort(CheckpointPort, Protocol):
    """The interface of an instance for the loader."""

    checkpointer: CheckpointWriter
    moves: InstanceMoves | None


def load(step: Step, instance: LoadPort, items: dict[StorageKey, Any], start: int, watermark_ms: int) -> None:
    """Fill a reset instance from its last checkpoint; without one it begins at `start`."""
    cursor: CheckpointHeader | None = items.get(("checkpoint",))
    checkpointer = instance.checkpointer
    if cursor is None:
        instance.applied = start
        instance.watermark_ms = watermark_ms
        checkpointer.discard(items)  # parts of a first checkpoint that was never finished
        return
    instance.applied = cursor.applied
    instance.router_incarnation = cursor.router_incarnation
    instance.time_ms, instance.watermark_ms = cursor.time_ms, cursor.watermark_ms
    instance.durable = cursor.applied
    instance.space.era = cursor.era
    instance.takeover = cursor.takeover
    load_routes(instance.routes, items)
    if instance.moves is not None:
        for stored in cursor.incoming_moves:
            instance.moves.restore(step, stored)
    _load_keys(instance, items, cursor.generation)
    checkpointer.continue_from(cursor)
    for space in (instance.space, *(receiver.space for receiver in instance.receivers.values())):
        space.dirty.clear()
        if checkpointer.in_flight:  # it may still delete keys that are here: write all of them again
            space.dirty.update(dict.fromkeys(space.keys))


def load_routes(routes: RoutingTable, items: dict[StorageKey, Any]) -> None:
    """Bring a table up to date with the routes of a checkpoint."""
    for key, value in items.items():
        if key[0] == "routes":
            routes.take(value)


def is_covered(version: int, generation: int) -> bool:
    """Whether a stored version counts: the checkpoint of its generation, or a later one, was finished."""
    return version <= generation


def _load_keys(instance: LoadPort, items: dict[StorageKey, Any], generation: int) -> None:
    instance.space.memory_limit.covered = generation
    newest_written = generation  # a checkpoint may have no key of its own
    newest: dict[StorageKey, int] = {}
    for place in items:
        if len(place) == KEYED:
            version = int(place[-1])
            newest_written = max(newest_written, version)
            if newest.get(place[:-1], -1) < version and is_covered(version, generation):
                newest[place[:-1]] = version
    useless: list[StorageKey] = []
    for place, value in items.items():
        if len(place) != KEYED:
            continue
        if newest.get(place[:-1]) != place[-1] or not _install(instance, place, value):
            useless.append(place)
    instance.checkpointer.found_useless(useless, generation, newest_written)


def _install(instance: LoadPort, place: StorageKey, value: Any) -> bool:
    """Install a version that counts. True: it is of a key that the instance still owns."""
    match place:
        case ("state", _, bytes(key), int(version)):
            _install_own(instance, key, version, value)
            instance.checkpointer.found(None, key, version)
        case ("move", str(move), bytes(key), int(version)):
            receiver = instance.receivers.get(move)
            if receiver is None:
                return False
            receiver.space.install(value, receiver.epoch_of(key))
            instance.checkpointer.found(move, key, version)
        case _:
            pass
    return True


def _install_own(instance: LoadPort, key: Key, version: int, value: Any) -> None:
    space = instance.space
    if isinstance(value, StoredKeyInfo):
        space.install_evicted(key, version, value.timers)
        return
    slot = slot_of(key, instance.operator.slots)
    space.install(value, value.epoch if space.era is None else space.era.epoch(value, version, slot))
    if space.memory_limit.active:
        space.memory_limit.saw(key, value.size_bytes)
