"""Policies of a running deployment: `live.autoscale`, `live.offload` and `live.policy`.

Responsible for: options and limits as users write them; turning a decision into requests to the controller.
Not responsible for: deciding (control/), the thread that asks once a second (cluster/policy_thread.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tiercel.control.controller import MeasuredLoad, ScaleRequest
from tiercel.control.governor import instances_after
from tiercel.control.limits import Limits, by_site, parse_quiet
from tiercel.control.mobility import HandOver, Mobility, Predict, Visit
from tiercel.control.policies.named import make_policy
from tiercel.control.policies.policy import Decide
from tiercel.control.proposals import Decision, MoveLoad, Replace, Resize, Spread
from tiercel.control.view import BEHIND_MS, OperatorView, View
from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.strategies import PREDICT, STRATEGIES
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of
from tiercel.errors import UserError
from tiercel.spark.api.graph import Graph, check_choice, check_whole
from tiercel.spark.api.moves import MoveHandle
from tiercel.spark.api.requests import DeploymentRequests
from tiercel.spark.cluster.bootstrap import RunningDeployment
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.policy_thread import PolicyThread

log = logging.getLogger(__name__)

LIMITS = tuple(
    name for name in Limits.__struct_fields__ if name not in ("instances_min", "instances_max", "quiet")
)

ROUTER_STAYS = 1_000  # instances: an executor with a router is not released


class DeploymentPolicies:
    """The policies of one deployment."""

    def __init__(self, graph: Graph, running: RunningDeployment, requests: DeploymentRequests) -> None:
        self._graph, self._requests = graph, requests
        self._controller: ControllerThread = running.controller
        self._strategies: dict[str, str] = {}  # operator -> how its keys move
        self.thread: PolicyThread = running.start_policies(self._carry_out)

    def autoscale(
        self,
        operator: str,
        policy: str | Decide,
        least: int | Mapping[str, int],
        most: int | Mapping[str, int],
        spares: int | Mapping[str, int],
        strategy: str,
        given: Mapping[str, Any],
    ) -> None:
        self._graph.check_operator(operator)
        options, limits = self._split(given, least, most)
        name = f"{operator}: {policy if isinstance(policy, str) else _name_of(policy)}"
        counts = {self._graph.root: spares} if isinstance(spares, int) else dict(spares)
        for site, count in counts.items():
            self._graph.check_site(site)
            check_whole(f"spares at {site!r}", count, 0)
        for site in {*limits.instances_min, *limits.instances_max} - {"*"}:
            self._graph.check_site(site)
        check_choice("strategy", strategy, tuple(STRATEGIES))
        decide = self._decide_of(policy, operator, options)
        self._strategies[operator] = strategy
        for site, count in counts.items():
            self.thread.keep_spares(operator, site, count)
        shown = {"operator": operator, "policy": name.partition(": ")[2], "options": options}
        self.thread.add(name, decide, limits, shown)

    def offload(
        self, operator: str, cost: float, home: str, edges: Sequence[str], given: Mapping[str, Any]
    ) -> None:
        self._graph.check_operator(operator)
        home = home or self._graph.root
        for site in (home, *edges):
            self._graph.check_site(site)
        options, limits = self._split(given, 1, 8)
        options = {"home": home, "cost": cost, "edges": tuple(edges), **options}
        decide = self._decide_of("offload", operator, options)
        shown = {"operator": operator, "policy": "offload", "options": options}
        self.thread.add(f"{operator}: offload", decide, limits, shown)

    def follow_sources(self, operator: str, mobility: Mobility, strategy: str, predicted_s: float) -> None:
        self._graph.check_operator(operator)
        check_choice("strategy", strategy, tuple(name for name in STRATEGIES if name != PREDICT.name))

        def move(name: str, hand_over: HandOver) -> MoveHandle:
            to = self._requests.destination(name, hand_over.destination)
            owners = self._owners(name, KeySet(keys=hand_over.keys))
            if hand_over.predicted:
                return self._requests.move(name, owners, to, PREDICT.name, 0, predicted_s)
            return self._requests.move(name, owners, to, strategy, 0, None)

        self.thread.follow_sources(operator, mobility, move)

    def add(self, decide: Decide, name: str, given: Mapping[str, Any]) -> None:
        """A function of the user over the view of the whole deployment."""
        if not callable(decide):
            raise UserError(f"policy {decide!r:.80}", expected="a function of (view, memory)")
        options, limits = self._split(given, given.get("min", 1), given.get("max", 8))
        unknown = sorted(options.keys() - {"min", "max"})
        if unknown:
            raise UserError(f"unknown limit {unknown[0]!r}", expected=f"one of: {', '.join(LIMITS)}")
        name = name or _name_of(decide)
        self.thread.add(name, decide, limits, {"operator": "", "policy": name, "options": {}})

    def remove(self, name: str) -> None:
        if not self.thread.remove(name):
            known = ", ".join(shown["name"] for shown in self.thread.policies) or "none"
            raise UserError(f"unknown policy {name!r}", expected=f"one of: {known}")

    def _split(
        self, given: Mapping[str, Any], least: int | Mapping[str, int], most: int | Mapping[str, int]
    ) -> tuple[dict[str, Any], Limits]:
        """Options of the policy, and limits of the governor, out of one set of keyword arguments."""
        limits = {name: value for name, value in given.items() if name in LIMITS}
        options = {name: value for name, value in given.items() if name not in (*LIMITS, "quiet")}
        try:
            quiet = parse_quiet(given.get("quiet", ()))
            return options, Limits(
                instances_min=by_site(least), instances_max=by_site(most), quiet=quiet, **limits
            )
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal
        except TypeError as error:
            raise UserError(f"limits {limits!r:.100}: {error}", expected="numbers") from error

    def _decide_of(self, policy: str | Decide, operator: str, options: Mapping[str, Any]) -> Decide:
        if not isinstance(policy, str):
            if options:
                raise UserError(
                    f"option {sorted(options)[0]!r} for a function", expected=f"one of: {', '.join(LIMITS)}"
                )
            return policy
        try:
            return make_policy(policy, operator, options).decide
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal

    # -- carrying out --------------------------------------------------------------------------

    def _carry_out(self, decision: Decision, view: View, limits: Limits) -> None:
        """Request what was decided. Raises if it cannot be requested."""
        proposal = decision.proposal
        operator = view.operators[decision.operator]
        match proposal:
            case Resize():
                self._graph.check_site(proposal.site)
                executors = _releasable(view, proposal.site)
                wanted = instances_after(operator, proposal, limits.pins, executors=executors)
                self._scale(operator, wanted)
            case Spread():
                self._scale(operator, tuple(i.name for i in operator.instances))
            case MoveLoad():
                to = self._requests.destination(operator.name, proposal.to)
                owners = self._owners(operator.name, proposal.keys)
                self._requests.move(operator.name, owners, to, self._strategy(operator), 0, None)
            case Replace():
                self._requests.recover(proposal.instance, proposal.successors)
            case _:
                pass

    def _scale(self, operator: OperatorView, instances: tuple[str, ...]) -> None:
        load = MeasuredLoad(
            operator.arrivals,
            operator.slot_rates(),
            {key: rate for key, rate in operator.key_rates().items() if key in operator.isolated},
            self.thread.speeds.of(operator),
        )
        strategy = self._strategy(operator)
        measured = load if operator.arrivals > 0 else None
        spares = tuple(name for name in operator.spares if name not in instances)
        self._controller.scale(ScaleRequest(operator.name, instances, strategy, load=measured, spares=spares))

    def _strategy(self, operator: OperatorView) -> str:
        """How keys move now. A live move ends when the source has worked off what waits; `push` need not."""
        chosen = self._strategies.get(operator.name, "live")
        return "push" if chosen == "live" and operator.oldest_ms > BEHIND_MS else chosen

    def _owners(self, operator: str, keys: KeySet) -> list[tuple[str, KeySet]]:
        """Owners, each with its share of these slots or keys, as they are now."""
        slots, overrides = self._controller.routes(operator)
        by_slot: dict[str, set[int]] = {}
        by_key: dict[str, set[Key]] = {}
        for slot in keys.slots:
            by_slot.setdefault(slots[slot].instance, set()).add(slot)
        for key in keys.keys:
            route = overrides.get(key) or slots[slot_of(key, len(slots))]
            by_key.setdefault(route.instance, set()).add(key)
        found = [(owner, KeySet(slots=frozenset(some))) for owner, some in by_slot.items()]
        return found + [(owner, KeySet(keys=frozenset(some))) for owner, some in by_key.items()]


def _releasable(view: View, site: str) -> Counter[str] | None:
    """Processes on each executor, where Spark releases those without any."""
    facts = view.sites.get(site)
    if facts is None or facts.free_slots is not None:
        return None
    counts = Counter(i.executor for operator in view.operators.values() for i in operator.instances)
    return counts + Counter({other.executor: ROUTER_STAYS for other in view.sites.values()})


PredictSite = Callable[[Any, tuple[Visit, ...]], str | None]


def predictor(predict: PredictSite, key_values: Callable[[Key], tuple[Any, ...]], stream: str) -> Predict:
    """The user's function over keys as users write them. What it raises is logged, and predicts nothing."""

    def of_key(key: Key, visits: tuple[Visit, ...]) -> str | None:
        values = key_values(key)
        try:
            return predict(values[0] if len(values) == 1 else values, visits)
        except Exception:
            log.exception("the prediction for a key of %s raised; nothing is predicted for it", stream)
            return None

    return of_key


def _name_of(decide: Callable[..., object]) -> str:
    return getattr(decide, "__name__", type(decide).__name__)


class PolicyReport(msgspec.Struct, frozen=True):
    """The policies of a deployment, and what they decided."""

    policies: list[dict[str, Any]]
    history: list[Decision]

    @property
    def changes(self) -> list[Decision]:
        return [decision for decision in self.history if decision.is_change]

    def __str__(self) -> str:
        lines = [f"{shown['name']} {shown['options'] or ''}".rstrip() for shown in self.policies]
        return "\n".join([*lines, *map(str, self.history[-20:])]) or "no policies"
