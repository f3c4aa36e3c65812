"""Checkpoints of an instance: dirty keys and positions as of one entry, off the critical path.

Responsible for: what a checkpoint holds, that it rests on durable entries only, what follows from it.
Not responsible for: the bytes (state/), the instance's processing.

A checkpoint is taken at once and written a few keys at a time, while the keys go on changing
(snapshots.py): no key waits for the others to be written. It counts from the moment its cursor is there:

    (state, slot, key, 7)   (state, slot, key, 7)   ...   cursor 7    then versions before 7 are swept

Layout: ("state", slot, key, generation) own keys; ("move", move, key, generation) keys that are
arriving, under the move's name until it is done; ("routes",) what has changed of the routing table;
("cursor",) positions. Of a key, the newest version that is not newer than the cursor counts. A key set
that is not complete is not in a checkpoint: after a crash its arrival begins anew.

A move waits for checkpoints of its keys only, and gets them: one of arrivals leaves all other keys, and all
that was done with them, as the last checkpoint has them (docs/decisions/0026).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiercel.core import messages as m
from tiercel.core.arrival_images import ArrivalImage, arrival_image, load_arrival
from tiercel.core.destination import DestinationMove
from tiercel.core.destination import Phase as DestinationPhase
from tiercel.core.effects import StorageKey
from tiercel.core.keyed import KeyState
from tiercel.core.records import OWN, Key, KeyFacts, Position, TableUpdate
from tiercel.core.routing import slot_of
from tiercel.core.snapshots import Look, Snapshot
from tiercel.core.step import Step
from tiercel.core.taken import Cursor, Scope, Taken
from tiercel.core.topology import site_of

if TYPE_CHECKING:
    from tiercel.core.processing import Processing


KEYED = 4  # elements of a place that holds a key: table, slot or move, key, generation
SLICES_MAX = 256  # a large checkpoint takes larger slices, so that it ends before the next one is due
OLDER_ARRIVALS_MAX = 16  # that checkpoints of arrivals repeat; beyond it one of everything is cheaper


class Checkpointer:
    """Takes and writes the checkpoints of one instance, one at a time."""

    def __init__(self, instance: Processing) -> None:
        self.instance = instance
        self.taken: Taken | None = None
        self.generation = 0  # of this life no number is used twice
        self._orphans: list[StorageKey] = []  # written for checkpoints that were given up; go with a cursor
        self._due_ms = float("inf")
        self.in_flight = False  # a cursor was written and given up: it may become durable yet
        self.forget()

    def forget(self) -> None:
        """Begin anew at the last checkpoint; what is being written now must never count."""
        if self.taken is not None:
            self._orphans += self.taken.written
            self.in_flight = self.in_flight or self.taken.seq > 0
        self.taken = None
        self._last: Cursor | None = None  # what is stored and may be built upon
        self._again = Scope.NOTHING
        self._followers: list[m.Message] = []
        self._dropped: list[StorageKey] = []  # go with the next cursor: until then they may count
        self._swept: deque[StorageKey] = deque()  # count no more
        self._routes_version = -1  # of the table that is stored
        self._stored: dict[Key, int] = {}  # the generation of each own key that is stored
        self._stored_moves: dict[str, dict[Key, int]] = {}  # of the keys stored under a move's name

    def arm(self, step: Step) -> None:
        self._due_ms = step.now_ms + self.instance.settings.checkpoint_ms
        step.timer("checkpoint", self._due_ms)

    def before_long(self, step: Step) -> None:
        """A move has ended here; one of everything lets go of it. With many of them, the last one counts."""
        step.timer("checkpoint", min(self._due_ms, step.now_ms + self.instance.settings.tidy_ms))

    def due(self, step: Step) -> None:
        self.soon(step)
        self.arm(step)

    def soon(self, step: Step, scope: Scope = Scope.EVERYTHING) -> None:
        """Take one now, or as soon as the one under way is stored."""
        if self.taken is None and self.instance.phase.value == "running":
            self._take(step, scope)
        else:
            self._again = max(self._again, scope)

    def after_next(self, step: Step, message: m.Message) -> None:
        """Tell the router this once the next checkpoint of everything is stored; it asks again until then."""
        if message not in self._followers:
            self._followers.append(message)
            self.before_long(step)

    def begin_at(self, cursor: Cursor) -> None:
        """It was loaded. What comes next may build upon it, if nothing else that is stored could count then.

        Versions of one that was never finished are newer than it, and would be older than the next; one that
        may yet become durable would delete keys.
        """
        doubtful = self._dropped or self.in_flight
        if not doubtful or self.instance.settings.mutant == "builds-upon-unfinished":
            self._last = cursor

    def drop_move(self, arriving: DestinationMove) -> None:
        arriving.let_go()
        stored = self._stored_moves.pop(arriving.move, {})
        self._dropped += [("move", arriving.move, key, generation) for key, generation in stored.items()]

    def discard(self, items: dict[StorageKey, Any]) -> None:
        """Nothing of what is stored counts any more; no version of ours may have the name of one of these."""
        self._dropped += [*items, *self._orphans]
        cursor: Cursor | None = items.get(("cursor",))
        versions = [int(place[-1]) for place in items if len(place) == KEYED]
        self.generation = max([self.generation, *versions, cursor.generation if cursor is not None else 0])

    def inherited(self, own: dict[StorageKey, Any]) -> None:
        """What was loaded is another's: all of it goes into our first checkpoint, and nothing else counts."""
        self._stored, self._stored_moves, self._dropped = {}, {}, []
        self._last, self._routes_version = None, -1
        self.discard(own)
        space = self.instance.space
        space.dirty.update(dict.fromkeys(space.keys))

    merge_move = drop_move  # its keys are dirty own keys now; what was under the move's name goes

    # -- taking one ----------------------------------------------------------------------------

    def _take(self, step: Step, scope: Scope) -> None:
        instance, last = self.instance, self._last
        arrivals = [
            (arriving, position)
            for arriving in instance.arriving.values()
            if (position := arriving.checkpoint_position()) is not None
        ]
        older = self._older_arrivals(arrivals)
        stalled = any(image.move in self._stored_moves for image in older)
        few = stalled or len(older) <= OLDER_ARRIVALS_MAX
        if scope is Scope.ARRIVALS and last is not None and few:
            if not arrivals:
                return
            own, era = (last.applied, last.incarnation, last.time_ms, last.watermark_ms), last.era
        elif stalled:
            return  # it may have voted, but rows of it wait: behind them nothing can be claimed
        else:
            scope, older = Scope.EVERYTHING, []
            own = (instance.applied, instance.incarnation, instance.time_ms, instance.watermark_ms)
            era = instance.space.era
        rests_on = own[0]
        for arriving, position in arrivals:
            if position[0] == OWN or site_of(arriving.source) == instance.router:
                rests_on = max(rests_on, position[1])
        self.generation += 1
        images = [arrival_image(arriving, position) for arriving, position in arrivals]
        cursor = Cursor(self.generation, *own, [*images, *older], era, instance.inherited)
        taken = self.taken = Taken(scope, cursor, rests_on, instance.flushes)
        if scope is Scope.EVERYTHING:
            self._take_own(taken)
        for arriving, position in arrivals:
            self._take_arriving(taken, arriving, position)
        self.write_some(step)

    def _older_arrivals(self, now: list[tuple[DestinationMove, Position]]) -> list[ArrivalImage]:
        """Those that the last checkpoint holds, and of which this one has nothing newer to say.

        Rows of theirs wait, or they have merged or were undone: as of the last one, they still arrive.
        """
        known, mutant = {arriving.move for arriving, _ in now}, self.instance.settings.mutant
        older = [image for image in self._last.arrivals if image.move not in known] if self._last else []
        if mutant in ("merged-arrivals-left-out", "stalled-arrivals-left-out"):
            stalled = mutant == "merged-arrivals-left-out"
            older = [image for image in older if (image.move in self._stored_moves) == stalled]
        return older

    def _take_own(self, taken: Taken) -> None:
        instance = self.instance
        taken.deletes, self._dropped = self._dropped, []
        taken.followers, self._followers = self._followers, []
        taken.halting = instance.halting
        routes = instance.routes
        if self._routes_version != routes.version:
            self._routes_version = routes.version
            changed = {s: r for s, r in enumerate(routes.slots) if r.epoch > 1}
            taken.routes = TableUpdate(changed, dict(routes.overrides))
        slots, stored = instance.operator.slots, self._stored
        retained = {k: s for leaving in instance.leaving.values() for k, s in leaving.retained.items()}
        pending: dict[Key, KeyState] = {}
        for key in instance.space.dirty:
            state = instance.space.keys.get(key) or retained.get(key)
            if state is not None and not state.empty:
                pending[key] = state
            elif key in stored:
                taken.deletes.append(("state", slot_of(key, slots), key, stored.pop(key)))
        instance.space.dirty.clear()
        look = self._look(taken, taken.cursor.applied, stored, lambda key, slot: ("state", slot, key))
        self._watch(taken, instance.space.watch, pending, look)

    def _take_arriving(self, taken: Taken, arriving: DestinationMove, position: Position) -> None:
        move = arriving.move
        first = move not in self._stored_moves
        stored = self._stored_moves.setdefault(move, {})
        taken.of_moves.append((move, stored))
        pending: dict[Key, KeyState] = {}
        for key in arriving.space.keys if first else arriving.space.dirty:
            state = arriving.space.keys.get(key)
            if state is not None and not state.empty:
                pending[key] = state
            elif key in stored:
                taken.deletes.append(("move", move, key, stored.pop(key)))
        arriving.space.dirty.clear()
        look = self._look(taken, position[1], stored, lambda key, _: ("move", move, key))
        self._watch(taken, arriving.space.watch, pending, look)

    def _watch(
        self,
        taken: Taken,
        watch: Callable[[Snapshot], None],
        pending: dict[Key, KeyState],
        look: Look,
    ) -> None:
        if pending:
            snapshot = Snapshot(pending, look)
            taken.snapshots.append(snapshot)
            if self.instance.settings.mutant != "checkpoint-of-changed-keys":
                watch(snapshot)

    def _look(
        self, taken: Taken, at: int, stored: dict[Key, int], place: Callable[[Key, int], StorageKey]
    ) -> Look:
        """How a key's state as of this checkpoint becomes a stored version."""
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
        """The next few keys of the checkpoint, or of what it has made superfluous; then others' turn."""
        taken, settings, spill = self.taken, self.instance.settings, self.instance.space.spill
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
                if spill.active and place[0] == "state":
                    spill.saw(image.key, size_bytes)
        any_left = spill.make_room(max(at_least, 4 * settings.slice_keys), self._stored)
        self.try_store(step)
        if any_left or self._swept or (taken is not None and not taken.complete):
            step.timer("slice", step.now_ms + settings.capture_pause_ms)

    def relieve(self, step: Step) -> None:
        """If there is too much in memory, some of it goes; or a checkpoint comes early, and then it goes.

        Entries that bring more keys than slices write would fill the memory: they write some themselves.
        """
        spill = self.instance.space.spill
        at_least = max(4 * self.instance.settings.slice_keys, 4 * spill.newly_dirty())
        any_left = spill.make_room(at_least, self._stored)
        if (spill.over and not any_left) or spill.checkpoint_wanted():
            if not spill.checkpoint_asked:
                spill.checkpoint_asked = True
                self.soon(step)
            if self._swept or (self.taken is not None and not self.taken.complete):
                self.write_some(step, at_least)

    def try_store(self, step: Step) -> None:
        """A checkpoint rests on durable entries and admitted outputs only.

        Else it would know what the log has forgotten, or never make again an output that was lost.
        """
        taken, instance = self.taken, self.instance
        if taken is None or taken.seq or not taken.complete or self._swept:
            return  # what was to be swept must not outlive a newer version that this one deletes
        early = taken.rests_on > instance.durable or taken.flush > instance.confirmed
        if early and instance.settings.mutant != "checkpoint-ahead-of-log":
            return
        for key in taken.deletes:
            step.delete(key)
        step.put(("cursor",), taken.cursor)
        if taken.routes is not None:
            step.put(("routes",), taken.routes)
        taken.seq = instance.journal.written + 1

    def stored(self, step: Step, seq: int) -> None:
        taken = self.taken
        if taken is None or not taken.seq or taken.seq > seq:
            return
        self.taken = None
        instance, cursor = self.instance, taken.cursor
        self._last = cursor
        if taken.scope is Scope.EVERYTHING:
            instance.space.spill.covered = cursor.generation
            instance.space.spill.checkpoint_asked = False
        self._sweep(step, taken)
        moves = {a.move: a.position for a in cursor.arrivals}
        if instance.settings.mutant == "positions-flattened":
            moves = {move: (OWN, cursor.applied) for move in moves}
        count = instance.space.count
        step.send(instance.router, m.Checkpointed(instance.name, instance.life, cursor.applied, moves, count))
        for message in taken.followers:
            instance.tell(step, message)
        for image in cursor.arrivals:
            arriving = instance.arriving.get(image.move)
            if arriving is not None:
                self._covered(step, arriving, image.position)
        if taken.halting:
            instance.exit(step, "halted for " + taken.halting)
        elif again := Scope.EVERYTHING if instance.halting else self._again:
            self._again = Scope.NOTHING
            self._take(step, again)

    # -- after a crash -------------------------------------------------------------------------

    def load(self, items: dict[StorageKey, Any], generation: int) -> None:
        """The newest version of each key that the cursor covers; all others go with the next cursor.

        Of what this life wrote, a disk that is slow may not show everything yet: we remember it ourselves.
        """
        instance = self.instance
        self.generation = max(self.generation, generation)  # a checkpoint may have no key of its own
        instance.space.spill.covered = generation
        self._dropped += [place for place in self._orphans if int(place[-1]) > generation]
        newest: dict[StorageKey, int] = {}
        for place in items:
            if len(place) == KEYED:
                version = int(place[-1])
                self.generation = max(self.generation, version)
                if (
                    newest.get(place[:-1], -1)
                    < version
                    <= (generation if instance.settings.mutant != "unfinished-checkpoint-counts" else version)
                ):
                    newest[place[:-1]] = version
        for place, value in items.items():
            if len(place) != KEYED:
                continue
            if newest.get(place[:-1]) != place[-1]:
                self._dropped.append(place)
                continue
            match place:
                case ("state", _, bytes(key), int(version)):
                    if isinstance(value, KeyFacts):
                        instance.space.install_cold(key, version, value.timers)
                    else:
                        era, slot = instance.space.era, slot_of(key, instance.operator.slots)
                        epoch = value.epoch if era is None else era.epoch(value, version, slot)
                        instance.space.install(value, epoch)
                        if instance.space.spill.active:
                            instance.space.spill.saw(key, value.size_bytes)
                    self._stored[key] = version
                case ("move", str(move), bytes(key), int(version)):
                    arriving = instance.arriving.get(move)
                    if arriving is None:
                        self._dropped.append(place)
                        continue
                    arriving.space.install(value, arriving.epoch_of(key))
                    self._stored_moves.setdefault(move, {})[key] = version
                case _:
                    pass

    # -- what follows --------------------------------------------------------------------------

    def _sweep(self, step: Step, taken: Taken) -> None:
        """The cursor is there: older versions go, and what was written for moves that ended meanwhile."""
        self._orphans, self.in_flight = [], False
        taken.snapshots.clear()  # they know it, and it knows them: without this only the collector ends both
        self._swept += taken.superseded
        for move, stored in taken.of_moves:
            if self._stored_moves.get(move) is not stored:
                self._dropped += [("move", move, key, generation) for key, generation in stored.items()]
        if self._swept or self.instance.space.spill.over:
            step.timer("slice", step.now_ms + self.instance.settings.capture_pause_ms)

    def _covered(self, step: Step, arriving: DestinationMove, position: Position) -> None:
        instance = self.instance
        if (
            arriving.vote_position is not None
            and position >= arriving.vote_position
            and arriving.adopt is None
        ):
            if arriving.phase is DestinationPhase.IN_STEP:
                arriving.phase = DestinationPhase.VOTED
            arriving.say_ready(step)
        if arriving.may_settle(position):
            instance.tell(step, m.Settled(arriving.move))


def load(instance: Processing, items: dict[StorageKey, Any], start: int, watermark_ms: int) -> None:
    """Fill a fresh instance from its last checkpoint; without one it begins at `start`."""
    cursor: Cursor | None = items.get(("cursor",))
    checkpointer = instance.checkpointer
    if cursor is None:
        instance.applied = start
        instance.watermark_ms = watermark_ms
        checkpointer.discard(items)  # of a first checkpoint that was never finished
        return
    instance.applied = cursor.applied
    instance.incarnation = cursor.incarnation
    instance.time_ms, instance.watermark_ms = cursor.time_ms, cursor.watermark_ms
    instance.durable = cursor.applied
    instance.space.era = cursor.era
    instance.inherited = cursor.inherited
    instance.routes.take(items.get(("routes",), TableUpdate({}, {})))
    for image in cursor.arrivals:
        instance.arriving[image.move] = load_arrival(instance, image)
    checkpointer.load(items, cursor.generation)
    checkpointer.begin_at(cursor)
    for space in (instance.space, *(arriving.space for arriving in instance.arriving.values())):
        space.dirty.clear()
        if checkpointer.in_flight:  # it may delete keys yet that we have again: all are written once more
            space.dirty.update(dict.fromkeys(space.keys))
