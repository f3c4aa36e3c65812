"""One run: starts a scenario, runs it until it is quiet, and checks every promise.

Responsible for: when a run is over, and its result.
Not responsible for: many runs (campaign.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import permutations

import msgspec

from tiercel.control.controller import Controller
from tiercel.core.errors import LimitExceeded
from tiercel.core.instance.instance import Instance, InstancePhase
from tiercel.core.logs.dispatch import DispatchPhase
from tiercel.core.migration.phases import DestinationRouterPhase
from tiercel.core.router.router import Router
from tiercel.sim.check.checkers import Violation, check
from tiercel.sim.engine.process import MachineFailed
from tiercel.sim.engine.scheduler import NotQuiet
from tiercel.sim.explore.planting import planted
from tiercel.sim.explore.walks import walking
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import Scenario
from tiercel.sim.scenario.scripted_clients import ScriptedMobile, ScriptedProducer

QUIET_MS_MAX = 30_000.0  # virtual; a healthy run is quiet within a few seconds
STEPS_MAX = 600_000
POLL_MS = 40.0


class Result(msgspec.Struct, frozen=True):
    """The result of a run."""

    seed: int
    violations: list[Violation]
    moves: dict[str, int]  # final state -> number of moves
    faults: int
    points_hit: list[tuple[str, str, str, bool]]
    steps_seen: list[tuple[str, str, str]]
    trace_hash: str
    virtual_ms: float
    refusals: int
    walked: dict[str, int] = {}  # rare path (walks.py) -> how often; only if the scenario counts them


def run(scenario: Scenario, *, deployment: Deployment | None = None) -> Result:
    """Run a scenario to its end."""
    counts: Counter[str] = Counter()
    watching = walking(counts) if scenario.walks else contextlib.nullcontext()
    with planted(scenario.mutant), watching:
        result = _run(scenario, deployment or Deployment(scenario))
    return msgspec.structs.replace(result, walked=dict(counts)) if counts else result


def _run(scenario: Scenario, deployment: Deployment) -> Result:
    scheduler = deployment.scheduler
    violations: list[Violation] = []
    quiet, why = False, "it was not reached"
    last_action = max((a.at_ms for a in scenario.actions), default=0.0)
    traffic_end = max((t.end_ms for t in scenario.traffic), default=0.0)
    earliest = max(last_action, traffic_end) + 50.0
    try:
        scheduler.run(until_ms=earliest, steps_max=STEPS_MAX)
        while scheduler.now_ms < earliest + QUIET_MS_MAX:
            scheduler.run(until_ms=scheduler.now_ms + POLL_MS, steps_max=STEPS_MAX)
            why = unfinished_work(deployment)
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
        scheduler.trace_hash(),
        scheduler.now_ms,
        len(deployment.refusals),
    )


def unfinished_work(deployment: Deployment) -> str:
    """Why the deployment is not quiet yet; empty when it is."""
    for name, process in deployment.processes.items():
        machine = process.machine
        if machine is None and name in deployment.retired:
            continue
        if machine is None and name in deployment.dead:
            return f"{name} died for good, and nobody has taken over"
        if machine is None:
            return f"{name} is down"
        if isinstance(machine, ScriptedProducer | ScriptedMobile) and not machine.safe:
            return f"{name} has rows that are not acknowledged"
        if isinstance(machine, Controller) and machine.recoveries:
            return f"instances are being recovered: {list(machine.recoveries)}"
        if isinstance(machine, Controller) and (machine.active or machine.scales or machine.retiring):
            return f"moves are active: {[(t.move, t.state) for t in machine.active]}"
        if isinstance(machine, Instance):
            reason = _unfinished_in_instance(machine, deployment.router(machine.router))
            if reason:
                return f"{name} {reason}"
        if isinstance(machine, Router):
            reason = _unfinished_in_router(machine)
            if reason:
                return f"{name}: {reason}"
    for log, listener in deployment.listeners.items():
        router = deployment.router(listener.subscriber.home)
        if router is not None and len(listener.entries) < router.streams[log].offset:
            return f"{log} is not read to its end"
    return _report_under_way(deployment)


def _report_under_way(deployment: Deployment) -> str:
    """A report of a watermark that another site has not received; it has no answer, so look at both sides."""
    routers = [router for site in deployment.topology.sites if (router := deployment.router(site))]
    for reporting, other in permutations(routers, 2):
        for operator, promises in reporting.watermarks.promises.items():
            known = other.watermarks.promises[operator].reported[reporting.site]
            if promises.announced != known:
                return f"{other.site} has not received the watermark of {operator} at {reporting.site}"
    return ""


def _unfinished_in_router(router: Router) -> str:
    if router.outgoing_moves or any(
        a.phase is not DestinationRouterPhase.MERGED for a in router.incoming_moves.values()
    ):
        moves = [(d.move, d.phase.value) for d in router.outgoing_moves.values()]
        incoming_moves = [(a.move, a.phase.value) for a in router.incoming_moves.values()]
        return f"moves under way: departures {moves}, arrivals {incoming_moves}"
    for outbox in router.outboxes.values():
        if outbox.frames:
            return f"outbox to {outbox.to} for {outbox.inbox} has frames {list(outbox.frames)[:3]}"
    if router.journal.durable < router.journal.written:
        return "writes are not durable"
    for inbox in router.inboxes.values():
        for instance in inbox.readers:
            cursor = inbox.cursors.get(instance)
            if cursor is None or cursor.phase is not DispatchPhase.LIVE or not cursor.idle:
                return f"{instance} has not caught up ({cursor.phase.value if cursor else 'never attached'})"
    return ""


def _unfinished_in_instance(instance: Instance, router: Router | None) -> str:
    cursor = router.inboxes[instance.operator.name].cursors.get(instance.name) if router is not None else None
    if cursor is None or (cursor.incarnation, cursor.session) != (instance.incarnation, instance.session):
        return "is not attached"
    if instance.phase is not InstancePhase.RUNNING or instance.applied < cursor.last_sent:
        return "has not processed what it was sent"
    return ""
