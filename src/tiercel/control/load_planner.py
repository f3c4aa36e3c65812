"""The planner by load: new owners by measured load and bytes, moving as little as needed.

Responsible for: an even load on the wanted instances; instances that are not wanted lose everything.
Not responsible for: plans by the number of slots (planner.py), measuring load (view.py), carrying plans out.

The load of slots without a measured one is the rest, spread evenly over them. A slot moves only if that makes
its owner's load smaller and leaves the other below it. So plans end: the same load gives no moves after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercel.control.plans import PlannedMove
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import Route, slot_of

SPEEDS_ALIKE = 0.75  # of the fastest one: then all count as equally fast
CLEARLY = 0.9  # of the source's load: otherwise a heavy slot would go to and fro
TOLERANCE = 0.1  # above the mean load: then slots move


def rebalance_by_load(
    operator: str,
    slots: Mapping[int, Route],
    overrides: Mapping[Key, Route],
    wanted: Sequence[str],
    rates: Mapping[int, float],
    *,
    total: float | None = None,
    size_bytes: Mapping[int, float] | None = None,
    key_rates: Mapping[Key, float] | None = None,
    speeds: Mapping[str, float] | None = None,
    strategy: str = "live",
    tolerance: float = TOLERANCE,
) -> list[PlannedMove]:
    """Moves that leave every wanted instance with about the same load, and the others with nothing.

    `speeds` are the capacities of the instances: a slow one gets less. Without them all are alike.

    `rates` has the rows per second of the heaviest slots, and `total` those of all slots. Of two slots that
    relieve an instance alike, the one with fewer bytes moves. Overridden keys stay with a wanted owner.
    """
    load = slot_loads(slots, rates, total)
    speed = _relative(wanted, speeds or {})
    size_bytes = size_bytes or {}
    bytes_mean = sum(size_bytes.values()) / len(size_bytes) if size_bytes else 0.0
    work = dict.fromkeys(sorted(wanted), 0.0)
    for key, route in overrides.items():
        rate = (key_rates or {}).get(key, 0.0)
        slot = slot_of(key, len(slots))
        load[slot] = max(0.0, load[slot] - rate)  # it is counted where the key is
        if route.instance in work:
            work[route.instance] += rate / speed[route.instance]
    owned: dict[str, list[int]] = {name: [] for name in work}
    homeless: list[tuple[int, str]] = []
    for slot in sorted(slots):
        owner = slots[slot].instance
        if owner in work:
            owned[owner].append(slot)
            work[owner] += load[slot] / speed[owner]
        else:
            homeless.append((slot, owner))
    moves: dict[tuple[str, str], set[int]] = {}
    for slot, owner in sorted(homeless, key=lambda item: (-load[item[0]], item[0])):
        to = _idlest(work, speed, load[slot])
        work[to] += load[slot] / speed[to]
        moves.setdefault((owner, to), set()).add(slot)
    mean = sum(work[name] * speed[name] for name in work) / sum(speed.values())
    limit = mean * (1 + tolerance)

    def cost(slot: int) -> tuple[float, float, int]:
        """Slots that take much load along for few bytes come first."""
        return (-load[slot] / (1.0 + size_bytes.get(slot, bytes_mean)), size_bytes.get(slot, 0.0), slot)

    for source in sorted(work, key=lambda name: (-work[name], name)):
        for slot in sorted(owned[source], key=cost):
            to = _idlest(work, speed, load[slot])
            if work[source] <= limit:
                break
            if to != source and load[slot] > 0 and _relieves(work[source], work[to], load[slot] / speed[to]):
                work[source] -= load[slot] / speed[source]
                work[to] += load[slot] / speed[to]
                moves.setdefault((source, to), set()).add(slot)
    planned = [
        PlannedMove(operator, KeySet(slots=frozenset(found)), source, to, strategy)
        for (source, to), found in sorted(moves.items())
    ]
    lost: dict[str, set[Key]] = {}
    for key, route in overrides.items():
        swept = slots[slot_of(key, len(slots))].instance == route.instance  # its slot brings it along
        if route.instance not in work and not swept:
            lost.setdefault(route.instance, set()).add(key)
    coolest = min(work, key=lambda name: (work[name], name))
    for source in sorted(lost):
        planned.append(PlannedMove(operator, KeySet(keys=frozenset(lost[source])), source, coolest, strategy))
    return planned


def slot_loads(
    slots: Mapping[int, Route], rates: Mapping[int, float], total: float | None = None
) -> dict[int, float]:
    """Slot -> load. Slots without a measured load share what is left of the total."""
    known = {slot: rate for slot, rate in rates.items() if slot in slots}
    others = len(slots) - len(known)
    rest = 0.0 if total is None else max(0.0, total - sum(known.values()))
    each = rest / others if others else 0.0
    if not known and not rest:
        each = 1.0  # nothing is measured: every slot counts alike
    return {slot: known.get(slot, each) for slot in slots}


def _relative(wanted: Sequence[str], speeds: Mapping[str, float]) -> dict[str, float]:
    """Speeds with a mean of 1. Small differences are noise; one without a measure has the mean speed."""
    known = [speeds[name] for name in wanted if speeds.get(name, 0.0) > 0]
    if not known or min(known) > SPEEDS_ALIKE * max(known):
        return dict.fromkeys(wanted, 1.0)
    mean = sum(known) / len(known)
    return {name: (speeds.get(name) or mean) / mean for name in wanted}


def _idlest(work: Mapping[str, float], speed: Mapping[str, float], load: float) -> str:
    """The instance that has the least to do after it got this load."""
    return min(work, key=lambda name: (work[name] + load / speed[name], name))


def _relieves(source: float, destination: float, load: float) -> bool:
    """Whether the destination stays clearly below what the source has now: figures are noisy."""
    return destination + load < CLEARLY * source
