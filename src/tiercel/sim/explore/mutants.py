"""Planted bugs: each disables one rule of the protocol, and the checkers must notice it.

Responsible for: the list of planted bugs, the rule that each breaks, and the search for a seed that shows it.
Not responsible for: planting them (planting.py); the core knows nothing of planted bugs.

A mutant is killed by a seed that fails under it and passes with the unchanged code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.sim.explore.campaign import run_seed, stream_seeds
from tiercel.sim.scenario.scenario import FAULTS, Options

SEEDS_MAX = 200


DYING = {"kinds": ("forgetful",), "strategies": ("live",), "capture_pause_ms": 40.0, "move_slots_max": 16}
ROAMING = {"journeys": (4,), "site_frames_max": 1, "sites_min": 3, "sites_max": 6}
FLIPS = {
    **{"faults": ("crash", "step"), "sites_min": 2, "strategies": ("pause",), "timed": 0.0, "turns": 0.0},
    **{"chain": (1,), "journeys": (0,)},
}
CUTS = {
    "faults": ("crash", "step"),
    "strategies": ("pause", "push", "fetch"),
    "slow_code": 1.0,
    "chain": (1,),
}
BEHIND = {"strategies": ("pause", "push", "fetch", "bins"), "slow_code": 1.0, "turns": 0.0}
SLICED = {"faults": ("crash", "step"), "capture_pause_ms": 30.0}
CLOCKS = {"kinds": ("sessions", "windows"), "sites_min": 2}
EVICTING = {"little_memory": 1.0, "timed": 0.0, "turns": 0.0}
STANDBYS = {"strategies": ("standby",), "round_trips": 1.0, "faults": ("crash", "break", "mute")}
LATE = {"kinds": ("windows",), "sites_min": 2, "timed": 1.0}


SLOW = {"slow_code": 1.0, "strategies": ("live",), "turns": 0.0}


RUNS = {"kinds": ("choosy",), "runs": 1.0}
TAKEN_OVER = {"faults": ("crash",), "recoveries": 1.0}


CALM = {"features": ("calm",), "feature_share": 1.0}
CALM_BUFFERS = {"features": ("small-buffers", "calm"), "feature_share": 1.0, "slow_code": 0.0}
BUFFERS = {"features": ("small-buffers", "many-cars"), "feature_share": 1.0, "sites_min": 3}
DEAD = {"features": ("dead-for-good",), "feature_share": 1.0}
NEWS = {"features": ("late-news",), "feature_share": 1.0, "scales": True}
DEAD_SOURCES = {
    **{"features": ("dead-in-moves",), "feature_share": 1.0, "sites_min": 1, "chain": (1,)},
    **{"strategies": ("pause", "push", "fetch", "bins"), "faults": ("crash",)},
}
DEAD_DESTINATIONS = {**DEAD_SOURCES, "kinds": ("listing", "sessions", "windows")}
DEAD_RESTARTS = {**DEAD_SOURCES, "strategies": ("restart",)}
SCALED_DEAD = {"features": ("dead-for-good",), "feature_share": 1.0, "scales": True, "faults": ("crash",)}
UNITS = {
    **{"features": ("large-state",), "feature_share": 1.0, "strategies": ("pause", "push", "fetch")},
    **{"faults": ("crash", "step"), "chain": (1,), "move_slots_max": 16},
}
ZOMBIES = {**UNITS, "faults": ("zombie", "crash")}
LIMITS = {"features": ("small-limits", "slow-consumers"), "feature_share": 1.0}
OUTPUTS = {"features": ("short-output-logs",), "feature_share": 1.0}
WRONG_CLOCKS = {"features": ("wrong-clocks",), "feature_share": 1.0, "sites_min": 2}
DEVICES = {"features": ("gateways",), "feature_share": 1.0, "sites_min": 2}
STATEFUL = {"kinds": ("sessions", "windows", "listing", "forgetful"), "faults": ()}
TIMED = {"kinds": ("windows",), "sites_min": 2, "timed": 0.0}
FENCED = {"chain": (1,), "sites_min": 3, "sites_max": 6}


BUNDLES = {"features": ("bundles",), "feature_share": 1.0, "timed": 0.0}
CHAINED = {**BUNDLES, "chain": (2,), "turns": 0.0}
TWICE = {**CHAINED, "kinds": ("chained",), "last_kinds": ("mindful",), "sites_max": 1, "slow_code": 1.0}


class Mutant(NamedTuple):
    """A planted bug: the rule of the protocol that it disables, and the resulting fault."""

    rule: str
    what: str
    focus: Mapping[str, Any] = MappingProxyType(
        {}
    )  # options that a scenario draws more often, if the bug needs something rare


MUTANTS: dict[str, Mutant] = {
    "producer-dedup-lost": Mutant("R1", "a restarted router has forgotten what its producers sent"),
    "early-rows-not-held": Mutant("R1", "a row is appended though an earlier one of its source is under way"),
    "marks-not-moved": Mutant("R2", "the new sequencer of a key does not know which rows it has"),
    "checkpoint-with-holes": Mutant("R3", "a checkpoint claims rows that are still held"),
    "home-coming-not-held": Mutant("R4", "a key that came home takes new rows before the old ones are back"),
    "outbox-not-replayed": Mutant("R5", "frames that were under way when a link broke are not sent again"),
    "sent-before-durable": Mutant("R6", "frames leave a site before they are durable there"),
    "flip-announced-too-early": Mutant("R6", "a flip is announced that a crash can still undo", FLIPS),
    "checkpoint-ahead-of-log": Mutant("R6", "a checkpoint holds entries that the log can still lose"),
    "checkpoint-of-changed-keys": Mutant(
        "R3", "a checkpoint contains later versions of keys that change while it is written", SLICED
    ),
    "unfinished-checkpoint-counts": Mutant(
        "R3", "the parts of a checkpoint that a crash interrupted count as state", SLICED
    ),
    "builds-upon-unfinished": Mutant(
        "R3",
        "a checkpoint of arrivals completes an earlier one that a crash interrupted",
        {**SLICED, "strategies": ("live",), "capture_pause_ms": 15.0},
    ),
    "stops-before-its-outputs": Mutant("R35", "a source stops before outputs that are admitted", CUTS),
    "cut-rows-not-shadowed": Mutant("R35", "rows between the cut and the flip are not sent", BEHIND),
    "own-rows-overtake-the-cut": Mutant(
        "R35", "rows behind the flip are processed before those between cut and flip", BEHIND
    ),
    "evicts-dirty-keys": Mutant("R3", "keys are evicted before a checkpoint holds their changes", EVICTING),
    "evicts-older-version": Mutant(
        "R3",
        "keys are evicted before a running checkpoint has written them: an older version is restored",
        {**EVICTING, "capture_pause_ms": 30.0},
    ),
    "rollback-skipped": Mutant("R6", "a reader that is ahead of its log continues without a rollback"),
    "output-marks-forgotten": Mutant("R8", "a restarted router admits outputs that it has admitted before"),
    "move-marks-ignored": Mutant("R8", "outputs of keys on the move are admitted twice"),
    "acknowledged-too-early": Mutant("R9", "a producer gets an ack before its rows are durable"),
    "emit-before-arrival": Mutant("R10", "the destination's outputs overtake the source's last ones"),
    "call-not-atomic": Mutant("R11", "changes of a call that raised survive"),
    "row-batches-refused-whole": Mutant("R11", "one bad row makes dead letters of its whole batch", RUNS),
    "entries-merged": Mutant("R12", "a replay makes other calls than the first run did"),
    "attributes-survive": Mutant("R13", "attributes of a processor survive a call, and a replay lacks them"),
    "digests-not-compared": Mutant("R13", "a destination that differs from its source takes over"),
    "stale-moved-believed": Mutant("R14", "an old owner replaces a newer one", {"little_memory": 0.0}),
    "epoch-not-compared": Mutant("R15", "a slot's update removes overrides that are newer than it"),
    "clock-not-carried": Mutant("R17", "a moved key's clock and watermark run backwards", CLOCKS),
    "watermark-overtakes": Mutant("R17", "a watermark is promised while rows below it are under way"),
    "watermark-forgotten": Mutant("R19", "a restarted log has forgotten its watermark", LATE),
    "late-rows-taken": Mutant("R19", "a log takes rows that are behind its watermark", LATE),
    "late-for-each-other": Mutant("R19", "rows of one frame are late for each other", LATE),
    "ticks-not-held": Mutant("R19", "ticks and watermarks that pass while a key is held are lost for it"),
    "tick-delivered-twice": Mutant("R19", "timers fire before their time"),
    "deleted-keys-not-sent": Mutant(
        "R20", "the source does not send the keys that were deleted before their capture", DYING
    ),
    "shadow-from-begin": Mutant("R21", "rows between an overloaded source and Begin are not shadowed"),
    "capture-offset-too-low": Mutant("R21", "a captured key claims one entry less than it holds"),
    "capture-offset-too-high": Mutant("R21", "a captured key claims one entry more than it holds"),
    "suppressed-not-released": Mutant("R21", "outputs that the source still withheld at the cut are lost"),
    "adoption-overtakes-shadow": Mutant(
        "R21", "a destination owns keys before it has processed the shadow rows that it was sent", SLOW
    ),
    "vote-forgotten": Mutant("R22", "a restarted router has forgotten its vote"),
    "cut-not-enforced": Mutant("R23", "a source that its router cut off may emit again"),
    "shadow-not-stored": Mutant("R24", "a destination that restarts finds no shadow entries"),
    "source-forgets-early": Mutant("R25", "the source deletes keys before the destination has them durably"),
    "stale-copies-kept": Mutant("R25", "a restored instance retains keys that belong to others by now"),
    "abort-after-flip": Mutant("R26", "a decided move is undone"),
    "positions-flattened": Mutant("R27", "a checkpoint claims one position for all it holds"),
    "merged-arrivals-left-out": Mutant(
        "R27",
        "a checkpoint of arrivals leaves out moves that have merged since the last full checkpoint",
        {"strategies": ("live",), "faults": ("crash", "step")},
    ),
    "zombie-not-fenced": Mutant("R29", "messages of a replaced incarnation are accepted"),
    "held-rows-close-the-outbox": Mutant(
        "R30", "held rows use up the window of the site outbox that would release them", ROAMING
    ),
    "successors-emit-again": Mutant("R8", "successors repeat outputs of the dead instance", TAKEN_OVER),
    "taken-over-log-skipped": Mutant(
        "P1", "successors miss the rows behind the dead instance's checkpoint", TAKEN_OVER
    ),
    "successors-durable-too-early": Mutant(
        "P1", "a successor's checkpoint counts before the share that it builds on is complete", TAKEN_OVER
    ),
    "taken-over-epochs-kept": Mutant(
        "R7", "a successor uses the epochs of the dead instance for keys that it restores lazily", TAKEN_OVER
    ),
    "emit-filter-off-by-one": Mutant("P1", "the destination also emits for the cut itself"),
    "emits-before-cut": Mutant("P3", "the destination emits before the source has stopped"),
    "timers-not-moved": Mutant("P1", "timers stay behind"),
    "overlapping-moves-accepted": Mutant("R22", "two moves of one key run at once", {"round_trips": 1.0}),
    "log-trimmed-too-early": Mutant("P1", "entries are deleted before every reader's checkpoint covers them"),
    # standbys
    "changed-keys-from-the-copy": Mutant(
        "R40", "the destination takes keys from its copy that have changed since", STANDBYS
    ),
    # requests
    "late-retirements-count": Mutant("P1", "a late answer to a retirement ends an owner", NEWS),
    "overlapping-moves-requested": Mutant(
        "P6", "the controller asks for moves that share keys at once", CALM
    ),
    "overlap-by-first-slot": Mutant("P6", "the controller compares some keys of two moves only", CALM),
    "done-notice-not-awaited": Mutant("P6", "a move is refused because the last one is not known done", CALM),
    "successors-not-launched": Mutant("P6", "nobody starts the successors of a dead instance", DEAD),
    "moves-not-asked-again": Mutant("P6", "a request that was lost is not repeated"),
    "nobody-is-retired": Mutant(
        "P6", "instances that a scaling does not name stay", {**CALM, "scales": True}
    ),
    "scaling-stops-halfway": Mutant("P6", "a scaling does not go on after its first moves", {"scales": True}),
    # takeovers
    "ended-moves-not-taken-over": Mutant("P1", "successors miss keys that moved shortly before", DEAD),
    "moves-of-the-dead-never-end": Mutant("P6", "a move waits for a checkpoint of the dead", DEAD),
    "incoming-moves-of-the-dead-never-end": Mutant("P6", "the same, at the destination's router", DEAD),
    "newest-checkpoint-not-used": Mutant("P1", "an instance continues from an older checkpoint of its own"),
    # restarts
    "restarted-instances-not-counted": Mutant("P6", "a restart waits for instances that are back"),
    "dispatch-stays-paused": Mutant("P6", "dispatch does not continue after a restart"),
    "retired-instances-awaited": Mutant("P6", "a restart waits for instances that were retired"),
    # rows
    "rows-wait-for-the-table-forever": Mutant("R16", "rows that wait for the table are lost", ROAMING),
    "outbox-forgotten": Mutant("R5", "a restarted router has forgotten the frames of its outboxes"),
    "receipts-not-repeated": Mutant("R5", "receipts that a broken link lost are not given again"),
    "rows-over-the-limit-not-wanted": Mutant("R30", "rows over the limit are not asked for again", BUFFERS),
    "frames-not-sent-again": Mutant("R30", "frames that were sent back are not sent again", BUFFERS),
    "mobile-receipts-lost": Mutant("R1", "a mobile source does not learn that its rows are safe"),
    "held-rows-not-forwarded": Mutant("R3", "rows that were held at a flip are lost", ROAMING),
    "windows-never-open": Mutant("R5", "frames that were taken stay in the window", ROAMING),
    "backlog-never-shrinks": Mutant("P7", "producers wait for rows that were processed long ago", LIMITS),
    "acknowledgements-not-released": Mutant("P7", "producers that were slowed down wait for ever", LIMITS),
    # outputs
    "subscribers-not-continued": Mutant("P7", "entries that were consumed still count", OUTPUTS),
    "old-entries-not-published": Mutant("P1", "entries that are not in memory are not published", OUTPUTS),
    "output-log-trimmed-under-readers": Mutant("P1", "a log is trimmed under its named readers", OUTPUTS),
    "output-frames-repeated": Mutant("R10", "a home takes output frames that it has"),
    "outputs-in-one-log-only": Mutant("P1", "outputs are missing at home if their site logs them, too"),
    "fence-ignored": Mutant("R10", "a home appends outputs before those that come before them", FENCED),
    "held-outputs-forgotten": Mutant("R10", "a restarted home has forgotten outputs that it held", FENCED),
    "done-before-the-fence": Mutant("R10", "a move ends while outputs of its source are under way", FENCED),
    "fenced-outputs-not-released": Mutant("R10", "outputs that waited for another site are lost", FENCED),
    # moves
    "stalled-keys-never-go-on": Mutant("P6", "a full buffer stops a live move for good", CALM_BUFFERS),
    "transfer-not-restarted": Mutant("P6", "a destination that lost its state gets no other"),
    "shadow-overtaken-by-adoption": Mutant("R21", "an adoption overtakes shadow rows", SLOW),
    # event time
    "ticks-end": Mutant("R19", "the clock of a log stops while timers wait", {"kinds": ("sessions",)}),
    "watermark-reports-lost": Mutant("R17", "watermark reports that were lost are not given again", TIMED),
    "promises-forgotten": Mutant("R17", "a restarted router has forgotten what it promised", TIMED),
    "watermark-not-appended": Mutant("R17", "watermarks of other sites are ignored", TIMED),
    "moves-wait-for-clocks": Mutant("P6", "a move waits for a clock that is ahead", WRONG_CLOCKS),
    "clock-floor-ignored": Mutant(
        "R17", "behind the move the clock of a key runs backwards", {**WRONG_CLOCKS, "kinds": ("sessions",)}
    ),
    # numbers of devices
    "device-numbers-ignored": Mutant("R45", "each gateway's rows are numbered by its site", DEVICES),
    "early-device-rows-in-memory": Mutant(
        "R45", "only memory has the rows of a device that come too early", DEVICES
    ),
    "device-repeats-refused": Mutant("R45", "a row that two gateways bring is a dead letter", DEVICES),
    "reused-numbers-dropped": Mutant("R45", "another row under a used number vanishes", DEVICES),
    "gaps-never-close": Mutant("R45", "a row that no gateway brings stops its key", DEVICES),
    "gaps-close-in-silence": Mutant("R45", "nobody learns which rows of a device are missing", DEVICES),
    "recent-rows-not-moved": Mutant("R45", "behind a move repeated rows are not known again", DEVICES),
    "recent-rows-forgotten": Mutant("R45", "a restarted router does not know repeated rows again", DEVICES),
    # state of user code: the model notices
    "time-to-live-ignored": Mutant("P1", "state lives longer than its time", STATEFUL),
    "values-not-cleared": Mutant("P1", "state that was cleared is still there", STATEFUL),
    "lists-are-stacks": Mutant("P1", "a list is in the wrong order", STATEFUL),
    "maps-in-any-order": Mutant("R13", "iteration follows no order", STATEFUL),
    "map-keys-not-removed": Mutant("P1", "entries of a map that were removed are still there", STATEFUL),
    "timers-fire-late": Mutant("P1", "timers fire some time after they are due", STATEFUL),
    "only-last-timer-fires": Mutant("P1", "of several timers that are due one fires", STATEFUL),
    "only-first-timer-kept": Mutant("P1", "a key has one timer at most", STATEFUL),
    "timers-not-deleted": Mutant("P1", "timers that were deleted fire", STATEFUL),
    "bundles-not-split": Mutant("R46", "a bundle of several owners goes to one of them", BUNDLES),
    "moving-bundles-whole": Mutant("R46", "a bundle stays whole though one of its keys moves", BUNDLES),
    "bundles-overtake-rows": Mutant("R46", "a bundle overtakes earlier rows of its keys", CHAINED),
    "leaving-bundles-whole": Mutant(
        "R46", "a source processes keys that have left it, within a bundle", {**BUNDLES, **CUTS}
    ),
    "bundles-not-shadowed": Mutant("R46", "rows within bundles are not shadowed", {**BUNDLES, **BEHIND}),
    "bundles-not-taken-over": Mutant(
        "R46", "successors miss the rows of the dead instance within bundles", {**BUNDLES, **TAKEN_OVER}
    ),
    "keys-called-twice": Mutant("R12", "a key with rows in two bundles of an entry has two calls", TWICE),
    "bundles-late-whole": Mutant("R19", "one late row makes its whole bundle late", {**BUNDLES, **LATE}),
    "bundle-of-one-epoch": Mutant("R7", "the outputs of a bundle have the epoch of its first key", BUNDLES),
}

MUTANTS |= {
    "missing-units-claimed": Mutant(
        "R34", "a checkpoint claims units whose state or rows are missing", UNITS
    ),
    "covered-rows-again": Mutant("R34", "rows that a restored unit has are processed again", UNITS),
    "rows-of-missing-units-deleted": Mutant(
        "R34", "a router deletes rows of units that a checkpoint does not have", UNITS
    ),
    "released-units-forgotten": Mutant("R33", "a source cannot send a unit again that was durable", ZOMBIES),
    "server-not-announced": Mutant(
        "R36", "a destination asks the dead source of a move for its units", DEAD_SOURCES
    ),
    "server-without-the-state": Mutant(
        "R36", "the successor that serves a move does not read the state that has left", DEAD_SOURCES
    ),
    "replacement-not-announced": Mutant(
        "R36", "a source sends units to the dead destination of a move", DEAD_DESTINATIONS
    ),
    "replaced-destination-keeps-epochs": Mutant(
        "R36", "a successor emits moved keys under the epoch of the dead destination", DEAD_DESTINATIONS
    ),
    "dead-relaunch-awaited": Mutant(
        "R36", "a restart waits for an instance that never returns", DEAD_RESTARTS
    ),
    "scaling-waits-for-the-dead": Mutant(
        "R36", "a scaling waits for an instance that never returns", SCALED_DEAD
    ),
}

DIRECTED: dict[str, Mutant] = {  # too rare for random seeds: a transcript in tests/rules shows each
    "unit-without-its-beginning": Mutant(
        "R31", "a unit counts as whole though an earlier incarnation got its first chunk"
    ),
    "predicted-without-rows": Mutant("R47", "keys move to where nobody knows whether their source comes"),
    "units-before-the-cut": Mutant("R32", "units leave before the router has logged their cut"),
    "promised-before-durable": Mutant("R6", "a site promises a watermark that a crash can still undo"),
    "carried-watermark-not-logged": Mutant(
        "R17", "a move waits for a watermark that a silent site holds back"
    ),
    "flip-ahead-of-shadow": Mutant("R21", "keys move while some of their rows are not shadowed yet"),
    "flip-ignores-watermark": Mutant("R18", "keys move to a log whose watermark is ahead of theirs"),
    "stalled-arrivals-left-out": Mutant(
        "R27", "a checkpoint leaves out keys that have voted because their rows wait"
    ),
    "source-flips-while-away": Mutant("P6", "keys leave a source that is away, and wait for its return"),
    "retired-goes-on": Mutant("R29", "an instance that was retired while disconnected continues"),
    "forgets-returned-keys": Mutant("R25", "the source deletes keys that have returned to it"),
    "copy-of-another-session": Mutant("R40", "a key is taken from the copy of an earlier incarnation"),
    "lost-increments-ignored": Mutant("R40", "a copy counts though an increment is missing"),
    "passed-timers-not-fired": Mutant("R18", "timers do not fire, though the new log is past their time"),
    "refused-bundles-admitted": Mutant("R46", "outputs of keys that have left are admitted, within a bundle"),
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
