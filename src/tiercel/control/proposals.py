"""Proposals: what a policy wants, each with its reason; and the decision that the governor makes of it.

Responsible for: the closed list of proposals, their text, the form of a decision.
Not responsible for: making them (policies/), allowing them (governor.py), carrying them out (controller.py).
"""

from __future__ import annotations

import enum

import msgspec

from tiercel.core.model.keys import KeySet


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Run this number of instances of an operator at a site; they share the load evenly."""

    operator: str
    site: str
    instances: int
    reason: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.instances} at {self.site}"


class Spread(msgspec.Struct, frozen=True, tag=True):
    """Leave the number of instances, and share the measured load evenly among them."""

    operator: str
    site: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator}: even load at {self.site}"


class MoveLoad(msgspec.Struct, frozen=True, tag=True):
    """Give these keys to an instance, or to a site, which may need a first instance for them."""

    operator: str
    keys: KeySet
    to: str  # an instance or a site
    reason: str

    def __str__(self) -> str:
        what = f"{len(self.keys.slots)} slots" if self.keys.slots else f"{len(self.keys.keys)} keys"
        return f"{self.operator}: {what} to {self.to}"


class Replace(msgspec.Struct, frozen=True, tag=True):
    """Let successors take over an instance that does not return."""

    operator: str
    instance: str
    successors: int
    reason: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.successors} in place of {self.instance}"


class Nothing(msgspec.Struct, frozen=True, tag=True):
    """Change nothing, for this reason."""

    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator}: nothing"


Proposal = Resize | Spread | MoveLoad | Replace | Nothing


class Outcome(enum.Enum):
    """What became of a proposal."""

    CARRIED_OUT = "carried out"  # it was requested from the controller
    DRY_RUN = "dry run"  # it would have been
    NOTHING = "nothing"  # the policy wants no change
    REFUSED = "refused"  # the governor does not allow it now
    UNDONE = "undone"  # an earlier change made things worse: this takes it back
    FAILED = "failed"  # the policy raised, or the controller refused the request


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the history of decisions."""

    at_s: float
    operator: str
    policy: str
    outcome: Outcome
    proposal: Proposal
    reason: str  # of the policy, and of the governor if it refused
    repeated: int = 0  # how often the same decision followed this one

    @property
    def is_change(self) -> bool:
        return self.outcome in (Outcome.CARRIED_OUT, Outcome.UNDONE)

    def __str__(self) -> str:
        again = f" (and {self.repeated} times more)" if self.repeated else ""
        return f"{self.policy}: {self.proposal}: {self.outcome.value}: {self.reason}{again}"
