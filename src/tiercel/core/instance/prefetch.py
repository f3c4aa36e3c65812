"""Prefetching: the stored versions of evicted keys that an event may need.

Responsible for: the answer to `Instance.missing_state`. The driver reads these versions before it delivers
    the event, so the core does no IO.
Not responsible for: reading them (the driver), using them (instance.py, processing.py).

    driver: missing_state(event)? --> read --> StateRead(versions) --> the event

The answer may name more than the event needs, never less: a key that is neither in memory nor read is a
`CoreBug`. An event needs a key for one of these reasons:

    Dispatch, Continued           a row of the key; a timer of it that is due; its digest at a Compare; its
                                  image at the flip of a move that flips first
    capture timer                 the sender captures the next keys
    standby timer                 the next increment for the standby
    FlipToSource, AttachReply,    keys have left this instance: it captures their images, or compares the
    CheckpointLoaded              epochs of keys that have returned, to find which copy is here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tiercel.core import messages as m
from tiercel.core.instance.checkpoint_loader import load_routes
from tiercel.core.instance.checkpoint_writer import CheckpointPort
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.events import CheckpointLoaded, Continued, Event, Received, TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.migration.phases import SourceInstancePhase
from tiercel.core.model.bundle import is_bundle, keys_of
from tiercel.core.model.keys import Key, KeySet, StoredKeyInfo
from tiercel.core.model.log import Adopt, Compare, Done, Entry, Flip, TakenOver, Tick, Watermark
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of

FIRST_CHUNK_KEYS = 8  # of a capture, before the size of the keys is known

EpochOf = Callable[[Key], int]


class PrefetchPort(CheckpointPort, Protocol):
    """The interface of an instance for prefetching."""

    runner: ProcessorRunner
    queue: RowQueue

    def standby_read_ahead(self) -> list[StorageKey]: ...


def missing_state(instance: PrefetchPort, event: Event) -> tuple[StorageKey, ...]:
    """The storage keys of the versions that an event may need, for an instance with evicted keys."""
    space = instance.space
    needed = dict.fromkeys(_needed(instance, event))
    places = [space.stored_at(key) for key in needed if key in space.evicted]
    match event:
        case TimerFired(name=Timer(kind=TimerKind.CAPTURE, of=move)) if move in instance.senders:
            places += instance.senders[move].read_ahead()
        case TimerFired(name=Timer(kind=TimerKind.STANDBY)):
            places += instance.standby_read_ahead()
        case _:
            pass
    return tuple(places)


def _needed(instance: PrefetchPort, event: Event) -> Iterable[Key]:
    match event:
        case Received(message=m.Dispatch(entries=entries)):
            entries = instance.queue.first_of(entries) if instance.queue.is_free else []
            return _of_entries(instance, entries) if entries else ()
        case Continued():
            entries = instance.queue.peek().entries if instance.queue else []
            return _of_entries(instance, entries) if entries else ()
        case Received(message=m.FlipToSource(role=role)):
            return _of_roles(instance, [role])
        case Received(message=m.AttachReply(outgoing_moves=roles)):
            return _of_roles(instance, roles)
        case _:
            return ()


# -- entries of the inbox --------------------------------------------------------------------------


def _of_entries(instance: PrefetchPort, entries: list[Entry]) -> Iterator[Key]:
    evicted, applied = instance.space.evicted, instance.applied
    controls = []
    for entry in entries:
        if entry.offset <= applied:
            continue  # a replay for arriving keys, which are never evicted
        for row in entry.all_rows():
            if row[0] in evicted:
                yield row[0]
            elif is_bundle(row[0]):
                yield from [key for key in keys_of(row) if key in evicted]
        if entry.control is not None:
            controls.append(entry)
    if controls:
        yield from _of_controls(instance, controls)
    reached = max(applied, entries[-1].offset)
    updates = [e.control.update for e in controls if isinstance(e.control, Adopt | TakenOver)]
    for sender in instance.senders.values():
        if sender.phase is SourceInstancePhase.WAITING and sender.stop_after <= reached:
            candidates, slots = _evicted_of(instance, sender.keys), instance.operator.slots
            yield from _came_back(candidates, sender.epochs, slots, _newest_epoch(instance, updates))


def _of_controls(instance: PrefetchPort, controls: list[Entry]) -> Iterator[Key]:
    due_ms = -1
    updates: list[RouteUpdate] = []
    leaving: list[tuple[KeySet, RouteUpdate | None]] = []
    for entry in controls:
        match entry.control:
            case Tick() if not instance.runner.event_time:
                due_ms = max(due_ms, entry.time_ms)
            case Watermark(value_ms=value_ms) if instance.runner.event_time:
                due_ms = max(due_ms, value_ms)
            case Compare(move=move) if move in instance.senders:
                yield from instance.senders[move].touched
            case Adopt(update=update) | TakenOver(update=update):
                updates.append(update)
            case Flip(source=instance.name) as flip:
                leaving.append((flip.keys, flip.epochs))
            case Done():
                leaving += [(sender.keys, sender.epochs) for sender in instance.senders.values()]
            case _:
                pass
    yield from instance.space.timers_until(due_ms)
    for keys, epochs in leaving:
        candidates = _evicted_of(instance, keys)
        yield from _came_back(candidates, epochs, instance.operator.slots, _newest_epoch(instance, updates))


def _newest_epoch(instance: PrefetchPort, updates: list[RouteUpdate]) -> EpochOf:
    """The epoch of a key's route, or the one that an entry of the same dispatch brings."""
    slots = instance.operator.slots

    def epoch(key: Key) -> int:
        coming = [route for u in updates if (route := u.keys.get(key) or u.slots.get(slot_of(key, slots)))]
        return max(instance.routes.route(key).epoch, *(route.epoch for route in coming), 0)

    return epoch


# -- keys that leave -------------------------------------------------------------------------------


def _of_roles(instance: PrefetchPort, roles: Iterable[m.OutgoingRole]) -> Iterator[Key]:
    for role in roles:
        candidates = _evicted_of(instance, role.keys)
        if candidates:
            epoch_of = _newest_epoch(instance, [])
            yield from _of_role(role, candidates, instance.operator.slots, epoch_of, instance.applied)


def _of_role(
    role: m.OutgoingRole, candidates: Iterable[Key], slots: int, epoch_of: EpochOf, applied: int
) -> Iterable[Key]:
    """The keys of a decided move that have returned."""
    return _came_back(candidates, role.epochs, slots, epoch_of)


def _evicted_of(instance: PrefetchPort, keys: KeySet) -> list[Key]:
    space = instance.space
    return [key for key in space.members(keys.slots, keys.keys) if key in space.evicted]


def _came_back(
    candidates: Iterable[Key], epochs: RouteUpdate | None, slots: int, epoch_of: EpochOf
) -> Iterator[Key]:
    """Keys whose route is newer than the move: only their stored version tells which copy is here."""
    if epochs is None:
        return
    for key in candidates:
        before = epochs.keys.get(key) or epochs.slots.get(slot_of(key, slots))
        if before is not None and epoch_of(key) > before.epoch:
            yield key


# -- a checkpoint that is about to be loaded ---------------------------------------------------------


def missing_at_load(
    instance: PrefetchPort, loaded: CheckpointLoaded, roles: list[m.OutgoingRole]
) -> tuple[StorageKey, ...]:
    """The same for the event that loads the keys: it captures the keys of `roles`, which have left."""
    header: CheckpointHeader | None = loaded.items.get(("checkpoint",))
    if header is None or not roles:
        return ()
    slots, newest = instance.operator.slots, dict[Key, StorageKey]()
    for place, value in loaded.items.items():
        if isinstance(value, StoredKeyInfo):
            older = newest.get(place[2])
            if place[3] <= header.generation and (older is None or place[3] > older[3]):
                newest[place[2]] = place
    routes = RoutingTable.initial(instance.operator)
    load_routes(routes, loaded.items)
    needed: dict[Key, None] = {}
    for role in roles:
        candidates = [key for key, place in newest.items() if role.keys.has(key, place[1])]
        of_role = _of_role(role, candidates, slots, lambda key: routes.route(key).epoch, header.applied)
        needed.update(dict.fromkeys(of_role))
    return tuple([newest[key] for key in needed])
