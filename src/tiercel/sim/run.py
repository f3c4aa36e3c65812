"""One run: a scenario, started, left alone until it is quiet, and judged.

Responsible for: when a run is over, and its result.
Not responsible for: many runs (campaign.py).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from tiercel.control.controller import Controller
from tiercel.core.faults import LimitExceeded
from tiercel.core.feed import Phase as FeedPhase
from tiercel.core.instance import Instance
from tiercel.core.processing import Phase
from tiercel.core.router import Router
from tiercel.sim.checkers import Violation, check
from tiercel.sim.clients import ScriptedMobile, ScriptedProducer
from tiercel.sim.deployment import Deployment
from tiercel.sim.process import MachineFailed
from tiercel.sim.scenario import Scenario
from tiercel.sim.world import NotQuiet

QUIET_MS_MAX = 30_000.0  # virtual; a healthy run is quiet within a few seconds
STEPS_MAX = 600_000
POLL_MS = 40.0


class Result(msgspec.Struct, frozen=True):
    """What a run showed."""

    seed: int
    violations: list[Violation]
    moves: dict[str, int]  # how many ended how
    faults: int
    points_hit: list[tuple[str, str, str, bool]]
    steps_seen: list[tuple[str, str, str]]
    trace_hash: str
    virtual_ms: float
    refusals: int


def run(scenario: Scenario, *, deployment: Deployment | None = None) -> Result:
    """Run a scenario to its end."""
    deployment = deployment or Deployment(scenario)
    world = deployment.world
    violations: list[Violation] = []
    quiet, why = False, "it was not reached"
    last_action = max((a.at_ms for a in scenario.actions), default=0.0)
    traffic_end = max((t.end_ms for t in scenario.traffic), default=0.0)
    earliest = max(last_action, traffic_end) + 50.0
    try:
        world.run(until_ms=earliest, steps_max=STEPS_MAX)
        while world.now_ms < earliest + QUIET_MS_MAX:
            world.run(until_ms=world.now_ms + POLL_MS, steps_max=STEPS_MAX)
            why = unrest(deployment)
            if not why:
                quiet = True
                break
    except MachineFailed as failure:
        cause = failure.__cause__
        checker = "bounded" if isinstance(cause, LimitExceeded) else "core-bug"
        violations.append(Violation(checker, f"{failure}: {type(cause).__name__}: {cause}"))
    except NotQuiet as restless:
        why = str(restless)
    if not violations:
        violations = check(deployment, quiet, why)
    controller = deployment.processes["controller"].machine
    moves = (
        Counter(t.state for t in controller.moves.values())
        if isinstance(controller, Controller)
        else Counter()
    )
    return Result(
        scenario.seed,
        violations,
        dict(moves),
        deployment.faults,
        sorted(deployment.points_hit),
        sorted(deployment.steps_seen),
        world.trace_hash(),
        world.now_ms,
        len(deployment.refusals),
    )


def unrest(deployment: Deployment) -> str:
    """Why the deployment is not quiet yet; empty when it is."""
    for name, process in deployment.processes.items():
        machine = process.machine
        if machine is None and name in deployment.retired:
            continue
        if machine is None:
            return f"{name} is down"
        if isinstance(machine, ScriptedProducer | ScriptedMobile) and not machine.safe:
            return f"{name} has rows that are not acknowledged"
        if isinstance(machine, Controller) and machine.recoveries:
            return f"instances are being recovered: {list(machine.recoveries)}"
        if isinstance(machine, Controller) and (machine.active or machine.scales or machine.retiring):
            return f"moves are active: {[(t.move, t.state) for t in machine.active]}"
        if isinstance(machine, Instance):
            reason = _unrest_of_instance(machine, deployment.router(machine.router))
            if reason:
                return f"{name} {reason}"
        if isinstance(machine, Router):
            reason = _unrest_of_router(machine)
            if reason:
                return f"{name}: {reason}"
    for stream, listener in deployment.listeners.items():
        router = deployment.router(deployment.topology.streams[stream].home)
        if router is not None and len(listener.entries) < router.streams[stream].offset:
            return f"{stream} is not read to its end"
    return ""


def _unrest_of_router(router: Router) -> str:
    if router.departures or any(a.phase.value != "merged" for a in router.arrivals.values()):
        moves = [(d.move, d.phase.value) for d in router.departures.values()]
        arrivals = [(a.move, a.phase.value) for a in router.arrivals.values()]
        return f"moves under way: departures {moves}, arrivals {arrivals}"
    for lane in router.lanes.values():
        if lane.frames:
            return f"lane to {lane.to} for {lane.inbox} has frames {list(lane.frames)[:3]}"
    if router.journal.durable < router.journal.written:
        return "writes are not durable"
    for inbox in router.inboxes.values():
        for instance in inbox.readers:
            feed = inbox.feeds.get(instance)
            if feed is None or feed.phase is not FeedPhase.LIVE or not feed.idle:
                return f"{instance} has not caught up ({feed.phase.value if feed else 'never attached'})"
    return ""


def _unrest_of_instance(instance: Instance, router: Router | None) -> str:
    feed = router.inboxes[instance.operator.name].feeds.get(instance.name) if router is not None else None
    if feed is None or (feed.life, feed.session) != (instance.life, instance.session):
        return "is not attached"
    if instance.phase is not Phase.RUNNING or instance.applied < feed.last_sent:
        return "has not processed what it was sent"
    return ""
