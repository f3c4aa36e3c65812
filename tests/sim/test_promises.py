"""The promises, under faults: many seeds, every crash point, and each bug that was ever found here.

`make test` runs this; `tiercel sim --seeds 5000` and `tiercel sim --points` are the long form.
"""

from __future__ import annotations

import msgspec
import pytest

from tiercel.core.records import Entry, Row
from tiercel.core.runs import count_rows, is_run
from tiercel.sim.campaign import run_points, run_seed, run_seeds
from tiercel.sim.campaign import scenario_of as campaign_scenario
from tiercel.sim.deployment import Deployment
from tiercel.sim.mutants import DYING, ROAMING
from tiercel.sim.points import CRASH_POINTS, Sketch, scenario_of
from tiercel.sim.run import run
from tiercel.sim.scenario import FAULTS, Action, Options, Scenario, draw

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
def test_a_crash_at_any_step_of_any_party_breaks_no_promise(strategy: str) -> None:
    summary = run_points(1, None, [strategy], nth=2)
    assert summary.violations == [], summary.line
    assert {p for p in CRASH_POINTS if p[0] == strategy} <= summary.points_hit


def test_the_same_seed_twice_gives_the_same_trace() -> None:
    options = Options(faults=FAULTS)
    assert [run_seed(s, options).trace_hash for s in range(12)] == [
        run_seed(s, options).trace_hash for s in range(12)
    ]


def test_rows_of_a_key_travel_as_one_in_some_scenarios() -> None:
    runs = rows = 0
    for seed in range(12):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, runs=1.0))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        logged = [
            row for log in deployment.recorder.logs.values() for entry in log.values() for row in _rows(entry)
        ]
        runs += sum(is_run(row[2]) for row in logged)
        rows += count_rows([row for row in logged if is_run(row[2])])
    assert runs >= 200
    assert rows >= 2 * runs


def _rows(entry: Entry) -> list[Row]:
    return [row for rows in entry.parts.values() for row in rows]


def test_keys_go_to_and_fro_in_some_scenarios() -> None:
    returned = 0
    for seed in range(12):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, round_trips=1.0, little_memory=1.0))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        routers = [router for site in deployment.topology.sites if (router := deployment.router(site))]
        tables = [inbox.table for router in routers for inbox in router.inboxes.values()]
        epochs = [route.epoch for t in tables for route in (*t.slots, *t.overrides.values())]
        returned += max(epochs) >= 4  # it grows with each move
    assert returned >= 4


def test_some_that_live_are_believed_dead_and_others_take_over() -> None:
    taken_over = 0
    for seed in range(20):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, recoveries=1.0, suspicions=1.0))
        suspected = [action for action in scenario.actions if action.kind == "suspect"]
        if suspected:
            deployment = Deployment(scenario)
            assert run(scenario, deployment=deployment).violations == []
            heirs = {name for action in suspected for name in action.other.split()}
            taken_over += bool(heirs & set(deployment.processes))
    assert taken_over >= 3


def test_streams_with_a_delay_have_late_rows_and_idle_sites() -> None:
    late = idle = 0
    for seed in range(12):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, kinds=("windows",), timed=1.0, sites_min=2))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        late += sum(map(len, deployment.recorder.late.values()))
        for site in deployment.topology.sites:
            router = deployment.router(site)
            assert router is not None
            idle += sum(len(promises.idle) for promises in router.promises.values())
    assert late > 50
    assert idle > 5


def test_routers_take_several_events_in_one_step_and_die_within_it() -> None:
    shared = died = 0
    for seed in range(12):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, turns=1.0))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        shared += deployment.shared_steps
        died += sum(a.kind == "in-turn" for a in scenario.actions) - len(deployment.turn_deaths)
    assert shared > 50
    assert died > 3


def test_without_moves_nothing_of_the_move_code_runs() -> None:
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
                assert inbox.shadow_hook is None
                assert not inbox.groups


def scenario_without_moves(seed: int) -> Scenario:
    scenario = draw(seed, Options())
    return msgspec.structs.replace(scenario, actions=[])


# -- bugs that were found here: each left its seed or its schedule -----------------------------------------


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
        (9, ROAMING, "held rows closed the lane that would have brought what they waited for"),
        (10, DELAYED, "a timer that was due in a key's image was lost with a watermark that the image had"),
        (59, DELAYED, "the same, for the second operator"),
        (71, {}, "a fold changed keys that a checkpoint had still to read"),
        (42, AS_DRAWN, "a checkpoint of arrivals made count what a crash had cut short of an earlier one"),
        (250, AS_DRAWN, "the same, and its keys were forgotten"),
        (1717, {**AS_SEEN, **WIDE}, "a newcomer's second life took what it had stored before it was retired"),
        (22839, AS_SEEN, "a router that came back let go of what a reader had read and not stored"),
        (
            40757,
            {**AS_SEEN, **WIDE},
            "where all streams are idle, logs differed for ever, and moves waited as long",
        ),
        (
            52987,
            {**AS_SEEN, **WIDE},
            "one that was retired while it was away was never told what it had missed",
        ),
        (11058, AS_SEEN, "a producer took what its predecessor was told late for its own greeting"),
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


def test_a_source_that_fell_back_never_cuts_below_what_has_gone_out() -> None:
    """FLIPPED; the source's outputs are stuck and its connection breaks: it replays, and says a low Cut."""
    settings = (
        ("checkpoint_ms", 100_000.0),
        ("dispatch_rows_max", 1),
        ("read_entries_max", 1),
        ("takeover_ms", 5_000.0),
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
