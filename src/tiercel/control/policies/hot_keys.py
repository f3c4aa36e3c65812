"""The policy `hot_keys`: a hot slot is split, a hot key gets an instance without other load.

Responsible for: instances that are busy because of a few keys; saying when nothing can help.
Not responsible for: the number of instances (rate.py, busy.py), an even load (load_planner.py).

One key cannot be spread: its rows are processed in order by one instance. It can only be isolated.
"""

from __future__ import annotations

import msgspec

from tiercel.control.policies.policy import Memory, check_share, percent
from tiercel.control.proposals import MoveLoad, Nothing, Proposal, Spread
from tiercel.control.view import InstanceView, OperatorView, View
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of

MARGIN = 0.1  # share of time at work by which the other instance must stay less busy


class HotKeys(msgspec.Struct, frozen=True):
    """Options of the policy."""

    operator: str
    threshold: float = 0.7  # share of time at work above which an instance is hot
    key_share: float = 0.3  # a key with this share of its instance's rows is a hot key
    slot_share: float = 0.3  # likewise for a slot

    def __post_init__(self) -> None:
        for name in ("threshold", "key_share", "slot_share"):
            check_share(name, getattr(self, name))

    def decide(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        operator = view.operator(self.operator)
        hot = None if operator is None else operator.busiest
        if operator is None or hot is None:
            return [Nothing(self.operator, "it has no instance in this view")], memory
        return [self._of(operator, hot)], memory

    def _of(self, operator: OperatorView, hot: InstanceView) -> Proposal:
        if hot.work <= self.threshold:
            return Nothing(operator.name, f"{hot.name} is {percent(hot.work)} busy at most")
        rates = {key: rate for key, rate in operator.key_rates().items() if _owner(operator, key) == hot.name}
        total = max(hot.arrivals, hot.rate, 1e-9)
        others = [i for i in operator.instances if i.name != hot.name]
        coolest = min(others, key=lambda i: (i.work, i.name), default=None)
        key = max(rates, key=lambda k: (rates[k], k), default=None)
        if key is not None and rates[key] / total >= self.key_share:
            return self._of_key(operator, hot, coolest, key, rates[key] / total)
        slots = _slot_rates(operator, hot.name)
        slot = max(slots, key=lambda s: (slots[s], s), default=None)
        if slot is not None and slots[slot] / total >= self.slot_share:
            return self._of_slot(operator, hot, coolest, slot, slots[slot] / total, rates)
        return Nothing(operator.name, f"{hot.name} is {percent(hot.work)} busy, and not by a few keys")

    def _of_key(
        self, operator: OperatorView, hot: InstanceView, coolest: InstanceView | None, key: Key, share: float
    ) -> Proposal:
        facts = f"key {key.hex()} makes {percent(share)} of the load of {hot.name}"
        if share >= 1 - MARGIN:
            return Nothing(operator.name, f"{facts}, which has little else: one key cannot be spread")
        if coolest is None:
            return Nothing(operator.name, f"{facts}: it needs a second instance to be isolated")
        rest = coolest.work + hot.work * share
        if rest >= hot.work - MARGIN and coolest.work > MARGIN:
            busy = f"{facts}, and {coolest.name} is {percent(coolest.work)} busy"
            if coolest.work + hot.work * (1 - share) < hot.work - MARGIN:
                return Spread(operator.name, hot.site, f"{busy}: the other keys leave, and it is alone")
            return Nothing(operator.name, f"{busy}: no instance is free for it")
        alone = (
            " One key cannot be spread: it stays as slow as one instance." if share * hot.work > 0.9 else ""
        )
        return MoveLoad(operator.name, KeySet(keys=frozenset({key})), coolest.name, facts + "." + alone)

    def _of_slot(
        self,
        operator: OperatorView,
        hot: InstanceView,
        coolest: InstanceView | None,
        slot: int,
        share: float,
        rates: dict[Key, float],
    ) -> Proposal:
        facts = f"slot {slot} makes {percent(share)} of the load of {hot.name}"
        if coolest is None:
            return Nothing(operator.name, f"{facts}: it needs a second instance")
        count = len(operator.owners)
        inside = sorted((k for k in rates if slot_of(k, count) == slot), key=lambda k: (-rates[k], k))
        if len(inside) > 1:
            half = frozenset(inside[::2])
            return MoveLoad(operator.name, KeySet(keys=half), coolest.name, f"{facts}: it is split")
        if coolest.work + hot.work * share < hot.work - MARGIN:
            return MoveLoad(operator.name, KeySet(slots=frozenset({slot})), coolest.name, facts)
        return Nothing(operator.name, f"{facts}, and no other instance is free for it")


def _slot_rates(operator: OperatorView, instance: str) -> dict[int, float]:
    """The heaviest slots of an instance, without the keys of them that have a route of their own."""
    rates = {s: r for s, r in operator.slot_rates().items() if operator.owners.get(s) == instance}
    for key, rate in operator.key_rates().items():
        slot = slot_of(key, max(1, len(operator.owners)))
        if slot in rates and operator.isolated.get(key, instance) != instance:
            rates[slot] = max(0.0, rates[slot] - rate)
    return rates


def _owner(operator: OperatorView, key: Key) -> str | None:
    return operator.isolated.get(key) or operator.owners.get(slot_of(key, max(1, len(operator.owners))))
