"""A router after a restart: everything it knows is what its storage says.

Responsible for: filling the parts from storage, and the first things to do before any event.
Not responsible for: an instance's recovery (instance.py): that is loading a checkpoint and replay.

A move that was not decided is undone: its capture and its shadow rested on the life that ended.
A decided one goes on. What was not durable never happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.arrivals import Arrival
from tiercel.core.arrivals import Phase as ArrivalPhase
from tiercel.core.departures import DECIDED, Departure
from tiercel.core.departures import Phase as DeparturePhase
from tiercel.core.effects import StorageKey
from tiercel.core.inbox import Group
from tiercel.core.records import ABSENT_WATERMARK
from tiercel.core.step import Step

if TYPE_CHECKING:
    from tiercel.core.router import Router


def recover_router(router: Router, items: dict[StorageKey, Any]) -> Callable[[Step], None]:
    """Fill a fresh router from its storage; returns what it has to do with its first event."""
    lane_next: dict[tuple[str, str], int] = {}
    shadows: list[tuple[str, m.ShadowNotice]] = []
    marks: list[tuple[str, bytes, tuple[int, int]]] = []
    for key, value in items.items():
        match key:
            case ("head", name):
                inbox = router.inboxes[name]
                inbox.offset, inbox.time_ms, inbox.watermark_ms = value
                if router.mutant == "watermark-forgotten":
                    inbox.watermark_ms = ABSENT_WATERMARK
                inbox.durable = inbox.offset
            case ("trimmed", name):
                router.inboxes[name].trimmed = value
            case ("ends", name):
                router.inboxes[name].ends = list(value)
            case ("route", name, slot):
                router.inboxes[name].table.slots[slot] = value
            case ("route_key", name, routed):
                router.inboxes[name].table.overrides[routed] = value
                router.inboxes[name].stored_overrides.add(routed)
            case ("mark", name, marked):
                router.inboxes[name].marks[marked] = dict(value)
            case ("count", name, counted):
                router.inboxes[name].counts[counted] = value
            case ("reader", name, instance):
                router.inboxes[name].readers[instance] = value
            case ("heir", name, instance):
                router.inboxes[name].heirs[instance] = value
            case ("emitted", name, instance) if router.mutant != "output-marks-forgotten":
                router.inboxes[name].emitted[instance] = value
            case ("pause", name, move):
                router.inboxes[name].pauses[move] = value
            case ("producer", producer) if router.mutant != "producer-dedup-lost":
                router.producers.marks[producer] = value
            case ("producer_life", producer):
                router.producers.lives[producer] = value
            case ("source", name, producer):
                router.promises[name].sources[producer] = value
                router.promises[name].unwritten.discard(producer)
            case ("lane", to, name, n):
                router.lane(to, name).recover(n, *value)
            case ("lane_next", to, name):
                lane_next[to, name] = value
            case ("stream_head", name):
                router.streams[name].offset = router.streams[name].visible = value
            case ("received", name, sender):
                router.streams[name].received[sender] = value
            case ("departure", move):
                departure = Departure(router, router.inboxes[value.request.operator], value.request)
                departure.record = msgspec.structs.replace(value)
                departure.phase = DeparturePhase(value.phase)
                router.departures[move] = departure
            case ("arrival", move) if router.mutant != "vote-forgotten":
                arrival = Arrival(router, router.inboxes[value.prepare.operator], value.prepare)
                arrival.record = msgspec.structs.replace(value)
                arrival.phase = ArrivalPhase(value.phase)
                router.arrivals[move] = arrival
            case ("ended", move):
                router.ended[move] = value
            case ("merged", move):
                router.merged[move] = None
            case ("shadow", move, _):
                shadows.append((move, value))
            case ("move_mark", move, marked):
                marks.append((move, marked, value))
            case ("arrival", _) if router.mutant == "vote-forgotten":
                pass
            case ("inbox", _, _) | ("retired", _, _):
                pass  # read by readers when they need it
            case ("emitted", _, _) | ("producer", _):
                pass  # forgotten by a mutant
            case _:
                raise KeyError(key)
    for key in items:
        if key[0] == "retired":
            router.inboxes[key[1]].readers.pop(key[2], None)
    for (to, name), n in lane_next.items():
        router.lane(to, name).next_n = n
    for move, notice in shadows:
        if move in router.arrivals:
            router.arrivals[move].shadow[notice.offset] = notice
    for move, marked, position in marks:
        if move in router.arrivals:
            router.arrivals[move].marks[marked] = (position[0], position[1])
    return lambda step: _first_steps(router, step)


def _first_steps(router: Router, step: Step) -> None:
    for inbox in router.inboxes.values():
        inbox.ends = [*inbox.ends, (router.incarnation, inbox.offset)]
        step.put(("ends", inbox.name), list(inbox.ends))
        inbox.find_returning(lambda key, inbox=inbox: inbox.table.route(key).site == router.site)  # type: ignore[misc]
    for arrival in router.arrivals.values():
        if arrival.phase is ArrivalPhase.ADOPTED:
            arrival.inbox.groups[arrival.move] = Group(arrival.keys, arrival.destination, leaving=False)
    for departure in list(router.departures.values()):
        departure.flipped_at = step.now_ms
        if departure.phase is DeparturePhase.CUT:
            departure.unsettled = router.unsettled_outputs(departure.inbox.name)
        if departure.phase not in DECIDED:
            departure.abort(step, f"the router of {router.site} was restarted")
    for inbox in router.inboxes.values():
        for instance in list(inbox.readers):  # nobody is connected yet; some may have gone unheard
            router.let_go(step, inbox, instance)
    for lane in router.lanes.values():
        if lane.to == router.site:
            router.loop_back(step, lane)
    router.first_looks(step)
