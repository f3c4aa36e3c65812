"""Optional features of scenarios: each occurs in some seeds."""

from __future__ import annotations

from tiercel.core.model.log import Entry, Row
from tiercel.core.model.row_batch import count_rows, is_run
from tiercel.sim.explore.campaign import scenario_of as campaign_scenario
from tiercel.sim.explore.run import run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import FAULTS, Options


def test_some_scenarios_have_row_batches() -> None:
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
    return [row for row in entry.all_rows()]


def test_some_scenarios_move_keys_back_and_forth() -> None:
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


def test_some_scenarios_take_over_from_a_live_instance() -> None:
    taken_over = 0
    for seed in range(20):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, recoveries=1.0, suspicions=1.0))
        suspected = [action for action in scenario.actions if action.kind == "suspect"]
        if suspected:
            deployment = Deployment(scenario)
            assert run(scenario, deployment=deployment).violations == []
            successors = {name for action in suspected for name in action.other.split()}
            taken_over += bool(successors & set(deployment.processes))
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
            idle += sum(len(promises.idle) for promises in router.watermarks.promises.values())
    assert late > 50
    assert idle > 5


def test_some_routers_handle_several_events_in_one_step_and_crash_within_it() -> None:
    shared = died = 0
    for seed in range(12):
        scenario = campaign_scenario(seed, Options(faults=FAULTS, turns=1.0))
        deployment = Deployment(scenario)
        assert run(scenario, deployment=deployment).violations == []
        shared += deployment.shared_steps
        died += sum(a.kind == "in-turn" for a in scenario.actions) - len(deployment.turn_deaths)
    assert shared > 50
    assert died > 3
