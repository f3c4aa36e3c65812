"""The large scenario: fifty sites in a tree, twenty thousand keys, two hundred moves, one virtual clock.

Responsible for: the scenario, and what its moves cost by strategy, measured in virtual time.
Not responsible for: judging it (checkers.py, as for every run).

    cloud --5..10 ms--> 7 regions --1..5 ms--> 6 edges each; one instance per site, all links exist

The links alone make these latencies: user code and routers take no time here. A row's event time is
its due time, so an output shows how late it is. In addition to the background load, some keys of each
move are probes, which get rows at every frame around the move.

The stoppage of a key is the largest excess of its rows due between request and end. The excess is
over the key's own steady median, before the request or after the end, whichever is larger: a longer
way to the new owner is not a stop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from tiercel.control.controller import Controller, TrackedMove
from tiercel.control.plans import Plan
from tiercel.core import messages as m
from tiercel.core.machine.events import Event, Received
from tiercel.core.model.keys import Key
from tiercel.core.model.routing import RoutingTable, slot_of
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name, site_of
from tiercel.core.settings import Settings
from tiercel.sim.engine.process import Process
from tiercel.sim.explore.run import Result, run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import Action, Scenario, Traffic

REGIONS, EDGES = 7, 6  # with the cloud: 1 + 7 + 7 * 6 = 50 sites
KEYS, SLOTS = 20_000, 4_096
MOVES = {"live": 110, "pause": 80, "restart": 10}
PRODUCERS = 10
GAP_MS = 10
ROWS_PER_FRAME = 3  # background rows of one producer's frame
FIRST_MOVE_MS = 4_000  # by then most keys have state
MOVE_GAP_MS, RESTART_GAP_MS = 100, 1_200  # a restart stops every key: it gets some room
SLOTS_PER_MOVE, KEYS_PER_MOVE = 4, 8
PROBES = 4  # keys per move
PROBE_BEFORE_MS, PROBE_AFTER_MS = 200, 900
SETTLED_MS = 100  # after this time a move no longer affects latency
SLICE_MS = 250.0  # between two reports of progress
STEPS_MAX = 5_000_000  # per slice; only a livelock comes here

Rows = list[tuple[bytes, int, tuple[str, int]]]


class Line(msgspec.Struct, frozen=True):
    """The cost of the moves of one strategy. Times in virtual ms; None where nothing was measured."""

    strategy: str
    done: int
    undone: int
    keys_probed: int
    link_p50_ms: float | None  # one-way latency between the sites of a move
    stoppage_p50_ms: float | None
    stoppage_p99_ms: float | None
    stoppage_max_ms: float | None
    duration_p50_ms: float | None
    duration_max_ms: float | None


class Report(msgspec.Struct, frozen=True):
    """The large run as a whole."""

    sites: int
    keys: int
    rows: int
    moves: int
    steady_p50_ms: float
    virtual_s: float
    elapsed_s: float
    lines: list[Line]
    result: Result


# -- the scenario --------------------------------------------------------------------------------------


def scenario(seed: int = 1, share: float = 1.0) -> Scenario:
    """The large scenario, or with `share` one with that share of its moves."""
    rng = random.Random(f"large {seed}")
    sites = _sites()
    topology = _topology(sites)
    keys = [f"key{i:05}".encode() for i in range(KEYS)]
    actions = _moves(rng, topology.operators["alpha"], keys, share)
    end_ms = int(actions[-1].at_ms) + PROBE_AFTER_MS + 200
    probes = _probes(topology.operators["alpha"], keys, actions, end_ms)
    return Scenario(
        seed=seed,
        topology=topology,
        kinds={"alpha": "chained"},
        coarser={"alpha": False},
        latency_ms=_latencies(rng, sites),
        durability="os",
        sync_ms=0.5,
        clock_ms={},
        traffic=_traffic(rng, list(sites), keys, probes, end_ms),
        journeys=[],
        actions=actions,
        settings=Settings(),
    )


def _sites() -> dict[str, str | None]:
    sites: dict[str, str | None] = {"cloud": None}
    for region in range(REGIONS):
        sites[f"region{region}"] = "cloud"
        sites.update({f"edge{region}.{edge}": f"region{region}" for edge in range(EDGES)})
    return sites


def _topology(sites: dict[str, str | None]) -> Topology:
    instances = tuple(instance_name("alpha", site, i) for i, site in enumerate(sites))
    operator = Operator("alpha", ("input",), "alpha.out", instances, slots=SLOTS, dead_letters="alpha.dead")
    streams = {
        "input": Stream("input", "cloud", logged=False),
        "alpha.out": Stream("alpha.out", "cloud"),
        "alpha.dead": Stream("alpha.dead", "cloud"),
    }
    return Topology(sites, streams, {"alpha": operator})


def _latencies(rng: random.Random, sites: dict[str, str | None]) -> dict[str, float]:
    """Between two sites: the sum over the way through the tree, 1 to 30 ms."""
    up = {s: rng.uniform(5.0, 10.0) if p == "cloud" else rng.uniform(1.0, 5.0) for s, p in sites.items()}

    def way(site: str) -> list[str]:
        parent = sites[site]
        return [site] if parent is None else [site, *way(parent)]

    names = list(sites)
    latencies = {}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            crossed = set(way(a)) ^ set(way(b))
            latencies[f"{a} {b}"] = round(sum(up[site] for site in crossed if site != "cloud"), 3)
    return latencies


def _moves(rng: random.Random, operator: Operator, keys: list[Key], share: float) -> list[Action]:
    """Live and pause mixed, then the restarts; no slot moves twice, a fifth of the moves is by key."""
    counts = {strategy: max(1, round(count * share)) for strategy, count in MOVES.items()}
    mixed = ["live"] * counts["live"] + ["pause"] * counts["pause"]
    rng.shuffle(mixed)
    owned: dict[str, list[int]] = {}
    for slot, route in enumerate(RoutingTable.initial(operator).slots):
        owned.setdefault(route.instance, []).append(slot)
    by_slot = _by_slot(keys, SLOTS)
    actions: list[Action] = []
    at_ms = FIRST_MOVE_MS
    for strategy in [*mixed, *["restart"] * counts["restart"]]:
        at_ms += MOVE_GAP_MS if strategy != "restart" else RESTART_GAP_MS
        source, destination = rng.sample(operator.instances, 2)
        while len(owned[source]) < SLOTS_PER_MOVE:
            source = rng.choice([i for i in operator.instances if i != destination])
        slots = tuple(owned[source].pop() for _ in range(SLOTS_PER_MOVE))
        chosen = tuple(key for slot in slots for key in by_slot.get(slot, []))[:KEYS_PER_MOVE]
        by_key = rng.random() < 0.2 and bool(chosen)
        actions.append(
            Action(
                float(at_ms),
                "move",
                "alpha",
                destination,
                strategy=strategy,
                slots=() if by_key else slots,
                keys=chosen if by_key else (),
            )
        )
    return actions


def probes_of(action: Action, by_slot: dict[int, list[Key]]) -> list[Key]:
    """The keys of a move that are watched closely."""
    moving = action.keys or [key for slot in action.slots for key in by_slot.get(slot, [])]
    return list(moving)[:PROBES]


def _by_slot(keys: list[Key], slots: int) -> dict[int, list[Key]]:
    by_slot: dict[int, list[Key]] = {}
    for key in keys:
        by_slot.setdefault(slot_of(key, slots), []).append(key)
    return by_slot


def _probes(operator: Operator, keys: list[Key], actions: list[Action], end_ms: int) -> dict[int, list[Key]]:
    """Frame number -> keys that are fed in it, by whichever producer has their move."""
    by_slot = _by_slot(keys, operator.slots)
    fed: dict[int, list[Key]] = {}
    for number, action in enumerate(actions):
        begin, end = int(action.at_ms) - PROBE_BEFORE_MS, min(end_ms, int(action.at_ms) + PROBE_AFTER_MS)
        for frame in range(begin // GAP_MS, end // GAP_MS):
            fed.setdefault(frame * PRODUCERS + number % PRODUCERS, []).extend(probes_of(action, by_slot))
    return fed


def _traffic(
    rng: random.Random, sites: list[str], keys: list[Key], probes: dict[int, list[Key]], end_ms: int
) -> list[Traffic]:
    """Producers at sites all over the tree; together they go through all keys again and again."""
    order = rng.sample(keys, len(keys))
    scripts, at = [], 0
    for number in range(PRODUCERS):
        name, frames, n = f"p{number}", [], 0
        for frame in range(end_ms // GAP_MS):
            background = [order[(at + i) % len(order)] for i in range(ROWS_PER_FRAME)]
            at += ROWS_PER_FRAME
            rows: Rows = []
            for key in [*background, *probes.get(frame * PRODUCERS + number, [])]:
                n += 1
                rows.append((key, frame * GAP_MS, (name, n)))
            frames.append(rows)
        site = sites[number * len(sites) // PRODUCERS]
        scripts.append(Traffic(name, site, 0.0, float(GAP_MS), frames, watermarks=False))
    return scripts


# -- the run -------------------------------------------------------------------------------------------


class TimedDeployment(Deployment):
    """A deployment that records when each move was requested and when it ended."""

    def __init__(self, scenario: Scenario) -> None:
        self.requested_ms: dict[str, float] = {}
        self.ended_ms: dict[str, float] = {}
        super().__init__(scenario)
        controller = self.processes["controller"]
        before = controller.before_effect
        assert before is not None

        def watch(process: Process, event: Event, effects: Any) -> int | None:
            match event:
                case Received(message=m.MoveStatus(move=move, phase="done" | "aborted" | "refused")):
                    self.ended_ms.setdefault(move, self.scheduler.now_ms)
                case _:
                    pass
            return before(process, event, effects)

        controller.before_effect = watch

    def ask(self, plan: Plan) -> list[str]:
        names = super().ask(plan)
        self.requested_ms.update(dict.fromkeys(names, self.scheduler.now_ms))
        return names


def run_large(
    seed: int = 1, share: float = 1.0, on_progress: Callable[[float, float], object] | None = None
) -> Report:
    """Run it. `on_progress` is called with the virtual time and the end of the script."""
    started_s = time.monotonic()
    plan = scenario(seed, share)
    deployment = TimedDeployment(plan)
    end_ms = max(t.gap_ms * len(t.frames) for t in plan.traffic)
    at_ms = 0.0
    while at_ms < end_ms:
        at_ms += SLICE_MS
        deployment.scheduler.run(until_ms=at_ms, steps_max=STEPS_MAX)
        if on_progress is not None:
            on_progress(at_ms, end_ms)
    result = run(plan, deployment=deployment)
    latencies = _latencies_by_key(deployment)
    steady = [late for rows in latencies.values() for due, late in rows if due < FIRST_MOVE_MS]
    controller = deployment.processes["controller"].machine
    tracked = list(controller.moves.values()) if isinstance(controller, Controller) else []
    return Report(
        len(plan.topology.sites),
        len(latencies),
        sum(len(frame) for t in plan.traffic for frame in t.frames),
        len(tracked),
        median(steady),
        deployment.scheduler.now_ms / 1000.0,
        time.monotonic() - started_s,
        [_line(strategy, deployment, tracked, latencies) for strategy in MOVES],
        result,
    )


def _latencies_by_key(deployment: Deployment) -> dict[Key, list[tuple[int, float]]]:
    """Key -> (due, latency) of its outputs."""
    listener = deployment.listeners["alpha.out"]
    found: dict[Key, list[tuple[int, float]]] = {}
    for entry, seen_ms in zip(listener.entries, listener.seen_ms, strict=True):
        for output in entry.outputs:
            due = output.row[1]
            found.setdefault(output.key, []).append((due, seen_ms - due))
    return found


def stoppage_ms(rows: list[tuple[int, float]], requested_ms: float, ended_ms: float) -> float | None:
    """The largest excess of a key's rows due between request and end; None without a steady state."""
    steady_ms = requested_ms - SETTLED_MS / 2
    before = [late for due, late in rows if requested_ms - PROBE_BEFORE_MS <= due < steady_ms]
    after = [late for due, late in rows if ended_ms + SETTLED_MS <= due < ended_ms + PROBE_AFTER_MS]
    within = [late for due, late in rows if steady_ms <= due <= ended_ms]
    if len(before) < 5 or not within:
        return None
    steady = max(median(before), median(after) if len(after) >= 5 else 0.0)
    return max(0.0, max(within) - steady)


def _line(
    strategy: str,
    deployment: TimedDeployment,
    tracked: list[TrackedMove],
    latencies: dict[Key, list[tuple[int, float]]],
) -> Line:
    moves = [t for t in tracked if t.wanted.strategy == strategy]
    done = [t for t in moves if t.state == "done" and t.move in deployment.requested_ms]
    by_slot = _by_slot(list(latencies), SLOTS)
    stoppages: list[float] = []
    for t in done:
        asked, ended = deployment.requested_ms[t.move], deployment.ended_ms[t.move]
        keys = t.wanted.keys.keys or {k for slot in t.wanted.keys.slots for k in by_slot.get(slot, [])}
        found = [stoppage_ms(latencies.get(key, []), asked, ended) for key in sorted(keys)]
        stoppages += [s for s in found if s is not None]
    durations = [deployment.ended_ms[t.move] - deployment.requested_ms[t.move] for t in done]
    return Line(
        strategy,
        len([t for t in moves if t.state == "done"]),
        len([t for t in moves if t.state == "undone"]),
        len(stoppages),
        quantile([_link_ms(deployment, t) for t in done], 0.5),
        quantile(stoppages, 0.5),
        quantile(stoppages, 0.99),
        quantile(stoppages, 1.0),
        quantile(durations, 0.5),
        quantile(durations, 1.0),
    )


def _link_ms(deployment: Deployment, tracked: TrackedMove) -> float:
    a, b = site_of(tracked.wanted.source), site_of(tracked.wanted.destination)
    latency_ms = deployment.scenario.latency_ms
    return latency_ms[f"{a} {b}"] if f"{a} {b}" in latency_ms else latency_ms[f"{b} {a}"]


def quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least that share of the values does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
