"""What an instance does with the entries of its inbox: calls, timers, moves in and out, outputs.

Responsible for: the order of processing. Our own keys, keys on their way out (read by us until the
    flip), keys on their way in (once adopted), ticks and watermarks, all in log order.
Not responsible for: how it came to be attached, loaded and told (instance.py), user code (engine.py).
"""

from __future__ import annotations

import enum
from typing import Any

from tiercel.core import messages as m
from tiercel.core.checkpoints import Checkpointer
from tiercel.core.destination import DestinationMove
from tiercel.core.effects import Exit, StorageKey
from tiercel.core.engine import Code, Engine
from tiercel.core.faults import CoreBug
from tiercel.core.keyspace import KeySpace
from tiercel.core.records import (
    OWN,
    Adopt,
    Compare,
    Done,
    Entry,
    Era,
    Flip,
    Inherited,
    Key,
    Output,
    Row,
    TableUpdate,
    Tick,
    Watermark,
)
from tiercel.core.routing import RoutingTable
from tiercel.core.runs import count_rows
from tiercel.core.settings import Settings
from tiercel.core.source import Phase as SourcePhase
from tiercel.core.source import SourceMove
from tiercel.core.step import Journal, Step
from tiercel.core.strategies import STRATEGIES
from tiercel.core.taken import Scope
from tiercel.core.topology import Operator, site_of


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    ATTACHING = "attaching"  # waits for its router
    LOADING = "loading"  # older lives are fenced; the checkpoint is being read
    RUNNING = "running"  # processes what it is sent


class Processing:
    """The state of an instance, and what entries do to it."""

    def __init__(self, name: str, operator: Operator, code: Code, settings: Settings, life: int) -> None:
        self.name = name
        self.operator = operator
        self.settings = settings
        self.life = life
        self.router = site_of(name)
        self.phase = Phase.ATTACHING
        self.engine = Engine(code, operator, settings.mutant)
        self.journal = Journal()
        self.checkpointer = Checkpointer(self)
        self.rows = self.outputs = self.waits = 0  # of this life, for `gauges`
        self.waited_ms = 0.0
        self.lag = 0  # rows that wait for us in the inbox, as the router has last said
        self.reset()
        self.loaded = False
        self.session = 0
        self.halting = ""
        self._reply: m.AttachReply | None = None
        self._own: dict[StorageKey, Any] | None = None  # what we have stored ourselves, while we inherit
        self._asked = 0  # number of the last `LoadCheckpoint`

    def reset(self) -> None:
        """Forget everything in memory: the checkpoint is all there is."""
        self.routes = RoutingTable.initial(self.operator)
        self.space = KeySpace(
            self.operator.slots,
            self._epoch_of,
            *self.engine.about_keys,
            memory_bytes_max=self.operator.memory_limit(self.settings),
            mutant=self.settings.mutant,
        )
        self.applied = 0
        self.flushes = 0  # of this life
        self.confirmed = 0  # flushes that are durable at the router
        self.time_ms = 0
        self.watermark_ms = -1
        self.incarnation = 0
        self.durable = 0
        self.inherited = -1  # `Inheritance.through` of the last one
        self.leaving: dict[str, SourceMove] = {}
        self.arriving: dict[str, DestinationMove] = {}
        self._out: list[Output] = []
        self.loaded = False
        self.checkpointer.forget()

    def _epoch_of(self, key: Key) -> int:
        return self.routes.route(key).epoch

    # -- processing --------------------------------------------------------------------------

    def process(self, step: Step, entry: Entry) -> None:
        """One log entry: our own keys, keys on their way out, keys on their way in; or a control record."""
        self.time_ms = entry.time_ms
        for name, rows in entry.parts.items():
            if name == self.name:
                if entry.offset > self.applied:
                    self._call_all(self._not_cut(rows, entry.offset) if self.leaving else rows, entry)
            else:
                self._moving_part(step, name.partition("|")[0], rows, entry)
        if entry.control is not None and entry.offset > self.applied:
            self._on_control(step, entry)
        elif entry.control is not None:
            self._control_to_moves(step, entry)
        self.applied = max(self.applied, entry.offset)
        for leaving in self.leaving.values():
            if leaving.phase is SourcePhase.WAITING and 0 <= leaving.flip_offset <= self.applied:
                leaving.capture_all(step)

    def _call_all(self, rows: list[Row], entry: Entry) -> None:
        self.rows += count_rows(rows)
        if self.engine.folds:
            self._fold_all(rows, entry.offset)
            return
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            of_key = by_key.get(row[0])
            if of_key is None:
                by_key[row[0]] = [row]
            else:
                of_key.append(row)
        space, call, out = self.space, self.engine.call, self._out
        states, new_timers = space.keys, self.engine.handle.new_timers
        time_ms, watermark_ms, offset = entry.time_ms, self.watermark_ms, entry.offset
        if space.snapshots:
            space.about_to_change(by_key)
        for key, of_key in by_key.items():
            state = states.get(key) or space.state(key)
            call(state, key, of_key, time_ms, watermark_ms, offset, out)
            if new_timers or not state.values:
                space.touched(key, state, new_timers)
        space.dirty.update(dict.fromkeys(by_key))

    def _fold_all(self, rows: list[Row], offset: int) -> None:
        space, engine = self.space, self.engine
        if space.snapshots:
            space.about_to_change(dict.fromkeys(row[0] for row in rows))
        touched, emptied = engine.fold(space.keys, space.state, rows, offset, self._out)
        for key in emptied:
            if key in space.keys:
                space.touched(key, space.keys[key], engine.handle.new_timers)
        space.dirty.update(dict.fromkeys(touched))

    def _not_cut(self, rows: list[Row], offset: int) -> list[Row]:
        """Without the rows of moves that were cut before these: they are not ours to process any more."""
        for leaving in self.leaving.values():
            if leaving.skips(offset):
                rows = [r for r in rows if not leaving.has(r[0])]
            elif leaving.cut is None:
                leaving.touched.update(r[0] for r in rows if leaving.has(r[0]))
        return rows

    def _moving_part(self, step: Step, move: str, rows: list[Row], entry: Entry) -> None:
        arriving = self.arriving.get(move)
        if arriving is not None and arriving.adopted_at >= 0:
            arriving.feed(step, (OWN, entry.offset), entry.time_ms, rows, None)
        elif entry.offset > self.applied:
            rows = self._not_cut(rows, entry.offset)
            if rows:
                self._call_all(rows, entry)

    def _on_control(self, step: Step, entry: Entry) -> None:
        match entry.control:
            case Tick():
                if self.settings.mutant == "tick-delivered-twice":
                    self._fire_due(entry.time_ms + 40, entry)
                if not self.engine.event_time:
                    self._fire_due(entry.time_ms, entry)
                self._control_to_moves(step, entry)
            case Watermark(value_ms=value):
                self.watermark_ms = value
                if self.engine.event_time:
                    self._fire_due(value, entry)
                self._control_to_moves(step, entry)
            case Compare(move=move) if move in self.leaving:
                self.leaving[move].compare(step)
            case Adopt() as adopt:
                self._on_adopt(step, adopt, entry.offset)
            case Done(move=move) if move in self.arriving:
                self._merge(step, self.arriving.pop(move), entry.offset)
            case Inherited(update=update):
                self._on_inherited(update)
            case Flip(source=self.name) as flip:
                self._reached_flip(step, flip, entry.offset)
            case _:
                pass

    def _on_inherited(self, update: TableUpdate) -> None:
        """What we make of our keys from here on is of their new epoch, and every checkpoint must know."""
        self.routes.take(update)
        if any(route.instance == self.name for route in update.slots.values()):
            if self.settings.mutant != "inherited-epochs-kept":
                self.space.era = Era(self.checkpointer.generation, update)  # for those that are only stored
            self.space.about_to_change(self.space.keys)
            for key, state in self.space.keys.items():
                state.epoch = self._epoch_of(key)
            self.space.dirty.update(dict.fromkeys(self.space.keys))

    def _reached_flip(self, step: Step, flip: Flip, offset: int) -> None:
        """In band: nothing of the keys behind the flip is ours, whether we were told yet or not."""
        role = m.DepartureRole(
            flip.move,
            flip.keys,
            flip.destination,
            flip.strategy,
            flip.begin_offset,
            offset,
            None,
            flip.epochs,
        )
        self.take_departure(step, role)
        leaving = self.leaving[flip.move]
        if leaving.phase is SourcePhase.CAPTURED and leaving.cut is None:
            leaving.stop_at(offset)

    def _control_to_moves(self, step: Step, entry: Entry) -> None:
        """Ticks and watermarks of our log, for keys that arrived and are still a part of their own."""
        if isinstance(entry.control, Tick | Watermark):
            for arriving in self.arriving.values():
                if 0 <= arriving.adopted_at < entry.offset:
                    arriving.feed(step, (OWN, entry.offset), entry.time_ms, [], entry.control)

    def _fire_due(self, due_ms: int, entry: Entry) -> None:
        space, engine = self.space, self.engine
        for key in space.due(due_ms):
            space.about_to_change([key])
            state = space.keys[key]
            engine.fire(state, key, due_ms, entry.time_ms, self.watermark_ms, entry.offset, self._out)
            space.touched(key, state, engine.handle.new_timers)
            for leaving in self.leaving.values():
                if leaving.has(key):
                    leaving.touched.add(key)

    def _on_adopt(self, step: Step, adopt: Adopt, offset: int) -> None:
        self.routes.take(adopt.update)
        if site_of(adopt.source) == self.router and adopt.move in self.leaving:
            return  # we are its source
        destinations = {r.instance for r in adopt.update.slots.values()} | {
            adopt.update.keys[k].instance for k in adopt.keys.keys if k in adopt.update.keys
        }
        if self.name not in destinations:
            return
        arriving = self.arriving.get(adopt.move)
        if arriving is None:
            arriving = DestinationMove(
                self, adopt.move, adopt.keys, adopt.source, adopt.strategy, adopt.update
            )
            self.arriving[adopt.move] = arriving
        arriving.on_adopt(step, adopt, offset)
        self.fetch_later(step, arriving)

    def _merge(self, step: Step, arriving: DestinationMove, offset: int) -> None:
        arriving.flush(step)
        if not arriving.complete or arriving.kept:
            raise CoreBug(f"{self.name}: {arriving.move} is done, but not complete here")
        self.space.absorb(arriving.space)
        for leaving in self.leaving.values():
            if leaving.cut is not None and offset <= leaving.flip_offset:
                leaving.retain()  # a replay: these keys came before they left
        self.checkpointer.merge_move(arriving)
        self.checkpointer.before_long(step)

    # -- outputs -----------------------------------------------------------------------------

    def flush(self, step: Step) -> None:
        """Everything the processed entries made, in one message."""
        for arriving in self.arriving.values():
            arriving.flush(step)
        dead, self.engine.dead_letters = self.engine.dead_letters, []
        timers = self.engine.has_timers and not self.engine.event_time and self._any_timers()
        self.flushes += 1
        outputs, self._out = self._out, []
        rows = count_rows([output.row for output in outputs])
        self.outputs += rows
        step.send(
            self.router,
            m.Outputs(
                self.name,
                self.life,
                self.flushes,
                self.applied,
                outputs[0].offset if outputs else self.applied,
                outputs,
                dead,
                self.watermark_ms,
                timers,
                rows,
            ),
        )

    def gauges(self) -> dict[str, float]:
        """What this life has done, and how much it holds; sizes are guessed from a few keys."""
        spaces = [self.space, *(arriving.space for arriving in self.arriving.values())]
        keys = sum(space.count for space in spaces)
        sizes = [size for space in spaces for size in space.sample_bytes()]
        return {
            "rows": self.rows,
            "outputs": self.outputs,
            "waited": self.waits,
            "waited_ms": self.waited_ms,
            "lag": self.lag,
            "state_keys": keys,
            "state_bytes": keys * sum(sizes) / len(sizes) if sizes else 0,
            "hot_keys": sum(len(space.keys) for space in spaces),
            "read_back": self.space.spill.reads,
            "moves": len(self.leaving) + len(self.arriving),
        }

    def tell(self, step: Step, message: m.Message) -> None:
        """To our router, about a move; a router listens only to the latest life of an instance."""
        step.send(self.router, m.Said(self.name, self.life, message))

    def _any_timers(self) -> bool:
        return self.space.has_timers or any(a.space.has_timers for a in self.arriving.values())

    def fetch_later(self, step: Step, arriving: DestinationMove) -> None:
        step.timer(f"fetch|{arriving.move}", step.now_ms + self.settings.retry_ms)

    def take_departure(self, step: Step, role: m.DepartureRole) -> None:
        leaving = self.leaving.get(role.move)
        flips_first = STRATEGIES[role.strategy].flips_first
        if leaving is None:
            phase = SourcePhase.WAITING if flips_first else SourcePhase.CAPTURED
            leaving = self.leaving[role.move] = SourceMove(
                self, role.move, role.keys, role.destination, phase
            )
        leaving.begin_offset, leaving.flip_offset = role.begin_offset, role.flip_offset
        leaving.epochs = role.epochs
        if flips_first:
            if leaving.phase is SourcePhase.WAITING and self.applied >= role.flip_offset:
                leaving.capture_all(step)
        elif role.cut is not None and leaving.phase is not SourcePhase.DRAINED:
            leaving.stop_at(-1)  # all we owed has arrived: nothing of these keys is processed any more
        elif leaving.cut is None and self.applied >= role.flip_offset:
            leaving.stop_at(role.flip_offset)  # a checkpoint behind the flip: we had stopped there

    def digest_some(self, step: Step, move: str) -> None:
        """Go on with the digests of a move, a few keys at a time; say so when they are there."""
        for moving in (self.leaving.get(move), self.arriving.get(move)):
            digests = moving.digests if moving is not None else None
            if digests is None:
                continue
            digests.look_at(4 * self.settings.slice_keys)  # cheaper than writing them
            if not digests.complete:
                step.timer(f"digests|{move}", step.now_ms + self.settings.capture_pause_ms)
            elif isinstance(moving, SourceMove):
                self.tell(step, m.Digests(move, digests.found))
            elif isinstance(moving, DestinationMove) and moving.covered:
                moving.say_ready(step)

    def checkpoint_soon(self, step: Step) -> None:
        """Of what arrives; for all other keys the next one that is due is soon enough."""
        self.checkpointer.soon(step, Scope.ARRIVALS)

    def exit(self, step: Step, reason: str) -> None:
        step.effects.append(Exit(reason))
