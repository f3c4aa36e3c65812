"""The coordinator of the moves of one router: requests, preparations, locks, status.

Responsible for: passing each message to its outgoing or incoming move; locks; the outcomes of moves.
Not responsible for: the phases of a move (source_router.py, destination_router.py), rows (core/router/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest, check_limit
from tiercel.core.logs.dispatch import DispatchPhase
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.site_outbox import FrameId
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import IncomingMoveRecord, OutgoingMoveRecord
from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.migration.parallel_recovery import serve, succeed
from tiercel.core.migration.phases import (
    DECIDED,
    DURABLE,
    REVOCABLE,
    UNKNOWN_MOVE,
    Answer,
    DestinationRouterPhase,
    SourceRouterPhase,
)
from tiercel.core.migration.ports import RouterPort
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import OWN, SHADOW, Entry, Output, OutputFence, Position, Row
from tiercel.core.model.routing import RouteUpdate, check_keys, overlap
from tiercel.core.model.topology import operator_of, site_of


class MoveCoordinator:
    """The moves that a router takes part in. Implements `Moves` of core/router/moves.py."""

    tables = ("outgoing", "incoming", "ended", "shadow", "move_mark", "standby")

    def __init__(self, router: RouterPort) -> None:
        self.router = router
        self.outgoing_moves: dict[str, OutgoingMove] = {}
        self.incoming_moves: dict[str, IncomingMove] = {}
        self.standbys: dict[str, str] = {}  # instance of this site -> its standby
        self.ended: dict[str, tuple[str, str]] = {}  # outgoing moves and takeovers: outcome and reason

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        move: str = getattr(message, "move", "")
        outgoing, incoming = self.outgoing_moves.get(move), self.incoming_moves.get(move)
        from_instance = bool(operator_of(sender))
        match message:
            case m.MoveRequest():
                self.on_move_request(step, sender, message)
            case m.TakeoverRequest():
                succeed(self.router, self, step, sender, message)
            case m.OutcomeStored(move=ended):
                self.on_outcome_stored(step, ended)
            case m.SetStandby():
                self.on_set_standby(step, message)
            case m.StatusQuery():
                self.on_status_query(step, sender, message.n, message.known)
            case m.Prepare():
                self.on_prepare(step, sender, message)
            case m.AbortNotice() if incoming is not None:
                incoming.on_message(step, message)
            case m.Prepared() | m.Ready() | m.DestinationCheckpointed() | m.StateComplete() if (
                from_instance and incoming is not None
            ):
                incoming.on_message(step, message)
            case m.AbortNotice():
                self.answer_unknown(step, sender, message)
            case _ if outgoing is not None:
                outgoing.on_message(step, message, sender)
            case _:
                self.answer_unknown(step, sender, message)

    def on_set_standby(self, step: Step, message: m.SetStandby) -> None:
        """Remember the standby of an instance, and tell the instance now and whenever it attaches."""
        if self.standbys.get(message.instance, "") == message.standby:
            return
        if message.standby:
            self.standbys[message.instance] = message.standby
            step.put(("standby", message.instance), message.standby)
        else:
            del self.standbys[message.instance]
            step.delete(("standby", message.instance))
        step.send_durable(message.instance, m.StandbyRole(message.standby))

    def on_retry(self, step: Step) -> None:
        for outgoing in list(self.outgoing_moves.values()):
            overdue = step.now_ms > outgoing.deadline_ms and outgoing.phase not in DECIDED
            if overdue:
                outgoing.abort(step, f"not decided within {outgoing.request.deadline_ms:g} ms")
            else:
                outgoing.retry(step)
        for incoming in list(self.incoming_moves.values()):
            incoming.retry(step)

    def rows_came(self, step: Step, site: str, inbox: str, rows: list[Row]) -> None:
        """Rows that entered at another site are for keys of this one."""
        for outgoing in list(self.outgoing_moves.values()):
            if outgoing.inbox.name == inbox:
                outgoing.rows_came(step, site, rows)

    # -- requests --------------------------------------------------------------------------------

    def on_move_request(self, step: Step, sender: str, request: m.MoveRequest) -> None:
        if request.move in self.outgoing_moves:
            self.report_to(step, sender, self.outgoing_moves[request.move])
            return
        if request.move in self.ended:
            step.send_durable(sender, m.MoveStatus(request.move, *self.ended[request.move]))
            return
        if self.done_is_on_its_way(request.operator, request.keys, request.strategy):
            return
        try:
            self.check_request(request)
        except InvalidRequest as refusal:  # final: a repeat of the same request may be in flight
            self.ended[request.move] = (m.MoveOutcome.REFUSED.value, str(refusal))
            step.put(("ended", request.move), self.ended[request.move])
            step.send_durable(sender, m.MoveStatus(request.move, *self.ended[request.move]))
            return
        inbox = self.router.inboxes[request.operator]
        record = OutgoingMoveRecord(
            request, SourceRouterPhase.PREPARING.value, inbox.table.routes_of(request.keys)
        )
        outgoing = self.outgoing_moves[request.move] = OutgoingMove(self.router, self, inbox, record)
        outgoing.asked_by = sender
        outgoing.deadline_ms = step.now_ms + request.deadline_ms
        outgoing.save(step)  # durable, so that the name of a move is never used twice
        self.report_to(step, sender, outgoing)
        outgoing.retry(step)

    def check_request(self, request: m.MoveRequest) -> None:
        """Refuse an impossible request: the closed list of faults at this router."""
        operator = self.router.topology.operator(request.operator)
        strategy = STRATEGIES.get(request.strategy)
        if strategy is None:
            raise InvalidRequest.unknown("strategy", request.strategy, sorted(STRATEGIES))
        check_keys(request.keys, operator)
        for instance in (request.source, request.destination):
            if operator_of(instance) != request.operator:
                raise InvalidRequest(f"{instance!r} is not an instance of {request.operator!r}")
            self.router.topology.site(site_of(instance))
        if request.source == request.destination:
            raise InvalidRequest(
                f"move from {request.source!r} to itself", "expected two different instances"
            )
        if strategy.needs_determinism and not operator.deterministic:
            safe = sorted(name for name, s in STRATEGIES.items() if not s.needs_determinism)
            what = f"{operator.name!r} is declared non-deterministic; {request.strategy!r} would run it twice"
            raise InvalidRequest(what, f"expected one of: {', '.join(safe)}")
        inbox = self.router.inboxes[request.operator]
        self.check_owned(inbox, request)
        self.check_unlocked(inbox, request.keys, request.move, request.strategy)

    def done_is_on_its_way(self, operator: str, keys: KeySet, strategy: str) -> bool:
        """Whether a move that has brought keys here, and has ended at its source router, is in the way.

        The controller asks for a move once the earlier ones that it must not meet have ended, so DoneNotice
        is in the outbox. Who asks, asks again. A refusal would end the later move for nothing.
        """
        inbox = self.router.inboxes.get(operator)
        return inbox is not None and any(
            other.inbox is inbox
            and other.from_site != self.router.site
            and other.phase is DestinationRouterPhase.ADOPTED
            and self.exclude(inbox, keys, strategy, other)
            for other in self.incoming_moves.values()
        )

    def exclude(self, inbox: Inbox, keys: KeySet, strategy: str, other: OutgoingMove | IncomingMove) -> bool:
        """Rule R22: concurrent moves share no key; a move that restarts the operator runs alone."""
        known = STRATEGIES.get(strategy)
        alone = (known is not None and known.restarts) or STRATEGIES[other.strategy_name].restarts
        return alone or overlap(keys, other.keys, inbox.table.count)

    def check_owned(self, inbox: Inbox, request: m.MoveRequest) -> None:
        for slot in sorted(request.keys.slots):
            owner = inbox.table.slots[slot].instance
            if owner != request.source:
                raise InvalidRequest(
                    f"slot {slot} is not owned by {request.source!r}", f"its owner is {owner!r}"
                )
        for key in sorted(request.keys.keys):
            owner = inbox.table.route(key).instance
            if owner != request.source:
                raise InvalidRequest(
                    f"key {key!r} is not owned by {request.source!r}", f"its owner is {owner!r}"
                )

    def check_unlocked(self, inbox: Inbox, keys: KeySet, move: str, strategy: str) -> None:
        """Rule R22: concurrent moves share no key; a move that restarts the operator runs alone."""
        others: list[OutgoingMove | IncomingMove] = [
            *self.outgoing_moves.values(),
            *self.incoming_moves.values(),
        ]
        ended = (SourceRouterPhase.DONE, SourceRouterPhase.ABORTED, DestinationRouterPhase.MERGED)
        for other in others:
            if other.inbox is not inbox or other.move == move or other.phase in ended:
                continue
            if self.exclude(inbox, keys, strategy, other):
                what = f"keys are locked by move {other.move!r} ({other.phase.value})"
                raise InvalidRequest(what, "wait until it has ended")

    def on_prepare(self, step: Step, sender: str, prepare: m.Prepare) -> None:
        incoming = self.incoming_moves.get(prepare.move)
        if incoming is not None:
            incoming.on_message(step, prepare)
            return
        inbox = self.router.inboxes[prepare.operator]
        cursor = inbox.cursors.get(prepare.destination)
        try:
            if cursor is None or cursor.phase not in (DispatchPhase.LIVE, DispatchPhase.CATCHING_UP):
                raise InvalidRequest(f"destination {prepare.destination!r} is not running")
            on_its_way = self.done_is_on_its_way(prepare.operator, prepare.keys, prepare.strategy)
            if on_its_way or self.abort_is_on_its_way(prepare):
                return
            self.check_unlocked(inbox, prepare.keys, prepare.move, prepare.strategy)
        except InvalidRequest as refusal:
            self.router.send_router(step, site_of(prepare.source), m.Refused(prepare.move, str(refusal)))
            return
        frozen_ms = self.router.output_promise(prepare.operator)
        record = IncomingMoveRecord(prepare, DestinationRouterPhase.PREPARING.value, frozen_ms=frozen_ms)
        self.incoming_moves[prepare.move] = IncomingMove(self.router, self, inbox, record)
        step.send(prepare.destination, prepare)

    def abort_is_on_its_way(self, prepare: m.Prepare) -> bool:
        """Whether keys are locked by a move that the same source router has undone.

        It never runs two moves of a key, so it has undone the earlier one, and AbortedNotice is in the
        outbox. The source router asks again until then. A refusal would end the later move for nothing.
        """
        inbox, source_site = self.router.inboxes[prepare.operator], site_of(prepare.source)
        return any(
            other.inbox is inbox
            and other.move != prepare.move
            and other.from_site == source_site
            and other.phase in REVOCABLE
            and overlap(prepare.keys, other.keys, inbox.table.count)
            for other in self.incoming_moves.values()
        )

    # -- reports ---------------------------------------------------------------------------------

    def report(self, step: Step, move: str) -> None:
        outgoing = self.outgoing_moves[move]
        if outgoing.asked_by:
            self.report_to(step, outgoing.asked_by, outgoing)

    def report_to(self, step: Step, to: str, outgoing: OutgoingMove) -> None:
        status = m.MoveStatus(
            *(outgoing.move, outgoing.phase.value, outgoing.record.reason, *outgoing.moved),
            messages=outgoing.messages,
            overlap=outgoing.overlap,
        )
        step.send_durable(to, status)

    def on_status_query(self, step: Step, sender: str, n: int, known: dict[str, tuple[int, int]]) -> None:
        """Answer with the moves and the changed tables: the controller has the others already."""
        for outgoing in self.outgoing_moves.values():
            outgoing.asked_by = sender
        versions = {
            name: (self.router.incarnation, inbox.table.version)
            for name, inbox in self.router.inboxes.items()
        }
        unknown = [name for name, version in versions.items() if known.get(name) != version]
        tables = {name: self.sequenced_here(self.router.inboxes[name]) for name in unknown}
        step.send_durable(
            sender,
            m.StatusReply(
                [d.request for d in self.outgoing_moves.values()],
                [m.MoveStatus(d.move, d.phase.value, d.record.reason) for d in self.outgoing_moves.values()],
                tables,
                {
                    f.instance: f.keys
                    for i in self.router.inboxes.values()
                    for f in i.cursors.values()
                    if f.phase is not DispatchPhase.DETACHED
                },
                n,
                versions,
            ),
        )

    def sequenced_here(self, inbox: Inbox) -> RouteUpdate:
        table = inbox.table
        here = {instance for instance in table.owners() if site_of(instance) == self.router.site}
        return RouteUpdate(
            {s: r for s, r in enumerate(table.slots) if r.instance in here},
            {k: r for k, r in table.overrides.items() if r.instance in here},
        )

    # -- messages about one move -----------------------------------------------------------------

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        incoming = self.incoming_moves.get(notice.move)
        if incoming is None:
            self.answer_unknown(step, sender, notice)
        else:
            incoming.on_message(step, notice)

    def drop_incoming(self, step: Step, move: str) -> None:
        """Forget an undone move, here and at the destination."""
        incoming = self.incoming_moves[move]
        self.forget_incoming(step, incoming)
        step.send_durable(incoming.destination, m.AbortNotice(move))

    def forget_incoming(self, step: Step, incoming: IncomingMove) -> None:
        del self.incoming_moves[incoming.move]
        incoming.become(step, DestinationRouterPhase.FORGOTTEN)

    def answer_unknown(self, step: Step, sender: str, message: m.Message | m.AnyNotice) -> None:
        """Answer a message about a move that this router does not know, or no longer knows."""
        event, move = type(message).__name__, getattr(message, "move", "")
        known = UNKNOWN_MOVE.get(event)
        if known is None:
            step.unexpected("router", move, "unknown", event)
        elif known.answer is Answer.ABORT:
            self.router.send_router(step, sender, m.AbortNotice(move), durable=True)
        elif known.answer is Answer.REFUSE:
            self.router.send_router(
                step, sender, m.Refused(move, f"{self.router.site} was restarted and forgot it")
            )
        elif isinstance(message, m.FlipToDestination) and not self.was_adopted(message):
            inbox = self.router.inboxes[message.prepare.operator]
            record = IncomingMoveRecord(message.prepare, DestinationRouterPhase.PREPARING.value)
            self.incoming_moves[move] = IncomingMove(self.router, self, inbox, record)
            self.incoming_moves[move].on_message(step, message)

    def was_adopted(self, flip: m.FlipToDestination) -> bool:
        """Whether a flip is a repeat. Epochs only grow, so that no list of ended moves is necessary."""
        table, update = self.router.inboxes[flip.prepare.operator].table, flip.update
        if update.slots:
            return all(table.slots[slot].epoch >= route.epoch for slot, route in update.slots.items())
        return all(table.route(key).epoch >= route.epoch for key, route in update.keys.items())

    def on_outcome_stored(self, step: Step, move: str) -> None:
        """Forget an ended move, because nobody asks for it again."""
        if self.ended.pop(move, None) is not None:
            step.delete(("ended", move))

    def merged_at(self, instance: str) -> int:
        into = [move.record.merged for move in self.incoming_moves.values() if instance in move.holders]
        return max(into, default=-1)

    def end_outgoing(self, step: Step, move: str) -> None:
        """Delete a move whose roles have all ended. The router remembers only the outcome."""
        outgoing = self.outgoing_moves.pop(move, None)
        if outgoing is None:
            return
        self.ended[move] = (outgoing.phase.value, outgoing.record.reason)
        step.delete(("outgoing", move))
        step.put(("ended", move), self.ended[move])
        if outgoing.asked_by:
            self.report_to(step, outgoing.asked_by, outgoing)

    def shadow_backlog(self, move: str) -> int:
        """The number of shadow entries that the destination's site does not have durably."""
        outgoing = self.outgoing_moves[move]
        if outgoing.to_site != self.router.site:
            return len(self.router.outbox(outgoing.to_site, outgoing.inbox.name).frames)
        incoming = self.incoming_moves.get(move)
        return len(incoming.shadow) if incoming is not None else 0

    # -- queries of the data path ----------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self.outgoing_moves) + len(self.incoming_moves)

    def on_shadow_read(self, step: Step, move: str, entries: list[Entry]) -> None:
        outgoing = self.outgoing_moves.get(move)
        if outgoing is not None:
            outgoing.on_shadow_read(step, entries)

    def leaves(self, instance: str) -> bool:
        return any(instance in outgoing.holders for outgoing in self.outgoing_moves.values())

    def refuses_output(self, instance: str, output: Output) -> bool:
        return any(
            instance in outgoing.holders and outgoing.refuses_output(output.offset, output.key)
            for outgoing in self.outgoing_moves.values()
        )

    def outputs_admitted(self, step: Step, instance: str) -> None:
        for outgoing in list(self.outgoing_moves.values()) if self.outgoing_moves else ():
            if outgoing.source == instance:
                outgoing.source_advanced(step)

    def admit(self, step: Step, message: m.MoveOutputs) -> list[Output]:
        incoming = self.incoming_moves.get(message.move)
        if incoming is None:
            return []
        return incoming.admit(step, message.stage, [*message.outputs, *message.dead_letters])

    def fences_of(self, move: str) -> Mapping[str, OutputFence]:
        incoming = self.incoming_moves.get(move)
        return {} if incoming is None else incoming.record.fences

    def all_emit(self, operator: str, offset: int) -> bool:
        return all(
            incoming.has_emitted(offset)
            for incoming in self.incoming_moves.values()
            if incoming.inbox.name == operator and incoming.phase is DestinationRouterPhase.ADOPTED
        )

    def frame_settled(self, step: Step, frame: FrameId) -> None:
        for outgoing in list(self.outgoing_moves.values()):
            outgoing.output_frame_settled(step, frame)

    # -- instances that attach and leave ---------------------------------------------------------

    def roles_of(self, instance: str, *, known: bool) -> tuple[list[m.IncomingRole], list[m.OutgoingRole]]:
        incoming = [
            move.role()
            for move in self.incoming_moves.values()
            if instance in move.holders and (known or move.phase in DURABLE)
        ]
        outgoing = [
            role
            for move in self.outgoing_moves.values()
            if instance in move.holders and (role := move.role())
        ]
        return incoming, outgoing

    def incarnation_began(self, step: Step, instance: str) -> None:
        for outgoing in list(self.outgoing_moves.values()):
            if instance in outgoing.holders:
                outgoing.source_restarted(step)
        for incoming in list(self.incoming_moves.values()):
            if instance in incoming.holders and incoming.phase not in DURABLE:
                self.forgotten_by_destination(step, incoming)

    def forgotten_by_destination(self, step: Step, incoming: IncomingMove) -> None:
        self.router.send_router(
            step, incoming.from_site, m.Refused(incoming.move, "the destination was restarted")
        )
        if incoming.move in self.incoming_moves:
            self.drop_incoming(step, incoming.move)

    def resumed(self, step: Step, message: m.Resume) -> dict[str, Position]:
        if message.instance in self.standbys:
            step.send(message.instance, m.StandbyRole(self.standbys[message.instance]))
        moves = dict(message.moves)
        for incoming in list(self.incoming_moves.values()):
            if message.instance in incoming.holders:
                position = moves.get(incoming.move)
                if position is None and incoming.phase is DestinationRouterPhase.SHADOWING:
                    self.forgotten_by_destination(step, incoming)
                    continue
                if 0 <= incoming.record.merged <= message.applied:
                    continue
                if position is None and incoming.record.adopted >= 0:
                    moves[incoming.move] = (OWN, incoming.record.adopted)
                incoming.feed_shadow(step, position or (SHADOW, -1))
        return moves

    def checkpointed(self, step: Step, message: m.Checkpointed) -> dict[str, int]:
        own = {move: offset for move, (stage, offset) in message.moves.items() if stage == OWN}
        for incoming in list(self.incoming_moves.values()):
            if message.instance in incoming.holders:
                position = message.moves.get(incoming.move, (SHADOW, -1))
                if incoming.checkpointed(step, position, message.instance, message.applied):
                    self.forget_incoming(step, incoming)
                elif incoming.record.adopted >= 0:
                    own.setdefault(incoming.move, incoming.record.adopted)
        return own

    def concern(self, instance: str) -> bool:
        named = any(instance in move.holders for move in self.outgoing_moves.values())
        return named or any(instance in move.holders for move in self.incoming_moves.values())

    def move_that_needs(self, instance: str) -> str | None:
        """A move that cannot end without this instance; None if there is none."""
        leaving = [
            move.move
            for move in self.outgoing_moves.values()
            if instance in move.holders and move.phase is not SourceRouterPhase.DONE
        ]
        coming = [
            move.move
            for move in self.incoming_moves.values()
            if instance in move.holders and move.phase is not DestinationRouterPhase.MERGED
        ]
        return next(iter([*leaving, *coming]), None)

    def undo_moves_of(self, step: Step, instance: str) -> bool:
        """Undo the undecided moves of a dead instance. False: another router decides one of them."""
        for outgoing in list(self.outgoing_moves.values()):
            ends = (outgoing.source, outgoing.request.destination)
            if instance in ends and outgoing.phase not in DECIDED:
                outgoing.abort(step, f"{instance} is dead")
        open_moves = [
            incoming
            for incoming in self.incoming_moves.values()
            if incoming.destination == instance and incoming.phase in REVOCABLE
        ]
        for incoming in open_moves:
            if incoming.phase is DestinationRouterPhase.ADOPTABLE:
                refused = m.Refused(incoming.move, f"{instance} is dead")
                self.router.send_router(step, incoming.from_site, refused, durable=True)
            else:
                self.forgotten_by_destination(step, incoming)
        return not any(incoming.move in self.incoming_moves for incoming in open_moves)

    def keys_arriving(self, instance: str) -> list[KeySet]:
        """The keys of decided moves to this instance."""
        adopted = DestinationRouterPhase.ADOPTED
        coming = self.incoming_moves.values()
        return [move.keys for move in coming if move.destination == instance and move.phase is adopted]

    def keys_served(self, instance: str) -> list[KeySet]:
        """The keys of decided moves whose state only this instance has."""
        return [move.keys for move in self.outgoing_moves.values() if move.is_served_by(instance)]

    def need(self, instance: str) -> bool:
        return self.move_that_needs(instance) is not None

    def taken_over(self, step: Step, dead: str, successors: tuple[str, ...]) -> None:
        """The successors of a dead instance continue its decided moves, and end those that are done."""
        for outgoing in list(self.outgoing_moves.values()):
            if outgoing.is_served_by(dead):
                serve(step, outgoing, dead, successors[0])
            elif dead in outgoing.holders:
                outgoing.taken_over(step, dead, successors)
        for incoming in list(self.incoming_moves.values()):
            if incoming.destination == dead and incoming.phase is DestinationRouterPhase.ADOPTED:
                incoming.replaced_by(step, successors[0])
            elif dead in incoming.holders:
                incoming.taken_over(step, dead, successors)

    def retired(self, step: Step, instance: str) -> None:
        if self.standbys.pop(instance, None) is not None:
            step.delete(("standby", instance))
        for outgoing in list(self.outgoing_moves.values()):
            if instance in outgoing.holders:
                outgoing.forgotten_by(step, instance)  # it cannot forget the keys any more
        for incoming in [a for a in self.incoming_moves.values() if instance in a.holders]:
            if incoming.covered_but_for(instance):
                self.forget_incoming(step, incoming)

    # -- recovery --------------------------------------------------------------------------------

    def load(self, key: StorageKey, value: Any) -> None:
        """Load one stored item. The items of an incoming move follow its record."""
        match key:
            case ("outgoing", move):
                inbox = self.router.inboxes[value.request.operator]
                record = msgspec.structs.replace(value)
                self.outgoing_moves[move] = OutgoingMove(self.router, self, inbox, record)
            case ("incoming", _):
                self.recover_incoming(value)
            case ("ended", move):
                self.ended[move] = value
            case ("standby", instance):
                self.standbys[instance] = value
            case ("shadow", move, _):
                if move in self.incoming_moves:
                    self.incoming_moves[move].shadow[value.offset] = value
            case ("move_mark", move, marked):
                if move in self.incoming_moves:
                    self.incoming_moves[move].marks[marked] = (value[0], value[1])
            case _:
                raise KeyError(key)

    def recover(self, step: Step) -> None:
        """Undo undecided moves: they depended on memory of the incarnation that has ended."""
        for incoming in self.incoming_moves.values():
            if incoming.phase is DestinationRouterPhase.ADOPTED:
                incoming.own_part()
        for outgoing in list(self.outgoing_moves.values()):
            outgoing.flipped_at = step.now_ms
            if outgoing.phase in (SourceRouterPhase.CUT, SourceRouterPhase.EMITTING):
                outgoing.await_outputs()
            outgoing.retain_log()
            if outgoing.phase is SourceRouterPhase.CUT and not outgoing.cut_shadowed:
                outgoing.start_cut_shadow(step)
            if outgoing.phase not in DECIDED:
                outgoing.abort(step, f"the router of {self.router.site} was restarted")

    def validate(self) -> None:
        for incoming in self.incoming_moves.values():
            settings = incoming.inbox.settings  # behind a cut it is as long as the backlog of the source
            limit = settings.shadow_entries_max + settings.backlog_rows_max + 1
            check_limit(f"shadow entries of {incoming.move}", len(incoming.shadow), limit)

    def recover_incoming(self, record: IncomingMoveRecord) -> None:
        """Rule R22: a restarted router remembers the votes of its destinations."""
        inbox = self.router.inboxes[record.prepare.operator]
        self.incoming_moves[record.prepare.move] = IncomingMove(
            self.router, self, inbox, msgspec.structs.replace(record)
        )
