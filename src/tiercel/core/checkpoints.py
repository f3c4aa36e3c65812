"""Checkpoints of an instance: dirty keys and positions, in one atomic write, off the critical path.

Responsible for: what a checkpoint holds, that it rests on durable entries only, what follows from it.
Not responsible for: the bytes (state/), the instance's processing.

Layout: ("state", slot, key) own keys; ("move", move, key) keys that are arriving, under the move's
name until it is done; ("cursor",) positions. A key set that is not complete is not in a checkpoint:
after a crash its arrival begins anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.destination import DestinationMove, Marks
from tiercel.core.destination import Phase as DestinationPhase
from tiercel.core.effects import StorageKey
from tiercel.core.records import OWN, Adopt, KeySet, Output, Position, TableUpdate
from tiercel.core.routing import slot_of
from tiercel.core.step import Step
from tiercel.core.topology import site_of

if TYPE_CHECKING:
    from tiercel.core.processing import Processing


class ArrivalImage(msgspec.Struct, frozen=True):
    """An arriving key set as of a checkpoint."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    epochs: TableUpdate
    position: Position
    adopt: Adopt | None
    adopted_at: int
    shadow_watermark_ms: int
    own_watermark_ms: int
    floors: dict[bytes, int]
    at: dict[bytes, Position]
    kept: list[tuple[int, Output]]  # outputs that are not yet allowed out: nobody would make them again
    kept_dead: list[tuple[int, Output]]


class Cursor(msgspec.Struct, frozen=True):
    """Where a checkpoint stands."""

    applied: int
    incarnation: int
    time_ms: int
    watermark_ms: int
    routes: TableUpdate
    arrivals: list[ArrivalImage]


class _Taken:
    """A checkpoint that was taken and waits to be stored, or is being stored."""

    def __init__(
        self,
        puts: dict[StorageKey, Any],
        deletes: list[StorageKey],
        cursor: Cursor,
        rests_on: int,
        flush: int,
    ) -> None:
        self.puts, self.deletes, self.cursor = puts, deletes, cursor
        self.rests_on = rests_on  # the log must be durable up to here
        self.flush = flush  # and the outputs of what it covers must be admitted
        self.followers: list[m.Message] = []
        self.halting = ""
        self.seq = 0


class Checkpointer:
    """Takes and stores the checkpoints of one instance, one at a time."""

    def __init__(self, instance: Processing) -> None:
        self.instance = instance
        self.forget()

    def forget(self) -> None:
        self.taken: _Taken | None = None
        self._again = False
        self._followers: list[m.Message] = []
        self._dropped: list[StorageKey] = []
        self._routes: tuple[int, TableUpdate] | None = None  # what of the table has changed, at which version
        self._stored_moves: dict[str, set[bytes]] = {}  # keys that a checkpoint holds under a move's name

    def arm(self, step: Step) -> None:
        step.timer("checkpoint", step.now_ms + self.instance.settings.checkpoint_ms)

    def due(self, step: Step) -> None:
        self.soon(step)
        self.arm(step)

    def soon(self, step: Step) -> None:
        """Take one now, or as soon as the one under way is stored."""
        if self.instance.phase.value != "running":
            self._again = True
        elif self.taken is None:
            self._take(step)
        else:
            self._again = True

    def after_next(self, message: m.Message) -> None:
        """Tell the router this once the next checkpoint is stored."""
        self._followers.append(message)

    def drop_move(self, arriving: DestinationMove) -> None:
        stored = self._stored_moves.pop(arriving.move, set())
        self._dropped += [("move", arriving.move, key) for key in stored]

    def discard(self, items: dict[StorageKey, Any]) -> None:
        """Nothing of what is stored counts any more."""
        self._dropped += list(items)

    merge_move = drop_move  # its keys are dirty own keys now; what was under the move's name goes

    def _take(self, step: Step) -> None:
        instance = self.instance
        puts: dict[StorageKey, Any] = {}
        deletes = self._dropped
        self._dropped = []
        retained = {k: s for lv in instance.leaving.values() for k, s in lv.retained.items()}
        for key in instance.space.dirty:
            state = instance.space.keys.get(key) or retained.get(key)
            place = ("state", slot_of(key, instance.operator.slots), key)
            if state is None or state.empty:
                deletes.append(place)
            else:
                puts[place] = state.image(key, instance.applied, instance.time_ms, instance.watermark_ms)
        instance.space.dirty.clear()
        arrivals = []
        rests_on = instance.applied
        for arriving in instance.arriving.values():
            position = arriving.checkpoint_position()
            if position is not None:
                arrivals.append(self._arrival(arriving, position, puts, deletes))
                if position[0] == OWN or site_of(arriving.source) == instance.router:
                    rests_on = max(rests_on, position[1])
        routes = instance.routes
        if self._routes is None or self._routes[0] != routes.version:
            slots = {s: r for s, r in enumerate(routes.slots) if r.epoch > 1}
            self._routes = (routes.version, TableUpdate(slots, dict(routes.overrides)))
        changed = self._routes[1]
        cursor = Cursor(
            instance.applied, instance.incarnation, instance.time_ms, instance.watermark_ms, changed, arrivals
        )
        puts["cursor",] = cursor
        self.taken = _Taken(puts, deletes, cursor, rests_on, instance.flushes)
        self.taken.followers, self._followers = self._followers, []
        self.taken.halting = instance.halting
        self.try_store(step)

    def _arrival(
        self,
        arriving: DestinationMove,
        position: Position,
        puts: dict[StorageKey, Any],
        deletes: list[StorageKey],
    ) -> ArrivalImage:
        stored = self._stored_moves.setdefault(arriving.move, set())
        first = not stored
        for key in set(arriving.space.keys) if first else arriving.space.dirty:
            state = arriving.space.keys.get(key)
            place = ("move", arriving.move, key)
            if state is None or state.empty:
                deletes.append(place)
            else:
                puts[place] = state.image(key, position[1], self.instance.time_ms, self.instance.watermark_ms)
                stored.add(key)
        arriving.space.dirty.clear()
        return ArrivalImage(
            arriving.move,
            arriving.keys,
            arriving.source,
            arriving.strategy,
            arriving.epochs,
            position,
            arriving.adopt,
            arriving.adopted_at,
            arriving.marks.shadow_ms,
            arriving.marks.own_ms,
            dict(arriving.floor_wm),
            dict(arriving.at),
            list(arriving.kept),
            list(arriving.kept_dead),
        )

    def try_store(self, step: Step) -> None:
        """A checkpoint rests on durable entries and admitted outputs only.

        Else it would know what the log has forgotten, or never make again an output that was lost.
        """
        taken, instance = self.taken, self.instance
        if taken is None or taken.seq:
            return
        early = taken.rests_on > instance.durable or taken.flush > instance.confirmed
        if early and instance.settings.mutant != "checkpoint-ahead-of-log":
            return
        for key, value in taken.puts.items():
            step.put(key, value)
        for key in taken.deletes:
            step.delete(key)
        taken.seq = instance.journal.written + 1

    def stored(self, step: Step, seq: int) -> None:
        taken = self.taken
        if taken is None or not taken.seq or taken.seq > seq:
            return
        self.taken = None
        instance, cursor = self.instance, taken.cursor
        moves = {a.move: a.position for a in cursor.arrivals}
        if instance.settings.mutant == "positions-flattened":
            moves = {move: (OWN, cursor.applied) for move in moves}
        step.send(instance.router, m.Checkpointed(instance.name, instance.life, cursor.applied, moves))
        for message in taken.followers:
            instance.tell(step, message)
        for image in cursor.arrivals:
            arriving = instance.arriving.get(image.move)
            if arriving is not None:
                self._covered(step, arriving, image.position)
        if taken.halting:
            instance.exit(step, "halted for " + taken.halting)
        elif self._again or instance.halting:
            self._again = False
            self._take(step)

    def _covered(self, step: Step, arriving: DestinationMove, position: Position) -> None:
        instance = self.instance
        if (
            arriving.vote_position is not None
            and position >= arriving.vote_position
            and arriving.adopt is None
        ):
            if arriving.phase is DestinationPhase.IN_STEP:
                arriving.phase = DestinationPhase.VOTED
            instance.tell(step, m.Ready(arriving.move, instance.life, arriving.digests or {}))
        if arriving.may_settle(position):
            instance.tell(step, m.Settled(arriving.move))


def load(instance: Processing, items: dict[StorageKey, Any], start: int, watermark_ms: int) -> None:
    """Fill a fresh instance from its last checkpoint; without one it begins at `start`."""
    cursor: Cursor | None = items.get(("cursor",))
    if cursor is None:
        instance.applied = start
        instance.watermark_ms = watermark_ms
        return
    instance.applied = cursor.applied
    instance.incarnation = cursor.incarnation
    instance.time_ms, instance.watermark_ms = cursor.time_ms, cursor.watermark_ms
    instance.durable = cursor.applied
    instance.routes.take(cursor.routes)
    for image in cursor.arrivals:
        instance.arriving[image.move] = _load_arrival(instance, image)
    for place, value in items.items():
        match place:
            case ("state", _, _):
                instance.space.install(value, value.epoch)
            case ("move", move, key):
                arriving = instance.arriving.get(move)
                if arriving is None:
                    instance.checkpointer._dropped.append(place)
                    continue
                arriving.space.install(value, arriving.epoch_of(key))
                instance.checkpointer._stored_moves.setdefault(move, set()).add(key)
            case _:
                pass
    instance.space.dirty.clear()
    for arriving in instance.arriving.values():
        arriving.space.dirty.clear()


def _load_arrival(instance: Processing, image: ArrivalImage) -> DestinationMove:
    arriving = DestinationMove(instance, image.move, image.keys, image.source, image.strategy, image.epochs)
    arriving.complete = True
    arriving.position = tuple(image.position)  # type: ignore[assignment]
    arriving.marks = Marks(image.shadow_watermark_ms, image.own_watermark_ms)
    arriving.floor_wm = dict(image.floors)
    arriving.kept, arriving.kept_dead = list(image.kept), list(image.kept_dead)
    arriving.at = {k: (p[0], p[1]) for k, p in image.at.items()}
    arriving.adopt, arriving.adopted_at = image.adopt, image.adopted_at
    arriving.owned = image.adopt is not None
    arriving.phase = DestinationPhase.ADOPTED if arriving.owned else DestinationPhase.VOTED
    return arriving
