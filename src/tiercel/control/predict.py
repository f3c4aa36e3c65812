"""The cost model of moves: what each strategy would cost, and the choice of `auto`.

Responsible for: stoppage, peak, duration and bytes of a move by each strategy, from facts; choosing; why.
Not responsible for: measuring the facts (spark/api/requests.py), carrying the move out.

A key stops for what happens between its last row at the source and its next row at the destination:

    live, standby, replicate   the flip, and one way to the destination's site
    pause                      the flip, two ways, and the transfer of everything
    push, fetch                the same, and the transfer of what rows wait for
    bins, subscale             the same, and the transfer of one piece
    restart                    the restart of every instance, and the transfer of everything
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from tiercel.core.migration.strategies import STRATEGIES, Strategy

AUTO = "auto"  # the name under which a user asks for the choice
AS_GOOD = 1.3  # strategies whose stoppage is within this factor of the best are as good as it
AS_GOOD_MS = 0.5
CHANGED_MAX = 1.0
LEARNT_MIN, LEARNT_MAX = 0.2, 20.0  # factors between a prediction and what happened


class MoveFacts(msgspec.Struct, frozen=True):
    """What is known about a move before it begins."""

    keys: int
    state_bytes: int  # of all of them
    rate: float = 0.0  # their rows per second
    backlog_rows: int = 0  # that wait at the source, of all its keys
    service_us: float = 0.0  # of one row at the source
    latency_ms: float = 0.0  # one way between the two instances
    mbit: float | None = None  # between them; None: no limit is known
    deterministic: bool = True
    has_standby: bool = False  # the destination is the standby of the source
    checkpoint_ms: float = 1000.0
    flip_keys_max: int = 64

    @property
    def backlog_ms(self) -> float:
        return self.backlog_rows * self.service_us / 1e3

    @property
    def changed(self) -> float:
        """The share of the keys that change between two checkpoints."""
        return min(CHANGED_MAX, self.rate * self.checkpoint_ms / 1e3 / max(1, self.keys))


class Costs(msgspec.Struct, frozen=True):
    """What parts of a move take, in a deployment without links; measured on two cores."""

    flip_ms: float = 1.5  # a key waits for the flip
    flip_key_us: float = 10.0  # and more with each key that flips with it
    piece_ms: float = 16.0  # a piece of a move, from request to end, without its transfer
    key_us: float = 22.0  # a key is captured, sent and installed
    mb_s: float = 120.0  # bytes, apart from the link
    settle_ms: float = 150.0  # the checkpoint behind a move
    restart_ms: float = 290.0  # every instance ends and starts again
    learnt: dict[str, float] = {}  # strategy -> how much longer its moves took than predicted


class Prediction(msgspec.Struct, frozen=True):
    """What a move would cost with one strategy."""

    strategy: str
    stoppage_ms: float  # of a key that has rows meanwhile
    peak_ms: float  # the latency of the row that waits longest
    duration_ms: float
    size_bytes: int
    impossible: str = ""  # why it cannot be used


class Choice(msgspec.Struct, frozen=True):
    """The strategy that `auto` takes, why, and what was compared."""

    strategy: str
    because: str
    predictions: tuple[Prediction, ...]

    @property
    def prediction(self) -> Prediction:
        return next(p for p in self.predictions if p.strategy == self.strategy)

    def __str__(self) -> str:
        lines = [f"{'':2}{'strategy':<12}{'stoppage_ms':>12}{'peak_ms':>10}{'duration_ms':>13}{'bytes':>14}"]
        for p in self.predictions:
            mark = "*" if p.strategy == self.strategy else ""
            numbers = f"{p.stoppage_ms:>12.1f}{p.peak_ms:>10.1f}{p.duration_ms:>13.1f}{p.size_bytes:>14,}"
            lines.append(f"{mark:<2}{p.strategy:<12}{numbers}  {p.impossible}".rstrip())
        return "\n".join([*lines, f"auto takes {self.strategy}: {self.because}"])


def transfer_ms(facts: MoveFacts, costs: Costs, share: float = 1.0) -> float:
    """The time that a share of the state takes from instance to instance, without the way itself."""
    size_bytes = facts.state_bytes * share
    on_link = size_bytes * 8 / (facts.mbit * 1e3) if facts.mbit else 0.0
    return max(facts.keys * share * costs.key_us / 1e3 + size_bytes / (costs.mb_s * 1e3), on_link)


def predict(name: str, facts: MoveFacts, costs: Costs | None = None) -> Prediction:
    """The cost of a move with this strategy."""
    costs = costs or Costs()
    strategy = STRATEGIES[name]
    sent = facts.changed if strategy.copies else 1.0
    stoppage_ms, duration_ms = _times(strategy, facts, costs, transfer_ms(facts, costs, sent))
    caught_up_ms = stoppage_ms * facts.rate / 1e3 * facts.service_us / 1e3  # rows that came meanwhile
    return Prediction(
        name,
        round(stoppage_ms, 2),
        round(stoppage_ms + caught_up_ms + facts.backlog_ms, 2),
        round(duration_ms * costs.learnt.get(name, 1.0), 2),
        round(facts.state_bytes * sent),
        _obstacle(strategy, facts),
    )


def _times(strategy: Strategy, facts: MoveFacts, costs: Costs, transfer: float) -> tuple[float, float]:
    """Stoppage and duration."""
    way = facts.latency_ms
    pieces = max(1, math.ceil(facts.keys / facts.flip_keys_max)) if strategy.splits else 1
    together = min(facts.keys, facts.flip_keys_max) if strategy.splits else facts.keys
    flip = costs.flip_ms + together * costs.flip_key_us / 1e3
    if strategy.votes:
        return flip + way, pieces * (costs.piece_ms + 8 * way) + transfer + facts.backlog_ms
    if strategy.restarts:
        stop = costs.restart_ms + 2 * way + transfer
        return stop, stop + costs.settle_ms
    waiting = 1.0
    if strategy.order != "sorted":  # what rows wait for comes first
        rows = facts.backlog_rows + facts.rate * transfer / 1e3
        waiting = min(1.0, rows / max(1, facts.keys))
    ways = 3 if strategy.asks else 2
    stop = 2 * costs.flip_ms + ways * way + transfer / pieces * waiting  # the cut is logged first
    at_once = max(1, strategy.parallel)
    return stop, pieces / at_once * (costs.piece_ms + 4 * way) + transfer + costs.settle_ms


def _obstacle(strategy: Strategy, facts: MoveFacts) -> str:
    if strategy.needs_determinism and not facts.deterministic:
        return "the operator is declared non-deterministic"
    if strategy.awaits_rows:
        return "it waits for rows that enter at the destination's site"
    if strategy.copies and not facts.has_standby:
        return "the destination is not the source's standby"
    return ""


def choose(facts: MoveFacts, costs: Costs | None = None, names: Iterable[str] = ()) -> Choice:
    """The strategy with the least stoppage; of those that are as good, the shortest, then the smallest."""
    found = sorted(
        (predict(name, facts, costs) for name in names or STRATEGIES if not name.startswith("push-")),
        key=lambda p: (bool(p.impossible), p.stoppage_ms, p.duration_ms),
    )
    possible = [p for p in found if not p.impossible]
    least = possible[0].stoppage_ms
    good = [p for p in possible if p.stoppage_ms <= max(AS_GOOD * least, least + AS_GOOD_MS)]
    best = min(good, key=lambda p: (p.duration_ms, p.size_bytes))
    others = [p for p in possible if p not in good]
    because = f"its keys stop for about {best.stoppage_ms:.1f} ms"
    if len(good) > 1:
        because += f", as with {', '.join(p.strategy for p in good if p is not best)}, and it ends first"
    if others:
        because += f"; the next, {others[0].strategy}, would stop them for {others[0].stoppage_ms:.1f} ms"
    return Choice(best.strategy, because, tuple(found))


def learn(costs: Costs, ended: Iterable[tuple[Prediction, float]]) -> Costs:
    """Costs with what ended moves took, beside what was predicted: the middle factor of each strategy."""
    factors: dict[str, list[float]] = {}
    for prediction, duration_ms in ended:
        if prediction.duration_ms > 0 and duration_ms > 0:
            known = costs.learnt.get(prediction.strategy, 1.0)
            factors.setdefault(prediction.strategy, []).append(known * duration_ms / prediction.duration_ms)
    middle = {name: sorted(found)[len(found) // 2] for name, found in factors.items()}
    kept = {name: min(LEARNT_MAX, max(LEARNT_MIN, factor)) for name, factor in middle.items()}
    return msgspec.structs.replace(costs, learnt={**costs.learnt, **kept})
