"""The thread of the driver that runs policies once a second, and the pool of spare instances.

Responsible for: a view a second, carrying decisions out, the record in the storage, refilling the pool.
Not responsible for: deciding (control/governor.py), how a change is requested (api/policies.py).

    gauges, tables --> view --> governor --> decisions --> carry out --> controller
                          |                       |
                   policy/views.jsonl     policy/history.jsonl

A hand-over of keys that follow their source is one line of policy/hand_overs.jsonl when it has ended.

A policy never stops a deployment: what fails is a line in the history, and the next second is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tiercel.control.governor import Governor
from tiercel.control.limits import Limits
from tiercel.control.mobility import EndedHandOver, HandOver, Mobility
from tiercel.control.policies.policy import Decide
from tiercel.control.proposals import Decision, MoveLoad, Outcome
from tiercel.control.speeds import Speeds
from tiercel.control.view import View
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import instance_name, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.files import write_whole
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.load_view import LoadReader
from tiercel.spark.cluster.supervisor import Supervisor, free_slots

log = logging.getLogger(__name__)

EVERY_S = 1.0
RECORD_BYTES_MAX = 20 * 1024 * 1024  # of views; then the older half is dropped
HAND_OVERS_KEPT = 10_000  # in memory; more are in policy/hand_overs.jsonl
RECORD_EVERY_S = 5.0  # the history is written so often, and after each change

CarryOut = Callable[[Decision, View, Limits], None]


class MoveFigures(Protocol):
    """How one move went."""

    @property
    def phases(self) -> dict[str, float]: ...

    @property
    def bytes_moved(self) -> int: ...

    @property
    def reason(self) -> str: ...


class RunningMove(Protocol):
    """A requested move."""

    @property
    def done(self) -> bool: ...

    @property
    def undone(self) -> bool: ...

    requested_s: float

    def reports(self) -> Sequence[MoveFigures]: ...


MoveKeys = Callable[[str, HandOver], RunningMove]  # operator, what to hand over


class PolicyThread:
    """Runs the policies of one deployment."""

    def __init__(
        self,
        backend: Backend,
        deployment: DeploymentDir,
        controller: ControllerThread,
        supervisor: Supervisor,
        carry_out: CarryOut,
    ) -> None:
        self._backend, self._controller, self._supervisor = backend, controller, supervisor
        self._carry_out = carry_out
        manifest = deployment.manifest()
        self._topology = manifest.topology
        self._reader = LoadReader(controller.gauges, self._topology, manifest.sites_here)
        self._directory = deployment.directory / "policy"
        self._directory.mkdir(exist_ok=True)
        self._governor = Governor()
        self.speeds = Speeds()  # of all instances, for the planner by load
        self._lock = threading.Lock()  # of the governor: users add policies while it decides
        self._shown: dict[str, dict[str, Any]] = {}
        self._spares: dict[tuple[str, str], int] = {}  # operator, site -> spare instances to have
        self._mobility: dict[str, tuple[Mobility, MoveKeys]] = {}  # by operator
        self._moving: list[tuple[Mobility, HandOver, RunningMove]] = []
        self._hand_overs: deque[EndedHandOver] = deque(maxlen=HAND_OVERS_KEPT)
        self._recorded_s = 0.0
        self._owners: dict[str, dict[int, str]] = {}  # as last recorded
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercel-policies", daemon=True)
        self._thread.start()

    # -- what users ask ------------------------------------------------------------------------

    def add(self, name: str, decide: Decide, limits: Limits, shown: Mapping[str, Any]) -> None:
        """Add a policy, or replace the one of this name."""
        with self._lock:
            self._governor.add(name, decide, limits)
            self._shown[name] = {"name": name, **shown, "limits": msgspec.to_builtins(limits)}
            self._write_policies()

    def remove(self, name: str) -> bool:
        with self._lock:
            self._governor.remove(name)
            shown = self._shown.pop(name, None)
            if shown is not None and shown["policy"] == "mobility":
                self._mobility.pop(shown["operator"], None)
            self._write_policies()
            return shown is not None

    def keep_spares(self, operator: str, site: str, count: int) -> None:
        """Have so many attached instances at a site that own nothing."""
        self._spares[operator, site] = count

    def follow_sources(self, operator: str, mobility: Mobility, move: MoveKeys) -> None:
        """Hand the keys of an operator over to the sites at which their sources are."""
        self._mobility[operator] = (mobility, move)
        with self._lock:
            name = f"{operator}: mobility"
            self._shown[name] = {"name": name, "operator": operator, "policy": "mobility", "options": {}}
            self._write_policies()

    @property
    def policies(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._shown.values())

    @property
    def hand_overs(self) -> list[EndedHandOver]:
        """The last hand-overs that have ended, oldest first."""
        with self._lock:
            return list(self._hand_overs)

    @property
    def history(self) -> list[Decision]:
        with self._lock:
            return self._governor.history

    def end(self) -> None:
        self._stopped.set()
        self._thread.join(10.0)
        with self._lock:
            self._write_history()

    # -- once a second -------------------------------------------------------------------------

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + EVERY_S, time.monotonic())
            try:
                self._tick()
            except UserError as error:  # the controller restarts, or the deployment ends
                log.info("policies wait: %s", error)
            except Exception:
                log.exception("policies failed in this second")

    def _tick(self) -> None:
        self._controller.ask_tables()
        if not self._governor.policies and not self._spares and not self._mobility:
            return
        view = self.view()
        self.speeds.add(view)
        for operator in list(self._mobility):
            self._hand_over(operator, view)
        with self._lock:
            decisions = self._governor.decide(view)
            limits = {policy.name: policy.limits for policy in self._governor.policies.values()}
        changes = [decision for decision in decisions if decision.is_change]
        for decision in changes:
            if not self._stopped.is_set():
                self._perform(decision, view, limits.get(decision.policy, Limits()))
        self._refill(view)
        self._record(view, changed=bool(changes))

    def view(self) -> View:
        """The load of this second."""
        names = list(self._topology.operators)
        return self._reader.view(
            time.time(),
            self._controller.running(),
            {name: self._controller.routes(name) for name in names},
            {name: self._controller.changing(name) for name in names},
            free_slots=free_slots(self._backend),
            failed={n: why for n, why in self._supervisor.failures.items() if operator_of(n)},
        )

    def _perform(self, decision: Decision, view: View, limits: Limits) -> None:
        try:
            self._carry_out(decision, view, limits)
        except (UserError, InvalidRequest) as refusal:
            with self._lock:
                self._governor.refused(decision, str(refusal).replace("\n", "; "), time.time())

    # -- sources that travel -------------------------------------------------------------------

    def _hand_over(self, operator: str, view: View) -> None:
        for mobility, hand_over, move in [m for m in self._moving if m[2].done]:
            self._moving.remove((mobility, hand_over, move))
            mobility.ended(hand_over, view.at_s, undone=move.undone)
            self._hand_over_ended(operator, hand_over, move)
        seen = view.operators[operator]
        mobility, move_keys = self._mobility[operator]
        count = len(seen.owners)

        def owner_of(key: Key) -> str:
            return site_of(seen.isolated.get(key) or seen.owners[slot_of(key, count)])

        sightings = self._reader.sightings(operator)
        if not count:
            return
        for hand_over in mobility.decide(sightings, owner_of, view.at_s):
            outcome, reason = Outcome.CARRIED_OUT, hand_over.reason
            try:
                self._moving.append((mobility, hand_over, move_keys(operator, hand_over)))
            except (UserError, InvalidRequest) as refusal:
                mobility.ended(hand_over, view.at_s, undone=True)
                outcome, reason = Outcome.FAILED, str(refusal).replace("\n", "; ")
            proposal = MoveLoad(operator, KeySet(keys=hand_over.keys), hand_over.destination, reason)
            with self._lock:
                self._governor.note(Decision(view.at_s, operator, "mobility", outcome, proposal, reason))

    def _hand_over_ended(self, operator: str, hand_over: HandOver, move: RunningMove) -> None:
        reports = move.reports()
        phases: dict[str, float] = {}
        for report in reports:
            for phase, at_ms in report.phases.items():
                phases[phase] = max(phases.get(phase, 0.0), at_ms)
        ended = EndedHandOver(
            operator,
            tuple(sorted(hand_over.keys)),
            hand_over.source,
            hand_over.destination,
            hand_over.reason,
            move.requested_s - time.monotonic() + time.time(),
            phases,
            sum(report.bytes_moved for report in reports),
            "; ".join(report.reason for report in reports if report.reason) if move.undone else "",
        )
        with self._lock:
            self._hand_overs.append(ended)
        with (self._directory / "hand_overs.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(ended) + b"\n")
            size = file.tell()
        if size > RECORD_BYTES_MAX:
            path = self._directory / "hand_overs.jsonl"
            lines = path.read_bytes().splitlines(keepends=True)
            write_whole(path, b"".join(lines[len(lines) // 2 :]))

    # -- the pool ------------------------------------------------------------------------------

    def _refill(self, view: View) -> None:
        """Start spare instances where the pool lacks some and there is room."""
        for (operator, site), count in self._spares.items():
            seen = view.operators[operator]
            attached = {*(i.name for i in seen.instances), *seen.spares}
            known = {n for n in {*attached, *self._supervisor.names} if operator_of(n) == operator}
            known = {n for n in known if site_of(n) == site}
            working = {i.name for i in seen.instances}
            coming = known - attached
            free = view.sites[site].free_slots
            if seen.changing or len(known - working) >= count or coming or free == 0:
                continue
            names = (instance_name(operator, site, n) for n in range(1, len(known) + 2))
            self._controller.launch(next(name for name in names if name not in known))

    # -- the record ----------------------------------------------------------------------------

    def _record(self, view: View, *, changed: bool) -> None:
        path = self._directory / "views.jsonl"
        with path.open("ab") as file:
            file.write(msgspec.json.encode(self._without_known_owners(view)) + b"\n")
            size = file.tell()
        if size > RECORD_BYTES_MAX:
            lines = path.read_bytes().splitlines(keepends=True)
            write_whole(path, b"".join(lines[len(lines) // 2 :]))
            self._owners = {}
        if changed or time.monotonic() - self._recorded_s > RECORD_EVERY_S:
            with self._lock:
                self._write_history()

    def _without_known_owners(self, view: View) -> View:
        """A view without owners of slots that are the same as before: they are thousands."""
        operators = {}
        for name, operator in view.operators.items():
            same = self._owners.get(name) == operator.owners
            self._owners[name] = operator.owners
            operators[name] = msgspec.structs.replace(operator, owners={}) if same else operator
        return msgspec.structs.replace(view, operators=operators)

    def _write_history(self) -> None:
        self._recorded_s = time.monotonic()
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in self._governor.history)
        write_whole(self._directory / "history.jsonl", lines)

    def _write_policies(self) -> None:
        write_whole(self._directory / "policies.json", msgspec.json.encode(list(self._shown.values())))
