"""What runs where: routers and instances with their Spark tasks, operators, moves, feeds.

Responsible for: collecting it from the registry, the controller and Spark, and showing it.
Not responsible for: figures over time (the data source `tiercel-metrics`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.core.topology import operator_of, site_of
from tiercel.runtime.lives import Lives
from tiercel.runtime.metrics import Line, last_lines
from tiercel.runtime.place import Place
from tiercel.runtime.replicated import has_copy
from tiercel.runtime.replication import is_replica, site_of_replica
from tiercel.spark.decommission import Handover, Watch

if TYPE_CHECKING:
    from tiercel.spark.console import Console
    from tiercel.spark.hosting import Hosting
    from tiercel.spark.streams import Feed


class ProcessStatus(msgspec.Struct, frozen=True):
    """One router or instance, and the Spark task it is."""

    name: str
    kind: str  # router | instance | replica
    site: str
    state: str  # running | starting | leaving (its executor is being decommissioned) | failed
    stage: int
    attempt: int
    task: int
    executor: str
    pid: int
    life: int
    submissions: int
    slots: int
    reason: str = ""
    suspicions: int = 0  # how often it gave no sign of life, and was started again
    machine: str = ""  # executors of one machine have the same
    replica: str = ""  # with durability `replica`: who holds its copy now; empty: nobody
    replica_behind: int | None = None  # batches that it had committed and that one not, a second ago


class Status(msgspec.Struct, frozen=True):
    """A deployment at one moment."""

    id: str
    storage: str
    durability: str
    processes: list[ProcessStatus]
    operators: dict[str, dict[str, int]]  # operator -> instance -> slots
    moved_keys: dict[str, int]  # operator -> keys with an owner of their own
    moves: dict[str, str]
    feeds: dict[str, str]
    handovers: list[Handover] = []  # executors that were to go, and what of ours has left them
    single: list[str] = []  # with durability `replica`: who has no second copy now

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def near_their_copy(self) -> list[str]:
        """Who shares the machine of the replica that holds its copy, on another executor."""
        by_name = {p.name: p for p in self.processes}
        both = [(p, by_name[p.replica]) for p in self.processes if p.replica in by_name]
        return [p.name for p, r in both if p.machine == r.machine and p.executor != r.executor]

    def __str__(self) -> str:
        lines = [f"deployment {self.id[:8]} in {self.storage}, durability {self.durability}"]
        head = ("process", "state", "slots", "stage", "attempt", "task", "executor", "pid", "life")
        rows = [head] + [
            tuple(
                str(v)
                for v in (p.name, p.state, p.slots, p.stage, p.attempt, p.task, p.executor, p.pid, p.life)
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
        lines += [str(handover) for handover in self.handovers]
        lines += [f"{p.name}: {p.reason}" for p in self.processes if p.reason]
        if self.durability == "replica" and len({p.executor for p in self.processes}) == 1:
            lines.append("replicas share the executor of those they hold copies of: it is the only one")
        for replica in sorted({p.replica for p in self.processes} - {""}):
            held = [f"{p.name} ({_behind(p)})" for p in self.processes if p.replica == replica]
            lines.append(f"{replica} holds copies of: {', '.join(held)}")
        if near := self.near_their_copy():
            lines.append(f"on another executor, but on the machine of their replica: {', '.join(near)}")
        if self.single:
            lines.append(f"no second copy yet, or just now: {', '.join(self.single)}")
        return "\n".join(lines)


def collect_status(
    place: Place, hosting: Hosting, console: Console, watch: Watch, feeds: Sequence[Feed]
) -> Status:
    manifest = place.manifest()
    operators: dict[str, dict[str, int]] = {}
    moved: dict[str, int] = {}
    owned: Counter[str] = Counter()
    for name in manifest.topology.operators:
        by_slot, overrides = console.routes(name)
        counts = Counter(route.instance for route in by_slot.values())
        owned.update(counts)
        operators[name] = {i: counts[i] for i in hosting.names if operator_of(i) == name}
        moved[name] = len(overrides)
    leaving = {h.executor for h in watch.handovers.values() if h.state == "moving"}
    processes = [_process(name, place, hosting, console, leaving, owned[name]) for name in hosting.names]
    if manifest.replicas is not None:
        lines = last_lines(place.metrics)
        processes = [_with_copy(p, place, lines.get(p.name)) for p in processes]
    with_copies = [p for p in processes if p.kind != "replica"] if manifest.replicas else []
    single = [p.name for p in with_copies if not p.replica]
    return Status(
        manifest.id,
        str(place.directory),
        manifest.durability,
        processes,
        operators,
        moved,
        {name: tracked.state for name, tracked in console.moves().items()},
        {feed.name: _feed_state(feed) for feed in feeds},
        [msgspec.structs.replace(handover) for handover in watch.handovers.values()],
        single,
    )


def _process(
    name: str, place: Place, hosting: Hosting, console: Console, leaving: Collection[str], slots: int
) -> ProcessStatus:
    address = place.registry.find(name)
    instance = bool(operator_of(name))
    up = address is not None and (not instance or name in console.running())
    reason = hosting.failures.get(name, "")
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
        0 if address is None else address.life,
        hosting.submissions.get(name, 0),
        slots,
        reason,
        hosting.suspicions.get(name, 0),
        "" if address is None else address.machine,
    )


def _with_copy(process: ProcessStatus, place: Place, line: Line | None) -> ProcessStatus:
    if process.kind == "replica" or not has_copy(place, process.name):
        return process
    holder = Lives(place.lives, process.name).holder()
    behind = line.replica_behind if line is not None and line.replica == holder else None
    return msgspec.structs.replace(process, replica=holder, replica_behind=behind)


def _behind(process: ProcessStatus) -> str:
    behind = process.replica_behind
    return "not known yet how far" if behind is None else f"{behind} batches behind"


def _feed_state(feed: Feed) -> str:
    if feed.query is None:
        return "not started"
    failure = feed.query.exception()
    if failure is not None:
        return f"failed: {str(failure).partition(chr(10))[0][:200]}"
    return "running" if feed.query.isActive else "ended"
