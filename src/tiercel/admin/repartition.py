"""Changes of a stopped deployment: split an instance, merge two, import keys.

Responsible for: the stores of instances, routing tables and readers.
Not responsible for: running deployments, where keys are moved (`live.move`, `live.scale`).

    split   count@cloud#1: slots 0-15   -->  count@cloud#1: 0-7     count@cloud#2: 8-15
    merge   the other way round

There must be no unfinished move, and no row in the log that the checkpoints do not cover. Each store is
changed in one atomic batch. The routers come last, because they decide which instance owns a key. A change
that was interrupted before that is repeated.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiercel.core.machine.effects import StorageKey, Write
from tiercel.core.machine.stored import CheckpointHeader, LogReader
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.topology import Operator, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, DriverLock
from tiercel.runtime.recovery.read_only import stored_keys
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.store import Store, StoreView

KEYS_PER_BATCH = 1_000
UNDER_WAY = ("outgoing", "incoming", "pause")
_COME_TO_REST = "start it, let its inputs come to rest, run `tiercel state checkpoint`, then stop it"


class RepartitionResult(msgspec.Struct, frozen=True):
    """What was transferred."""

    source: str
    destination: str
    slots: int
    keys: int


def split(
    storage: str | Path, instance: str, slots: Iterable[int] | None = None, into: str | None = None
) -> RepartitionResult:
    """Give some slots of an instance, by default the upper half, to a new instance of its site."""
    deployment = DeploymentDir(storage)
    with _stopped_deployment(deployment):
        operator = _operator(deployment, instance)
        table = _table(deployment, operator, site_of(instance))
        owned = [slot for slot, route in enumerate(table.slots) if route.instance == instance]
        chosen = sorted(set(owned[len(owned) // 2 :] if slots is None else slots))
        foreign = [slot for slot in chosen if slot not in owned]
        if foreign or not 0 < len(chosen) < len(owned):
            raise UserError(
                f"slots to split off {instance}: {foreign or chosen}",
                expected=f"some, not all, of its {len(owned)} slots",
                hint="tiercel state show lists what each instance has",
            )
        new = into or _next_name(deployment, operator, instance)
        if (
            operator_of(new) != operator.name
            or site_of(new) != site_of(instance)
            or new in deployment.desired_instances()
        ):
            what = f"a new instance {new!r} beside {instance}"
            raise UserError(what, expected=f"a name as {_next_name(deployment, operator, instance)}")
        return _transfer(deployment, operator, instance, new, KeySet(slots=frozenset(chosen)))


def merge(storage: str | Path, source: str, destination: str) -> RepartitionResult:
    """Give everything of one instance to another one of the same operator and site, and retire the first."""
    deployment = DeploymentDir(storage)
    with _stopped_deployment(deployment):
        operator = _operator(deployment, source)
        if source == destination or _operator(deployment, destination) != operator:
            what = f"merging {source} into {destination}"
            raise UserError(what, expected="two instances of one operator")
        if site_of(source) != site_of(destination):
            what = f"{source} and {destination} are at different sites"
            raise UserError(what, expected="one site", hint="move the keys while it runs: live.move(...)")
        table = _table(deployment, operator, site_of(source))
        owned = frozenset(slot for slot, route in enumerate(table.slots) if route.instance == source)
        found = _transfer(deployment, operator, source, destination, KeySet(slots=owned))
        deployment.set_desired_instances([i for i in deployment.desired_instances() if i != source])
        return found


def put_keys(
    storage: str | Path, operator_name: str, state: Iterable[tuple[Key, dict[str, Any], Sequence[int]]]
) -> int:
    """Store keys with values and timers for an operator without keys; returns their number.

    They are stored as versions that no checkpoint covers. The cursors of the instances follow at the end, so
    an interruption before that changes nothing.
    """
    deployment = DeploymentDir(storage)
    with _stopped_deployment(deployment):
        operator = deployment.manifest().topology.operators[operator_name]
        if next(stored_keys(deployment, operator_name), None) is not None:
            what = f"operator {operator_name!r} has keys already"
            raise UserError(what, expected="an operator without state: nothing is overwritten")
        table = _table(deployment, operator, site_of(operator.instances[0]))
        cursors = {name: _next_cursor(deployment, operator, name) for name in table.owners()}
        count = 0
        for some in _batches(state, KEYS_PER_BATCH):
            puts: dict[str, dict[StorageKey, Any]] = {}
            for key, values, timers in some:
                route = table.route(key)
                at = cursors[route.instance]
                times = (at.time_ms, at.watermark_ms)
                image = StateImage(key, route.epoch, at.applied, values, tuple(timers), *times)
                storage_key = ("state", _slot(key, operator), key, at.generation)
                puts.setdefault(route.instance, {})[storage_key] = image
            for instance, of_instance in puts.items():
                _write(deployment, instance, of_instance)
            count += len(some)
        for instance, cursor in cursors.items():
            _write(deployment, instance, {("checkpoint",): cursor})
    return count


def _next_cursor(deployment: DeploymentDir, operator: Operator, instance: str) -> CheckpointHeader:
    """The cursor of a checkpoint after everything that an instance has stored."""
    cursor = _cursor(deployment, instance)
    if cursor is None or cursor.incoming_moves:
        _refuse(f"{instance} has {'keys that are still arriving' if cursor else 'no checkpoint yet'}")
    assert cursor is not None
    with _view(deployment, site_of(instance)) as router:
        _refuse_rows_in_log(router, operator.name, instance, cursor.applied)
    with _view(deployment, instance) as view:
        stored = [int(key[-1]) for table in ("state", "move") for key, _ in view.scan((table,))]
    return msgspec.structs.replace(cursor, generation=max([cursor.generation, *stored]) + 1)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while some := list(itertools.islice(iterator, size)):
        yield some


# -- the change itself ------------------------------------------------------------------------


class _StoredBefore:
    """What is stored of an operator at one site before the transfer."""

    def __init__(self, deployment: DeploymentDir, operator: Operator, source: str, destination: str) -> None:
        with _view(deployment, site_of(source)) as router:
            self.reader: LogReader | None = router.get(("reader", operator.name, destination))
            emitted = [router.get(("emitted", operator.name, i)) or 0 for i in (source, destination)]
            self.emitted = max(emitted)
            self.cursors = {name: _cursor(deployment, name) for name in (source, destination)}
            for name, cursor in self.cursors.items():
                if cursor is not None and cursor.incoming_moves:
                    _refuse(f"{name} has keys that are still arriving")
                _refuse_rows_in_log(router, operator.name, name, -1 if cursor is None else cursor.applied)


def _transfer(
    deployment: DeploymentDir, operator: Operator, source: str, destination: str, keys: KeySet
) -> RepartitionResult:
    """Transfer the keys of these slots; with all slots of the source, also keys with their own route."""
    before_move = _StoredBefore(deployment, operator, source, destination)
    table = _table(deployment, operator, site_of(source))
    update = table.moved(keys, source, destination) if keys.slots else RouteUpdate({}, {})
    if all(slot in keys.slots for slot, route in enumerate(table.slots) if route.instance == source):
        overridden = {k: r for k, r in table.overrides.items() if r.instance == source}
        update.keys.update(
            {k: r.to(destination) for k, r in overridden.items() if _slot(k, operator) not in keys.slots}
        )
    before = dict(table.overrides)
    table.take(update)
    images, versions = _keys_to_move(deployment, operator, source, destination, table)
    cursor = before_move.cursors[destination] or before_move.cursors[source]
    deployment.set_desired_instances(
        {*deployment.desired_instances(), destination}
    )  # an instance that no router knows would discard its store
    if cursor is not None:
        known = before_move.cursors[destination]
        generation = known.generation + 1 if known is not None else 1
        puts: dict[StorageKey, Any] = {
            ("state", _slot(image.key, operator), image.key, generation): image for image in images
        }
        era = known.era if known is not None else None  # of the versions in the destination's store
        puts |= {("checkpoint",): msgspec.structs.replace(cursor, generation=generation, era=era)}
        # values of an earlier schema may be among them: the destination checks all of them again
        _write(deployment, destination, puts, [("schema",)])
    # with the router's write the destination owns the keys; a kill before or after it loses none
    for site in _sites(deployment, first=site_of(source)):
        puts = {("route", operator.name, slot): route for slot, route in update.slots.items()}
        puts |= {("route_key", operator.name, key): route for key, route in update.keys.items()}
        gone: list[StorageKey] = [
            ("route_key", operator.name, k) for k in before.keys() - table.overrides.keys()
        ]
        if site == site_of(source):
            if cursor is not None:
                began = before_move.reader if before_move.cursors[destination] is not None else None
                reader = began or LogReader(
                    before_move.reader.incarnation if before_move.reader else 0, cursor.applied, {}
                )
                # otherwise the router would treat it as a new instance, and its store as stale
                puts["reader", operator.name, destination] = msgspec.structs.replace(reader, stored=True)
            puts["emitted", operator.name, destination] = before_move.emitted
            gone.append(("retired", operator.name, destination))
            if source not in table.owners():
                puts["retired", operator.name, source] = True
                gone.append(("reader", operator.name, source))
        _write(deployment, site, puts, gone)
    for name in _instances(deployment, operator):
        _write(deployment, name, _routes(deployment, name, operator, update))
    _write(deployment, source, {}, versions)
    return RepartitionResult(source, destination, len(update.slots), len(images))


def _keys_to_move(
    deployment: DeploymentDir, operator: Operator, source: str, destination: str, table: RoutingTable
) -> tuple[list[StateImage], list[StorageKey]]:
    """The keys that belong to the destination now, with their new epoch; all their stored versions."""
    images: dict[bytes, StateImage] = {}
    versions: list[StorageKey] = []
    if not exists(deployment.process(source)):
        return [], []
    with _view(deployment, source) as view:
        cursor: CheckpointHeader | None = view.get(("checkpoint",))
        for stored, image in view.scan(("state",)):
            route = table.route(image.key)
            if route.instance != destination:
                continue
            versions.append(stored)
            if cursor is not None and int(stored[-1]) <= cursor.generation:
                images[image.key] = StateImage(
                    image.key,
                    route.epoch,
                    image.at,
                    image.values,
                    image.timers,
                    image.time_ms,
                    image.watermark_ms,
                )
    return list(images.values()), versions


def _routes(
    deployment: DeploymentDir, instance: str, operator: Operator, update: RouteUpdate
) -> dict[StorageKey, RouteUpdate]:
    """The stored routing table of an instance, with the update."""
    table = RoutingTable.initial(operator)
    with _view(deployment, instance) as view:
        for _, routes in view.scan(("routes",)):
            table.take(routes)
    table.take(update)
    changed = table.changed_slots()
    return {("routes", slot): table.routes_of(KeySet(frozenset((slot,)))) for slot in changed}


# -- reading ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopped_deployment(deployment: DeploymentDir) -> Iterator[None]:
    """Hold the driver lock, and check that no move is unfinished."""
    manifest = deployment.manifest()
    if manifest.local:
        _refuse("its processes store on disks of their executors")
    lock = DriverLock(deployment)
    try:
        for site in manifest.topology.sites:
            if not exists(deployment.process(site)):
                _refuse(f"the router of {site} has stored nothing yet")
            with _view(deployment, site) as router:
                for table in UNDER_WAY:
                    if next(router.scan((table,)), None) is not None:
                        _refuse("a move is under way")
        yield
    finally:
        lock.release()


def _refuse(what: str) -> None:
    raise UserError(
        f"nothing can be changed by hand: {what}",
        expected="a stopped deployment without unfinished work",
        hint=_COME_TO_REST,
    )


def _refuse_rows_in_log(router: StoreView, operator: str, instance: str, applied: int) -> None:
    waiting = 0
    for stored, entry in router.scan(("inbox", operator)):
        if int(stored[-1]) > applied:
            waiting += len(entry.rows_of(instance))
    if waiting:
        _refuse(f"{waiting} rows in the log of {instance} are not in its checkpoint")


@contextlib.contextmanager
def _view(deployment: DeploymentDir, process: str) -> Iterator[StoreView]:
    with contextlib.closing(StoreView(deployment.process(process))) as view:
        yield view


def _cursor(deployment: DeploymentDir, instance: str) -> CheckpointHeader | None:
    if not exists(deployment.process(instance)):
        return None
    with _view(deployment, instance) as view:
        found: CheckpointHeader | None = view.get(("checkpoint",))
        return found


def _table(deployment: DeploymentDir, operator: Operator, site: str) -> RoutingTable:
    table = RoutingTable.initial(operator)
    with _view(deployment, site) as router:
        for stored, route in router.scan(("route", operator.name)):
            table.slots[int(stored[-1])] = route
        for stored, route in router.scan(("route_key", operator.name)):
            table.overrides[stored[-1]] = route
    return table


def _operator(deployment: DeploymentDir, instance: str) -> Operator:
    wanted = deployment.desired_instances()
    if instance not in wanted:
        raise UserError(f"no instance {instance!r}", expected=f"one of: {', '.join(wanted)}")
    return deployment.manifest().topology.operators[operator_of(instance)]


def _instances(deployment: DeploymentDir, operator: Operator) -> list[str]:
    names = sorted(d.name for d in (deployment.directory / "processes").iterdir() if exists(d))
    return [name for name in names if operator_of(name) == operator.name]


def _sites(deployment: DeploymentDir, first: str) -> list[str]:
    return [first, *(site for site in deployment.manifest().topology.sites if site != first)]


def _next_name(deployment: DeploymentDir, operator: Operator, beside: str) -> str:
    stem = beside.rpartition("#")[0]
    taken = {*deployment.desired_instances(), *_instances(deployment, operator)}
    return next(name for n in range(1, len(taken) + 2) if (name := f"{stem}#{n}") not in taken)


def _slot(key: bytes, operator: Operator) -> int:
    return slot_of(key, operator.slots)


def _write(
    deployment: DeploymentDir, process: str, puts: dict[StorageKey, Any], deletes: Iterable[StorageKey] = ()
) -> None:
    store = Store(deployment.process(process), "disk")
    with contextlib.closing(store):
        store.add(Write(1, puts, tuple(deletes)))
        store.commit()
        store.sync()
