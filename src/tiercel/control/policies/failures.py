"""The policy `failures`: successors for an instance that does not return.

Responsible for: replacement after several views in which an instance has failed.
Not responsible for: noticing it (spark/cluster/liveness.py), restarts by Spark, which come first.
"""

from __future__ import annotations

import msgspec

from tiercel.control.policies.policy import Memory, check_above
from tiercel.control.proposals import Nothing, Proposal, Replace
from tiercel.control.view import View
from tiercel.core.model.topology import operator_of


class Failures(msgspec.Struct, frozen=True):
    """Options of the policy."""

    operator: str
    successors: int = 1  # several share the load and the restore
    reports: int = 2  # views in a row

    def __post_init__(self) -> None:
        check_above("successors", self.successors)
        check_above("reports", self.reports)

    def decide(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        before: dict[str, int] = memory or {}
        failed = {name: why for name, why in view.failed.items() if operator_of(name) == self.operator}
        after = {name: before.get(name, 0) + 1 for name in failed}
        due = [name for name in sorted(failed) if after[name] >= self.reports]
        if not due:
            return [Nothing(self.operator, "no instance has failed for long")], after
        return [Replace(self.operator, name, self.successors, failed[name]) for name in due], after
