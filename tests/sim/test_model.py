"""The model of the operators, and the checks that compare a run with it and with its scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.router.watermarks import Watermarks
from tiercel.sim.check.checkers import check
from tiercel.sim.check.model import Call, KeyModel, decoded
from tiercel.sim.explore.campaign import scenario_of
from tiercel.sim.explore.planting import Patch, instead, patched
from tiercel.sim.explore.run import Result, run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import Options
from tiercel.sim.workload import encoded

KEY = b"a01"


def rows(*payloads: Any, at: int = 0) -> list[tuple[bytes, int, Any]]:
    return [(KEY, at, payload) for payload in payloads]


def test_encoded_rows_are_decoded_alike() -> None:
    plain = [(KEY, 5, ("p", 1)), (KEY, 7, ("p", 2))]
    assert [one for row in encoded(plain) for one in decoded(row)] == plain
    assert [one for row in plain for one in decoded(row)] == plain


def test_a_session_of_the_model_ends_after_its_gap() -> None:
    model = KeyModel("op", KEY, "sessions", coarser=False)
    model.run([Call(rows("x"), 100, 100, -1), Call([], 219, 219, -1)])
    assert model.timers == {220}
    model.run([Call([], 220, 220, -1)])
    assert model.made[-1][2][2:4] == ("session", 1)
    assert model.timers == set()


def test_a_window_of_the_model_closes_with_the_watermark() -> None:
    model = KeyModel("op", KEY, "windows", coarser=True)
    model.run([Call(rows("x", at=120), -1, 0, -1), Call([], 199, 0, 199), Call([], 200, 0, 200)])
    assert [made[2][2] for made in model.made] == [1, "window"]
    assert model.made[-1][0] == b"a0", "to the coarser key"


def run_with(patches: list[Patch], options: Options, seeds: int = 10) -> set[str]:
    """The checkers that notice the replaced methods."""
    noticed: set[str] = set()
    for seed in range(seeds):
        with patched(patches):
            noticed |= {violation.checker for violation in run(scenario_of(seed, options)).violations}
    return noticed


def test_the_model_notices_a_bug_that_the_core_s_own_code_has_everywhere() -> None:
    """Timers fire 30 ms late, also in the first reference, which calls the same code."""

    def late(original: Any) -> Any:
        return lambda self, state, key, due_ms, *rest: original(self, state, key, due_ms - 30, *rest)

    options = Options(kinds=("sessions",), chain=(1,))
    assert "model" in run_with([Patch(ProcessorRunner, "fire", late)], options, 4)


def test_a_log_that_never_gets_its_last_watermark_is_noticed() -> None:
    options = Options(kinds=("windows",), timed=0.0, sites_min=2, sites_max=3)
    silent = [
        Patch(Watermarks, "send_report", instead(None)),
        Patch(Watermarks, "repeat_promises", instead(None)),
    ]
    assert "event-time" in run_with(silent, options, 4)


def judged(change: Callable[[Deployment], None], seed: int = 1) -> set[str]:
    """The checkers that notice a change of the recorded facts of a run that was right."""
    scenario = scenario_of(seed, Options(sites_max=3))
    deployment = Deployment(scenario)
    result: Result = run(scenario, deployment=deployment)
    assert result.violations == []
    change(deployment)
    return {violation.checker for violation in check(deployment, quiet=True, why="")}


def test_outputs_of_two_instances_in_turn_are_noticed() -> None:
    def mix(deployment: Deployment) -> None:
        emitters = deployment.recorder.emitters
        for n, identity in enumerate(list(emitters)):
            if n % 2:
                emitters[identity] = "somebody@else#0"

    assert judged(mix) == {"one-owner"}


def moves_of(deployment: Deployment) -> dict[str, Any]:
    return deployment.processes["controller"].machine.moves  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "after", "checker"),
    [
        ("done", {"state": "undone", "reason": "not decided within 1500 ms"}, "done-is-done"),
        ("done", {"state": "undone", "reason": ""}, "undone-reason"),
        ("undone", {"state": "done"}, "done-is-done"),
    ],
)
def test_a_wrong_outcome_of_a_move_is_noticed(before: str, after: dict[str, str], checker: str) -> None:
    def lie(deployment: Deployment) -> None:
        moves = moves_of(deployment)
        name = next(name for name, tracked in moves.items() if tracked.state == before)
        moves[name] = msgspec.structs.replace(moves[name], **after)

    seed = next(s for s in range(2, 30) if has_move(s, before))
    assert checker in judged(lie, seed)


def has_move(seed: int, state: str) -> bool:
    return state in run(scenario_of(seed, Options(sites_max=3))).moves


def test_an_owner_that_does_not_run_is_noticed() -> None:
    def end(deployment: Deployment) -> None:
        operator = next(iter(deployment.topology.operators))
        deployment.processes[deployment.owner(operator, slot=0).instance].stop()

    assert "who-runs" in judged(end)
