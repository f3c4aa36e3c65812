"""The checkpoint writer: it stores dirty keys and positions as of one entry, while processing continues.

Responsible for: the contents of a checkpoint; storing it only when its entries are durable; the messages and
    deletions that follow.
Not responsible for: bytes (state/), processing (processing.py).

The writer takes a checkpoint at once and writes it a few keys at a time, while the keys change
(copy_on_write.py). So no key waits for others to be written. A checkpoint counts once its cursor is stored:

    (state, slot, key, 7)   (state, slot, key, 7)   ...   cursor 7    then versions before 7 are deleted

Layout: ("state", slot, key, generation) own keys; ("move", move, key, generation) arriving keys, under the
name of the move until it is done; ("routes", slot) changed routes; ("checkpoint",) positions. Of a
key, the newest version that is not newer than the cursor counts. Of an incomplete key set a checkpoint has
the units that are here; after a crash the destination receives the others again.

A move waits only for checkpoints of its own keys. A checkpoint of arrivals writes these keys, and leaves all
other keys as the last checkpoint has them (docs/decisions/0026).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tiercel.core import messages as m
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Journal, Step
from tiercel.core.machine.stored import CheckpointHeader, StoredIncomingMove
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.migration.units import unit_of
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.log import OWN, Position
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.topology import Operator, site_of
from tiercel.core.settings import Settings
from tiercel.core.state.copy_on_write import Look, Snapshot
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable

KEYED = 4  # elements of the storage key of a key: table, slot or move, key, generation
SLICES_MAX = 256  # a large checkpoint takes larger slices, so that it ends before the next one is due
OLDER_ARRIVALS_MAX = 16  # moves that a checkpoint of arrivals repeats; beyond it a full checkpoint is cheaper


class CheckpointScope(enum.IntEnum):
    """The requested contents of a checkpoint."""

    NOTHING = 0
    ARRIVALS = 1
    EVERYTHING = 2


class PendingCheckpoint:
    """A checkpoint that the writer has taken and is writing."""

    def __init__(self, scope: CheckpointScope, cursor: CheckpointHeader, rests_on: int, flush: int) -> None:
        self.scope = scope
        self.cursor = cursor
        self.rests_on = rests_on  # the log must be durable up to this offset
        self.flush = flush  # and the router must have admitted the outputs up to this flush
        self.deletes: list[StorageKey] = []  # deleted keys; removed together with the cursor
        self.routes: dict[int, RouteUpdate] = {}  # of the slots in which a route has changed
        self.snapshots: list[Snapshot] = []
        self.seen: deque[tuple[StorageKey, StateImage]] = deque()  # captured, not yet written
        self.written: list[StorageKey] = []
        self.of_moves: list[tuple[str, dict[Key, int]]] = []  # generations of keys under a move's name
        self.superseded: list[StorageKey] = []  # versions that do not count once the cursor is stored
        self.followers: list[m.Message] = []
        self.halting = ""
        self.seq = 0

    @property
    def complete(self) -> bool:
        return not self.seen and not any(snapshot.pending for snapshot in self.snapshots)


class CheckpointPort(Protocol):
    """The interface of an instance for its checkpoints."""

    name: str
    router: str
    incarnation: int
    operator: Operator
    settings: Settings
    journal: Journal
    space: StateTable
    routes: RoutingTable
    applied: int
    flushes: int
    confirmed: int
    durable: int
    time_ms: int
    watermark_ms: int
    router_incarnation: int
    takeover: int
    halting: str

    @property
    def is_running(self) -> bool: ...

    @property
    def senders(self) -> Mapping[str, StateSender]: ...

    @property
    def receivers(self) -> Mapping[str, StateReceiver]: ...

    def keys_changed(self, step: Step, keys: Iterable[Key]) -> None: ...

    def tell(self, step: Step, message: m.Message) -> None: ...

    def exit(self, step: Step, reason: str) -> None: ...


class CheckpointWriter:
    """Takes and writes the checkpoints of one instance, one at a time."""

    def __init__(self, instance: CheckpointPort) -> None:
        self.instance = instance
        self.taken: PendingCheckpoint | None = None
        self.generation = 0  # no number is used twice in an incarnation
        self._orphans: list[StorageKey] = []  # of abandoned checkpoints; deleted with a later cursor
        self._due_ms = float("inf")
        self.in_flight = False  # an abandoned cursor was written, and may still become durable
        self.forget()

    def forget(self) -> None:
        """Abandon the running checkpoint, which must never count: the instance restarts at the last one."""
        if self.taken is not None:
            self._orphans += self.taken.written
            self.in_flight = self.in_flight or self.taken.seq > 0
        self.taken = None
        self._last: CheckpointHeader | None = None  # the stored checkpoint that the next one may build upon
        self._again = CheckpointScope.NOTHING
        self._followers: list[m.Message] = []
        self._dropped: list[StorageKey] = []  # deleted with the next cursor: until then they may count
        self._swept: deque[StorageKey] = deque()  # to delete; they no longer count
        self._routes_version = -1  # of the table that is stored
        self._stored: dict[Key, int] = {}  # the generation of each own key that is stored
        self._stored_moves: dict[str, dict[Key, int]] = {}  # of the keys stored under a move's name

    def arm(self, step: Step) -> None:
        self._due_ms = step.now_ms + self.instance.settings.checkpoint_ms
        step.timer(Timer(TimerKind.CHECKPOINT), self._due_ms)

    def schedule_soon(self, step: Step) -> None:
        """Schedule a full checkpoint after the end of a move; the end of another move postpones it."""
        step.timer(
            Timer(TimerKind.CHECKPOINT), min(self._due_ms, step.now_ms + self.instance.settings.tidy_ms)
        )

    def due(self, step: Step) -> None:
        self.soon(step)
        self.arm(step)

    def soon(self, step: Step, scope: CheckpointScope = CheckpointScope.EVERYTHING) -> None:
        """Take a checkpoint now, or as soon as the running one is stored."""
        if self.taken is None and self.instance.is_running:
            self._take(step, scope)
        else:
            self._again = max(self._again, scope)

    def notify_after_next(self, step: Step, message: m.Message) -> None:
        """Send the router a message once the next full checkpoint is stored; it asks again until then."""
        if message not in self._followers:
            self._followers.append(message)
            self.schedule_soon(step)

    def continue_from(self, cursor: CheckpointHeader) -> None:
        """Continue from a loaded checkpoint. The next may build upon it if no other version could count.

        Versions of an unfinished checkpoint are newer than the loaded one and older than the next. A cursor
        that may still become durable would delete keys.
        """
        if self.may_build_upon_stored():
            self._last = cursor

    def may_build_upon_stored(self) -> bool:
        """Whether a checkpoint of arrivals may build upon the last one: no unfinished one is stored."""
        return not self._dropped and not self.in_flight

    def drop_move(self, move: str) -> None:
        """Delete the stored keys of an undone or merged move with the next checkpoint."""
        stored = self._stored_moves.pop(move, {})
        self._dropped += [("move", move, key, generation) for key, generation in stored.items()]

    def stored_generation(self, key: Key) -> int | None:
        """The generation of the newest stored version of an own key; None if there is none."""
        return self._stored.get(key)

    def found(self, move: str | None, key: Key, generation: int) -> None:
        """Record a version that counts, which the loader has found: of an own key or of a move's key."""
        (self._stored if move is None else self._stored_moves.setdefault(move, {}))[key] = generation

    def found_useless(self, places: list[StorageKey], generation: int, newest: int) -> None:
        """Delete versions that do not count, which the loader has found, with the next checkpoint.

        Writes of this incarnation may not be on disk yet, so the writer also remembers its own.
        """
        self.generation = max(self.generation, newest)
        self._dropped += [place for place in self._orphans if int(place[-1]) > generation]
        self._dropped += places

    def discard(self, items: dict[StorageKey, Any]) -> None:
        """Discard all stored versions. No new version may use the generation of one of them."""
        self._dropped += [*items, *self._orphans]
        cursor: CheckpointHeader | None = items.get(("checkpoint",))
        versions = [int(place[-1]) for place in items if len(place) == KEYED]
        self.generation = max([self.generation, *versions, cursor.generation if cursor is not None else 0])

    def takeover(self, own: dict[StorageKey, Any]) -> None:
        """Take over loaded keys of another instance: the first checkpoint stores all, and only it counts."""
        self._stored, self._stored_moves, self._dropped = {}, {}, []
        self._last, self._routes_version = None, -1
        self.discard(own)
        space = self.instance.space
        space.dirty.update(dict.fromkeys(space.keys))

    # -- taking one ----------------------------------------------------------------------------

    def _take(self, step: Step, scope: CheckpointScope) -> None:
        instance, last = self.instance, self._last
        incoming_moves = [
            (receiver, position)
            for receiver in instance.receivers.values()
            if (position := receiver.checkpoint_position()) is not None
        ]
        older = self._older_arrivals(incoming_moves)
        stalled = any(image.move in self._stored_moves for image in older)
        few = stalled or len(older) <= OLDER_ARRIVALS_MAX
        if scope is CheckpointScope.ARRIVALS and last is not None and few:
            if not incoming_moves:
                return
            own, era = (last.applied, last.router_incarnation, last.time_ms, last.watermark_ms), last.era
        elif stalled:
            return  # rows of a move wait, which may have voted: no position can be claimed for it
        else:
            scope, older = CheckpointScope.EVERYTHING, []
            own = (instance.applied, instance.router_incarnation, instance.time_ms, instance.watermark_ms)
            era = instance.space.era
        rests_on = own[0]
        for receiver, position in incoming_moves:
            if position[0] == OWN or site_of(receiver.source) == instance.router:
                rests_on = max(rests_on, position[1])
        self.generation += 1
        images = [receiver.to_stored(position) for receiver, position in incoming_moves]
        cursor = CheckpointHeader(self.generation, *own, [*images, *older], era, instance.takeover)
        taken = self.taken = PendingCheckpoint(scope, cursor, rests_on, instance.flushes)
        if scope is CheckpointScope.EVERYTHING:
            instance.keys_changed(step, instance.space.dirty)
            self._take_own(taken)
        for receiver, position in incoming_moves:
            self._take_arriving(taken, receiver, position)
        self.write_some(step)

    def _older_arrivals(self, now: list[tuple[StateReceiver, Position]]) -> list[StoredIncomingMove]:
        """The incoming moves that the last checkpoint holds and for which this one has nothing newer.

        Their rows wait, or they have merged or were undone: as of the last checkpoint, they still arrive.
        """
        known = {receiver.move for receiver, _ in now}
        return [image for image in self._last.incoming_moves if image.move not in known] if self._last else []

    def _take_own(self, taken: PendingCheckpoint) -> None:
        instance = self.instance
        taken.deletes, self._dropped = self._dropped, []
        taken.followers, self._followers = self._followers, []
        taken.halting = instance.halting
        routes = instance.routes
        if self._routes_version != routes.version:
            changed = routes.take_changed()
            if self._routes_version < 0:
                changed = routes.changed_slots()
            self._routes_version = routes.version
            taken.routes = {slot: routes.routes_of(KeySet(frozenset((slot,)))) for slot in changed}
        slots, stored = instance.operator.slots, self._stored
        retained_state = {
            k: s for sender in instance.senders.values() for k, s in sender.retained_state.items()
        }
        pending: dict[Key, KeyState] = {}
        for key in instance.space.dirty:
            state = instance.space.keys.get(key) or retained_state.get(key)
            if state is not None and not state.empty:
                pending[key] = state
            elif key in stored:
                taken.deletes.append(("state", slot_of(key, slots), key, stored.pop(key)))
        instance.space.dirty.clear()
        look = self._look(taken, taken.cursor.applied, stored, lambda key, slot: ("state", slot, key))
        self._watch(taken, instance.space.watch, pending, look)

    def _take_arriving(self, taken: PendingCheckpoint, receiver: StateReceiver, position: Position) -> None:
        move = receiver.move
        first = move not in self._stored_moves
        stored = self._stored_moves.setdefault(move, {})
        taken.of_moves.append((move, stored))
        pending: dict[Key, KeyState] = {}
        later: list[Key] = []  # rows of theirs wait: the checkpoint has nothing of their units
        missing, slots = receiver.uncovered_units(), self.instance.operator.slots
        for key in receiver.space.keys if first else receiver.space.dirty:
            if missing and unit_of(key, slots) in missing:
                later.append(key)
                continue
            state = receiver.space.keys.get(key)
            if state is not None and not state.empty:
                pending[key] = state
            elif key in stored:
                taken.deletes.append(("move", move, key, stored.pop(key)))
        receiver.space.dirty.clear()
        receiver.space.dirty.update(dict.fromkeys(later))
        look = self._look(taken, position[1], stored, lambda key, _: ("move", move, key))
        self._watch(taken, receiver.space.watch, pending, look)

    def _watch(
        self,
        taken: PendingCheckpoint,
        watch: Callable[[Snapshot], None],
        pending: dict[Key, KeyState],
        look: Look,
    ) -> None:
        if pending:
            snapshot = Snapshot(pending, look)
            taken.snapshots.append(snapshot)
            watch(snapshot)

    def _look(
        self,
        taken: PendingCheckpoint,
        at: int,
        stored: dict[Key, int],
        place: Callable[[Key, int], StorageKey],
    ) -> Look:
        """The function that turns the state of a key into a version of this checkpoint."""
        generation = taken.cursor.generation
        time_ms, watermark_ms = self.instance.time_ms, self.instance.watermark_ms

        def look(key: Key, state: KeyState) -> None:
            where = place(key, state.slot)
            taken.seen.append(((*where, generation), state.image(key, at, time_ms, watermark_ms)))
            before = stored.get(key)
            if before is not None:
                taken.superseded.append((*where, before))
            stored[key] = generation

        return look

    # -- writing it ----------------------------------------------------------------------------

    def write_some(self, step: Step, at_least: int = 0) -> None:
        """Write the next few keys, or delete some superseded versions; then other work has its turn."""
        taken, settings, memory_limit = self.taken, self.instance.settings, self.instance.space.memory_limit
        if self._swept:
            for _ in range(min(len(self._swept), max(at_least, 4 * settings.slice_keys))):
                step.delete(self._swept.popleft())
        elif taken is not None and not taken.complete:
            waiting = sum(len(s.pending) for s in taken.snapshots)
            count = max(settings.slice_keys, waiting // SLICES_MAX, at_least)
            left, size = count - len(taken.seen), 0
            for snapshot in taken.snapshots:
                if left > 0:
                    left -= snapshot.look_at(left)
            while taken.seen and count and (size < settings.chunk_bytes_max or at_least):
                place, image = taken.seen.popleft()
                step.put(place, image)
                taken.written.append(place)
                count -= 1
                size += (size_bytes := image.size_bytes)
                if memory_limit.active and place[0] == "state":
                    memory_limit.saw(image.key, size_bytes)
        any_left = memory_limit.make_room(max(at_least, 4 * settings.slice_keys), self._stored)
        self.try_store(step)
        if any_left or self._swept or (taken is not None and not taken.complete):
            step.timer(Timer(TimerKind.SLICE), step.now_ms + settings.capture_pause_ms)

    def enforce_memory_limit(self, step: Step) -> None:
        """Evict keys above the memory limit, or take an early checkpoint so that they can be evicted.

        Entries may bring keys faster than slices write them. Then each entry also writes some keys.
        """
        memory_limit = self.instance.space.memory_limit
        at_least = max(4 * self.instance.settings.slice_keys, 4 * memory_limit.newly_dirty())
        any_left = memory_limit.make_room(at_least, self._stored)
        if (memory_limit.over and not any_left) or memory_limit.checkpoint_wanted():
            if not memory_limit.checkpoint_asked:
                memory_limit.checkpoint_asked = True
                self.soon(step)
            if self._swept or (self.taken is not None and not self.taken.complete):
                self.write_some(step, at_least)

    def try_store(self, step: Step) -> None:
        """Store the cursor once the entries of the checkpoint are durable and their outputs admitted.

        Otherwise the checkpoint could hold entries that the log has lost, or cover outputs that were lost.
        """
        taken, instance = self.taken, self.instance
        if taken is None or taken.seq or not taken.complete or self._swept:
            return  # older versions must be deleted before a newer one that this cursor deletes
        if not self.may_store(taken):
            return
        for key in taken.deletes:
            step.delete(key)
        step.put(("checkpoint",), taken.cursor)
        for slot, update in taken.routes.items():
            step.put(("routes", slot), update)
        taken.seq = instance.journal.written + 1

    def may_store(self, taken: PendingCheckpoint) -> bool:
        """Whether the covered entries are durable, and the router has admitted their outputs."""
        return taken.rests_on <= self.instance.durable and taken.flush <= self.instance.confirmed

    def stored(self, step: Step, seq: int) -> None:
        taken = self.taken
        if taken is None or not taken.seq or taken.seq > seq:
            return
        self.taken = None
        instance, cursor = self.instance, taken.cursor
        self._last = cursor
        if taken.scope is CheckpointScope.EVERYTHING:
            instance.space.memory_limit.covered = cursor.generation
            instance.space.memory_limit.checkpoint_asked = False
        self._sweep(step, taken)
        moves, count = self.covered_positions(cursor), instance.space.count
        step.send(
            instance.router, m.Checkpointed(instance.name, instance.incarnation, cursor.applied, moves, count)
        )
        for message in taken.followers:
            instance.tell(step, message)
        for image in cursor.incoming_moves:
            receiver = instance.receivers.get(image.move)
            if receiver is not None:
                receiver.on_units_stored(step, image.missing)
                if not image.missing:
                    receiver.on_checkpoint_stored(step, image.position)
        if taken.halting:
            instance.exit(step, "halted for " + taken.halting)
        elif again := CheckpointScope.EVERYTHING if instance.halting else self._again:
            self._again = CheckpointScope.NOTHING
            self._take(step, again)

    def covered_positions(self, cursor: CheckpointHeader) -> dict[str, Position]:
        """The position of each incoming move: it reads another log, or lags behind the own keys.

        Rule R34: a move with missing units has none. Their rows are not covered, and come again.
        """
        return {image.move: image.position for image in cursor.incoming_moves if not image.missing}

    # -- after the cursor is stored ------------------------------------------------------------

    def _sweep(self, step: Step, taken: PendingCheckpoint) -> None:
        """Delete older versions, and versions of moves that ended while the checkpoint was written."""
        self._orphans, self.in_flight = [], False
        taken.snapshots.clear()  # breaks a reference cycle, so that memory is released now
        self._swept += taken.superseded
        for move, stored in taken.of_moves:
            if self._stored_moves.get(move) is not stored:
                self._dropped += [("move", move, key, generation) for key, generation in stored.items()]
        if self._swept or self.instance.space.memory_limit.over:
            step.timer(Timer(TimerKind.SLICE), step.now_ms + self.instance.settings.capture_pause_ms)
