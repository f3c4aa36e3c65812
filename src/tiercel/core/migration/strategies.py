"""The strategies of a move: each decides when the move flips, and when the source sends which state.

Responsible for: all differences between strategies. No other module compares the name of a strategy.
Not responsible for: carrying a move out (the four roles of this package).

    live      the source sends state while it processes; flip when the destination has caught up
    pause     flip at once; the keys wait until all of their state has arrived
    restart   stop the operator's dispatch, restart every instance, move the state, resume
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from tiercel.core.model.keys import Key


class CaptureMode(enum.Enum):
    """How the source captures the state of the keys."""

    WORKING = "working"  # a few keys at a time, while the source continues processing them
    FROZEN = "frozen"  # as of the flip: the source no longer changes them


class FlipFacts(msgspec.Struct, frozen=True):
    """The facts that the source router passes to `may_flip`."""

    prepared: bool = False  # the destination is ready to receive
    voted: bool = False  # the destination holds the same state, in a checkpoint
    shadow_complete: bool = False  # the destination has been sent every row of the keys
    source_attached: bool = True  # the source can send its state
    source_watermark_reached: bool = False  # no output can be late behind the destination's watermark


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a strategy. The defaults are those of a strategy that flips first."""

    name: str
    summary: str
    shadows: bool = False  # the keys' rows go to the destination too, before the flip
    votes: bool = False  # the flip waits for the destination's vote
    captures: CaptureMode = CaptureMode.FROZEN
    restarts: bool = False  # every instance of the operator restarts between flip and transfer
    splits: bool = False  # the controller splits a large move into moves that flip one after the other

    # -- when ----------------------------------------------------------------------------------

    @property
    def flips_first(self) -> bool:
        """Whether the flip comes before the state."""
        return not self.votes

    def may_flip(self, facts: FlipFacts) -> bool:
        """Whether the source router may decide the move now."""
        if not facts.prepared or not facts.source_watermark_reached:
            return False
        if self.flips_first and not facts.source_attached:  # only the source has the state
            return False
        return (facts.voted or not self.votes) and (facts.shadow_complete or not self.shadows)

    @property
    def destination_can_finish(self) -> bool:
        """Whether the destination can produce the missing outputs of a silent source."""
        return self.shadows

    @property
    def needs_determinism(self) -> bool:
        """Whether two instances process the same rows and must produce the same outputs."""
        return self.shadows

    # -- which state -----------------------------------------------------------------------------

    def order(self, keys: Iterable[Key]) -> list[Key]:
        """The order in which the source captures and sends the keys."""
        return sorted(keys)

    def asks(self, missing: Sequence[Key]) -> tuple[Key, ...]:
        """The keys that the destination requests out of turn; by default none."""
        return ()


LIVE = Strategy(
    name="live",
    summary="Falcon's idea: both instances process, one emits, no key waits.",
    shadows=True,
    votes=True,
    captures=CaptureMode.WORKING,
    splits=True,
)
PAUSE = Strategy(
    name="pause", summary="SEEP, Trisk, Flux: the keys stop until all of their state has arrived."
)
RESTART = Strategy(
    name="restart",
    summary="Flink, Spark: the operator stops and every instance is ended and started again.",
    restarts=True,
)

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (LIVE, PAUSE, RESTART)}
