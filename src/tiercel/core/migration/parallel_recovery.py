"""Parallel recovery: several successors take over a dead instance, each a share of its slots.

Responsible for: the router's part: one atomic step that assigns the slots to the successors, the share of the
    log and of the checkpoint that each successor reads.
Not responsible for: starting the successors (control/), reading the checkpoint (the drivers).

    A: slots 0-11, checkpoint at 70, dead          log ... 70 [A] [A] [A] 90 TakenOver [B1] [B2] ...
    successor B1: slots 0-5    reads them in A's checkpoint, their rows in A's parts up to 90, then its own
    successor B2: slots 6-11   does the same with its slots, at the same time

The takeover needs no cooperation of A; the router fences A if it still runs. One step retires all
incarnations of A and creates the successors. Admitted outputs of A stay admitted, and the successors start at
that mark. A successor that crashes before its first checkpoint reads A's checkpoint again. It is a successor
until its checkpoint covers the entry `TakenOver`; until then A may not attach.
"""

from __future__ import annotations

from typing import Protocol

from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.logs.inbox import Inbox
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import LogReader
from tiercel.core.migration.ports import RouterPort
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Entry, TakenOver, Takeover
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.topology import operator_of, site_of


class Outcomes(Protocol):
    """The interface of the coordinator for a takeover."""

    ended: dict[str, tuple[str, str]]

    def move_that_needs(self, instance: str) -> str | None:
        """A move that cannot end without this instance; None if there is none."""

    def taken_over(self, step: Step, dead: str, successors: tuple[str, ...]) -> None:
        """The successors end the moves that only a checkpoint of the dead instance would have ended."""


def succeed(router: RouterPort, moves: Outcomes, step: Step, sender: str, request: m.TakeoverRequest) -> None:
    """Assign everything that an instance owns to its successors.

    The router stores the answer, also a refusal: the controller repeats the request until it has an answer,
    and a request that was refused once must not be carried out later.
    """
    if request.recovery not in moves.ended:
        try:
            _give(step, _check(router, moves, request), request)
            moves.taken_over(step, request.instance, request.successors)
            ended = (m.MoveOutcome.DONE.value, "")
        except InvalidRequest as refusal:
            ended = (m.MoveOutcome.REFUSED.value, str(refusal))
        moves.ended[request.recovery] = ended
        step.put(("ended", request.recovery), ended)
    step.send_durable(sender, m.MoveStatus(request.recovery, *moves.ended[request.recovery]))


def _check(router: RouterPort, moves: Outcomes, request: m.TakeoverRequest) -> Inbox:
    """Refuse an impossible takeover: the closed list of faults."""
    router.topology.operator(operator_of(request.instance))
    inbox = router.inboxes[operator_of(request.instance)]
    if request.instance not in inbox.readers:
        what = f"{request.instance!r} is no instance of this site"
        known = ", ".join(sorted(inbox.readers))
        raise InvalidRequest(what, f"expected one of: {known}", "status shows where each one runs")
    if request.instance in inbox.successors:
        what = f"{request.instance!r} is itself still taking over"
        raise InvalidRequest(what, "expected an instance with a checkpoint of its own", "ask again later")
    for successor in request.successors:
        stranger = operator_of(successor) != inbox.name or site_of(successor) != router.site
        if stranger or successor in inbox.readers or inbox.is_fenced_by_takeover(successor):
            raise InvalidRequest(
                f"successor {successor!r}", "expected a new instance of the operator at this site"
            )
    owned = [slot for slot, route in enumerate(inbox.table.slots) if route.instance == request.instance]
    most = max(len(owned), 1)  # one takes over single keys of other slots
    if not 0 < len(set(request.successors)) == len(request.successors) <= most:
        raise InvalidRequest(
            f"{len(request.successors)} successors for {len(owned)} slots of {request.instance!r}",
            "expected different instances, and a slot for each",
        )
    moving = moves.move_that_needs(request.instance)
    if moving is not None:
        what = f"{request.instance!r} takes part in move {moving!r}"
        raise InvalidRequest(what, "expected an instance without moves", "wait until the move has ended")
    if inbox.pauses:
        what = f"{inbox.name!r} is being restarted"
        raise InvalidRequest(what, "expected an operator that runs", "wait until that has ended")
    return inbox


def _give(step: Step, inbox: Inbox, request: m.TakeoverRequest) -> None:
    dead, name = request.instance, inbox.name
    shares = divided(inbox.table, dead, request.successors)
    update = RouteUpdate({}, {})
    for successor, keys in shares.items():
        part = inbox.table.moved(KeySet(slots=keys.slots), dead, successor)
        update.slots.update(part.slots)
        update.keys.update(part.keys)
        update.keys.update({k: inbox.table.route(k).to(successor) for k in keys.keys})
    before = inbox.readers.pop(dead)
    inbox.cursors.pop(dead, None)
    step.delete(("reader", name, dead))
    step.put(("retired", name, dead), True)
    step.send_durable(dead, m.InstanceFenced(before.incarnation))  # in case it still runs
    inbox.update_table(step, update)
    entry = inbox.append(step, {}, TakenOver(dead, update))
    for successor, keys in shares.items():
        inbox.successors[successor] = Takeover(dead, keys, reads_through(entry, before), inbox.table.count)
        step.put(("takeover", name, successor), inbox.successors[successor])
        inbox.readers[successor] = LogReader(
            0, before.applied, before.moves, before.start_watermark_ms, before.stored
        )
        step.put(("reader", name, successor), inbox.readers[successor])
        step.delete(("retired", name, successor))
        inbox.cursors.pop(successor, None)  # from an earlier use of the name, like its mark
        inbox.emitted.pop(successor, None)
        step.delete(("emitted", name, successor))
        take_output_mark(step, inbox, dead, successor)
    step.note(f"{request.recovery}: {', '.join(shares)} take over from {dead}")


def reads_through(taken_over: Entry, before: LogReader) -> int:
    """Rule P1: a successor reads the dead instance's rows up to the takeover, not up to its checkpoint."""
    return taken_over.offset


def take_output_mark(step: Step, inbox: Inbox, dead: str, successor: str) -> None:
    """Rule R8: a successor starts behind the outputs that the dead instance had admitted."""
    if dead in inbox.emitted:
        inbox.emitted[successor] = inbox.emitted[dead]
        step.put(("emitted", inbox.name, successor), inbox.emitted[successor])


def divided(table: RoutingTable, instance: str, successors: tuple[str, ...]) -> dict[str, KeySet]:
    """Divide the slots into contiguous ranges, because a checkpoint is laid out by slot and read in ranges.

    The first successor also gets the instance's overridden keys of other slots.
    """
    owned = [slot for slot, route in enumerate(table.slots) if route.instance == instance]
    guests = frozenset(
        key
        for key, route in table.overrides.items()
        if route.instance == instance and table.slots[slot_of(key, table.count)].instance != instance
    )
    shares: dict[str, KeySet] = {}
    for n, successor in enumerate(successors):
        begin, end = n * len(owned) // len(successors), (n + 1) * len(owned) // len(successors)
        shares[successor] = KeySet(frozenset(owned[begin:end]), guests if n == 0 else frozenset())
    return shares


def is_of_share(place: StorageKey, takeover: Takeover) -> bool:
    """Whether a stored item of the dead instance belongs to the share of a successor."""
    match place:
        case ("checkpoint",) | ("routes", *_):
            return True
        case ("state", int(slot), bytes(key), _):
            return takeover.keys.has(key, slot)
        case ("move", _, bytes(key), _):  # keys of a move that has ended; a checkpoint did not cover its end
            return takeover.count > 0 and takeover.keys.has(key, slot_of(key, takeover.count))
        case _:
            return False
