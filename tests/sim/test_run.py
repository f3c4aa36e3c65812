"""Every promise under faults: many seeds, every crash point, and each seed that once failed.

`make test` runs this; `tiercel sim --seeds 5000` and `tiercel sim --points` are the long form.
"""

from __future__ import annotations

import msgspec
import pytest

from tiercel.sim.explore import campaign
from tiercel.sim.explore.campaign import run_crash_points, run_seed, run_seeds
from tiercel.sim.explore.crash_points import CRASH_POINTS, Sketch, scenario_of
from tiercel.sim.explore.mutants import DYING, ROAMING
from tiercel.sim.explore.run import run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import FAULTS, Action, Options, Scenario, draw

WIDE = {"sites_max": 6, "scales": True}


AS_DRAWN = {"timed": Options().timed, "turns": Options().turns}


AS_SEEN = {**AS_DRAWN, "runs": Options().runs}


DELAYED = {**WIDE, "kinds": ("windows", "chained"), "timed": 1.0, "turns": 0.35}


BLOCKS = 5


SEEDS_PER_BLOCK = 60  # 300 seeds in all


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_promise_holds_under_faults(block: int) -> None:
    first = block * SEEDS_PER_BLOCK
    summary = run_seeds(
        range(first, first + SEEDS_PER_BLOCK), Options(faults=FAULTS, sites_max=6, scales=True), 1
    )
    assert summary.violations == [], summary.line
    assert summary.moves >= 2 * SEEDS_PER_BLOCK
    assert summary.faults >= 3 * SEEDS_PER_BLOCK


@pytest.mark.parametrize("strategy", ["live", "pause", "restart"])
def test_crash_at_any_step_of_any_role_breaks_no_promise(strategy: str) -> None:
    summary = run_crash_points(1, None, [strategy], nth=2)
    assert summary.violations == [], summary.line
    assert {p for p in CRASH_POINTS if p[0] == strategy} <= summary.points_hit


def test_the_same_seed_twice_gives_the_same_trace() -> None:
    options = Options(faults=FAULTS)
    assert [run_seed(s, options).trace_hash for s in range(12)] == [
        run_seed(s, options).trace_hash for s in range(12)
    ]


def test_run_without_moves_calls_no_move_code() -> None:
    """An idle path is unchanged: no message about a move, no hook, no group."""
    for seed in range(12):
        scenario = scenario_without_moves(seed)
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        assert deployment.recorder.move_messages == 0
        for site in deployment.topology.sites:
            router = deployment.router(site)
            assert router is not None
            for inbox in router.inboxes.values():
                assert not inbox.shadow_readers
                assert not inbox.moving


def scenario_without_moves(seed: int) -> Scenario:
    scenario = draw(seed, Options())
    return msgspec.structs.replace(scenario, actions=[])


@pytest.mark.parametrize(
    ("seed", "focus", "story"),
    [
        (14, {}, "rows the source read under an aborted move's name were not in the shadow feed"),
        (870, {}, "a restored source took keys that had come back for its old copies of them"),
        (386, WIDE, "a source captured keys whose own arrival it had not read to its end"),
        (1889, WIDE, "news of a slot swept the override of the site that owns the key"),
        (
            2998,
            WIDE,
            "a source restored from a checkpoint behind the flip let timers of keys that had left fire",
        ),
        (3923, WIDE, "a newcomer did not know the watermark of the log it began to read"),
        (3957, WIDE, "state that was captured long after the flip brought a watermark that was too new"),
        (54, DYING, "the Compare record of another move was taken for one's own"),
        (45, ROAMING, "a receipt that was lost with its connection was never given again"),
        (58, ROAMING, "EndOfKeys and the confirmation of outputs answered each other for ever"),
        (9, ROAMING, "held rows closed the outbox that would have sent what they waited for"),
        (10, DELAYED, "a timer that was due in a key's image was lost with a watermark that the image had"),
        (59, DELAYED, "the same, for the second operator"),
        (71, {}, "a fold changed keys that a checkpoint had still to read"),
        (42, AS_DRAWN, "a checkpoint of arrivals made count what a crash had cut short of an earlier one"),
        (250, AS_DRAWN, "the same, and its keys were forgotten"),
        (1717, {**AS_SEEN, **WIDE}, "a rehired instance used a checkpoint from before its retirement"),
        (22839, AS_SEEN, "a router that came back let go of what a reader had read and not stored"),
        (
            40757,
            {**AS_SEEN, **WIDE},
            "where all streams are idle, logs differed for ever, and moves waited as long",
        ),
        (
            52987,
            {**AS_SEEN, **WIDE},
            "an instance that was retired while it was down missed a message",
        ),
        (11058, AS_SEEN, "a producer took a late reply to its predecessor for its own"),
    ],
)
def test_a_seed_that_once_failed_does_not_fail_again(seed: int, focus: dict[str, object], story: str) -> None:
    later = (
        "timed",
        "turns",
        "runs",
        "round_trips",
        "suspicions",
    )  # were drawn only after most of these were found
    found = dict.fromkeys(later, 0.0)
    options = Options(**{"faults": FAULTS, **found, **focus})  # type: ignore[arg-type]
    assert run_seed(seed, options).violations == [], story


def test_restarted_source_never_stops_below_its_published_outputs() -> None:
    """FLIPPED; the source's outputs are stuck and its connection breaks: it replays, and says a low Cut."""
    settings = (
        ("checkpoint_ms", 100_000.0),
        ("dispatch_rows_max", 1),
        ("read_entries_max", 1),
        ("source_silence_ms", 5_000.0),
        ("retry_ms", 17.0),
    )
    base = scenario_of(Sketch("cut", "live", 2, settings=settings))
    for i in range(75):
        mute_ms = 140.0 + (i % 15) * 4.0
        break_ms = mute_ms + 8.0 + 6.0 * (i // 15)
        faults = [
            Action(mute_ms, "mute", "alpha@cloud#0", for_ms=break_ms - mute_ms + 29.99),
            Action(break_ms, "break", "alpha@cloud#0", "cloud"),
        ]
        actions = sorted([*base.actions[:1], *faults], key=lambda a: a.at_ms)
        scenario = msgspec.structs.replace(base, kinds={"alpha": "chained"}, sync_ms=1.5, actions=actions)
        assert run(scenario).violations == []


def test_an_instance_that_was_taken_over_and_is_hired_again_is_not_called_retired() -> None:
    """Seed 6069: who had asked for the takeover looked again while the instance was starting anew."""
    base = scenario_of(Sketch("hired-again", "live", 1, settings=(("retry_ms", 100.0),)))
    dead, other = base.topology.operators["alpha"].instances[:2]
    successor = f"{dead.rpartition('#')[0]}#81"
    hired = 0
    for i in range(8):
        actions = [
            Action(60.0, "die", dead, successor),
            Action(200.0 + i * 5.0, "scale", "alpha", f"{dead} {other}", strategy="live"),
        ]
        scenario = msgspec.structs.replace(base, actions=actions)
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        hired += deployment.processes[dead].up and not deployment.processes[successor].up
    assert hired == 8


def test_an_instance_that_dies_while_it_reads_evicted_keys_loses_nothing() -> None:
    died = 0
    for seed in range(8):
        scenario = campaign.scenario_of(seed, Options(faults=("crash",), little_memory=1.0))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        died += deployment.deaths_in_reads
    assert died >= 3


@pytest.mark.parametrize(
    "seed",
    [
        988,  # outputs sent before the instance knew of a reconnect arrived without those before them
        2556,  # a late Prepare of a restarted destination router was followed by notices of the first one
        2725,  # a frame sent before the router knew of a reconnect overtook the frames before it
    ],
)
def test_messages_for_a_broken_connection_are_lost_with_it(seed: int) -> None:
    options = Options(faults=FAULTS, sites_max=6, scales=True)
    assert run_seed(seed, options).violations == []
