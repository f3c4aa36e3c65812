"""Parallel recovery: several successors take over a dead instance, each a share of its slots.

Responsible for: the router's part: one atomic step that assigns the slots to the successors, the share of the
    log and of the checkpoint that each successor reads; handing over the moves of the dead instance.
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

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.logs.inbox import Inbox
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import LogReader, OutgoingMoveRecord
from tiercel.core.migration.ports import RouterPort
from tiercel.core.migration.strategies import Strategy
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Entry, TakenOver, Takeover
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.topology import operator_of, site_of


class Outcomes(Protocol):
    """The interface of the coordinator for a takeover."""

    ended: dict[str, tuple[str, str]]

    def undo_moves_of(self, step: Step, instance: str) -> bool:
        """Undo the undecided moves of a dead instance. False: another router decides one of them."""

    def keys_arriving(self, instance: str) -> list[KeySet]:
        """The keys of decided moves to this instance."""

    def keys_served(self, instance: str) -> list[KeySet]:
        """The keys of decided moves whose state only this instance has."""

    def taken_over(self, step: Step, dead: str, successors: tuple[str, ...]) -> None:
        """The successors continue its decided moves, and end those that are done."""


class DecidedMove(Protocol):
    """The interface of an outgoing move that a successor finishes."""

    move: str
    record: OutgoingMoveRecord
    request: m.MoveRequest

    @property
    def strategy(self) -> Strategy: ...

    def save(self, step: Step) -> None: ...
    def notify(self, step: Step, notice: m.AnyNotice) -> None: ...
    def announce_flip(self, step: Step) -> None: ...


def serve(step: Step, outgoing: DecidedMove, dead: str, server: str) -> None:
    """Rule R36: a successor of a dead source has the frozen units, and the destination learns of it."""
    outgoing.record.served_for = (*outgoing.record.served_for, dead)
    outgoing.request = outgoing.record.request = msgspec.structs.replace(outgoing.request, source=server)
    outgoing.record.successors = ()
    outgoing.save(step)
    announce_server(step, outgoing, server)


def announce_server(step: Step, outgoing: DecidedMove, server: str) -> None:
    """Name the server to the destination."""
    outgoing.notify(step, m.ServedByNotice(outgoing.move, server))


def replace_destination(step: Step, outgoing: DecidedMove, destination: str) -> None:
    """Rule R36: a successor of a dead destination receives the keys; the source sends it their units."""
    if outgoing.request.destination != destination:
        request = msgspec.structs.replace(outgoing.request, destination=destination)
        outgoing.request = outgoing.record.request = request
        outgoing.record.installed = False
        outgoing.save(step)
        if outgoing.strategy.freezes:
            outgoing.announce_flip(step)


def succeed(router: RouterPort, moves: Outcomes, step: Step, sender: str, request: m.TakeoverRequest) -> None:
    """Assign everything that an instance owns to its successors.

    The router stores the answer, also a refusal: the controller repeats the request until it has an answer,
    and a request that was refused once must not be carried out later.
    """
    if request.recovery not in moves.ended:
        try:
            inbox = _check(router, request)
            if not moves.undo_moves_of(step, request.instance):
                return  # the controller asks again
            _give(step, inbox, moves, request)
            moves.taken_over(step, request.instance, request.successors)
            ended = (m.MoveOutcome.DONE.value, "")
        except InvalidRequest as refusal:
            ended = (m.MoveOutcome.REFUSED.value, str(refusal))
        moves.ended[request.recovery] = ended
        step.put(("ended", request.recovery), ended)
    step.send_durable(sender, m.MoveStatus(request.recovery, *moves.ended[request.recovery]))


def _check(router: RouterPort, request: m.TakeoverRequest) -> Inbox:
    """Refuse an impossible takeover: the closed list of faults."""
    router.topology.operator(operator_of(request.instance))
    inbox = router.inboxes[operator_of(request.instance)]
    if request.instance not in inbox.readers:
        what = f"{request.instance!r} is no instance of this site"
        known = ", ".join(sorted(inbox.readers))
        raise InvalidRequest(what, f"expected one of: {known}", "status shows where each one runs")
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
    return inbox


def _give(step: Step, inbox: Inbox, moves: Outcomes, request: m.TakeoverRequest) -> None:
    dead, name = request.instance, inbox.name
    served, arriving = moves.keys_served(dead), moves.keys_arriving(dead)
    shares = divided(inbox.table, dead, request.successors, arriving + served)
    update = RouteUpdate({}, {})
    coming = frozenset(slot for keys in arriving for slot in keys.slots)
    for successor, keys in shares.items():
        for part in (
            inbox.table.moved(KeySet(slots=keys.slots - coming), dead, successor),
            with_overrides(inbox.table, keys.slots & coming, dead, successor),
        ):
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
    inbox.await_no_more(step, dead)
    earlier = inbox.successors.pop(dead, None)
    step.delete(("takeover", name, dead))
    for n, (successor, keys) in enumerate(shares.items()):
        reads = with_served(keys, served) if n == 0 else keys
        through = reads_through(entry, before)
        inbox.successors[successor] = taking_over(dead, earlier, reads, through, inbox.table.count)
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


def taking_over(dead: str, earlier: Takeover | None, reads: KeySet, through: int, count: int) -> Takeover:
    """The share of a successor. If the dead instance was itself still taking over, it reads on from there.

    Then it begins with the checkpoint of the first dead instance, unless the second has one of its own.
    """
    if earlier is None:
        return Takeover(dead, reads, through, count)
    if earlier.fresh:
        return Takeover(earlier.of, reads, through, count, before=(*earlier.before, dead))
    return Takeover(dead, reads, through, count, before=earlier.readers)


def reads_through(taken_over: Entry, before: LogReader) -> int:
    """Rule P1: a successor reads the dead instance's rows up to the takeover, not up to its checkpoint."""
    return taken_over.offset


def take_output_mark(step: Step, inbox: Inbox, dead: str, successor: str) -> None:
    """Rule R8: a successor starts behind the outputs that the dead instance had admitted."""
    if dead in inbox.emitted:
        inbox.emitted[successor] = inbox.emitted[dead]
        step.put(("emitted", inbox.name, successor), inbox.emitted[successor])


def with_overrides(table: RoutingTable, slots: frozenset[int], dead: str, successor: str) -> RouteUpdate:
    """The entries of slots that are still arriving: a key that came before them keeps an entry of its own.

    Without it the key would belong to the move of its slot, and wait for state that does not come.
    """
    update = table.moved(KeySet(slots=slots), "", successor)
    keys = {k: r.to(successor) if r.instance == dead else r for k, r in update.keys.items()}
    return RouteUpdate(update.slots, keys)


def with_served(share: KeySet, served: list[KeySet]) -> KeySet:
    """Rule R36: the first successor also reads the state that has left, and that it sends in its place."""
    return KeySet(
        share.slots.union(*(keys.slots for keys in served)), share.keys.union(*(k.keys for k in served))
    )


def divided(
    table: RoutingTable, instance: str, successors: tuple[str, ...], moving: list[KeySet]
) -> dict[str, KeySet]:
    """Divide the slots into contiguous ranges, because a checkpoint is laid out by slot and read in ranges.

    The first successor also gets the instance's overridden keys of other slots, and the slots of `moving`
    keys: a move has one source and one destination.
    """
    whole = {slot for keys in moving for slot in keys.slots}
    whole.update(slot_of(key, table.count) for keys in moving for key in keys.keys)
    mine = [slot for slot, route in enumerate(table.slots) if route.instance == instance]
    owned, together = [slot for slot in mine if slot not in whole], whole.intersection(mine)
    guests = frozenset(
        key
        for key, route in table.overrides.items()
        if route.instance == instance and table.slots[slot_of(key, table.count)].instance != instance
    )
    shares: dict[str, KeySet] = {}
    for n, successor in enumerate(successors):
        begin, end = n * len(owned) // len(successors), (n + 1) * len(owned) // len(successors)
        first = n == 0
        slots = frozenset(owned[begin:end]) | (together if first else frozenset())
        shares[successor] = KeySet(slots, guests if first else frozenset())
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
