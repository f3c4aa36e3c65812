"""Dividing the stored keys of an instance, and bringing them together: split, merge; and putting keys in.

Responsible for: stores of instances, routing tables and readers of a deployment that is stopped.
Not responsible for: the same while it runs: that is a move (`live.move`, `live.scale`).

    split   count@cloud#1: slots 0-15   -->  count@cloud#1: 0-7     count@cloud#2: 8-15
    merge   the other way round

Nothing may be under way: no move, and no row in the log that the instances' checkpoints do not cover. Each
store is changed in one atomic batch, and the routers come last: they decide who owns what. What was cut
short before that is done again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiercel.core.effects import StorageKey, Write
from tiercel.core.readers import Reader
from tiercel.core.records import Key, KeyImage, KeySet, Route, TableUpdate
from tiercel.core.routing import RoutingTable, slot_of
from tiercel.core.taken import Cursor
from tiercel.core.topology import Operator, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.locking import StorageLock
from tiercel.runtime.place import Place
from tiercel.runtime.store import Store, StoreView
from tiercel.runtime.stored_state import stored_keys
from tiercel.runtime.storing import exists

KEYS_PER_BATCH = 1_000
UNDER_WAY = ("departure", "arrival", "pause")
_COME_TO_REST = "start it, let its inputs come to rest, run `tiercel state checkpoint`, then stop it"


class Divided(msgspec.Struct, frozen=True):
    """What has changed hands."""

    source: str
    destination: str
    slots: int
    keys: int


def split(
    storage: str | Path, instance: str, slots: Iterable[int] | None = None, into: str | None = None
) -> Divided:
    """Give some of an instance's slots, else the upper half of them, to a new instance of its site."""
    place = Place(storage)
    with _stopped(place):
        operator = _operator(place, instance)
        table = _table(place, operator, site_of(instance))
        owned = [slot for slot, route in enumerate(table.slots) if route.instance == instance]
        chosen = sorted(set(owned[len(owned) // 2 :] if slots is None else slots))
        foreign = [slot for slot in chosen if slot not in owned]
        if foreign or not 0 < len(chosen) < len(owned):
            raise UserError(
                f"slots to split off {instance}: {foreign or chosen}",
                expected=f"some, not all, of its {len(owned)} slots",
                hint="tiercel state show lists what each instance has",
            )
        new = into or _next_name(place, operator, instance)
        if operator_of(new) != operator.name or site_of(new) != site_of(instance) or new in place.wanted():
            what = f"a new instance {new!r} beside {instance}"
            raise UserError(what, expected=f"a name as {_next_name(place, operator, instance)}")
        return _hand_over(place, operator, instance, new, KeySet(slots=frozenset(chosen)))


def merge(storage: str | Path, source: str, destination: str) -> Divided:
    """Give everything of one instance to another one of the same operator and site; the first one goes."""
    place = Place(storage)
    with _stopped(place):
        operator = _operator(place, source)
        if source == destination or _operator(place, destination) != operator:
            what = f"merging {source} into {destination}"
            raise UserError(what, expected="two instances of one operator")
        if site_of(source) != site_of(destination):
            what = f"{source} and {destination} are at different sites"
            raise UserError(what, expected="one site", hint="move the keys while it runs: live.move(...)")
        table = _table(place, operator, site_of(source))
        owned = frozenset(slot for slot, route in enumerate(table.slots) if route.instance == source)
        found = _hand_over(place, operator, source, destination, KeySet(slots=owned))
        place.want([i for i in place.wanted() if i != source])
        return found


def put_keys(
    storage: str | Path, operator_name: str, state: Iterable[tuple[Key, dict[str, Any], Sequence[int]]]
) -> int:
    """Give an operator that has no keys these, each with its values and timers; returns how many.

    They lie there as versions that no checkpoint covers, until each instance's cursor follows at the end: cut
    short before that, nothing has changed.
    """
    place = Place(storage)
    with _stopped(place):
        operator = place.manifest().topology.operators[operator_name]
        if next(stored_keys(place, operator_name), None) is not None:
            what = f"operator {operator_name!r} has keys already"
            raise UserError(what, expected="an operator without state: nothing is overwritten")
        table = _table(place, operator, site_of(operator.instances[0]))
        cursors = {name: _next_cursor(place, operator, name) for name in table.owners()}
        count = 0
        for some in _batches(state, KEYS_PER_BATCH):
            puts: dict[str, dict[StorageKey, Any]] = {}
            for key, values, timers in some:
                route = table.route(key)
                at = cursors[route.instance]
                times = (at.time_ms, at.watermark_ms)
                image = KeyImage(key, route.epoch, at.applied, values, tuple(timers), *times)
                place_of = ("state", _slot(key, operator), key, at.generation)
                puts.setdefault(route.instance, {})[place_of] = image
            for instance, of_instance in puts.items():
                _write(place, instance, of_instance)
            count += len(some)
        for instance, cursor in cursors.items():
            _write(place, instance, {("cursor",): cursor})
    return count


def _next_cursor(place: Place, operator: Operator, instance: str) -> Cursor:
    """The cursor of a checkpoint behind everything that an instance has stored."""
    cursor = _cursor(place, instance)
    if cursor is None or cursor.arrivals:
        _refuse(f"{instance} has {'keys that are still arriving' if cursor else 'no checkpoint yet'}")
    assert cursor is not None
    with _view(place, site_of(instance)) as router:
        _refuse_rows_in_log(router, operator.name, instance, cursor.applied)
    with _view(place, instance) as view:
        stored = [int(key[-1]) for table in ("state", "move") for key, _ in view.scan((table,))]
    return msgspec.structs.replace(cursor, generation=max([cursor.generation, *stored]) + 1)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while some := list(itertools.islice(iterator, size)):
        yield some


# -- the change itself ------------------------------------------------------------------------


class _Looked:
    """What is stored of an operator at one site, before anything changes."""

    def __init__(self, place: Place, operator: Operator, source: str, destination: str) -> None:
        with _view(place, site_of(source)) as router:
            self.reader: Reader | None = router.get(("reader", operator.name, destination))
            emitted = [router.get(("emitted", operator.name, i)) or 0 for i in (source, destination)]
            self.emitted = max(emitted)
            self.cursors = {name: _cursor(place, name) for name in (source, destination)}
            for name, cursor in self.cursors.items():
                if cursor is not None and cursor.arrivals:
                    _refuse(f"{name} has keys that are still arriving")
                _refuse_rows_in_log(router, operator.name, name, -1 if cursor is None else cursor.applied)


def _hand_over(place: Place, operator: Operator, source: str, destination: str, keys: KeySet) -> Divided:
    """The keys of these slots, and with all slots of the source whatever else it has."""
    looked = _Looked(place, operator, source, destination)
    table = _table(place, operator, site_of(source))
    update = table.moved(keys, source, destination) if keys.slots else TableUpdate({}, {})
    if all(slot in keys.slots for slot, route in enumerate(table.slots) if route.instance == source):
        guests = {k: r for k, r in table.overrides.items() if r.instance == source}
        update.keys.update(
            {
                k: Route(destination, r.epoch + 1)
                for k, r in guests.items()
                if _slot(k, operator) not in keys.slots
            }
        )
    before = dict(table.overrides)
    table.take(update)
    images, versions = _leaving(place, operator, source, destination, table)
    cursor = looked.cursors[destination] or looked.cursors[source]
    place.want({*place.wanted(), destination})  # one that no router knows throws away what it finds
    if cursor is not None:
        known = looked.cursors[destination]
        generation = known.generation + 1 if known is not None else 1
        puts: dict[StorageKey, Any] = {
            ("state", _slot(image.key, operator), image.key, generation): image for image in images
        }
        era = known.era if known is not None else None  # of versions that the destination has
        puts |= {("cursor",): msgspec.structs.replace(cursor, generation=generation, era=era)}
        # values of an earlier schema may be among them: the destination looks through all again
        _write(place, destination, puts, [("schema",)])
    # from the router's write on they are the destination's: killed before or behind it, none is missing
    for site in _sites(place, first=site_of(source)):
        puts = {("route", operator.name, slot): route for slot, route in update.slots.items()}
        puts |= {("route_key", operator.name, key): route for key, route in update.keys.items()}
        gone: list[StorageKey] = [
            ("route_key", operator.name, k) for k in before.keys() - table.overrides.keys()
        ]
        if site == site_of(source):
            if cursor is not None:
                began = looked.reader if looked.cursors[destination] is not None else None
                reader = began or Reader(looked.reader.life if looked.reader else 0, cursor.applied, {})
                # else it would be taken for a newcomer, and what it finds for older than itself
                puts["reader", operator.name, destination] = msgspec.structs.replace(reader, stored=True)
            puts["emitted", operator.name, destination] = looked.emitted
            gone.append(("retired", operator.name, destination))
            if source not in table.owners():
                puts["retired", operator.name, source] = True
                gone.append(("reader", operator.name, source))
        _write(place, site, puts, gone)
    for name in _instances(place, operator):
        _write(place, name, {("routes",): _routes(place, name, operator, update)})
    _write(place, source, {}, versions)
    return Divided(source, destination, len(update.slots), len(images))


def _leaving(
    place: Place, operator: Operator, source: str, destination: str, table: RoutingTable
) -> tuple[list[KeyImage], list[StorageKey]]:
    """The keys that belong to the destination now, with their new epoch; and all stored versions of them."""
    images: dict[bytes, KeyImage] = {}
    versions: list[StorageKey] = []
    if not exists(place.process(source)):
        return [], []
    with _view(place, source) as view:
        cursor: Cursor | None = view.get(("cursor",))
        for stored, image in view.scan(("state",)):
            route = table.route(image.key)
            if route.instance != destination:
                continue
            versions.append(stored)
            if cursor is not None and int(stored[-1]) <= cursor.generation:
                images[image.key] = KeyImage(
                    image.key,
                    route.epoch,
                    image.at,
                    image.values,
                    image.timers,
                    image.time_ms,
                    image.watermark_ms,
                )
    return list(images.values()), versions


def _routes(place: Place, instance: str, operator: Operator, update: TableUpdate) -> TableUpdate:
    """What an instance knows of the routing table, with what is new."""
    table = RoutingTable.initial(operator)
    with _view(place, instance) as view:
        table.take(view.get(("routes",)) or TableUpdate({}, {}))
    table.take(update)
    return TableUpdate({s: r for s, r in enumerate(table.slots) if r.epoch > 1}, dict(table.overrides))


# -- looking ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopped(place: Place) -> Iterator[None]:
    """Nobody else changes anything meanwhile, and nothing is under way."""
    manifest = place.manifest()
    if manifest.local:
        _refuse("its processes store on disks of their executors")
    lock = StorageLock(place)
    try:
        for site in manifest.topology.sites:
            if not exists(place.process(site)):
                _refuse(f"the router of {site} has stored nothing yet")
            with _view(place, site) as router:
                for table in UNDER_WAY:
                    if next(router.scan((table,)), None) is not None:
                        _refuse("a move is under way")
        yield
    finally:
        lock.release()


def _refuse(what: str) -> None:
    raise UserError(
        f"nothing can be changed by hand: {what}",
        expected="a deployment that has come to rest and was stopped",
        hint=_COME_TO_REST,
    )


def _refuse_rows_in_log(router: StoreView, operator: str, instance: str, applied: int) -> None:
    waiting = 0
    for stored, entry in router.scan(("inbox", operator)):
        if int(stored[-1]) > applied:
            waiting += sum(
                len(rows) for part, rows in entry.parts.items() if part.rpartition("|")[2] == instance
            )
    if waiting:
        _refuse(f"{waiting} rows in the log of {instance} are not in its checkpoint")


@contextlib.contextmanager
def _view(place: Place, process: str) -> Iterator[StoreView]:
    with contextlib.closing(StoreView(place.process(process))) as view:
        yield view


def _cursor(place: Place, instance: str) -> Cursor | None:
    if not exists(place.process(instance)):
        return None
    with _view(place, instance) as view:
        found: Cursor | None = view.get(("cursor",))
        return found


def _table(place: Place, operator: Operator, site: str) -> RoutingTable:
    table = RoutingTable.initial(operator)
    with _view(place, site) as router:
        for stored, route in router.scan(("route", operator.name)):
            table.slots[int(stored[-1])] = route
        for stored, route in router.scan(("route_key", operator.name)):
            table.overrides[stored[-1]] = route
    return table


def _operator(place: Place, instance: str) -> Operator:
    wanted = place.wanted()
    if instance not in wanted:
        raise UserError(f"no instance {instance!r}", expected=f"one of: {', '.join(wanted)}")
    return place.manifest().topology.operators[operator_of(instance)]


def _instances(place: Place, operator: Operator) -> list[str]:
    names = sorted(d.name for d in (place.directory / "processes").iterdir() if exists(d))
    return [name for name in names if operator_of(name) == operator.name]


def _sites(place: Place, first: str) -> list[str]:
    return [first, *(site for site in place.manifest().topology.sites if site != first)]


def _next_name(place: Place, operator: Operator, beside: str) -> str:
    stem = beside.rpartition("#")[0]
    taken = {*place.wanted(), *_instances(place, operator)}
    return next(name for n in range(1, len(taken) + 2) if (name := f"{stem}#{n}") not in taken)


def _slot(key: bytes, operator: Operator) -> int:
    return slot_of(key, operator.slots)


def _write(
    place: Place, process: str, puts: dict[StorageKey, Any], deletes: Iterable[StorageKey] = ()
) -> None:
    store = Store(place.process(process), "disk")
    with contextlib.closing(store):
        store.add(Write(1, puts, tuple(deletes)))
        store.commit()
        store.sync()
