"""One running copy of an operator: processes entries of its inbox, and takes part in moves.

Responsible for: the order of processing, checkpoints, replay after a crash or a lost log tail.
Not responsible for: user code (engine.py), one move's life (source.py, destination.py), storing.

    (start) --connected--> ATTACHING --reply--> LOADING --loaded--> RUNNING
                               ^------- connection lost --------------+

What it knows is its last checkpoint plus the entries since: every life replays the same entries to
the same user code and makes the same outputs, and the router admits each of them once.
"""

from __future__ import annotations

import enum
from typing import Any, assert_never

from tiercel.core import messages as m
from tiercel.core.checkpoints import Checkpointer, load
from tiercel.core.destination import DestinationMove
from tiercel.core.effects import Effect, Exit, LoadCheckpoint, StorageKey
from tiercel.core.engine import Code, Engine
from tiercel.core.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.core.faults import CoreBug
from tiercel.core.keyspace import KeySpace
from tiercel.core.records import (
    OWN,
    SHADOW,
    Adopt,
    Compare,
    Done,
    Entry,
    Flip,
    Key,
    Output,
    Row,
    Tick,
    Watermark,
)
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.core.source import Phase as SourcePhase
from tiercel.core.source import SourceMove
from tiercel.core.step import Journal, Step
from tiercel.core.strategies import STRATEGIES
from tiercel.core.topology import Operator, site_of


class Phase(enum.Enum):
    ATTACHING = "attaching"  # waits for its router
    LOADING = "loading"  # older lives are fenced; the checkpoint is being read
    RUNNING = "running"  # processes what it is sent


class Instance:
    """One instance. `life` grows with each start of its process and fences older ones."""

    def __init__(self, name: str, operator: Operator, code: Code, settings: Settings, life: int) -> None:
        self.name = name
        self.operator = operator
        self.settings = settings
        self.life = life
        self.router = site_of(name)
        self.phase = Phase.ATTACHING
        self.engine = Engine(code, operator.time_mode)
        self.journal = Journal()
        self.checkpointer = Checkpointer(self)
        self.reset()
        self.loaded = False
        self.session = 0
        self.halting = ""
        self._reply: m.AttachReply | None = None

    def reset(self) -> None:
        """Forget everything in memory: the checkpoint is all there is."""
        self.routes = RoutingTable.initial(self.operator)
        self.space = KeySpace(self.operator.slots, self._epoch_of, self.engine.code.user_key)
        self.applied = 0
        self.flushes = 0  # of this life
        self.confirmed = 0  # flushes that are durable at the router
        self.time_ms = 0
        self.watermark_ms = -1
        self.incarnation = 0
        self.durable = 0
        self.leaving: dict[str, SourceMove] = {}
        self.arriving: dict[str, DestinationMove] = {}
        self._out: list[Output] = []
        self.loaded = False
        self.checkpointer.forget()

    def _epoch_of(self, key: Key) -> int:
        return self.routes.route(key).epoch

    # -- the one entry -----------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """Same state, event and time give the same effects."""
        step = Step(now_ms)
        released: list[Effect] = []
        match event:
            case Received(sender=sender, message=message):
                self._on_message(step, sender, message)
            case Durable(seq=seq):
                released = self.journal.durable_through(seq)
                self.checkpointer.stored(step, seq)
            case TimerFired(name=timer):
                self._on_timer(step, timer)
            case Connected(peer=peer):
                self._on_connected(step, peer)
            case Disconnected(peer=peer):
                if peer == self.router:
                    self.phase = Phase.ATTACHING
            case CheckpointLoaded(items=items):
                self._on_loaded(step, items)
            case LogRead():
                raise CoreBug(self.name + ": an instance does not read logs")
            case _:
                assert_never(event)
        return released + self.journal.commit(step)

    def _on_connected(self, step: Step, peer: str) -> None:
        if peer == self.router:
            self.phase = Phase.ATTACHING
            self.session += 1
            step.send(self.router, m.Attach(self.name, self.life, self.session))
        for leaving in self.leaving.values():
            if leaving.destination == peer:
                leaving.resend(step)

    def _on_message(self, step: Step, sender: str, message: Any) -> None:
        match message:
            case m.Dispatch() if self.phase is Phase.RUNNING:
                for entry in message.entries:
                    self._process(step, entry)
                self.flush(step)
            case m.Confirmed():
                self._on_confirmed(step, message)
            case m.AttachReply():
                self._on_attach_reply(step, message)
            case m.Halt():
                if message.life == self.life:
                    self.halting = message.move
                    self.checkpointer.soon(step)
            case _ if self.phase is Phase.RUNNING:
                self._on_move_message(step, message)
            case _:
                pass  # said before we were ready; it is repeated

    def _on_move_message(self, step: Step, message: Any) -> None:
        move: str = message.move
        leaving, arriving = self.leaving.get(move), self.arriving.get(move)
        match message:
            case m.Prepare():
                if arriving is None and not self.halting:
                    args = (message.move, message.keys, message.source, message.strategy, message.epochs)
                    self.arriving[move] = DestinationMove(self, *args)
                if move in self.arriving:
                    self.tell(step, m.Prepared(move, self.watermark_ms))
                    self._fetch_later(step, self.arriving[move])
            case m.Capture():
                if leaving is None:
                    leaving = SourceMove(self, move, message.keys, message.destination, SourcePhase.CAPTURING)
                    self.leaving[move] = leaving
                    self.flush(step)
                    leaving.start(step)
            case m.Shadow() if arriving is not None:
                for notice in message.entries:
                    arriving.feed(step, (SHADOW, notice.offset), notice.time_ms, notice.rows, notice.control)
                self.flush(step)
            case m.Chunk() if arriving is not None:
                arriving.on_chunk(step, message)
                self.flush(step)
            case m.EndOfKeys() if arriving is not None:
                arriving.on_end_of_keys(step, message)
                self.flush(step)
            case m.ChunkReceipt() if leaving is not None:
                leaving.on_receipt(step, message)
            case m.Fetch() if leaving is not None:
                leaving.on_fetch(step)
            case m.FlipNotice():
                self._take_departure(step, message.role)
                self.leaving[move].on_flip(step)
            case m.EmitFrom() if arriving is not None:
                arriving.on_emit_from(step, message.offset)
                self.flush(step)
                self.checkpointer.soon(step)
            case m.EmittedThrough() if arriving is not None:
                arriving.on_emitted_through(message.offset)
            case m.AbortNotice():
                self.leaving.pop(move, None)
                if arriving is not None:
                    del self.arriving[move]
                    self.checkpointer.drop_move(arriving)
            case m.Forget():
                self._forget(step, move)
            case _:
                pass  # a letter about a move that has ended here

    def _forget(self, step: Step, move: str) -> None:
        leaving = self.leaving.get(move)
        if leaving is not None:
            if self.applied < leaving.flip_offset:
                return  # a replay still meets rows of these keys; it is said again
            del self.leaving[move]
            self.space.dirty.update(leaving.retained)
        self.checkpointer.after_next(m.Forgotten(move))
        self.checkpointer.soon(step)

    def _on_timer(self, step: Step, timer: str) -> None:
        kind, _, move = timer.partition("|")
        if kind == "checkpoint":
            self.checkpointer.due(step)
        elif kind == "capture" and move in self.leaving:
            self.leaving[move].capture_some(step)
        elif kind == "fetch" and move in self.arriving:
            arriving = self.arriving[move]
            if not arriving.complete:
                arriving.fetch_if_stuck(step)
                self._fetch_later(step, arriving)

    def _fetch_later(self, step: Step, arriving: DestinationMove) -> None:
        step.timer(f"fetch|{arriving.move}", step.now_ms + self.settings.retry_ms)

    # -- processing --------------------------------------------------------------------------

    def _process(self, step: Step, entry: Entry) -> None:
        """One log entry: our own keys, keys on their way out, keys on their way in; or a control record."""
        self.time_ms = entry.time_ms
        self.engine.begin_entry()
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
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            of_key = by_key.get(row[0])
            if of_key is None:
                by_key[row[0]] = [row]
            else:
                of_key.append(row)
        space, engine, out = self.space, self.engine, self._out
        time_ms, watermark_ms, offset = entry.time_ms, self.watermark_ms, entry.offset
        new_timers = engine.handle.new_timers
        for key, of_key in by_key.items():
            state = space.state(key)
            engine.call(state, key, of_key, time_ms, watermark_ms, offset, out)
            space.touched(key, state, new_timers)

    def _not_cut(self, rows: list[Row], offset: int) -> list[Row]:
        """Without the rows of moves that were cut before these: they are not ours to process any more."""
        for leaving in self.leaving.values():
            if leaving.skips(offset):
                rows = [r for r in rows if not leaving.has(r[0])]
        return rows

    def _moving_part(self, step: Step, move: str, rows: list[Row], entry: Entry) -> None:
        arriving = self.arriving.get(move)
        if arriving is not None and arriving.adopted_at >= 0:
            arriving.feed(step, (OWN, entry.offset), entry.time_ms, rows, None)
        elif entry.offset > self.applied:
            rows = self._not_cut(rows, entry.offset)
            leaving = self.leaving.get(move)
            if leaving is not None:
                leaving.touched.update(r[0] for r in rows)
            if rows:
                self._call_all(rows, entry)

    def _on_control(self, step: Step, entry: Entry) -> None:
        match entry.control:
            case Tick():
                if not self.engine.event_time:
                    self._fire_due(entry.time_ms, entry)
                self._control_to_moves(step, entry)
            case Watermark(value_ms=value):
                self.watermark_ms = value
                if self.engine.event_time:
                    self._fire_due(value, entry)
                self._control_to_moves(step, entry)
            case Compare(move=move) if move in self.leaving:
                self.tell(step, m.Digests(move, self.leaving[move].digests()))
            case Adopt() as adopt:
                self._on_adopt(step, adopt, entry.offset)
            case Done(move=move) if move in self.arriving:
                self._merge(step, self.arriving.pop(move), entry.offset)
            case Flip(source=self.name) as flip:
                self._reached_flip(step, flip, entry.offset)
            case _:
                pass

    def _reached_flip(self, step: Step, flip: Flip, offset: int) -> None:
        """In band: nothing of the keys behind the flip is ours, whether we were told yet or not."""
        role = m.DepartureRole(
            flip.move, flip.keys, flip.destination, flip.strategy, flip.begin_offset, offset, None
        )
        self._take_departure(step, role)
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
        self._fetch_later(step, arriving)

    def _merge(self, step: Step, arriving: DestinationMove, offset: int) -> None:
        arriving.flush(step)
        if not arriving.complete or arriving.kept:
            raise CoreBug(f"{self.name}: {arriving.move} is done, but not complete here")
        self.space.absorb(arriving.space)
        for leaving in self.leaving.values():
            if leaving.cut is not None and offset <= leaving.flip_offset:
                leaving.retain()  # a replay: these keys came before they left
        self.checkpointer.merge_move(arriving)

    # -- outputs -----------------------------------------------------------------------------

    def flush(self, step: Step) -> None:
        """Everything the processed entries made, in one message."""
        for arriving in self.arriving.values():
            arriving.flush(step)
        dead, self.engine.dead_letters = self.engine.dead_letters, []
        timers = self.engine.has_timers and not self.engine.event_time and self._any_timers()
        self.flushes += 1
        outputs, self._out = self._out, []
        step.send(
            self.router,
            m.Outputs(
                self.name, self.life, self.flushes, self.applied, outputs, dead, self.watermark_ms, timers
            ),
        )

    def tell(self, step: Step, message: m.Message) -> None:
        """To our router, about a move; a router listens only to the latest life of an instance."""
        step.send(self.router, m.Said(self.name, self.life, message))

    def _any_timers(self) -> bool:
        return self.space.has_timers or any(a.space.has_timers for a in self.arriving.values())

    # -- attach, load, resume ----------------------------------------------------------------

    def _on_confirmed(self, step: Step, message: m.Confirmed) -> None:
        if message.life != self.life:
            return
        self.confirmed = max(self.confirmed, message.flush)
        self.durable = max(self.durable, message.durable)
        self.checkpointer.try_store(step)
        for leaving in self.leaving.values():
            leaving.pump(step)

    def _on_attach_reply(self, step: Step, reply: m.AttachReply) -> None:
        if (reply.life, reply.session) != (self.life, self.session):
            return
        self._reply = reply
        ahead = any(inc > self.incarnation and self.applied > end for inc, end in reply.ends)
        lost = self.confirmed < self.flushes and (
            reply.incarnation != self.incarnation or reply.flush < self.flushes
        )
        if self.loaded and (not (ahead or lost) or self.settings.mutant == "rollback-skipped"):
            self._resume(step)
        else:  # what we said may be lost, or what we know the log has forgotten: begin at the checkpoint
            for move in self.leaving:
                self.tell(step, m.Refused(move, "the source fell back to its checkpoint"))
            flushes = self.flushes
            self.reset()
            self.flushes = flushes
            self.phase = Phase.LOADING
            step.effects.append(LoadCheckpoint())

    def _on_loaded(self, step: Step, items: dict[StorageKey, Any]) -> None:
        if self.phase is not Phase.LOADING or self._reply is None:
            return
        load(self, items, self._reply.start)
        self.loaded = True
        self._resume(step)
        self.checkpointer.arm(step)

    def _resume(self, step: Step) -> None:
        reply = self._reply
        assert reply is not None
        self.incarnation = reply.incarnation
        self._take_roles(step, reply)
        self.phase = Phase.RUNNING
        positions = {move: a.position for move, a in self.arriving.items()}
        step.send(self.router, m.Resume(self.name, self.life, self.session, self.applied, positions, self.watermark_ms))
        self.flush(step)

    def _take_roles(self, step: Step, reply: m.AttachReply) -> None:
        """The router's log knows which moves concern us; whatever else we remember is over."""
        listed = {role.move for role in reply.arrivals}
        for move in [mv for mv in self.arriving if mv not in listed]:
            self.checkpointer.drop_move(self.arriving.pop(move))
        for role in reply.arrivals:
            if 0 <= role.merged <= self.applied:
                continue  # its keys are ours like any others
            arriving = self.arriving.get(role.move)
            if arriving is None:
                if role.adopt is None or role.adopted > self.applied:
                    continue  # Adopt is still to come, and brings all we need
                arriving = DestinationMove(
                    self, role.move, role.keys, role.source, role.strategy, role.epochs
                )
                self.arriving[role.move] = arriving
                arriving.on_adopt(step, role.adopt, role.adopted)
            if role.emit_from is not None and arriving.emit_from is None:
                arriving.on_emit_from(step, role.emit_from)
            if arriving.complete:
                self.tell(step, m.Installed(role.move))
            self._fetch_later(step, arriving)
        decided = {role.move for role in reply.departures}
        for move in [mv for mv, lv in self.leaving.items() if mv not in decided and lv.cut is not None]:
            del self.leaving[move]
        for role_out in reply.departures:
            self._take_departure(step, role_out)

    def _take_departure(self, step: Step, role: m.DepartureRole) -> None:
        leaving = self.leaving.get(role.move)
        flips_first = STRATEGIES[role.strategy].flips_first
        if leaving is None:
            phase = SourcePhase.WAITING if flips_first else SourcePhase.CAPTURED
            leaving = self.leaving[role.move] = SourceMove(
                self, role.move, role.keys, role.destination, phase
            )
        leaving.begin_offset, leaving.flip_offset = role.begin_offset, role.flip_offset
        if flips_first:
            if leaving.phase is SourcePhase.WAITING and self.applied >= role.flip_offset:
                leaving.capture_all(step)
        elif role.cut is not None and leaving.phase is not SourcePhase.DRAINED:
            leaving.stop_at(-1)  # all we owed has arrived: nothing of these keys is processed any more

    def checkpoint_soon(self, step: Step) -> None:
        self.checkpointer.soon(step)

    def exit(self, step: Step, reason: str) -> None:
        step.effects.append(Exit(reason))
