"""The state receiver: the destination instance's side of a move.

Responsible for: holding rows of a key until its state has arrived, processing the rows of the source without
    emitting, the vote, and emitting from the cut on.
Not responsible for: the order of rows (destination_router.py), the time of checkpoints
    (checkpoint_writer.py).

    RECEIVING --every key--> IN_STEP --Compare--> COMPARING --checkpoint--> VOTED --Adopt--> ADOPTED --Done-->
    RECEIVING --Adopt--> ADOPTED_RECEIVING --every key--> ADOPTED --Done-->                    (flip first)

Its transitions are DESTINATION_INSTANCE in phases.py.

A move that flips first gets the source's rows between its cut and the flip as a shadow, too. Rows of this
site's log wait until that shadow has ended. The rows of a key wait until its unit is here, and no longer:
other units may still be missing.

The emit filter: the receiver withholds outputs until EmitFrom(r) arrives: the source has emitted everything
up to r, and it is durable. The receiver then drops its outputs up to r and emits the others in order.
"""

from __future__ import annotations

from collections import deque

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import StoredIncomingMove
from tiercel.core.migration.catch_up import CatchUp, Item, LogWatermarks, first_route, overlap_of, passed_by
from tiercel.core.migration.instance_port import CallResult, InstancePort
from tiercel.core.migration.phases import (
    DESTINATION_INSTANCE,
    INCOMPLETE,
    DestinationInstancePhase,
    MovePhase,
)
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.migration.units import Unit, unit_of, units_of
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.log import (
    OWN,
    SHADOW,
    Adopt,
    Compare,
    Control,
    Output,
    Position,
    Row,
    TakenOver,
    Tick,
    Watermark,
)
from tiercel.core.model.routing import Route, RouteUpdate, slot_of
from tiercel.core.model.row_batch import count_rows
from tiercel.core.state.digests import DigestJob
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable, no_epoch

NEWEST = 1 << 60  # behind every entry
CONTROLS_MAX = 1_024  # ticks and watermarks that keys which catch up pass by in one slice


class StateReceiver:
    """One key set that moves into this instance."""

    def __init__(
        self, instance: InstancePort, move: str, keys: KeySet, source: str, strategy: str, epochs: RouteUpdate
    ) -> None:
        self.instance = instance
        self.move = move
        self.keys = keys
        self.source = source
        self.strategy = strategy
        self.epochs = epochs  # of the keys before the flip
        self._phase = MovePhase(DESTINATION_INSTANCE, move, DestinationInstancePhase.ABSENT)
        self.accepts, self.become = self._phase.accepts, self._phase.become
        self.shadow_position = -1  # the last entry of the shadow that has come
        self.own_position = -1  # the last entry of our own log that has come
        self.adopt: Adopt | None = None  # once this instance owns the keys
        self.adopted_at = -1  # offset of Adopt in our log; Adopt may wait behind stalled rows
        self.flip_offset = -1  # flip first: the shadow ends there
        self.emit_from: int | None = None
        self.space = StateTable(instance.operator.slots, self.epoch_of, *instance.user_code.about_keys)
        if not instance.user_code.event_time:
            self.space.has_reached = self._has_reached
        self.at: dict[Key, Position] = {}  # the position of each key's image
        self.floor_wm: dict[Key, int] = {}
        self.marks = LogWatermarks(-1, -1)
        self.missing: set[Unit] = units_of(keys, self.space.slots)
        self.staged: dict[Unit, dict[Key, StateImage]] = {}  # of units that are not whole
        self.held: dict[Unit, dict[Key, list[Item]]] = {}  # rows of missing units
        self.controls: list[Item] = []  # for the keys that wait for their state or catch up
        self.catching_up: dict[Key, CatchUp] = {}  # keys whose unit is here, and not all of their rows
        self.behind_shadow: deque[Item] = deque()  # of our own log, until the shadow has ended
        self.asked: set[Unit] = set()  # requested out of turn
        self.to_ask: list[Unit] = []
        self.stalled: deque[Item] = (
            deque()
        )  # rows behind a Compare that arrived before the last key, or behind a full buffer
        self.withheld: list[tuple[int, Output]] = []  # (stage, output), until the receiver may emit
        self.withheld_dead_letters: list[tuple[int, Output]] = []
        self._missing_seen = -1
        self.passed: Position = (SHADOW, -1)  # the last item that did not wait for its turn
        self.covered: Position = (SHADOW, -1)  # by the checkpoint that this incarnation has loaded
        self.covered_units: frozenset[Unit] = frozenset()  # that were here then
        self.durable_units: set[Unit] = set()  # the source need not keep them in memory
        self.renewed: list[tuple[int, RouteUpdate]] = []  # takeovers since the adoption, by their offset
        self.touched: set[Key] = set()
        self._arrivals_ms: list[tuple[float, int]] = []  # of chunks, each with its number of units
        self.digests: DigestJob | None = None  # as of Compare
        self.vote_position: Position | None = None  # of Compare

    @property
    def phase(self) -> DestinationInstancePhase:
        return self._phase.now

    @property
    def complete(self) -> bool:
        """Whether the state of every key is here, and no rows wait that came before it."""
        return not self.missing and not self.catching_up and not self.reads_again

    @property
    def reads_again(self) -> bool:
        """Whether rows come again that the units of a restored checkpoint have, and other units have not."""
        return self.passed < self.covered

    @property
    def shadow_ended(self) -> bool:
        """Whether every row that the source has not processed before the flip is here."""
        return self.flip_offset < 0 or self.shadow_position >= self.flip_offset

    @property
    def position(self) -> Position:
        """The position up to which all keys are processed, once their state is here."""
        return (OWN, self.own_position) if self.adopt is not None else (SHADOW, self.shadow_position)

    @property
    def received_position(self) -> Position:
        """The position from which the router continues after a reconnect."""
        return (OWN, self.own_position) if self.adopted_at >= 0 else (SHADOW, self.shadow_position)

    @property
    def blocks_instance(self) -> bool:
        """Whether the instance must not process anything else: rows wait for a missing unit."""
        return STRATEGIES[self.strategy].blocks and bool(self.held)

    # -- in a checkpoint ---------------------------------------------------------------------

    def to_stored(self, position: Position) -> StoredIncomingMove:
        """The part of this move that a checkpoint stores in addition to its keys."""
        missing, slots = self.uncovered_units(), self.space.slots
        return StoredIncomingMove(
            self.move,
            self.keys,
            self.source,
            self.strategy,
            self.epochs,
            position,
            self.adopt,
            self.adopted_at,
            self.marks.shadow_ms,
            self.marks.own_ms,
            dict(self.floor_wm),
            dict(self.at),
            [(s, o) for s, o in self.withheld if unit_of(o.key, slots) not in missing],
            [(s, o) for s, o in self.withheld_dead_letters if unit_of(o.key, slots) not in missing],
            list(self.renewed),
            sorted(missing),
        )

    def uncovered_units(self) -> set[Unit]:
        """Rule R34: a checkpoint has the units that are here, with all of their rows up to its position."""
        slots = self.space.slots
        return self.missing.union(unit_of(key, slots) for key in self.catching_up)

    @classmethod
    def restored(cls, step: Step, instance: InstancePort, stored: StoredIncomingMove) -> StateReceiver:
        """A move from a checkpoint. The router knows whether it voted.

        If units are missing, it sends all rows of the keys again; those that are covered are skipped.
        """
        receiver = cls(instance, stored.move, stored.keys, stored.source, stored.strategy, stored.epochs)
        receiver.covered_units = frozenset(receiver.missing.difference(stored.missing))
        receiver.missing = set(stored.missing)
        if receiver.missing and stored.adopt is not None:
            receiver.covered = (stored.position[0], stored.position[1])
            receiver.own_position, receiver.flip_offset = stored.adopted_at, stored.adopt.flip_offset
            receiver.durable_units.update(receiver.covered_units)
            receiver.behind_shadow.append(((OWN, stored.adopted_at), stored.adopt.time_ms, [], None))
            receiver.behind_shadow.extend(passed_by(stored.adopt, stored.adopted_at))
        elif stored.position[0] == OWN:
            receiver.own_position, receiver.shadow_position = stored.position[1], 1 << 60
        else:
            receiver.shadow_position = stored.position[1]
        receiver.marks = LogWatermarks(stored.shadow_watermark_ms, stored.own_watermark_ms)
        receiver.floor_wm = dict(stored.floors)
        receiver.withheld = list(stored.withheld)
        receiver.withheld_dead_letters = list(stored.withheld_dead_letters)
        receiver.at = {k: (p[0], p[1]) for k, p in stored.at.items()}
        receiver.adopt, receiver.adopted_at = stored.adopt, stored.adopted_at
        receiver.renewed = [(offset, update) for offset, update in stored.renewed]
        phases = DestinationInstancePhase
        owned = phases.ADOPTED_RECEIVING if receiver.missing else phases.ADOPTED
        receiver.become(step, phases.IN_STEP if stored.adopt is None else owned)
        return receiver

    def epoch_of(self, key: Key) -> int:
        """The epoch of a new key: the old owner's until the adoption, then the new one.

        It comes from Adopt, not from our routing table, which may be older during a replay.
        """
        return self.epoch_at(key, self._now)

    @property
    def _now(self) -> Position:
        return (OWN, NEWEST) if self.adopt is not None else (SHADOW, NEWEST)

    def epoch_at(self, key: Key, position: Position) -> int:
        """The epoch of a key at an entry: rows of the shadow were logged under the old owner."""
        route = self._route_at(key, position)
        return route.epoch if route is not None else 0

    def _route_at(self, key: Key, position: Position) -> Route | None:
        own = position[0] == OWN and self.adopt is not None
        updates = [update for offset, update in reversed(self.renewed) if own and offset < position[1]]
        first = self.adopt.update if own and self.adopt is not None else self.epochs
        return first_route([*updates, first], key, slot_of(key, self.space.slots))

    def clock_floor_ms(self, key: Key, position: Position) -> int:
        """Rule R17: the clock of a key never runs behind the logs that it has left."""
        route = self._route_at(key, position)
        return route.floor_ms if route is not None else 0

    def _has_reached(self, key: Key, time_ms: int) -> bool:
        return time_ms <= self.clock_floor_ms(key, self._now)

    # -- incoming state ----------------------------------------------------------------------

    def start(self, step: Step) -> None:
        """Start to receive: the instance is ready for state and shadow rows."""
        self.become(step, DestinationInstancePhase.RECEIVING)

    def on_chunk(self, step: Step, chunk: m.Chunk) -> None:
        """Install the units that are whole with this chunk. A unit that is here already changes nothing."""
        slots = self.space.slots
        incomplete = -1
        if chunk.sent_before and not self.has_beginning(chunk):
            incomplete = unit_of(chunk.images[0].key, slots)
        for image in chunk.images:
            unit = unit_of(image.key, slots)
            if unit in self.missing and unit != incomplete:
                self.staged.setdefault(unit, {})[image.key] = image
        taken = [unit for unit in chunk.units if unit != incomplete]
        if not self.complete:
            self._arrivals_ms.append((step.now_ms, len(taken)))
        for unit in taken:
            if unit in self.missing:
                self._install_unit(unit)
        step.send(self.source, m.UnitReceipt(self.move, chunk.n, taken))
        self._finish_if_complete(step)

    def refuse_copy(self, step: Step, chunk: m.Chunk) -> None:
        """Request the units of a chunk again, in full: it names keys that the copy does not have."""
        slots = self.space.slots
        units = {*chunk.units, *(unit_of(image.key, slots) for image in chunk.images)} & self.missing
        step.send(self.source, m.UnitReceipt(self.move, chunk.n, []))
        step.send(self.source, m.UnitRequest(self.move, sorted(units), in_full=True))

    def has_beginning(self, chunk: m.Chunk) -> bool:
        """Rule R31: a unit is whole only with all of its chunks; an earlier incarnation may have got some."""
        unit = unit_of(chunk.images[0].key, self.space.slots)
        return len(self.staged.get(unit, ())) >= chunk.sent_before

    def look_later(self, step: Step) -> None:
        step.timer(Timer(TimerKind.FETCH, self.move), step.now_ms + self.instance.settings.retry_ms)

    def on_look(self, step: Step) -> None:
        """Ask for the missing units if none came: the source may not know that this instance restarted."""
        if not self.missing:
            return
        if STRATEGIES[self.strategy].flips_first and len(self.missing) == self._missing_seen:
            step.send(self.source, m.UnitRequest(self.move, sorted(self.missing), again=True))
        self._missing_seen = len(self.missing)
        self.look_later(step)

    def on_served_by(self, step: Step, instance: str) -> None:
        """Rule R36: the source is dead, and a successor of it has the units that are missing."""
        self.source = instance
        if self.missing:
            step.send(self.source, m.UnitRequest(self.move, sorted(self.missing), again=True))

    def ask(self, step: Step) -> None:
        """Request the units for which the first rows have come."""
        if self.to_ask:
            wanted, self.to_ask = [unit for unit in self.to_ask if unit in self.missing], []
            if wanted:
                step.send(self.source, m.UnitRequest(self.move, wanted))

    def _install_unit(self, unit: Unit) -> None:
        self.missing.discard(unit)
        held = self.held.pop(unit, {})
        for image in self.staged.pop(unit, {}).values():
            self._install(image)
            self._start_catching_up(image.key, held.pop(image.key, []))
        for key, items in held.items():
            self.at[key] = (SHADOW, -1)  # no state and not deleted: the key is newer than the capture
            self._start_catching_up(key, items)

    def _install(self, image: StateImage) -> None:
        key = image.key
        self.space.install(image, self.epoch_of(key))
        self.at[key] = (SHADOW, image.at)
        self.floor_wm[key] = image.watermark_ms

    def _start_catching_up(self, key: Key, held: list[Item]) -> None:
        """Rows that waited for a key's state come before its later ones; `work` processes them in slices."""
        state = self.space.keys.get(key)
        waits = bool(self.controls) or self.reads_again
        if held or (waits and state is not None and state.timers):
            self.catching_up[key] = CatchUp(held)

    def _catch_up(self, rows_max: float) -> int:
        """Process rows of keys that catch up, with the ticks and watermarks between them, in order."""
        count = steps = 0
        while self.can_catch_up() and count < rows_max and steps < CONTROLS_MAX:
            key, waiting = next(iter(self.catching_up.items()))
            while count < rows_max and (item := waiting.next_item(self.controls)) is not None:
                steps += 1
                position, time_ms, rows, control = item
                if position[0] == OWN and self.adopt is not None:
                    waiting.marks.own_ms = max(waiting.marks.own_ms, self.adopt.own_watermark_ms)
                waiting.marks.pass_by(position, control)
                if control is None:
                    self._call(key, rows, position, time_ms, waiting.marks)
                    count += count_rows(rows)
                else:
                    self._control_for(key, position, time_ms, control, waiting.marks)
            if not waiting.is_over(self.controls):
                continue
            del self.catching_up[key]
            state = self.space.keys.get(key)
            if state is not None:
                state.epoch = self.epoch_of(key)
        return count

    def _finish_if_complete(self, step: Step) -> None:
        """Go on once the state of every key is here; a key set that flips first must also be owned."""
        if not self.complete or self.phase not in INCOMPLETE:
            return
        owned = self.phase is DestinationInstancePhase.ADOPTED_RECEIVING
        early = STRATEGIES[self.strategy].freezes and not owned  # Adopt is still to come
        waiting = self.adopt is None or self.stalled or self.behind_shadow or not self.shadow_ended
        if early or (owned and waiting):
            return
        self.controls.clear()
        self.become(step, DestinationInstancePhase.ADOPTED if owned else DestinationInstancePhase.IN_STEP)
        self.instance.tell(step, m.StateComplete(self.move, overlap_of(self._arrivals_ms)))

    # -- incoming rows -----------------------------------------------------------------------

    def cursor(
        self, step: Step, position: Position, time_ms: int, rows: list[Row], control: Control | None
    ) -> None:
        """Process the next item of the shadow or, after the adoption, of our own log."""
        stage, offset = position
        if offset <= (self.shadow_position if stage == SHADOW else self.own_position):
            return
        item = (position, time_ms, rows, control)
        if stage == SHADOW:
            self.shadow_position = offset
            self._take(step, item)
            self._end_shadow()
            self._finish_if_complete(step)
        else:
            self.own_position = offset
            if self.shadow_ended:
                self._take(step, item)
            else:
                self.behind_shadow.append(item)

    def _end_shadow(self) -> None:
        """Rule R35: the rows of our own log follow the rows that the source has not processed."""
        if self.behind_shadow and self.shadow_ended:
            self.stalled.extend(self.behind_shadow)
            self.behind_shadow.clear()

    def _take(self, step: Step, item: Item) -> None:
        if self.stalled or self._must_stall(item[3]):
            self.stalled.append(item)
        else:
            self._process(step, item)

    def _must_stall(self, control: Control | None) -> bool:
        return not self.complete if isinstance(control, Compare) else self._is_full()

    def _is_full(self) -> bool:
        return self.emit_from is None and len(self.withheld) >= self.instance.settings.withheld_max

    # -- rows that waited --------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether rows that waited can be processed now."""
        if self.can_catch_up():
            return True
        return bool(self.stalled) and not self._must_stall(self.stalled[0][3])

    def can_catch_up(self) -> bool:
        """Whether keys that catch up may go on: of rows and ticks that come again, all must be here."""
        return bool(self.catching_up) and not self.reads_again and not self._is_full()

    def work(self, step: Step, rows_max: float) -> int:
        """Process about this many of the rows that waited; returns how many. The others have their turn."""
        count = 0
        while count < rows_max and self.stalled and not self._must_stall(self.stalled[0][3]):
            item = self.stalled.popleft()
            self._process(step, item)
            count += 1 + count_rows(item[2])
        count += self._catch_up(rows_max - count)
        self._finish_if_complete(step)
        if not self.stalled and self.phase is DestinationInstancePhase.COMPARING:
            self.instance.checkpoint_soon(step)  # the one taken at Compare does not cover the stalled rows
        return count

    def _process(self, step: Step, item: Item) -> None:
        position, time_ms, rows, control = item
        if isinstance(control, Compare):
            self.become(step, DestinationInstancePhase.COMPARING)
            self.digests = DigestJob(self.space, self.touched)
            self.vote_position = position
            self.digest_some(step)
            self.instance.checkpoint_soon(step)
            return
        if isinstance(control, Adopt):
            self._own(step, control)
            return
        covered = self.is_covered(position)
        self.passed = max(self.passed, position)
        if isinstance(control, TakenOver):
            if not covered:
                self.renew(position[1], control)
            return
        if control is not None:
            if not self.complete:
                self.hold_control(item)
            if covered:
                return
            self.marks.pass_by(position, control)
            for key in self.space.due(self._due(position, time_ms, control)):
                if position <= self.at.get(key, (SHADOW, -1)) or key in self.catching_up:
                    # its image has this item, or it comes in its turn: its due timers wait for the next one
                    self.space.requeue_timers(key)
                else:
                    self._control_for(key, position, time_ms, control, self.marks)
            return
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(row[0], []).append(row)
        for key, of_key in by_key.items():
            unit = unit_of(key, self.space.slots) if self.missing or covered else -1
            if covered and unit in self.covered_units:
                continue
            if unit in self.missing:
                self.hold(unit, key, (position, time_ms, of_key, None))
            elif covered or key in self.catching_up:
                waiting = self.catching_up.setdefault(key, CatchUp([]))
                waiting.items.append((position, time_ms, of_key, None))
            else:
                self._call(key, of_key, position, time_ms, self.marks)

    def is_covered(self, position: Position) -> bool:
        """Rule R34: a restored unit has the rows up to the position of its checkpoint; they come again."""
        return position <= self.covered

    def renew(self, offset: int, taken_over: TakenOver) -> None:
        """This instance has replaced a dead destination: from here on the keys have the epochs of that."""
        if not (taken_over.update.names(self.instance.name) or self.instance.is_taking_over()):
            return
        self.renewed.append((offset, taken_over.update))
        for key, state in self.space.keys.items():
            if key not in self.catching_up:
                state.epoch = self.epoch_of(key)

    def hold(self, unit: Unit, key: Key, item: Item) -> None:
        """Hold rows of a key until its unit is here, and perhaps ask for it."""
        self.held.setdefault(unit, {}).setdefault(key, []).append(item)
        if STRATEGIES[self.strategy].asks and unit not in self.asked:
            self.asked.add(unit)
            self.to_ask.append(unit)

    def hold_control(self, item: Item) -> None:
        """Hold a tick or watermark for the keys that wait for their state."""
        self.controls.append(item)

    def digest_some(self, step: Step) -> None:
        """Compute the digests of the next few keys; the vote may wait for them."""
        if self.digests is not None and self.digests.advance(step, self.move, self.instance.settings):
            self._vote(step)

    def _vote(self, step: Step) -> None:
        """Send the vote: a checkpoint has every key, with these digests."""
        voted = self.phase is DestinationInstancePhase.VOTED
        if voted and self.digests is not None and self.digests.complete:
            instance = self.instance
            instance.tell(step, m.Ready(self.move, instance.incarnation, self.digests.found))

    def on_checkpoint_stored(self, step: Step, covered: Position) -> None:
        """A checkpoint holds the keys up to a position; the vote or the source may wait for it."""
        if self.phase is DestinationInstancePhase.COMPARING and self.may_vote(covered):
            self.become(step, DestinationInstancePhase.VOTED)
        self._vote(step)
        if self.may_settle(covered):
            self.instance.tell(step, m.DestinationCheckpointed(self.move))

    def on_units_stored(self, step: Step, missing: list[Unit]) -> None:
        """Rule R33: a checkpoint has all units but these. The source need not keep the others in memory."""
        stored = units_of(self.keys, self.space.slots).difference(missing, self.durable_units)
        if stored and STRATEGIES[self.strategy].freezes:
            self.durable_units |= stored
            step.send(self.source, m.UnitReceipt(self.move, 0, [], sorted(stored)))

    def may_vote(self, covered: Position) -> bool:
        """The vote requires a checkpoint of every key as of Compare or later."""
        return self.vote_position is not None and covered >= self.vote_position

    # -- calls -------------------------------------------------------------------------------

    def _times(self, key: Key, position: Position, time_ms: int, marks: LogWatermarks) -> tuple[int, int]:
        """The log time and watermark of a key: its clock never runs backwards when it changes logs."""
        floor = self.floor_wm.get(key, -1)
        time_ms = max(time_ms, self.clock_floor_ms(key, position))
        if position[0] == SHADOW:
            return time_ms, max(floor, marks.shadow_ms)
        adopt = self.adopt
        assert adopt is not None
        return time_ms, max(floor, adopt.watermark_ms, marks.own_ms)

    def _due(self, position: Position, time_ms: int, control: Control) -> int:
        """The timer value up to which this tick or watermark fires timers."""
        if self.instance.user_code.event_time:
            if not isinstance(control, Watermark):
                return -1
            floor = self.adopt.watermark_ms if self.adopt is not None and position[0] == OWN else -1
            return max(control.value_ms, floor)
        if not isinstance(control, Tick):
            return -1
        return max(time_ms, self.adopt.time_ms) if self.adopt is not None and position[0] == OWN else time_ms

    def _call(
        self, key: Key, rows: list[Row], position: Position, time_ms: int, marks: LogWatermarks
    ) -> None:
        if position <= self.at.get(key, (SHADOW, -1)):
            return  # its image already has this item
        self.space.before_change([key])
        state = self.space.state(key)
        state.epoch = self.epoch_at(key, position)
        time_ms, watermark_ms = self._times(key, position, time_ms, marks)
        result = self.instance.user_code.call_apart(state, key, rows, time_ms, watermark_ms, position[1])
        self._changed(key, state, position, result)

    def _control_for(
        self, key: Key, position: Position, time_ms: int, control: Control, marks: LogWatermarks
    ) -> None:
        state = self.space.keys.get(key)
        if state is None or not state.timers or position <= self.at.get(key, (SHADOW, -1)):
            return
        due = self._due(position, time_ms, control)
        time_ms, watermark_ms = self._times(key, position, time_ms, marks)
        if isinstance(control, Tick) and not self.instance.user_code.event_time:
            due = max(due, time_ms)
        if min(state.timers) > due:
            return
        self.space.before_change([key])
        state.epoch = self.epoch_at(key, position)
        if isinstance(control, Watermark):
            watermark_ms = max(watermark_ms, due)
        result = self.instance.user_code.fire_apart(state, key, due, time_ms, watermark_ms, position[1])
        self._changed(key, state, position, result)

    def _changed(self, key: Key, state: KeyState, position: Position, result: CallResult) -> None:
        self.touched.add(key)
        self.space.touched(key, state, result.new_timers)
        self._out(position, result.outputs, result.dead_letters)

    # -- the emit filter ---------------------------------------------------------------------

    def _out(self, position: Position, out: list[Output], dead: list[Output]) -> None:
        for withheld, outputs in ((self.withheld, out), (self.withheld_dead_letters, dead)):
            if self.emit_from is None or position > (SHADOW, self.emit_bound()):
                withheld += [(position[0], o) for o in outputs]

    def emit_bound(self) -> int:
        """The source emits the outputs up to this offset."""
        assert self.emit_from is not None
        return self.emit_from

    def may_emit(self) -> bool:
        """Whether the source has stopped and all of its outputs have arrived."""
        return self.emit_from is not None

    def on_emitted_through(self, step: Step, offset: int) -> None:
        """Drop withheld outputs: the source's own outputs up to here have arrived. Stalled rows go on."""
        self._drop_withheld(offset)

    def on_emit_from(self, step: Step, offset: int) -> None:
        if self.emit_from is None:
            self.emit_from = offset
            self.release_withheld()

    def release_withheld(self) -> None:
        """Drop withheld outputs up to the source's last offset, and emit those above."""
        self._drop_withheld(self.emit_bound())

    def _drop_withheld(self, through: int) -> None:
        self.withheld = [(s, o) for s, o in self.withheld if s == OWN or o.offset > through]
        self.withheld_dead_letters = [
            (s, o) for s, o in self.withheld_dead_letters if s == OWN or o.offset > through
        ]

    def flush(self, step: Step) -> None:
        """Send outputs that may be emitted, in the order of entries and so in order per key."""
        if not self.may_emit() or not (self.withheld or self.withheld_dead_letters):
            return
        for stage in (SHADOW, OWN):
            outputs = [o for s, o in self.withheld if s == stage]
            dead = [o for s, o in self.withheld_dead_letters if s == stage]
            if outputs or dead:
                instance = self.instance
                step.send(
                    instance.router,
                    m.MoveOutputs(instance.name, instance.incarnation, self.move, stage, outputs, dead),
                )
        self.withheld, self.withheld_dead_letters = [], []

    def has_emitted_all(self) -> bool:
        """Whether nothing is held or withheld of the rows up to our position in our own log."""
        waiting = self.held or self.stalled or self.behind_shadow
        held = waiting or self.withheld or self.withheld_dead_letters
        return self.complete and self.may_emit() and self.position[0] == OWN and not held

    # -- the end -----------------------------------------------------------------------------

    def on_adopt(self, step: Step, adopt: Adopt, offset: int) -> None:
        """From this entry of our log on, this instance owns the keys."""
        self.adopted_at = offset
        if STRATEGIES[self.strategy].freezes:
            self.flip_offset = adopt.flip_offset
            self.become(step, DestinationInstancePhase.ADOPTED_RECEIVING)
        self.cursor(step, (OWN, offset), adopt.time_ms, [], adopt)
        self._finish_if_complete(step)

    def _own(self, step: Step, adopt: Adopt) -> None:
        self.adopt, self.passed = adopt, (OWN, self.adopted_at)
        if not STRATEGIES[self.strategy].freezes:
            self.become(step, DestinationInstancePhase.ADOPTED)
        self.marks.own_ms = max(self.marks.own_ms, adopt.own_watermark_ms)
        for key, state in self.space.keys.items():
            state.epoch = self.epoch_of(key)
            if state.timers and self.clock_floor_ms(key, self._now) > adopt.time_ms:
                self.space.requeue_timers(key)  # its clock has jumped ahead of the others'
        self.fire_passed(step, adopt)

    def fire_passed(self, step: Step, adopt: Adopt) -> None:
        """Fire the timers that the watermark of our log has passed: no later watermark would fire them.

        When the move is done, the site's promise covers these keys. Their outputs must precede it.
        """
        for item in passed_by(adopt, self.adopted_at):
            self._process(step, item)

    def end(self, step: Step) -> None:
        """End the move here and release its memory now, not at the next garbage collection."""
        self.become(step, DestinationInstancePhase.ABSENT)
        self.space.epoch_of = no_epoch
        self.digests = None

    def checkpoint_position(self) -> Position | None:
        """The position that a checkpoint may claim now; None while rows are held."""
        if self.phase is DestinationInstancePhase.ADOPTED_RECEIVING and self.adopt is not None:
            return max(self.passed, self.covered)
        waiting = self.stalled or self.behind_shadow or self.phase in INCOMPLETE
        return self.position if not waiting else None

    def check_merge(self) -> None:
        """Check that every key is complete and every output is emitted before the keys merge."""
        if self.phase is not DestinationInstancePhase.ADOPTED or self.withheld:
            raise CoreBug(f"{self.instance.name}: {self.move} is done, but not complete here")

    def may_settle(self, covered: Position) -> bool:
        """Whether the source may forget: a checkpoint covers the adoption, and no output is withheld."""
        return (
            self.phase is DestinationInstancePhase.ADOPTED
            and self.emit_from is not None
            and not self.withheld
            and not self.stalled
            and covered >= (OWN, self.adopted_at)
        )
