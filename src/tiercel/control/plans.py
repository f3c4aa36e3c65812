"""Plans: requested moves, and the closed list of faults that make a plan impossible.

Responsible for: validating a plan before any move starts. Each error names the value, the allowed values
    and the command that lists them.
Not responsible for: making plans (planner.py), carrying them out (controller.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import check_keys, overlap
from tiercel.core.model.topology import Topology, operator_of, site_of

LIST_INSTANCES = "list them with: tiercel sim --list instances"


class PlannedMove(msgspec.Struct, frozen=True):
    """One requested move."""

    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str = "live"


class Plan(msgspec.Struct, frozen=True):
    """Moves, and the reason that is shown next to each of them."""

    moves: tuple[PlannedMove, ...]
    reason: str


class PlanFault(enum.Enum):
    """Everything that can be wrong with a plan."""

    UNKNOWN_OPERATOR = "unknown operator"
    UNKNOWN_SITE = "unknown site"
    UNKNOWN_STRATEGY = "unknown strategy"
    WRONG_OPERATOR = "an instance of another operator"
    TO_ITSELF = "a move to itself"
    KEYS = "an empty, mixed or out-of-range key set"
    DEAD_TARGET = "a destination that is not running"
    NOT_DETERMINISTIC = "a strategy that needs a deterministic operator"
    OVERLAPPING = "two moves of one plan that share a key"


def faults_of(
    plan: Plan, topology: Topology, running: Iterable[str] | None = None
) -> list[tuple[PlanFault, InvalidRequest]]:
    """All faults of a plan; an empty list means that it may be carried out."""
    found: list[tuple[PlanFault, InvalidRequest]] = []
    alive = set(running) if running is not None else None
    for index, move in enumerate(plan.moves):
        found += _faults_of_move(move, topology, alive)
        for other in plan.moves[:index]:
            known = move.operator == other.operator and move.operator in topology.operators
            if known and overlap(move.keys, other.keys, topology.operators[move.operator].slots):
                what = f"moves {plan.moves.index(other)} and {index} share keys of {move.operator!r}"
                found.append(
                    (
                        PlanFault.OVERLAPPING,
                        InvalidRequest(
                            what, "expected disjoint key sets", "make one move of them, or two plans"
                        ),
                    )
                )
    return found


def _faults_of_move(
    move: PlannedMove, topology: Topology, alive: set[str] | None
) -> list[tuple[PlanFault, InvalidRequest]]:
    found: list[tuple[PlanFault, InvalidRequest]] = []
    operator = topology.operators.get(move.operator)
    if operator is None:
        return [
            (
                PlanFault.UNKNOWN_OPERATOR,
                InvalidRequest.unknown("operator", move.operator, sorted(topology.operators)),
            )
        ]
    strategy = STRATEGIES.get(move.strategy)
    if strategy is None:
        found.append(
            (
                PlanFault.UNKNOWN_STRATEGY,
                InvalidRequest.unknown("strategy", move.strategy, sorted(STRATEGIES)),
            )
        )
    elif strategy.needs_determinism and not operator.deterministic:
        what = f"strategy {move.strategy!r} runs {operator.name!r} twice, which is declared non-deterministic"
        found.append((PlanFault.NOT_DETERMINISTIC, InvalidRequest(what, "expected a flip-first strategy")))
    try:
        check_keys(move.keys, operator)
    except InvalidRequest as error:
        found.append((PlanFault.KEYS, error))
    for instance in (move.source, move.destination):
        if operator_of(instance) != move.operator:
            what = f"{instance!r} is not an instance of {move.operator!r}"
            found.append(
                (
                    PlanFault.WRONG_OPERATOR,
                    InvalidRequest(what, f"expected a name like {move.operator}@site#0", LIST_INSTANCES),
                )
            )
        elif site_of(instance) not in topology.sites:
            unknown = InvalidRequest.unknown("site", site_of(instance), sorted(topology.sites))
            found.append((PlanFault.UNKNOWN_SITE, unknown))
    if move.source == move.destination:
        what = f"move from {move.source!r} to itself"
        found.append(
            (PlanFault.TO_ITSELF, InvalidRequest(what, "expected two different instances", LIST_INSTANCES))
        )
    if alive is not None and move.destination not in alive:
        dead = InvalidRequest.unknown("running instance", move.destination, sorted(alive))
        found.append((PlanFault.DEAD_TARGET, dead))
    return found


def check_plan(plan: Plan, topology: Topology, running: Iterable[str] | None = None) -> None:
    """Raise the first fault of a plan."""
    for _, error in faults_of(plan, topology, running):
        raise error


def check_standby(instance: str, standby: str, topology: Topology) -> None:
    """Refuse a standby that cannot be one; an empty name is none."""
    operator = topology.operator(operator_of(instance))
    topology.site(site_of(instance))
    if not standby:
        return
    if operator_of(standby) != operator.name:
        what = f"{standby!r} as the standby of {instance!r}"
        raise InvalidRequest(what, f"expected another instance of {operator.name!r}", LIST_INSTANCES)
    topology.site(site_of(standby))
    if standby == instance:
        raise InvalidRequest(f"{instance!r} as its own standby", "expected another instance", LIST_INSTANCES)
    if not operator.deterministic:
        what = f"{operator.name!r} is declared non-deterministic; a move to a standby would run it twice"
        raise InvalidRequest(what, "expected a deterministic operator")


def check_standbys(plan: Plan, standbys: Mapping[str, str]) -> None:
    """Refuse moves to a standby that is none."""
    for move in plan.moves:
        strategy = STRATEGIES.get(move.strategy)
        if strategy is not None and strategy.copies and standbys.get(move.source) != move.destination:
            has = standbys.get(move.source)
            what = f"{move.destination!r} is not the standby of {move.source!r}"
            expected = f"expected {has!r}" if has else f"expected a standby; {move.source!r} has none"
            raise InvalidRequest(what, expected, "name one with: live.set_standby(instance, standby)")


def check_limits(deadline_ms: float | None, retries: int) -> None:
    """Refuse negative or absurd numbers; the message names them."""
    if deadline_ms is not None and not 0 < deadline_ms <= 1e9:
        raise InvalidRequest(f"deadline_ms = {deadline_ms!r}", "expected a number above 0 and at most 1e9")
    if not 0 <= retries <= 1000:
        raise InvalidRequest(f"retries = {retries!r}", "expected a whole number from 0 to 1000")
