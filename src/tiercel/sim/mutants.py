"""Planted bugs: each takes one rule of the protocol out, and the checkers must notice.

Responsible for: which planted bugs there are, what each breaks, and finding a seed that shows it.
Not responsible for: the planting; core code asks `settings.mutant` at the rule in question.

A mutant is killed by a seed that fails under it and passes with the unchanged code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tiercel.core.faults import InvalidRequest
from tiercel.sim.campaign import run_seed, stream_seeds
from tiercel.sim.scenario import FAULTS, Options

SEEDS_MAX = 200


DYING = {"kinds": ("forgetful",), "strategies": ("live",), "capture_pause_ms": 40.0, "move_slots_max": 16}
ROAMING = {"journeys": (4,), "lane_frames_max": 1, "sites_min": 3, "sites_max": 6}
FLIPS = {
    **{"faults": ("crash", "step"), "sites_min": 2, "strategies": ("pause",), "timed": 0.0, "turns": 0.0},
    **{"chain": (1,), "journeys": (0,)},
}
SLICED = {"faults": ("crash", "step"), "capture_pause_ms": 30.0}
CLOCKS = {"kinds": ("sessions", "windows"), "sites_min": 2}
SPILLED = {"little_memory": 1.0, "timed": 0.0, "turns": 0.0}
LATE = {"kinds": ("windows",), "sites_min": 2, "timed": 1.0}


RUNS = {"kinds": ("choosy",), "runs": 1.0}
HEIRS = {"faults": ("crash",), "recoveries": 1.0}


class Mutant(NamedTuple):
    """A planted bug: the rule of the protocol it takes out, and what is then wrong."""

    rule: str
    what: str
    focus: Mapping[str, Any] = MappingProxyType(
        {}
    )  # what to draw more of, where the bug needs something rare


MUTANTS: dict[str, Mutant] = {
    "producer-dedup-lost": Mutant("R1", "a restarted router has forgotten what its producers sent"),
    "early-rows-not-held": Mutant("R1", "a row is appended though an earlier one of its source is under way"),
    "marks-not-moved": Mutant("R2", "the new sequencer of a key does not know which rows it has"),
    "checkpoint-with-holes": Mutant("R3", "a checkpoint claims rows that are still held"),
    "home-coming-not-held": Mutant("R4", "a key that came home takes new rows before the old ones are back"),
    "outbox-not-replayed": Mutant("R5", "frames that were under way when a link broke are not sent again"),
    "sent-before-durable": Mutant("R6", "frames leave a site before they are durable there"),
    "flip-told-too-early": Mutant("R6", "others hear of a flip that a crash can still take back", FLIPS),
    "checkpoint-ahead-of-log": Mutant("R6", "a checkpoint knows what the log can still forget"),
    "checkpoint-of-changed-keys": Mutant(
        "R3", "keys that change while a checkpoint is written are in it as they were later", SLICED
    ),
    "unfinished-checkpoint-counts": Mutant(
        "R3", "what was written of a checkpoint that a crash cut short is taken for state", SLICED
    ),
    "builds-upon-unfinished": Mutant(
        "R3",
        "a checkpoint of arrivals makes count what a crash had cut short",
        {**SLICED, "strategies": ("live",), "capture_pause_ms": 15.0},
    ),
    "spills-dirty-keys": Mutant("R3", "keys leave memory before a checkpoint has what has changed", SPILLED),
    "spills-older-version": Mutant(
        "R3",
        "keys leave memory before a checkpoint under way has written them: an older version comes back",
        {**SPILLED, "capture_pause_ms": 30.0},
    ),
    "rollback-skipped": Mutant("R6", "a reader that is ahead of its log goes on as if it were not"),
    "output-marks-forgotten": Mutant("R8", "a restarted router admits outputs that it has admitted before"),
    "move-marks-ignored": Mutant("R8", "outputs of keys on the move are admitted twice"),
    "acknowledged-too-early": Mutant("R9", "a producer is told that its rows are safe before they are"),
    "emit-before-arrival": Mutant("R10", "the destination's outputs overtake the source's last ones"),
    "call-not-atomic": Mutant("R11", "what a call changed before it raised survives"),
    "runs-refused-whole": Mutant("R11", "a row at fault takes the others of its run along", RUNS),
    "entries-merged": Mutant("R12", "a replay makes other calls than the first run did"),
    "attributes-survive": Mutant("R13", "a processor remembers things that a replay does not have"),
    "digests-not-compared": Mutant("R13", "a destination that differs from its source takes over"),
    "stale-moved-believed": Mutant("R14", "old news about an owner replaces newer", {"little_memory": 0.0}),
    "epoch-not-compared": Mutant("R15", "a slot's news sweeps overrides that are newer than it"),
    "clock-not-carried": Mutant("R17", "a moved key's clock and watermark run backwards", CLOCKS),
    "watermark-overtakes": Mutant("R17", "a watermark is promised while rows below it are under way"),
    "watermark-forgotten": Mutant("R19", "a restarted log has forgotten its watermark", LATE),
    "late-rows-taken": Mutant("R19", "a log takes rows that are behind its watermark", LATE),
    "late-for-each-other": Mutant("R19", "rows of one frame are late for each other", LATE),
    "ticks-not-held": Mutant("R19", "ticks and watermarks that pass while a key is held are lost for it"),
    "tick-delivered-twice": Mutant("R19", "timers fire before their time"),
    "deleted-keys-not-told": Mutant(
        "R20", "the destination is not told of keys that died before their capture", DYING
    ),
    "shadow-from-begin": Mutant("R21", "rows between an overloaded source and Begin are not shadowed"),
    "capture-offset-too-low": Mutant("R21", "a captured key claims one entry less than it holds"),
    "capture-offset-too-high": Mutant("R21", "a captured key claims one entry more than it holds"),
    "suppressed-not-released": Mutant("R21", "what the source still owed at the cut is nobody's"),
    "vote-forgotten": Mutant("R22", "a restarted router has forgotten that it promised to adopt"),
    "cut-not-enforced": Mutant("R23", "a source that was taken over may emit again"),
    "shadow-not-stored": Mutant("R24", "a destination that restarts finds no shadow entries"),
    "source-forgets-early": Mutant("R25", "the source deletes keys before the destination has them durably"),
    "forgets-who-came-back": Mutant(
        "R25",
        "told late to forget keys that left, it deletes those that are back",
        {**SPILLED, "round_trips": 1.0},
    ),
    "stale-copies-kept": Mutant("R25", "a restored instance keeps keys that the log has given away"),
    "abort-after-flip": Mutant("R26", "a decided move is undone"),
    "positions-flattened": Mutant("R27", "a checkpoint claims one position for all it holds"),
    "merged-arrivals-left-out": Mutant(
        "R27",
        "a checkpoint of arrivals forgets those that have merged since the last of everything",
        {"strategies": ("live",), "faults": ("crash", "step")},
    ),
    "zombie-not-fenced": Mutant("R29", "a life that was replaced is still listened to"),
    "held-rows-close-the-lane": Mutant(
        "R30", "held rows use up the window of the lane that would release them", ROAMING
    ),
    "heirs-emit-again": Mutant("R8", "heirs emit what the dead instance had emitted", HEIRS),
    "inherited-log-skipped": Mutant(
        "P1", "heirs do not get the rows behind the dead instance's checkpoint", HEIRS
    ),
    "heirs-durable-too-early": Mutant(
        "P1", "an heir's checkpoint counts before all that it rests on has come", HEIRS
    ),
    "inherited-epochs-kept": Mutant(
        "R7", "an heir goes on with the epochs of the dead instance where it reads a key late", HEIRS
    ),
    "emit-filter-off-by-one": Mutant("P1", "the destination also emits for the cut itself"),
    "emits-before-cut": Mutant("P3", "the destination emits before the source has stopped"),
    "timers-not-moved": Mutant("P1", "timers stay behind"),
    "overlapping-moves-accepted": Mutant("R22", "two moves of one key run at once"),
    "log-trimmed-too-early": Mutant("P1", "entries are deleted before every reader's checkpoint covers them"),
}

DIRECTED: dict[str, Mutant] = {  # too rare for random seeds: a transcript in tests/rules shows each
    "promised-before-durable": Mutant("R6", "a site promises what a crash can still take back"),
    "carried-watermark-not-logged": Mutant(
        "R17", "a move waits for a watermark that a silent site holds back"
    ),
    "flip-ahead-of-shadow": Mutant("R21", "keys move while some of their rows are not shadowed yet"),
    "flip-ignores-watermark": Mutant("R18", "keys move to a place whose watermark is ahead of theirs"),
    "stalled-arrivals-left-out": Mutant(
        "R27", "a checkpoint forgets keys that have voted because rows of theirs wait"
    ),
    "retired-goes-on": Mutant("R29", "one that was retired while it was away goes on as if it were not"),
    "passed-timers-not-fired": Mutant("R18", "timers wait, though the log they have come to is past them"),
}


class Kill(NamedTuple):
    """The checker that noticed a mutant, and the seed that showed it."""

    checker: str
    seed: int


def options_of(mutant: str) -> Options:
    return Options(
        **{
            "faults": FAULTS,
            "mutant": mutant,
            "recoveries": 0.0,
            "runs": 0.0,
            "round_trips": 0.0,
            **MUTANTS[mutant].focus,
        }
    )


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
