"""Faults of whole sites, as if each were an application of its own: cut off, heard one way only, dead.

Responsible for: drawing them, at any time and at the steps of moves; carrying them out.
Not responsible for: which seeds have them (features.py), faults of one process or link (scenario.py).

A site is its router, its instances and, at the root, the controller: its driver. A stall holds what one side
sends, and loses it when the link is healed. It meets some of the connections between two sites and not
others, because each connection goes through the door of the side that was dialled.
"""

from __future__ import annotations

import random
from typing import Protocol

import msgspec

from tiercel.core.model.topology import Topology, site_of
from tiercel.sim.engine.network import Network
from tiercel.sim.engine.process import Process
from tiercel.sim.engine.scheduler import Scheduler
from tiercel.sim.scenario.scenario import Action, Options, Scenario

STEPS = {
    "origin": ("MoveRequest", "Prepared", "CaptureFrom", "Captured", "Ready", "SourceStopped"),
    "target": ("Prepare", "ShadowNotice", "FlipToDestination", "EmitFromNotice", "DoneNotice"),
    "source": ("Capture", "UnitReceipt", "FlipToSource", "Dispatch:Flip", "Forget"),
    "destination": ("Prepare", "Chunk", "Dispatch:Adopt", "EmitFrom", "Dispatch:Done"),
}
HELD_SHARE = 0.7  # of the connections between two sites that a stall meets
KINDS = ("cut-sites", "stall-sites", "application")


def cut_sites(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Sites are cut off from each other, or heard in one direction only, at any time or step of a move."""
    sites = list(scenario.topology.sites)
    strategies = [action.strategy for action in scenario.actions if action.kind == "move"]
    if len(sites) < 2 or not strategies:
        return scenario
    actions = list(scenario.actions)
    end_ms = max(script.end_ms for script in scenario.traffic)
    for _ in range(rng.randint(1, 3)):
        kind, for_ms = rng.choice(KINDS[:2]), rng.choice((40.0, 150.0, 700.0))
        if rng.random() < 0.5:
            a, b = rng.sample(sites, 2)
            actions.append(Action(rng.uniform(20, end_ms), kind, a, b, for_ms))
        else:
            role = rng.choice(list(STEPS))
            step = rng.choice(STEPS[role])
            actions.append(Action(0.0, "step", role, kind, for_ms, rng.choice(strategies), point=step))
    return _with(scenario, actions)


def absent_sites(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Event time does not wait for sites that are cut off; their rows may be late when they come back."""
    settings = msgspec.structs.replace(scenario.settings, site_idle_ms=rng.choice((30.0, 120.0, 400.0)))
    return cut_sites(msgspec.structs.replace(scenario, settings=settings), rng, options)


def dying_applications(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """All processes of a site die at once, at any time or step of a move, and are started again."""
    strategies = [action.strategy for action in scenario.actions if action.kind == "move"]
    actions = list(scenario.actions)
    end_ms = max(script.end_ms for script in scenario.traffic)
    for _ in range(rng.choice((1, 1, 2))):
        site, for_ms = rng.choice(list(scenario.topology.sites)), rng.choice((5.0, 60.0, 400.0))
        if not strategies or rng.random() < 0.5:
            actions.append(Action(rng.uniform(20, end_ms), "application", site, for_ms=for_ms))
        else:
            role = rng.choice(list(STEPS))
            step = rng.choice(STEPS[role])
            strategy = rng.choice(strategies)
            actions.append(Action(0.0, "step", role, "application", for_ms, strategy, point=step))
    return _with(scenario, actions)


def _with(scenario: Scenario, actions: list[Action]) -> Scenario:
    return msgspec.structs.replace(scenario, actions=sorted(actions, key=lambda action: action.at_ms))


# -- carrying them out -------------------------------------------------------------------------


class Running(Protocol):
    """The parts of a running scenario that these faults meet."""

    topology: Topology
    scheduler: Scheduler
    network: Network
    processes: dict[str, Process]
    instances: set[str]


def processes_of(deployment: Running, site: str) -> list[str]:
    """The processes of a site, with the driver of the root."""
    found = [site, *sorted(name for name in deployment.instances if site_of(name) == site)]
    return [*found, "controller"] if deployment.topology.sites[site] is None else found


def carry_out(deployment: Running, action: Action) -> None:
    """Begin a fault of one site, or between two."""
    if action.kind == "application":
        for name in processes_of(deployment, action.target):
            process = deployment.processes[name]
            process.crash()
            process.restart_after(action.for_ms)
        return
    a, b = processes_of(deployment, action.target), processes_of(deployment, action.other)
    if action.kind == "cut-sites":
        deployment.network.partition(a, b, action.for_ms)
    else:
        deployment.network.stall(a, b, action.for_ms, HELD_SHARE)


def at_step(deployment: Running, process: str, action: Action) -> None:
    """Begin the fault that a step of a move causes, a moment later: at the site of this process."""
    site = site_of(process) if process in deployment.instances else process
    if site not in deployment.topology.sites:
        return
    others = [other for other in deployment.topology.sites if other != site]
    if action.other == "application" or others:
        other = deployment.scheduler.rng.choice(others) if others else ""
        fault = Action(deployment.scheduler.now_ms, action.other, site, other, action.for_ms)
        deployment.scheduler.call_after(0.0, carry_out, deployment, fault)
