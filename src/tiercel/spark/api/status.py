"""The status of a deployment: its processes with their Spark tasks, operators, moves and feeds.

Responsible for: collecting it from the registry, the controller and Spark, and printing it.
Not responsible for: figures over time (the data source `tiercel-metrics`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tiercel.core.model.topology import operator_of, site_of
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.metrics import MetricsLine, last_lines
from tiercel.runtime.recovery.recover import has_replica_copy
from tiercel.runtime.replication.primary import is_replica, site_of_replica
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.api.feeds import Feed
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.decommission import DecommissionWatcher, Handover
from tiercel.spark.cluster.supervisor import Supervisor


class ProcessStatus(msgspec.Struct, frozen=True):
    """One router, instance or replica, and the Spark task that runs it."""

    name: str
    kind: str  # router | instance | replica
    site: str
    state: str  # running | starting | leaving (its executor is being decommissioned) | failed
    stage: int
    attempt: int
    task: int
    executor: str
    pid: int
    incarnation: int
    submissions: int
    slots: int
    reason: str = ""
    suspicions: int = 0  # how often it sent no heartbeat, and was restarted
    machine: str = ""  # the same for all executors of one machine
    replica: str = ""  # with durability `replica`: the replica that follows it now; empty: none
    replica_behind: int | None = None  # batches that the replica lacked a second ago


class Status(msgspec.Struct, frozen=True):
    """A deployment at one moment."""

    id: str
    storage: str
    durability: str
    processes: list[ProcessStatus]
    operators: dict[str, dict[str, int]]  # operator -> instance -> slots
    moved_keys: dict[str, int]  # operator -> keys that were moved one by one
    moves: dict[str, str]
    feeds: dict[str, str]
    handovers: list[Handover] = []  # decommissioned executors, and the processes that have left them
    unreplicated: list[str] = []  # with durability `replica`: processes without a replica now
    dead_letters: dict[str, int] = {}  # stream -> rows, where they are watched: live.watch_dead_letters()
    hand_overs: list[str] = []  # the last ones of keys that followed their sources, with their reasons
    silent: dict[str, float] = {}  # site of another application -> seconds without an answer; -1: never

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def on_machine_of_replica(self) -> list[str]:
        """Processes on the machine of their replica, but on another executor."""
        by_name = {p.name: p for p in self.processes}
        both = [(p, by_name[p.replica]) for p in self.processes if p.replica in by_name]
        return [p.name for p, r in both if p.machine == r.machine and p.executor != r.executor]

    def __str__(self) -> str:
        lines = [f"deployment {self.id[:8]} in {self.storage}, durability {self.durability}"]
        head = ("process", "state", "slots", "stage", "attempt", "task", "executor", "pid", "incarnation")
        rows = [head] + [
            tuple(
                str(v)
                for v in (
                    p.name,
                    p.state,
                    p.slots,
                    p.stage,
                    p.attempt,
                    p.task,
                    p.executor,
                    p.pid,
                    p.incarnation,
                )
            )
            for p in self.processes
        ]
        widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        running = [f"{move} {state}" for move, state in self.moves.items() if state in ("queued", "asked")]
        lines.append(f"moves: {len(self.moves)}" + (f", running: {', '.join(running)}" if running else ""))
        for feed, state in self.feeds.items():
            lines.append(f"feed {feed}: {state}")
        lines += [f"dead letters of {name}: {rows}" for name, rows in self.dead_letters.items() if rows]
        for site, silent_s in self.silent.items():
            lines.append(f"site {site} is silent" + (f" for {silent_s:.0f} s" if silent_s >= 0 else ""))
        lines += [str(handover) for handover in self.handovers]
        lines += [f"handed over: {shown}" for shown in self.hand_overs]
        lines += [f"{p.name}: {p.reason}" for p in self.processes if p.reason]
        if self.durability == "replica" and len({p.executor for p in self.processes}) == 1:
            lines.append("replicas share the executor of the processes that they follow: it is the only one")
        for replica in sorted({p.replica for p in self.processes} - {""}):
            held = [f"{p.name} ({_behind(p)})" for p in self.processes if p.replica == replica]
            lines.append(f"{replica} follows: {', '.join(held)}")
        if near := self.on_machine_of_replica():
            lines.append(f"on another executor, but on the machine of their replica: {', '.join(near)}")
        if self.unreplicated:
            lines.append(f"without a replica at the moment: {', '.join(self.unreplicated)}")
        return "\n".join(lines)


def collect_status(
    deployment: DeploymentDir,
    supervisor: Supervisor,
    controller: ControllerThread,
    watch: DecommissionWatcher,
    feeds: Sequence[Feed],
    dead_letters: Mapping[str, int],
    hand_overs: Sequence[object] = (),
) -> Status:
    manifest = deployment.manifest()
    operators: dict[str, dict[str, int]] = {}
    moved: dict[str, int] = {}
    owned: Counter[str] = Counter()
    for name in manifest.topology.operators:
        by_slot, overrides = controller.routes(name)
        counts = Counter(route.instance for route in by_slot.values())
        owned.update(counts)
        operators[name] = {i: counts[i] for i in supervisor.names if operator_of(i) == name}
        moved[name] = len(overrides)
    leaving = {h.executor for h in watch.handovers.values() if h.state == "moving"}
    processes = [
        _process(name, deployment, supervisor, controller, leaving, owned[name]) for name in supervisor.names
    ]
    if manifest.replicas is not None:
        lines = last_lines(deployment.metrics)
        processes = [_with_replica(p, deployment, lines.get(p.name)) for p in processes]
    replicated = [p for p in processes if p.kind != "replica"] if manifest.replicas else []
    unreplicated = [p.name for p in replicated if not p.replica]
    return Status(
        manifest.id,
        str(deployment.directory),
        manifest.durability,
        processes,
        operators,
        moved,
        {name: tracked.state for name, tracked in controller.moves().items()},
        {feed.name: feed.state for feed in feeds},
        [msgspec.structs.replace(handover) for handover in watch.handovers.values()],
        unreplicated,
        dict(dead_letters),
        list(map(str, hand_overs)),
        controller.silent_sites(),
    )


def _process(
    name: str,
    deployment: DeploymentDir,
    supervisor: Supervisor,
    controller: ControllerThread,
    leaving: Collection[str],
    slots: int,
) -> ProcessStatus:
    address = deployment.registry.find(name)
    instance = bool(operator_of(name))
    up = address is not None and (not instance or name in controller.running())
    reason = supervisor.failures.get(name, "")
    state = "failed" if reason else "running" if up else "starting"
    if state == "running" and address is not None and address.executor in leaving:
        state = "leaving"
    return ProcessStatus(
        name,
        "instance" if instance else "replica" if is_replica(name) else "router",
        site_of(name) if instance else site_of_replica(name) if is_replica(name) else name,
        state,
        -1 if address is None else address.stage,
        -1 if address is None else address.attempt,
        -1 if address is None else address.task,
        "" if address is None else address.executor,
        -1 if address is None else address.pid,
        0 if address is None else address.incarnation,
        supervisor.submissions.get(name, 0),
        slots,
        reason,
        supervisor.suspicions.get(name, 0),
        "" if address is None else address.machine,
    )


def _with_replica(
    process: ProcessStatus, deployment: DeploymentDir, line: MetricsLine | None
) -> ProcessStatus:
    if process.kind == "replica" or not has_replica_copy(deployment, process.name):
        return process
    holder = IncarnationClaims(deployment.incarnations, process.name).holder()
    behind = line.replica_behind if line is not None and line.replica == holder else None
    return msgspec.structs.replace(process, replica=holder, replica_behind=behind)


def _behind(process: ProcessStatus) -> str:
    behind = process.replica_behind
    return "unknown how far behind" if behind is None else f"{behind} batches behind"
