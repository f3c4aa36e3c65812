"""Checks of what requests led to: reasons of undone moves, keys of done moves, who runs.

Responsible for: comparing the controller's answers with the run: its faults, its requests, its logs.
Not responsible for: rows, outputs and state (checkers.py).

A move may be undone only for a reason that the run explains. In a run without faults only another request
explains one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tiercel.control.controller import Controller, MoveState, TrackedMove
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.log import Adopt, Flip, TakenOver
from tiercel.core.model.routing import overlap
from tiercel.core.model.topology import operator_of
from tiercel.sim.scenario.deployment import Deployment

NAMED = re.compile(r"'([^']+@[^']+)'")


def unexplained(deployment: Deployment, controller: Controller) -> Iterator[str]:
    """The undone moves whose reason nothing in the run explains."""
    for tracked in controller.moves.values():
        if tracked.state == MoveState.UNDONE.value and not _explains(deployment, controller, tracked):
            yield f"{tracked.move} is undone: {tracked.reason or 'without a reason'}"


def _explains(deployment: Deployment, controller: Controller, tracked: TrackedMove) -> bool:
    reason, scenario = tracked.reason, deployment.scenario
    if "not deterministic" in reason:
        return True  # another checker judges that
    if STRATEGIES[tracked.wanted.strategy].awaits_rows and ("not decided" in reason or "came at" in reason):
        return True  # no rows of its keys have entered at the destination's site
    if "is not owned by" in reason:
        taken_over = tracked.wanted.operator in _operators_taken_over(deployment)
        took = any(_took_keys(deployment, tracked, other) for other in controller.moves.values())
        return took or taken_over or deployment.faults > 0  # who asked may not have known the owner
    if "is not running" in reason:
        named = NAMED.search(reason)
        late = named is not None and named.group(1) not in _first_instances(deployment)
        return deployment.faults > 0 or late or tracked.wanted.destination in deployment.ended
    if "shadow outbox is full" in reason:
        limits = scenario.settings
        small = limits.shadow_entries_max < 500 or limits.outbox_frames_max < 200
        return deployment.faults > 0 or small
    if "not decided within" in reason:
        return deployment.faults > 0 or bool(scenario.service_ms) or bool(scenario.bytes_per_ms)
    if "restarted" in reason or "fell back" in reason:
        return deployment.faults > 0 or bool(deployment.ended)
    return deployment.faults > 0 and bool(reason)


def _took_keys(deployment: Deployment, tracked: TrackedMove, other: TrackedMove) -> bool:
    wanted, by = tracked.wanted, other.wanted
    if other is tracked or other.state != MoveState.DONE.value or by.operator != wanted.operator:
        return False
    return overlap(wanted.keys, by.keys, deployment.topology.operators[by.operator].slots)


def _operators_taken_over(deployment: Deployment) -> set[str]:
    logs = deployment.recorder.logs.items()
    return {name for (_, name), log in logs for e in log.values() if isinstance(e.control, TakenOver)}


def _first_instances(deployment: Deployment) -> set[str]:
    operators = deployment.topology.operators.values()
    return {name for operator in operators for name in operator.instances} | {*deployment.scenario.spares}


def not_moved(deployment: Deployment, controller: Controller) -> Iterator[str]:
    """Moves that are called done, or undone, while the logs say otherwise."""
    flipped: dict[str, str] = {}  # move -> destination
    adopted: dict[str, str] = {}
    for (site, _), log in deployment.recorder.logs.items():
        for entry in log.values():
            if isinstance(entry.control, Flip):
                flipped[entry.control.move] = entry.control.destination
            elif isinstance(entry.control, Adopt):
                adopted[entry.control.move] = site
    for tracked in controller.moves.values():
        decided = tracked.move in flipped and tracked.move in adopted
        if tracked.state == MoveState.DONE.value and not decided:
            yield f"{tracked.move} is called done, and its keys have not moved"
        elif tracked.state == MoveState.DONE.value and flipped[tracked.move] != tracked.wanted.destination:
            yield f"{tracked.move} went to {flipped[tracked.move]}, not to {tracked.wanted.destination}"
        elif tracked.state == MoveState.UNDONE.value and tracked.move in flipped:
            yield f"{tracked.move} is called undone, and its keys have moved"


def wrong_processes(deployment: Deployment, controller: Controller) -> Iterator[str]:
    """Owners that do not run; retired ones that do; instances that the last scaling did or did not name."""
    for operator in deployment.topology.operators.values():
        slots = [deployment.owner(operator.name, slot=slot).instance for slot in range(operator.slots)]
        for owner in sorted(set(slots)):
            if not _runs(deployment, owner):
                yield f"{owner} owns slots of {operator.name}, and no process of it runs"
    for name in sorted(deployment.retired):
        if _runs(deployment, name):
            yield f"{name} was retired, and it runs"
    if deployment.faults:
        return  # a controller that died may have lost the request, an instance that was away its retirement
    destinations = {tracked.wanted.destination for tracked in controller.moves.values()}
    for operator_name, wanted in deployment.scaled.items():
        for instance in sorted(wanted):
            if not _runs(deployment, instance):
                yield f"{instance} was asked for by a scaling, and it does not run"
        known = [name for name in sorted(deployment.instances) if operator_of(name) == operator_name]
        for instance in known:
            if instance not in wanted | destinations and _runs(deployment, instance):
                yield f"{instance} runs, and the last scaling did not name it"


def _runs(deployment: Deployment, name: str) -> bool:
    return name in deployment.processes and deployment.processes[name].up
