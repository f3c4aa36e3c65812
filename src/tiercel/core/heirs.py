"""Parallel recovery: an instance is dead, and several new ones take over, each a share of its slots.

Responsible for: the router's side of it: one atomic step that gives the slots away, and who reads what of the
    log behind the dead one's checkpoint; which part of a checkpoint is an heir's.
Not responsible for: starting the heirs (control/), reading the dead one's checkpoint (the drivers).

    A: slots 0-11, checkpoint at 70, dead          log ... 70 [A] [A] [A] 90 Inherited [B1] [B2] ...
    heir B1: slots 0-5    reads A's checkpoint of these, then their rows in A's parts up to 90, then its own
    heir B2: slots 6-11   the same of those, at the same time

Nothing is asked of A; if it lives after all, it is told to end. Its life and all later ones are retired in
the step that makes the heirs; what it had admitted is admitted, and its heirs begin at that mark. Until an
heir has a checkpoint of its own it reads A's again after a crash; it stays an heir until its checkpoint
covers the entry `Inherited`, and A is kept out for so long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tiercel.core import messages as m
from tiercel.core.effects import StorageKey
from tiercel.core.faults import InvalidRequest
from tiercel.core.inbox import Inbox
from tiercel.core.readers import Reader
from tiercel.core.records import Inheritance, Inherited, KeySet, Route, TableUpdate
from tiercel.core.routing import RoutingTable, slot_of
from tiercel.core.step import Step
from tiercel.core.topology import operator_of, site_of

if TYPE_CHECKING:
    from tiercel.core.movedesk import MoveDesk


def succeed(router: MoveDesk, step: Step, sender: str, request: m.Succession) -> None:
    """Give all that an instance owns to its heirs.

    The answer is stored, a refusal too: the same request is sent again until it is answered, and must not
    be carried out after whoever asked was told that it is not.
    """
    if request.recovery not in router.ended:
        try:
            _give(router, step, _check(router, request), request)
            ended = ("done", "")
        except InvalidRequest as refusal:
            ended = ("refused", str(refusal))
        router.ended[request.recovery] = ended
        step.put(("ended", request.recovery), ended)
    step.send_durable(sender, m.MoveStatus(request.recovery, *router.ended[request.recovery]))


def _check(router: MoveDesk, request: m.Succession) -> Inbox:
    """The closed list of faults that make it impossible."""
    router.topology.operator(operator_of(request.instance))
    inbox = router.inboxes[operator_of(request.instance)]
    if request.instance not in inbox.readers:
        what = f"{request.instance!r} is no instance of this site"
        known = ", ".join(sorted(inbox.readers))
        raise InvalidRequest(what, f"expected one of: {known}", "status shows where each one runs")
    if request.instance in inbox.heirs:
        what = f"{request.instance!r} is itself still taking over"
        raise InvalidRequest(what, "expected an instance with a checkpoint of its own", "ask again later")
    for heir in request.heirs:
        stranger = operator_of(heir) != inbox.name or site_of(heir) != router.site
        if stranger or heir in inbox.readers or inbox.kept_out(heir):
            raise InvalidRequest(f"heir {heir!r}", "expected a new instance of the operator at this site")
    owned = [slot for slot, route in enumerate(inbox.table.slots) if route.instance == request.instance]
    if not 0 < len(set(request.heirs)) == len(request.heirs) <= len(owned):
        raise InvalidRequest(
            f"{len(request.heirs)} heirs for {len(owned)} slots of {request.instance!r}",
            "expected different ones, and a slot for each",
        )
    moving = [d.move for d in router.departures.values() if d.source == request.instance]
    moving += [a.move for a in router.arrivals.values() if a.destination == request.instance]
    if moving:
        what = f"{request.instance!r} takes part in move {moving[0]!r}"
        raise InvalidRequest(what, "expected one that takes part in none", "wait until it has ended")
    if inbox.pauses:
        what = f"{inbox.name!r} is being restarted"
        raise InvalidRequest(what, "expected an operator that runs", "wait until that has ended")
    return inbox


def _give(router: MoveDesk, step: Step, inbox: Inbox, request: m.Succession) -> None:
    dead, name = request.instance, inbox.name
    shares = divided(inbox.table, dead, request.heirs)
    update = TableUpdate({}, {})
    for heir, keys in shares.items():
        part = inbox.table.moved(KeySet(slots=keys.slots), dead, heir)
        update.slots.update(part.slots)
        update.keys.update(part.keys)
        update.keys.update({k: Route(heir, inbox.table.route(k).epoch + 1) for k in keys.keys})
    before = inbox.readers.pop(dead)
    inbox.feeds.pop(dead, None)
    step.delete(("reader", name, dead))
    step.put(("retired", name, dead), True)
    step.send_durable(dead, m.Outlived(before.life))  # should it live after all
    inbox.update_table(step, update)
    entry = inbox.append(step, {}, Inherited(dead, update))
    for heir, keys in shares.items():
        through = entry.offset if router.mutant != "inherited-log-skipped" else before.applied
        inbox.heirs[heir] = Inheritance(dead, keys, through)
        step.put(("heir", name, heir), inbox.heirs[heir])
        inbox.readers[heir] = Reader(0, before.applied, {}, before.start_watermark_ms, before.stored)
        step.put(("reader", name, heir), inbox.readers[heir])
        step.delete(("retired", name, heir))
        inbox.feeds.pop(heir, None)  # of a time when it was here and owned nothing, like its mark
        inbox.emitted.pop(heir, None)
        step.delete(("emitted", name, heir))
        if dead in inbox.emitted and router.mutant != "heirs-emit-again":
            inbox.emitted[heir] = inbox.emitted[dead]
            step.put(("emitted", name, heir), inbox.emitted[heir])
    step.note(f"{request.recovery}: {', '.join(shares)} take over from {dead}")


def divided(table: RoutingTable, instance: str, heirs: tuple[str, ...]) -> dict[str, KeySet]:
    """Neighbouring slots to one heir each: a checkpoint is laid out by slots, and is read in ranges.

    Single keys that live with the instance although their slot does not go to the first heir.
    """
    owned = [slot for slot, route in enumerate(table.slots) if route.instance == instance]
    guests = frozenset(
        key
        for key, route in table.overrides.items()
        if route.instance == instance and table.slots[slot_of(key, table.count)].instance != instance
    )
    shares: dict[str, KeySet] = {}
    for n, heir in enumerate(heirs):
        begin, end = n * len(owned) // len(heirs), (n + 1) * len(owned) // len(heirs)
        shares[heir] = KeySet(frozenset(owned[begin:end]), guests if n == 0 else frozenset())
    return shares


def covered(router: MoveDesk, step: Step, inbox: Inbox, instance: str, applied: int) -> None:
    """An heir has a checkpoint of its own; once that holds all it inherited, it is one like any other."""
    inherited = inbox.heirs.get(instance)
    if inherited is None:
        return
    if applied < inherited.through:
        inbox.heirs[instance] = msgspec.structs.replace(inherited, fresh=False)
        step.put(("heir", inbox.name, instance), inbox.heirs[instance])
        return
    give_up(router, step, inbox, instance)


def give_up(router: MoveDesk, step: Step, inbox: Inbox, instance: str) -> None:
    """It needs nothing more of the one it succeeds: it has all, or was retired and has given all away."""
    inherited = inbox.heirs.pop(instance, None)
    if inherited is None:
        return
    step.delete(("heir", inbox.name, instance))
    feed = inbox.feeds.get(instance)
    if feed is not None:
        feed.inherited = None
    waiting = inbox.attaching.get(inherited.of)
    if waiting is not None and not inbox.kept_out(inherited.of):
        del inbox.attaching[inherited.of]
        router.on_attach(step, waiting)


def is_of_share(place: StorageKey, inherited: Inheritance) -> bool:
    """Of all that the dead one has stored, what its heir loads."""
    match place:
        case ("cursor",) | ("routes",):
            return True
        case ("state", int(slot), bytes(key), _):
            return inherited.keys.has(key, slot)
        case _:
            return False
