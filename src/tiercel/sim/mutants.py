"""Planted bugs: each takes one rule of the protocol out, and the checkers must notice.

Responsible for: which planted bugs there are, what each breaks, and finding a seed that shows it.
Not responsible for: the planting; core code asks `settings.mutant` at the rule in question.

A mutant is killed by a seed that fails under it and passes with the unchanged code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tiercel.core.faults import InvalidRequest
from tiercel.sim.campaign import run_seed, stream_seeds
from tiercel.sim.scenario import FAULTS, Options

SEEDS_MAX = 200

MUTANTS: dict[str, str] = {
    "abort-after-flip": "a move may be undone after its Flip; the rule: the Flip record is the decision",
    "capture-offset-too-high": "a captured key claims one entry more than it holds; "
    "the rule: state and offset belong together",
    "capture-offset-too-low": "a captured key claims one entry less than it holds; "
    "the rule: state and offset belong together",
    "checkpoint-ahead-of-log": "a checkpoint is stored before what it rests on is durable; "
    "the rule: nothing others can see rests on an entry that can be lost",
    "digests-not-compared": "the flip does not wait for equal digests; "
    "the rule: a destination that differs from its source does not take over",
    "early-rows-not-held": "a row is appended though an earlier one of its source is under way; "
    "the rule: rows of one source keep their order",
    "emit-before-arrival": "the destination emits before the source's last outputs have arrived; "
    "the rule: outputs of a key are in order across sites",
    "emit-filter-off-by-one": "the destination emits for the cut itself; the rule: behind it only",
    "emits-before-cut": "the destination emits once it has adopted the keys; the rule: one owner at a time",
    "epoch-not-compared": "a row is sent on also by a router that knows no newer owner; "
    "the rule: rows travel towards newer epochs only",
    "flip-ignores-watermark": "a move flips before the source has reached the destination's watermark; "
    "the rule: no output comes behind a watermark",
    "home-coming-not-held": "rows of a key that comes back are appended at once; "
    "the rule: they wait for those that are still on the way round",
    "log-trimmed-too-early": "the log is trimmed at what was processed; the rule: at what was checkpointed",
    "marks-not-moved": "the marks of a key's sources do not travel with it; the rule: each row counts once",
    "move-marks-ignored": "outputs of keys on the move are admitted twice; the rule: once",
    "overlapping-moves-accepted": "a router takes a move whose keys another one holds; "
    "the rule: two moves at once share no key",
    "producer-dedup-lost": "a frame that a producer sends again counts again; the rule: once",
    "rollback-skipped": "an instance ahead of the log it resumes from goes on; "
    "the rule: it falls back to its checkpoint",
    "source-forgets-early": "the source drops the keys at the cut; "
    "the rule: it keeps them until the destination has them safe",
    "stale-moved-believed": "an old routing update overwrites a newer one; the rule: epochs only grow",
    "suppressed-not-released": "the destination drops what it computed in the shadow behind the cut; "
    "the rule: it owes those outputs",
    "timers-not-moved": "a key arrives without its timers; the rule: timers are part of the state",
    "watermark-overtakes": "a router promises a watermark while older rows are in its lanes; "
    "the rule: a watermark does not overtake rows",
    "zombie-not-fenced": "messages of an older life are taken; the rule: a successor ends it",
}


class Kill(NamedTuple):
    """The checker that noticed a mutant, and the seed that showed it."""

    checker: str
    seed: int


def options_of(mutant: str) -> Options:
    return Options(faults=FAULTS, mutant=mutant)


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in MUTANTS:
            raise InvalidRequest.unknown("mutant", name, sorted(MUTANTS))


def hunt(
    name: str,
    seeds_max: int = SEEDS_MAX,
    jobs: int = 1,
    first: int = 0,
    on_seed: Callable[[], object] | None = None,
) -> Kill | None:
    """The first seed that fails under the mutant and passes without it; None if the mutant survives."""
    check_names([name])
    options = options_of(name)
    clean = msgspec.structs.replace(options, mutant="")
    results = stream_seeds(range(first, first + seeds_max), options, jobs)
    try:
        for result in results:
            if on_seed is not None:
                on_seed()
            if result.violations and not run_seed(result.seed, clean).violations:
                return Kill(result.violations[0].checker, result.seed)
    finally:
        results.close()
    return None
