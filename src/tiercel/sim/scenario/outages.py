"""Scenario features about long failures: the dead, late news, wrong clocks, zombie routers; and none at all.

Responsible for: drawing each of them from the random stream that it is given.
Not responsible for: which seeds have them (features.py), carrying them out (deployment.py).
"""

from __future__ import annotations

import random

import msgspec

from tiercel.core.model.topology import operator_of, site_of
from tiercel.sim.scenario.scenario import MOVES, Action, Options, Scenario

replace = msgspec.structs.replace

DEATH_STEPS = {
    "source": ("Capture", "UnitReceipt", "Dispatch:Begin", "Dispatch:Flip", "FlipToSource", "Forget"),
    "destination": ("Prepare", "Chunk", "Dispatch:Adopt", "EmitFrom", "Dispatch:Done"),
}


def _with(scenario: Scenario, actions: list[Action]) -> Scenario:
    return replace(scenario, actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms))


def _end_ms(scenario: Scenario) -> float:
    return max(script.end_ms for script in scenario.traffic)


def _instances(scenario: Scenario) -> list[str]:
    return [name for operator in scenario.topology.operators.values() for name in operator.instances]


def _successors(rng: random.Random, instance: str) -> str:
    stem = instance.rpartition("#")[0]
    return " ".join(f"{stem}#{n}" for n in range(81, 81 + rng.choice((1, 2, 3))))


def dead_for_good(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """An instance dies and never returns; others take over. It takes part in no move that has not ended."""
    dead = rng.choice(_instances(scenario))
    at_ms = rng.uniform(60, _end_ms(scenario))
    return _with(scenario, [Action(at_ms, "die", dead, _successors(rng, dead))])


def dead_in_moves(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """The source or the destination of a move dies at any of its steps, and never returns."""
    strategies = [action.strategy for action in scenario.actions if action.kind == "move"]
    role = rng.choice(list(DEATH_STEPS))
    step = Action(
        0.0,
        "step",
        role,
        "die",
        strategy=rng.choice(strategies or ["live"]),
        point=rng.choice(DEATH_STEPS[role]),
        after=rng.random() < 0.5,
    )
    return _with(scenario, [step])


def late_news(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """What routers tell the controller, or it tells them, comes late; meanwhile other requests are made."""
    sites, end_ms = list(scenario.topology.sites), _end_ms(scenario)
    actions: list[Action] = []
    for _ in range(rng.randint(1, 3)):
        site, at_ms = rng.choice(sites), rng.uniform(40, end_ms)
        pair = (site, "controller") if rng.random() < 0.7 else ("controller", site)
        late_ms = rng.choice((120.0, 400.0, 1_200.0))
        actions.append(Action(at_ms, "late", *pair, for_ms=late_ms))
    operator = rng.choice(list(scenario.topology.operators.values()))
    if len(operator.instances) > 1:  # in, and at once a move there
        leaving = rng.choice(operator.instances)
        staying = " ".join(name for name in operator.instances if name != leaving)
        at_ms = rng.uniform(60, end_ms)
        actions.append(Action(at_ms, "scale", operator.name, staying, strategy="pause"))
        late = Action(
            at_ms + rng.uniform(60, 500),
            "late",
            site_of(leaving),
            "controller",
            for_ms=rng.choice((300.0, 900.0)),
        )
        actions.append(late)
        for _ in range(rng.randint(1, 3)):
            slot = rng.randrange(operator.slots)
            asked_ms = late.at_ms + rng.uniform(20, late.for_ms)
            actions.append(
                Action(
                    asked_ms,
                    "move",
                    operator.name,
                    leaving,
                    strategy=rng.choice(options.strategies),
                    slots=(slot,),
                )
            )
    return _with(scenario, actions)


def wrong_clocks(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Clocks that are seconds or minutes off, run fast or slow, or are corrected in the middle of a run."""
    processes = [*scenario.topology.sites, *_instances(scenario), "controller"]
    clocks, drift = dict(scenario.clock_ms), dict(scenario.drift)
    for name in rng.sample(processes, rng.randint(1, min(3, len(processes)))):
        clocks[name] = rng.choice((3_000.0, 90_000.0, 600_000.0))
    for name in rng.sample(processes, rng.randint(0, min(3, len(processes)))):
        drift[name] = rng.choice((-0.1, -0.01, 0.01, 0.1))
    jumps = [
        Action(
            rng.uniform(40, _end_ms(scenario)),
            "clock",
            rng.choice(processes),
            for_ms=rng.choice((-5_000.0, -200.0, 200.0, 5_000.0)),
        )
        for _ in range(rng.choice((0, 1, 2)))
    ]
    return _with(replace(scenario, clock_ms=clocks, drift=drift), jumps)


def zombie_routers(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """A router is started elsewhere while the old one runs on, and can make nothing durable any more."""
    sites, end_ms = list(scenario.topology.sites), _end_ms(scenario)
    actions = [
        Action(rng.uniform(40, end_ms), "zombie-router", rng.choice(sites), for_ms=rng.choice((30.0, 150.0)))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return _with(scenario, actions)


def calm(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """No fault at all: what is undone then has another request as its reason."""
    return replace(
        scenario, actions=[action for action in scenario.actions if action.kind in MOVES], drift={}
    )


def beside(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Requests to replace instances one for one, without rebalancing, beside the moves."""
    operator = rng.choice(list(scenario.topology.operators.values()))
    gone = rng.choice(operator.instances)
    new = f"{operator_of(gone)}@{rng.choice(list(scenario.topology.sites))}#{rng.choice((51, 52))}"
    staying = " ".join([*(name for name in operator.instances if name != gone), new])
    at_ms = rng.uniform(60, _end_ms(scenario))
    replacing = Action(
        at_ms,
        "replace",
        operator.name,
        staying,
        strategy=rng.choice(("live", "pause")),
        point=f"{gone} {new}",
    )
    return _with(scenario, [replacing])
