"""The sessions of instances at their router: attach, resume, checkpoints, retirement.

Responsible for: fencing older incarnations, the position from which an instance reads, its retirement.
Not responsible for: the entries that it is sent (core/logs/dispatch.py), its moves (moves.py).
"""

from __future__ import annotations

import msgspec

from tiercel.core import messages as m
from tiercel.core.logs.dispatch import DispatchPhase
from tiercel.core.logs.inbox import Inbox
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import LogReader
from tiercel.core.model.topology import operator_of
from tiercel.core.router.moves import Moves
from tiercel.core.router.state import RouterState


class Sessions:
    """The connections of this site's instances to their logs."""

    def __init__(self, state: RouterState, moves: Moves) -> None:
        self.state = state
        self._moves = moves

    def on_attach(self, step: Step, message: m.Attach) -> None:
        inbox = self.state.inboxes[operator_of(message.instance)]
        if inbox.is_fenced_by_takeover(message.instance):
            inbox.defer_or_fence_attach(step, message)
            return
        reader = inbox.readers.get(message.instance)
        last_incarnation = reader.incarnation if reader is not None else 0
        if reader is not None and reader.fences(message.incarnation):
            step.send(message.instance, m.InstanceFenced(message.incarnation))
            return
        cursor = inbox.cursors.get(message.instance)
        if cursor is None:
            cursor = inbox.new_feed(message.instance)
        cursor.takeover = inbox.successors.get(message.instance)
        cursor.attach(message.incarnation, message.session)
        fresh = reader is None
        if reader is None:
            # a new instance owns nothing that is in the log
            reader = LogReader(0, inbox.offset, {}, inbox.watermark_ms)
        if message.incarnation > last_incarnation:
            reader = msgspec.structs.replace(reader, incarnation=message.incarnation)
            inbox.readers[message.instance] = reader
            step.put(("reader", inbox.name, message.instance), reader)
            step.delete(("retired", inbox.name, message.instance))
            inbox.relaunched(step, message.instance, message.incarnation)
            self._moves.incarnation_began(step, message.instance)
        inbox.limit_feeds()
        # the same process with a new connection still has entries that are not durable
        known = message.incarnation == last_incarnation
        incoming_moves, outgoing_moves = self._moves.roles_of(message.instance, known=known)
        reply = m.AttachReply(
            message.incarnation,
            message.session,
            self.state.incarnation,
            reader.applied,
            reader.start_watermark_ms,
            fresh,
            cursor.flush_no,
            inbox.ends,
            incoming_moves,
            outgoing_moves,
            cursor.takeover,
            reader.stored,
            inbox.offset,
        )
        step.send_durable(message.instance, reply)

    def on_resume(self, step: Step, message: m.Resume) -> None:
        inbox = self.state.inboxes[operator_of(message.instance)]
        cursor = inbox.cursors.get(message.instance)
        if cursor is None or cursor.incarnation != message.incarnation or cursor.session != message.session:
            return
        if cursor.phase is not DispatchPhase.FENCED:
            return
        moves = self._moves.resumed(step, message)
        cursor.resume(message.applied, moves, inbox.trimmed)
        cursor.watermark_ms = max(cursor.watermark_ms, message.watermark_ms)

    def on_checkpointed(self, step: Step, message: m.Checkpointed) -> None:
        inbox = self.state.inboxes[operator_of(message.instance)]
        cursor = inbox.cursors.get(message.instance)
        if cursor is None and message.instance not in inbox.readers:  # retired: its work is not needed
            step.send(message.instance, m.InstanceFenced(message.incarnation))
        if cursor is None or cursor.is_fenced(message.incarnation):
            return
        own = self._moves.checkpointed(step, message)
        reader = inbox.readers[message.instance] = LogReader(
            message.incarnation, message.applied, own, stored=True
        )
        step.put(("reader", inbox.name, message.instance), reader)
        cursor.keys = message.keys
        self._takeover_covered(step, inbox, message.instance, min([message.applied, *own.values()]))
        inbox.trim(step)

    def retire(self, step: Step, sender: str, message: m.Retirement) -> None:
        """Retire an instance that owns nothing: the log no longer waits for it and sends it nothing."""
        instance = message.instance
        inbox = self.state.inboxes[operator_of(instance)]
        needed = self._is_needed(inbox, instance)
        if not needed:
            inbox.cursors.pop(instance, None)  # a process that waits to attach may still be wanted again
            self._forget_reader(step, inbox, instance)
            self._moves.retired(step, instance)
        step.send_durable(sender, m.RetirementReply(instance, not needed, message.number))

    def disconnected(self, step: Step, peer: str) -> None:
        for inbox in self.state.inboxes.values():
            inbox.attaching.pop(peer, None)
            if peer in inbox.cursors:
                inbox.cursors[peer].detach()
                self.let_go(step, inbox, peer)

    def let_go(self, step: Step, inbox: Inbox, instance: str) -> None:
        """Forget an instance that is disconnected, owns nothing and takes part in no move.

        It may have been retired while it was attaching. If it returns, the router treats it as new.
        """
        if not self._moves.concern(instance) and not self._is_needed(inbox, instance):
            self._forget_reader(step, inbox, instance)

    def _is_needed(self, inbox: Inbox, instance: str) -> bool:
        return instance in inbox.table.owners() or self._moves.need(instance)

    def _forget_reader(self, step: Step, inbox: Inbox, instance: str) -> None:
        inbox.let_go(step, instance)
        self._end_takeover(step, inbox, instance)

    # -- takeovers -----------------------------------------------------------------------------

    def _takeover_covered(self, step: Step, inbox: Inbox, instance: str, covered: int) -> None:
        """Record the first checkpoint of a successor; end the takeover once a checkpoint covers it.

        Rows of keys that were arriving at the dead instance may still wait for their state.
        """
        takeover = inbox.successors.get(instance)
        if takeover is None:
            return
        if covered < takeover.through:
            inbox.successors[instance] = msgspec.structs.replace(takeover, fresh=False)
            step.put(("takeover", inbox.name, instance), inbox.successors[instance])
            return
        self._end_takeover(step, inbox, instance)

    def _end_takeover(self, step: Step, inbox: Inbox, instance: str) -> None:
        """End a takeover: the successor no longer needs the dead instance, which may attach again."""
        takeover = inbox.successors.pop(instance, None)
        if takeover is None:
            return
        step.delete(("takeover", inbox.name, instance))
        cursor = inbox.cursors.get(instance)
        if cursor is not None:
            cursor.takeover = None
        waiting = inbox.attaching.get(takeover.of)
        if waiting is not None and not inbox.is_fenced_by_takeover(takeover.of):
            del inbox.attaching[takeover.of]
            self.on_attach(step, waiting)
