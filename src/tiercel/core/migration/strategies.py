"""The strategies of a move: each decides when the move flips, and when the source sends which state.

Responsible for: all differences between strategies. No other module compares the name of a strategy.
Not responsible for: carrying a move out (the four roles of this package), the orders themselves (orders.py).

    live        the source sends state while it processes; flip when the destination has caught up
    pause       flip at once, stop the keys where they are; each goes on when its unit has arrived
    restart     stop the operator's dispatch, restart every instance, move the state, resume
    push        as pause; the source orders the units by the rows that wait for them
    fetch       as pause; the destination requests the units that rows wait for, the others follow
    meces       as fetch; the destination processes nothing else while a requested unit is missing
    bins        as pause, in pieces that flip one after the other
    subscale    as fetch, in pieces of which two move at a time
    standby     as live; the source sends only what the destination, its standby, does not have
    replicate   as live, with one flip for all keys
    predict     as live; the flip waits until a row of a key enters at the destination's site
"""

from __future__ import annotations

import enum

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.orders import NEEDS_BACKLOG


class CaptureMode(enum.Enum):
    """How the source captures the state of the keys."""

    WORKING = "working"  # a few keys at a time, while the source continues processing them
    FROZEN = "frozen"  # as of the cut: the source no longer changes them


class FlipFacts(msgspec.Struct, frozen=True):
    """The facts that the source router passes to `may_flip`."""

    prepared: bool = False  # the destination is ready to receive
    voted: bool = False  # the destination holds the same state, in a checkpoint
    shadow_complete: bool = False  # the destination has been sent every row of the keys
    source_attached: bool = True  # the source can send its state
    source_watermark_reached: bool = False  # no output can be late behind the destination's watermark
    rows_came: bool = False  # rows of the keys have entered at the destination's site


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a strategy. The defaults are those of a strategy that flips first."""

    name: str
    summary: str
    shadows: bool = False  # the keys' rows go to the destination too, before the flip
    votes: bool = False  # the flip waits for the destination's vote
    captures: CaptureMode = CaptureMode.FROZEN
    restarts: bool = False  # every instance of the operator restarts between flip and transfer
    splits: bool = False  # the controller splits a large move into moves that flip one after the other
    parallel: int = 1  # so many pieces of a split move run at a time
    order: str = "sorted"  # in which the source sends units, of `ORDERS`
    asks: bool = False  # the destination requests units that rows wait for
    copies: bool = False  # what the destination has as the source's standby is not sent
    awaits_rows: bool = False  # the flip waits for rows that enter at the destination's site
    blocks: bool = False  # the destination processes nothing else while a requested unit is missing

    # -- when ----------------------------------------------------------------------------------

    @property
    def flips_first(self) -> bool:
        """Whether the flip comes before the state."""
        return not self.votes

    @property
    def freezes(self) -> bool:
        """Whether the source stops the keys at the flip, and the destination gets the rows up to it."""
        return self.captures is CaptureMode.FROZEN

    def may_flip(self, facts: FlipFacts) -> bool:
        """Whether the source router may decide the move now."""
        if not facts.prepared or not facts.source_watermark_reached:
            return False
        if self.awaits_rows and not facts.rows_came:
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

    @property
    def needs_backlog(self) -> bool:
        """Whether the source needs to know which rows wait for its units."""
        return self.order in NEEDS_BACKLOG


LIVE = Strategy(
    name="live",
    summary="Falcon's idea: both instances process, one emits, no key waits.",
    shadows=True,
    votes=True,
    captures=CaptureMode.WORKING,
    splits=True,
)
PAUSE = Strategy(name="pause", summary="SEEP, Trisk, Flux: the keys stop until their state has arrived.")
RESTART = Strategy(
    name="restart",
    summary="Flink, Spark: the operator stops and every instance is ended and started again.",
    restarts=True,
)
PUSH = Strategy(
    name="push",
    summary="PAM: the source pushes what rows wait for first, without requests.",
    order="pam",
)
PUSH_ORDERS = tuple(
    Strategy(name=f"push-{order}", summary=f"push in the order `{order}`.", order=order)
    for order in ("fifo", "skew", "random", "sorted")
)
FETCH = Strategy(
    name="fetch",
    summary="Meces without its stops: on demand first, the rest in the background.",
    order="asked",
    asks=True,
)
MECES = Strategy(
    name="meces",
    summary="Meces as published: a missing unit stops the destination.",
    order="asked",
    asks=True,
    blocks=True,
)
BINS = Strategy(
    name="bins",
    summary="Megaphone: bins move one after the other; each stops while it moves.",
    splits=True,
)
SUBSCALE = Strategy(
    name="subscale",
    summary="DRRS: pieces, two at a time, each in the order that its destination requests.",
    splits=True,
    parallel=2,
    order="asked",
    asks=True,
)
STANDBY = Strategy(
    name="standby",
    summary="Rhino, Falcon-HB: the destination has a copy; only what has changed since is sent.",
    shadows=True,
    votes=True,
    captures=CaptureMode.WORKING,
    splits=True,
    copies=True,
)
REPLICATE = Strategy(
    name="replicate",
    summary="ChronoStream, Gloss: a second instance processes everything, and one flip is for all.",
    shadows=True,
    votes=True,
    captures=CaptureMode.WORKING,
)
PREDICT = Strategy(
    name="predict",
    summary="EdgeWarp: the copy is there before the source of the rows is; a wrong guess costs bytes.",
    shadows=True,
    votes=True,
    captures=CaptureMode.WORKING,
    parallel=16,
    awaits_rows=True,
)

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        LIVE,
        PAUSE,
        RESTART,
        PUSH,
        *PUSH_ORDERS,
        FETCH,
        MECES,
        BINS,
        SUBSCALE,
        STANDBY,
        REPLICATE,
        PREDICT,
    )
}
PRINCIPAL = tuple(name for name in STRATEGIES if name not in {s.name for s in (*PUSH_ORDERS, PREDICT)})


def ordered(strategy: str, order: str) -> str:
    """The name of a strategy with an order; without one, the strategy's own."""
    if not order:
        return strategy
    orders = [PUSH.order, *(other.order for other in PUSH_ORDERS)]
    if order not in orders:
        raise InvalidRequest.unknown("order", order, orders)
    if strategy != PUSH.name:
        raise InvalidRequest(f"strategy {strategy!r} has no order", f"expected strategy {PUSH.name!r}")
    return strategy if order == PUSH.order else f"{strategy}-{order}"
