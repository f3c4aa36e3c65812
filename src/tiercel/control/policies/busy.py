"""The policy `busy`: one instance more where one is busier than a threshold, as SEEP does.

Responsible for: scale-out after several reports in a row above the threshold; scale-in when the others could
    take the load of one.
Not responsible for: how many instances a load needs (rate.py), limits and cool-down (governor.py).
"""

from __future__ import annotations

import msgspec

from tiercel.control.policies.policy import Memory, check_above, check_share, percent, skewed
from tiercel.control.proposals import Nothing, Proposal, Resize, Spread
from tiercel.control.view import OperatorView, View

RELAX = 0.7  # scale-in leaves the others below this part of the threshold


class Busy(msgspec.Struct, frozen=True):
    """Options of the policy. SEEP's paper has 0.7 and two reports."""

    operator: str
    threshold: float = 0.7
    reports: int = 2  # in a row above the threshold

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        check_above("reports", self.reports)

    def decide(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        operator = view.operator(self.operator)
        if operator is None or not operator.instances:
            return [Nothing(self.operator, "it has no instance in this view")], memory
        before: dict[str, int] = memory or {}
        above = {i.name: before.get(i.name, 0) + 1 for i in operator.instances if i.work > self.threshold}
        found = [p for site in sorted(operator.sites) for p in self._at(operator, site, above)]
        return found, above

    def _at(self, operator: OperatorView, site: str, above: dict[str, int]) -> list[Proposal]:
        here = operator.at(site)
        busiest = max(here, key=lambda i: (i.work, i.name))
        hot = [i.name for i in here if above.get(i.name, 0) >= self.reports]
        count = len(here)
        if hot:
            reason = (
                f"{busiest.name} is {percent(busiest.work)} busy, above {percent(self.threshold)} "
                f"in {above[hot[0]]} reports"
            )
            mean = sum(i.work for i in here) / count
            if skewed(here, self.threshold) is not None and mean < RELAX * self.threshold:
                return [Spread(operator.name, site, f"{reason}, the others are not")]
            return [Resize(operator.name, site, count + 1, reason)]
        after = busiest.work * count / (count - 1) if count > 1 else 1.0
        if after < RELAX * self.threshold:
            return [Resize(operator.name, site, count - 1, f"{count - 1} would be {percent(after)} busy")]
        return [Nothing(operator.name, f"{busiest.name} is {percent(busiest.work)} busy at most")]
