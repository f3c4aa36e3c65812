"""Named features of scenarios: each is drawn in some seeds, and does what it says."""

from __future__ import annotations

import msgspec
import pytest

from tiercel.sim.check.checkers import check
from tiercel.sim.explore.campaign import run_seeds
from tiercel.sim.explore.campaign import scenario_of as campaign_scenario
from tiercel.sim.explore.run import run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.features import DRAWN_FEATURES, FEATURES
from tiercel.sim.scenario.scenario import FAULTS, MOVES, Action, Options, Scenario


def options_with(*features: str, share: float | None = 1.0, **more: object) -> Options:
    return Options(**{"faults": FAULTS, "features": features, "feature_share": share, **more})  # type: ignore[arg-type]


def scenario_with(seed: int, *features: str) -> Scenario:
    return campaign_scenario(seed, options_with(*features))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_drawn_in_some_seeds_only_and_leaves_the_others_alone(feature: str) -> None:
    drawn = 0
    for seed in range(60):
        scenario = campaign_scenario(seed, options_with(feature, share=None))
        assert scenario.features in ((), (feature,))
        drawn += bool(scenario.features)
        if not scenario.features:
            assert scenario == campaign_scenario(seed, Options(faults=FAULTS))
    assert 0 < drawn < 30


def test_a_feature_does_not_change_what_another_one_draws() -> None:
    for seed in range(20):
        alone = scenario_with(seed, "slow-consumers")
        both = scenario_with(seed, "slow-consumers", "large-state")
        assert alone.service_ms == both.service_ms != {}


@pytest.mark.parametrize("feature", DRAWN_FEATURES)
def test_seeds_with_a_feature_keep_every_promise(feature: str) -> None:
    assert run_seeds(range(6), options_with(feature, sites_max=3), 1).violations == []


def test_operators_that_share_a_stream_each_get_its_rows_also_if_one_reads_rows_of_devices_too() -> None:
    """Seed 461: such a row is another one for each of them, and rows that are only slow are no gap."""
    shared = 0
    for seed in (*range(6), 461):
        scenario = scenario_with(seed, "third-operators", "small-buffers", "gateways")
        first, *others = scenario.topology.operators.values()
        shared += any(set(operator.inputs) & set(first.inputs) for operator in others)
        assert run(scenario).violations == []
    assert shared >= 2


def test_a_slow_consumer_makes_rows_wait() -> None:
    quick, slow = Options(), Options(features=("slow-consumers",), feature_share=1.0)
    waited = []
    for options in (quick, slow):
        ms = 0.0
        for seed in range(6):
            scenario = campaign_scenario(seed, options)
            deployment = Deployment(scenario)
            assert run(scenario, deployment=deployment).violations == []
            ms += sum(ms for listener in deployment.listeners.values() for ms in listener.seen_ms[-1:])
        waited.append(ms)
    assert waited[1] > waited[0] + 500


def test_calm_seeds_have_moves_and_no_faults() -> None:
    for seed in range(20):
        actions = scenario_with(seed, "calm").actions
        assert actions
        assert {action.kind for action in actions} <= {*MOVES}


def test_a_router_that_was_replaced_makes_nothing_durable_any_more() -> None:
    zombies = 0
    for seed in range(10):
        scenario = scenario_with(seed, "zombie-routers")
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        zombies += sum(deployment.processes[site].incarnation > 1 for site in deployment.topology.sites)
    assert zombies >= 10


def test_an_application_dies_with_all_of_its_processes_and_the_root_with_its_controller() -> None:
    controllers = applications = 0
    for seed in range(12):
        scenario = scenario_with(seed, "dying-applications")
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        died = [action.target for action in scenario.actions if action.kind == "application"]
        applications += len(died)
        controllers += "cloud" in died and deployment.processes["controller"].incarnation > 1
        assert all(deployment.processes[site].incarnation > 1 for site in died)
    assert applications >= 3
    assert controllers >= 1


def test_a_link_that_stalls_one_way_loses_what_it_held() -> None:
    lost = 0
    for seed in range(12):
        scenario = scenario_with(seed, "cut-sites")
        if any("stall-sites" in (action.kind, action.other) for action in scenario.actions):
            deployment = Deployment(scenario)
            assert run(scenario, deployment=deployment).violations == []
            lost += deployment.network.messages_lost > 0
    assert lost >= 3


@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (17, "the run was called quiet while a link held the last reports, which have no answer"),
        (28, "the run was called quiet while they came again, over the next connection"),
    ],
)
def test_a_run_whose_last_link_is_held_ends_with_the_watermarks_of_the_producers(
    seed: int, story: str
) -> None:
    scenario = campaign_scenario(seed, Options(kinds=("windows",), sites_max=3, timed=0.0))
    last = max((script for script in scenario.traffic if script.watermarks), key=lambda script: script.end_ms)
    other = next(site for site in scenario.topology.sites if site != last.site)
    stall = Action(last.end_ms - 25.0, "stall-sites", last.site, other, 700.0)
    actions = sorted([*scenario.actions, stall], key=lambda action: action.at_ms)
    result = run(msgspec.structs.replace(scenario, actions=actions))
    assert result.violations == [], story
    assert result.virtual_ms > stall.at_ms + 700.0


def test_an_operator_is_judged_by_its_own_inputs_also_beside_one_that_devices_write_to() -> None:
    """Where only the other one has several inputs, only its rows carry the number of their input."""
    beside = 0
    for seed in range(12):
        scenario = scenario_with(seed, "third-operators", "gateways", "calm")
        operators = scenario.topology.operators
        first = next(iter(operators))
        if set(operators["gamma"].inputs) < set(operators[first].inputs):
            deployment = Deployment(scenario)
            assert run(scenario, deployment=deployment).violations == []
            beside += 1
            for (_, operator), log in deployment.recorder.logs.items():
                for offset in [o for o, entry in log.items() if operator == "gamma" and entry.all_rows()][:1]:
                    log[offset] = msgspec.structs.replace(log[offset], parts={}, moving=())
            found = [violation.text for violation in check(deployment, True, "")]
            assert any(text.startswith("gamma: lost") for text in found)
    assert beside >= 2


def test_the_number_of_a_late_row_is_no_gap_and_a_gap_between_late_rows_is_one() -> None:
    scenario = campaign_scenario(
        1191, Options(faults=FAULTS, features=DRAWN_FEATURES, sites_max=6, scales=True)
    )
    deployment = Deployment(scenario)
    assert run(scenario, deployment=deployment).violations == []
    late = deployment.recorder.late["alpha"]
    assert {(b"dev0", (1, ("dev0", n))) for n in (17, 19)} <= late  # nobody brought 18
    late.discard((b"dev0", (1, ("dev0", 17))))
    found = [violation.text for violation in check(deployment, True, "") if violation.checker == "numbers"]
    assert any("no dead letter names the gap (b'dev0', 17, 19)" in text for text in found)
