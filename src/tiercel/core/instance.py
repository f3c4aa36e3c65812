"""One running copy of an operator: processes entries of its inbox, and takes part in moves.

Responsible for: the order of processing, checkpoints, replay after a crash or a lost log tail.
Not responsible for: user code (engine.py), one move's life (source.py, destination.py), storing.

    (start) --connected--> ATTACHING --reply--> LOADING --loaded--> RUNNING
                               ^------- connection lost --------------+

What it knows is its last checkpoint plus the entries since: every life replays the same entries to
the same user code and makes the same outputs, and the router admits each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import msgspec

from tiercel.core import messages as m
from tiercel.core.checkpoints import load
from tiercel.core.destination import DestinationMove
from tiercel.core.effects import Effect, LoadCheckpoint, StorageKey
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
from tiercel.core.faults import CoreBug, LostCheckpoint, LostLog, within
from tiercel.core.processing import Phase, Processing
from tiercel.core.records import (
    SHADOW,
    Entry,
    Inheritance,
    Key,
    KeySet,
)
from tiercel.core.routing import overlap
from tiercel.core.source import Phase as SourcePhase
from tiercel.core.source import SourceMove
from tiercel.core.step import Step
from tiercel.core.taken import Cursor


class Instance(Processing):
    """One instance. `life` grows with each start of its process and fences older ones."""

    # -- the one entry -----------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """Same state, event and time give the same effects."""
        step = Step(now_ms)
        released: list[Effect] = []
        match event:
            case Received():
                self._on_message(step, event.sender, event.message)
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
            case CheckpointLoaded():
                self._on_loaded(step, event)
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
                self.waits += 1
                self.waited_ms += step.now_ms - message.entries[0].time_ms
                for entry in (
                    message.entries if self.settings.mutant != "entries-merged" else merged(message.entries)
                ):
                    self.process(step, entry)
                self.flush(step)
                if self.space.spill.active:
                    self.checkpointer.relieve(step)
            case m.Confirmed():
                self._on_confirmed(step, message)
            case m.AttachReply():
                self._on_attach_reply(step, message)
            case m.Halt():
                if message.life == self.life:
                    self.halting = message.move
                    self.checkpointer.soon(step)
            case m.Outlived():
                if message.life == self.life:
                    self.exit(step, "a later life has attached, or others have taken over")
            case _ if self.phase is Phase.RUNNING:
                self._on_move_message(step, message)
            case m.AbortNotice() if self.phase is Phase.LOADING and self._reply is not None:
                # said once, and our roles are those of before
                others = [role for role in self._reply.arrivals if role.move != message.move]
                self._reply = msgspec.structs.replace(self._reply, arrivals=others)
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
                    self.fetch_later(step, self.arriving[move])
            case m.Capture():
                if (
                    leaving is None
                    and not self._still_arriving(message.keys)
                    and not self._still_inheriting()
                ):
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
                self.take_departure(step, message.role)
                self.leaving[move].on_flip(step)
            case m.EmitFrom() if arriving is not None:
                arriving.on_emit_from(step, message.offset)
                self.flush(step)
                self.checkpoint_soon(step)
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

    def _still_arriving(self, keys: KeySet) -> bool:
        """Keys that are still coming in are not ours to capture yet; it is asked again."""
        return any(overlap(keys, a.keys, self.operator.slots) for a in self.arriving.values())

    def _still_inheriting(self) -> bool:
        """Rows that are still the dead instance's, of its epoch, would be in no shadow; it is asked again."""
        inherited = self._reply.inherited if self._reply is not None else None
        return inherited is not None and self.applied < inherited.through

    def _forget(self, step: Step, move: str) -> None:
        leaving = self.leaving.get(move)
        if leaving is not None:
            if self.applied < leaving.flip_offset:
                return  # a replay still meets rows of these keys; it is said again
            del self.leaving[move]
            self._let_go(leaving.retained)
        self.checkpointer.after_next(step, m.Forgotten(move))

    def _let_go(self, retained: Iterable[Key]) -> None:
        """What is stored of these keys goes with the next checkpoint, if it is theirs who left.

        One that has come back meanwhile is stored as it is now, perhaps nowhere else; and so is one that
        came back and is leaving again.
        """
        others = [leaving.retained for leaving in self.leaving.values()]
        for key in retained:
            is_back = self.space.has(key) or any(key in other for other in others)
            if not is_back or self.settings.mutant == "forgets-who-came-back":
                self.space.dirty[key] = None

    def _on_timer(self, step: Step, timer: str) -> None:
        kind, _, move = timer.partition("|")
        if kind == "checkpoint":
            self.checkpointer.due(step)
        elif kind == "slice":
            self.checkpointer.write_some(step)
        elif kind == "digests":
            self.digest_some(step, move)
        elif kind == "capture" and move in self.leaving:
            self.leaving[move].capture_some(step)
        elif kind == "fetch" and move in self.arriving:
            arriving = self.arriving[move]
            if not arriving.complete:
                arriving.fetch_if_stuck(step)
                self.fetch_later(step, arriving)

    # -- attach, load, resume ----------------------------------------------------------------

    def _on_confirmed(self, step: Step, message: m.Confirmed) -> None:
        if message.life != self.life:
            return
        self.confirmed = max(self.confirmed, message.flush)
        self.durable = max(self.durable, message.durable)
        self.lag = message.lag
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
        unknown = reply.fresh or _is_older(reply, self.applied)
        if self.settings.mutant == "rollback-skipped":
            ahead = lost = False
        if self.settings.mutant == "retired-goes-on":
            unknown = False
        if self.loaded and not (ahead or lost or unknown):
            self._resume(step)
        else:  # what we said may be lost, or what we know, or we, forgotten: begin at the checkpoint
            for move in self.leaving:
                self.tell(step, m.Refused(move, "the source fell back to its checkpoint"))
            flushes = self.flushes
            self.reset()
            self.flushes = flushes
            self.phase = Phase.LOADING
            self._own = None
            self._asked += 1
            # values are read when they are needed; unless a cursor is under way, which may yet delete some
            values, timers = self.checkpointer.in_flight, self.engine.has_timers
            step.effects.append(LoadCheckpoint(values, timers, number=self._asked))

    def _check_newest(self, items: dict[StorageKey, Any], told: int) -> None:
        """What a checkpoint covers is trimmed from the log: without it, going on would lose that silently."""
        cursor: Cursor | None = items.get(("cursor",))
        found = -1 if cursor is None else cursor.applied
        if found < told:
            whose = self._reply.inherited if self._own is not None and self._reply is not None else None
            raise LostCheckpoint(whose.of if whose is not None else self.name, found, told)

    def _check_log(self, items: dict[StorageKey, Any], reply: m.AttachReply) -> None:
        """A checkpoint rests on a durable log: one that ends before it gives old numbers to new rows."""
        cursor: Cursor | None = items.get(("cursor",))
        if cursor is not None and (cursor.applied > reply.head or cursor.incarnation > reply.incarnation):
            raise LostLog(self.name, reply.head, cursor.applied)

    def _on_loaded(self, step: Step, loaded: CheckpointLoaded) -> None:
        if self.phase is not Phase.LOADING or self._reply is None or loaded.number != self._asked:
            return
        items: dict[StorageKey, Any] = loaded.items
        self._check_log(items, self._reply)
        self.space.spill.shelf = loaded.shelf
        cursor: Cursor | None = items.get(("cursor",))
        if self._reply.fresh or (cursor is not None and _is_older(self._reply, cursor.applied, stored=True)):
            self.checkpointer.discard(items)
            items = {}
        inherited = self._reply.inherited
        if (
            inherited is not None
            and inherited.fresh
            and self._own is None
            and not _is_since(inherited, items)
        ):
            self._own = items  # of a checkpoint that was never finished, or of a time before it was retired
            self._asked += 1
            adopt, timers = not self.checkpointer.in_flight, self.engine.has_timers
            step.effects.append(
                LoadCheckpoint(timers=timers, inherited=inherited, number=self._asked, adopt=adopt)
            )
            return
        if self._reply.stored and not self._reply.fresh:
            self._check_newest(items, self._reply.start)
        load(self, items, self._reply.start, self._reply.start_watermark_ms)
        if self._own is not None and not loaded.adopted:
            self.checkpointer.inherited(self._own)
        if self._own is not None and inherited is not None:
            self.inherited = inherited.through
        self._own = None
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
        step.send(
            self.router,
            m.Resume(self.name, self.life, self.session, self.applied, positions, self.watermark_ms),
        )
        self.flush(step)

    def _take_roles(self, step: Step, reply: m.AttachReply) -> None:
        """The router's log knows which moves concern us; whatever else we remember is over."""
        listed = {role.move for role in reply.arrivals}
        if self.settings.mutant == "stale-copies-kept":
            return
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
            self.fetch_later(step, arriving)
        decided = {role.move for role in reply.departures}
        for move in [mv for mv, lv in self.leaving.items() if mv not in decided and lv.cut is not None]:
            del self.leaving[move]
        for leaving in self.leaving.values():
            if leaving.begun is not None and leaving.move not in decided:
                self.tell(step, leaving.begun)  # if it was undone meanwhile, the answer says so
        in_order = sorted(reply.departures, key=lambda role: role.flip_offset)  # who left first takes first
        for role_out in in_order:
            self.take_departure(step, role_out)

    def validate(self) -> None:
        """Every queue is within its limit, no key is cold and dirty; the simulator asks after each event."""
        limits = self.settings
        for leaving in self.leaving.values():
            within(
                f"chunks of {leaving.move} under way",
                leaving.sent - leaving.received,
                limits.chunks_unacked_max,
            )
        for arriving in self.arriving.values():
            largest = 8 * limits.dispatch_rows_max  # one entry's outputs may pass the limit
            within(f"outputs kept for {arriving.move}", len(arriving.kept), limits.suppressed_max + largest)
        for key in self.space.cold.keys() & self.space.dirty.keys():
            raise CoreBug(f"{self.name}: key {key!r} is to be stored anew, and its stored version is all")


def _is_older(reply: m.AttachReply, applied: int, *, stored: bool = False) -> bool:
    """Whether what a newcomer knows is of a time before it was retired: it began behind that.

    It was told so when it first attached, and may have died, or not have heard it, before it had a checkpoint
    of its own. One that is stored for the very place where it began may be as old: nothing was logged since.
    If it is not, it has nothing in it that anyone has heard of.
    """
    newcomer = not reply.stored and reply.inherited is None
    return newcomer and (applied < reply.start or (stored and applied == reply.start))


def _is_since(inherited: Inheritance, items: dict[StorageKey, Any]) -> bool:
    """Whether what an heir has stored is of a time since it inherits; the router may not have heard of it.

    If it hears now, the log behind the dead one's checkpoint goes: to begin anew with that would miss it.
    """
    cursor: Cursor | None = items.get(("cursor",))
    return cursor is not None and cursor.inherited == inherited.through


def merged(entries: list[Entry]) -> list[Entry]:
    """The mutant `entries-merged`: neighbours become one entry, so a replay groups rows differently."""
    out: list[Entry] = []
    for entry in entries:
        if (
            out
            and entry.control is None
            and out[-1].control is None
            and entry.parts.keys() == out[-1].parts.keys()
        ):
            parts = {name: out[-1].parts[name] + rows for name, rows in entry.parts.items()}
            out[-1] = Entry(entry.offset, entry.time_ms, parts)
        else:
            out.append(entry)
    return out
