"""The fleet: two hundred sites, 124,000 keys, and cars that travel; the mobility policy hands keys over.

Responsible for: sites, cars and their ways, gateways that bring the rows which cars number, the policy
    once a virtual second, and what hand-overs cost: time, messages, memory.
Not responsible for: deciding hand-overs (control/mobility.py), moving (core/), other scenarios.

    cloud --5..10 ms--> 11 regions --1..5 ms--> 17 edges each; one instance per site

Most cars are silent after their first row: their state is what makes the tables large. Some drive. A car that
drives crosses to another edge, oscillates between two edges, vanishes behind a crossing, or changes its edge
twice within one move. Some of them send often: interruptions of hand-overs are seen at those.

The operator counts the rows of each key, so every output says whether a row was lost, doubled or reordered.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tiercel.control.controller import Controller
from tiercel.control.mobility import HandOver, Mobility, Sighting, Threshold
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.clients import Producer
from tiercel.core.machine.effects import Effect, SetTimer
from tiercel.core.machine.events import Connected, Event, Received, TimerFired
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Row
from tiercel.core.model.routing import RoutingTable, slot_of
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name, site_of
from tiercel.core.settings import Settings
from tiercel.sim.check.recorder import steps_of
from tiercel.sim.engine.process import Process
from tiercel.sim.scenario.deployment import LOCAL_MS, Deployment
from tiercel.sim.scenario.large import quantile, stoppage_ms
from tiercel.sim.scenario.scenario import Scenario

OPERATOR, STREAM, OUTPUT = "alpha", "positions", "alpha.out"
WAYS = ("crosses", "oscillates", "vanishes", "twice")
FIRST_MS = 3_000  # by then every key has state
FRAME_ROWS = 50
PROBE_GAP_MS, GAP_MS = 20.0, 250.0
STAY_MS = 9_000.0  # long enough to be followed down
POLICY_MS = 1_000.0
DRAIN_MS = 20_000.0
STEPS_MAX = 50_000_000

Sent = tuple[float, Row, int]  # when, row, number


class Car(msgspec.Struct, frozen=True):
    """A car that drives: which way, how often it sends, and when it is where."""

    key: Key
    way: str
    gap_ms: float
    stops: list[tuple[float, str]]
    end_ms: float

    def site_at(self, at_ms: float) -> str:
        return [site for since, site in self.stops if since <= at_ms][-1]


class FleetReport(msgspec.Struct, frozen=True):
    """What the run gave. Times in virtual ms."""

    sites: int
    keys: int
    cars: int
    rows: int
    moves: int
    hand_overs: int  # keys, each time it was moved
    undone: int
    hand_overs_per_s: float  # of virtual time, while cars drove
    interruption_p50_ms: float | None
    interruption_p99_ms: float | None
    interruption_max_ms: float | None
    measured: int
    duration_p50_ms: float | None
    duration_p99_ms: float | None
    one_way_p50_ms: float | None  # between the sites of a move
    messages_per_move: float
    messages_per_hand_over: float
    by_way: dict[str, float]  # how the cars drove -> hand-overs of each
    entries_early: int  # of all tables, when a third of the hand-overs was over
    entries_late: int
    rss_early_mb: float
    rss_late_mb: float
    virtual_s: float
    elapsed_s: float
    faults: list[str]


# -- the plan ---------------------------------------------------------------------------------------------


def fleet_sites(count: int) -> dict[str, str | None]:
    """A cloud, regions, and edges below them."""
    regions = max(1, round(count / 18))
    sites: dict[str, str | None] = {"cloud": None}
    sites.update({f"region{n}": "cloud" for n in range(regions)})
    for n in range(count - 1 - regions):
        sites[f"edge{n}"] = f"region{n % regions}"
    return sites


def fleet_topology(sites: dict[str, str | None]) -> Topology:
    instances = tuple(instance_name(OPERATOR, site, 1) for site in sites)
    operator = Operator(OPERATOR, (STREAM,), OUTPUT, instances, dead_letters="alpha.dead")
    streams = {
        STREAM: Stream(STREAM, "cloud", logged=False, gap_ms=30_000, dead_letters="positions/dead"),
        "positions/dead": Stream("positions/dead", "cloud", holds_dead_letters=True),
        OUTPUT: Stream(OUTPUT, "cloud"),
        "alpha.dead": Stream("alpha.dead", "cloud"),
    }
    return Topology(sites, streams, {OPERATOR: operator})


def draw_cars(
    rng: random.Random, keys: Sequence[Key], homes: dict[Key, str], edges: dict[str, list[str]], count: int,
    probes: int, drive_ms: float,
) -> list[Car]:  # fmt: skip
    """Cars that leave their homes, at times spread over the drive."""
    cars = []
    for n, key in enumerate(rng.sample(list(keys), count)):
        home = homes[key]
        near = edges.get(home) or next(iter(edges.values()))
        there, then = rng.choice(near), rng.choice(near)
        begin = FIRST_MS + rng.uniform(0.0, drive_ms)
        way = WAYS[n % len(WAYS)]
        left = begin + 1_000.0
        if way == "oscillates":
            stops = [(left + 700.0 * k, (there, then)[k % 2]) for k in range(12)]
        elif way == "twice":
            stops = [(left, there), (left + 1_300.0, then), (left + 1_450.0, there), (left + 1_600.0, then)]
        else:
            stops = [(left, there)]
        end = left + (1_500.0 if way == "vanishes" else STAY_MS)
        gap = PROBE_GAP_MS if n < probes else GAP_MS
        cars.append(Car(key, way, gap, [(begin, home), *stops], end))
    return cars


def schedule(rng: random.Random, keys: Sequence[Key], homes: dict[Key, str], cars: Sequence[Car]) -> Any:
    """Site -> what its gateway brings, and key -> how many rows it has."""
    by_site: dict[str, list[Sent]] = {}
    counts: Counter[Key] = Counter()
    for n, key in enumerate(keys):
        at = (n % 1_000) * FIRST_MS / 2_000
        by_site.setdefault(homes[key], []).append((at, (key, int(at), (0,)), 1))
        counts[key] = 1
    for car in cars:
        at = car.stops[0][0] + rng.uniform(0.0, car.gap_ms)
        while at < car.end_ms:
            counts[car.key] += 1
            row = (car.key, int(at), (counts[car.key],))
            by_site.setdefault(car.site_at(at), []).append((at, row, counts[car.key]))
            at += car.gap_ms
    for rows in by_site.values():
        rows.sort(key=lambda one: one[0])
    return by_site, counts


# -- the machines of the run --------------------------------------------------------------------------------


class Gateway:
    """Brings the rows of cars that are at its site, when they are due."""

    def __init__(self, site: str, rows: list[Sent]) -> None:
        self.producer = Producer(f"gateway {site}", site, "1")
        self._rows, self._place = rows, 0

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = self.producer.on_event(event, now_ms)
        if isinstance(event, TimerFired) and self.producer.greeted:
            effects += self._submit(now_ms)
        if isinstance(event, Connected | TimerFired) and self._place < len(self._rows):
            effects.append(SetTimer("next", max(now_ms + 1.0, self._rows[self._place][0])))
        return effects

    def _submit(self, now_ms: float) -> list[Effect]:
        first = self._place
        while (
            self._place < len(self._rows)
            and self._rows[self._place][0] <= now_ms
            and self._place - first < FRAME_ROWS
        ):
            self._place += 1
        some = self._rows[first : self._place]
        if not some:
            return []
        return self.producer.submit(STREAM, [row for _, row, _ in some], numbers=[n for _, _, n in some])

    @property
    def is_over(self) -> bool:
        return self._place >= len(self._rows) and self.producer.acknowledged == self.producer.submitted


class FleetDeployment(Deployment):
    """A deployment that keeps no logs, judges outputs as they come, and follows sources."""

    def __init__(self, scenario: Scenario, gateways: dict[str, list[Sent]], probes: set[Key]) -> None:
        self.move_messages = 0
        self.requested_ms: dict[str, float] = {}
        self.ended: set[str] = set()
        self.ended_ms: dict[str, tuple[float, str]] = {}  # move -> when, and how
        self.seen: dict[Key, int] = {}
        self.faults_found: list[str] = []
        self.latencies: dict[Key, list[tuple[int, float]]] = {key: [] for key in probes}
        self.dead_letters = 0
        super().__init__(scenario)
        self.gateways: list[Gateway] = []
        for site, rows in gateways.items():
            gateway = Gateway(site, rows)
            self.gateways.append(gateway)
            name = gateway.producer.name
            self._add(name, lambda incarnation, items, gateway=gateway: gateway)
            self.network.declare(name, site, LOCAL_MS)
            self.processes[name].start()

    def _before_effect(self, process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        for _ in steps_of(event, effects):
            self.move_messages += 1
            break
        if process.name == "controller" and isinstance(event, Received):
            status = event.message
            if isinstance(status, m.MoveStatus) and status.phase in ("done", "aborted", "refused"):
                self.ended_ms.setdefault(status.move, (self.scheduler.now_ms, status.phase))
        return None

    def learn_moves(self) -> None:
        """Nothing here asks for them."""

    def judge(self) -> None:
        """Take what the listeners have, and forget it."""
        listener = self.listeners[OUTPUT]
        for entry, seen_ms in zip(listener.entries, listener.seen_ms, strict=True):
            for output in entry.outputs:
                key, due, count = output.key, output.row[1], output.row[2][2]
                if count != self.seen.get(key, 0) + 1:
                    before = self.seen.get(key, 0)
                    self.faults_found.append(f"{key!r}: row {count} came behind row {before}")
                self.seen[key] = count
                if key in self.latencies:
                    self.latencies[key].append((due, seen_ms - due))
        listener.entries.clear()
        listener.seen_ms.clear()
        for name in ("positions/dead", "alpha.dead"):
            self.dead_letters += sum(len(entry.outputs) for entry in self.listeners[name].entries)
            self.listeners[name].entries.clear()
            self.listeners[name].seen_ms.clear()

    def table_entries(self) -> int:
        """The entries of all tables that could grow with the number of hand-overs, beyond one per key."""
        found = 0
        for site in self.topology.sites:
            router = self.router(site)
            if router is not None:
                inbox = router.inboxes[OPERATOR]
                found += len(inbox.sequencer.held) + len(inbox.sequencer.counts) + len(router.state.inbound)
                found += len(router.outgoing_moves) + len(router.incoming_moves)
                found += sum(len(outbox.frames) for outbox in router.outboxes.values())
        controller = self.processes["controller"].machine
        return found + (len(controller.active) if isinstance(controller, Controller) else 0)


class Follower:
    """The mobility policy of the run: once a virtual second, as the driver of a deployment does."""

    def __init__(self, deployment: FleetDeployment, owners: dict[Key, str], strategy: str) -> None:
        self._deployment, self._strategy = deployment, strategy
        self.owners = owners  # key -> instance
        sites = deployment.topology.sites
        self._mobility = Mobility(sites, Threshold(tuples=3, seconds=1.0), Threshold(seconds=4.0))
        self._running: list[tuple[HandOver, list[str]]] = []
        self.moved: list[tuple[HandOver, list[str]]] = []
        self.undone = 0

    def tick(self) -> None:
        now_s = self._deployment.scheduler.now_ms / 1e3
        for hand_over, names in list(self._running):
            ends = [self._deployment.ended_ms.get(name) for name in names]
            if all(end is not None for end in ends):
                self._running.remove((hand_over, names))
                undone = any(end is not None and end[1] != "done" for end in ends)
                self._mobility.ended(hand_over, now_s, undone=undone)
                self.undone += undone
                if not undone:
                    self.moved.append((hand_over, names))
                    to = instance_name(OPERATOR, hand_over.destination, 1)
                    self.owners.update(dict.fromkeys(hand_over.keys, to))
        for hand_over in self._mobility.decide(self._sightings(now_s), self._site, now_s):
            self._request(hand_over, now_s)

    def _site(self, key: Key) -> str:
        return site_of(self.owners[key])

    def _sightings(self, now_s: float) -> list[Sighting]:
        found = []
        for site in self._deployment.topology.sites:
            router = self._deployment.router(site)
            if router is not None:
                sent_on = router.loads()[OPERATOR].sent_on
                found += [Sighting(key, site, count, now_s) for key, count in sent_on]
        return found

    def _request(self, hand_over: HandOver, now_s: float) -> None:
        to = instance_name(OPERATOR, hand_over.destination, 1)
        by_owner: dict[str, set[Key]] = {}
        for key in hand_over.keys:
            by_owner.setdefault(self.owners[key], set()).add(key)
        planned = tuple(
            PlannedMove(OPERATOR, KeySet(keys=frozenset(keys)), owner, to, self._strategy)
            for owner, keys in sorted(by_owner.items())
        )
        names = self._deployment.ask(Plan(planned, hand_over.reason))
        if not names:
            self._mobility.ended(hand_over, now_s, undone=True)
            return
        self._deployment.requested_ms.update(dict.fromkeys(names, self._deployment.scheduler.now_ms))
        self._running.append((hand_over, names))

    @property
    def is_idle(self) -> bool:
        return not self._running


# -- the run ----------------------------------------------------------------------------------------------


def run_fleet(
    sites: int = 200, keys: int = 124_000, cars: int = 1_200, probes: int = 60, drive_s: float = 30.0,
    strategy: str = "push", seed: int = 1, on_progress: Callable[[float, float], object] | None = None,
) -> FleetReport:  # fmt: skip
    """Run it. `on_progress` is called with the virtual time and the end of the script."""
    started_s = time.monotonic()
    rng = random.Random(f"fleet {seed}")
    topology = fleet_topology(fleet_sites(sites))
    operator = topology.operators[OPERATOR]
    names = [b"car%06d" % n for n in range(keys)]
    slots = RoutingTable.initial(operator).slots
    owners = {key: slots[slot_of(key, operator.slots)].instance for key in names}
    homes = {key: site_of(owner) for key, owner in owners.items()}
    drivers = draw_cars(rng, names, homes, _neighbours(topology.sites), cars, probes, drive_s * 1e3)
    by_site, counts = schedule(rng, names, homes, drivers)
    probed = {car.key for car in drivers[:probes]}
    deployment = FleetDeployment(_scenario(rng, topology, seed), by_site, probed)
    follower = Follower(deployment, owners, strategy)
    end_ms = max(rows[-1][0] for rows in by_site.values())
    memory = [(0, 0.0)]
    at_ms, expected = 0.0, sum(counts.values())
    while at_ms < end_ms + DRAIN_MS:
        at_ms += POLICY_MS
        deployment.scheduler.run(until_ms=at_ms, steps_max=STEPS_MAX)
        deployment.judge()
        follower.tick()
        memory.append((deployment.table_entries(), _rss_mb()))
        if on_progress is not None:
            on_progress(at_ms, end_ms)
        if at_ms > end_ms and follower.is_idle and sum(deployment.seen.values()) >= expected:
            break
    return _report(deployment, follower, drivers, counts, memory, time.monotonic() - started_s, drive_s)


def _neighbours(sites: dict[str, str | None]) -> dict[str, list[str]]:
    """Site -> edges to which its cars drive: those of the same region, and one of the next."""
    found: dict[str, list[str]] = {}
    edges = [site for site in sites if site.startswith("edge")]
    for n, site in enumerate(edges):
        near = [other for other in edges if sites[other] == sites[site] and other != site]
        found[site] = [*near[:4], edges[(n + 1) % len(edges)]]
    return found


def _scenario(rng: random.Random, topology: Topology, seed: int) -> Scenario:
    sites = topology.sites
    up = {s: rng.uniform(5.0, 10.0) if p == "cloud" else rng.uniform(1.0, 5.0) for s, p in sites.items()}
    above = {site: _above(sites, site) for site in sites}
    latency = {
        f"{a} {b}": round(sum(up[s] for s in above[a] ^ above[b] if s != "cloud"), 3)
        for n, a in enumerate(sites)
        for b in list(sites)[n + 1 :]
    }
    return Scenario(
        seed=seed,
        topology=topology,
        kinds={OPERATOR: "chained"},
        coarser={OPERATOR: False},
        latency_ms=latency,
        durability="os",
        sync_ms=0.5,
        clock_ms={},
        traffic=[],
        journeys=[],
        actions=[],
        settings=Settings(),
    )


def _above(sites: dict[str, str | None], site: str) -> frozenset[str]:
    way, parent = {site}, sites[site]
    while parent is not None:
        way.add(parent)
        parent = sites[parent]
    return frozenset(way)


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _report(
    deployment: FleetDeployment, follower: Follower, cars: Sequence[Car], counts: Counter[Key],
    memory: list[tuple[int, float]], elapsed_s: float, drive_s: float,
) -> FleetReport:  # fmt: skip
    faults = list(deployment.faults_found[:5])
    faults += [
        f"{key!r}: {deployment.seen.get(key, 0)} of {count} rows came"
        for key, count in counts.items()
        if deployment.seen.get(key, 0) != count
    ][:5]
    if deployment.dead_letters:
        faults.append(f"{deployment.dead_letters} dead letters")
    if not all(gateway.is_over for gateway in deployment.gateways):
        faults.append("rows of a gateway are not acknowledged")
    stopped, durations, links, moved = [], [], [], Counter[Key]()
    for hand_over, names in follower.moved:
        asked = min(deployment.requested_ms[name] for name in names)
        ended = max(deployment.ended_ms[name][0] for name in names)
        durations.append(ended - asked)
        links.append(_latency(deployment, hand_over.source, hand_over.destination))
        moved.update(hand_over.keys)
        found = [
            stoppage_ms(deployment.latencies[key], asked, ended)
            for key in hand_over.keys
            if key in deployment.latencies
        ]
        stopped += [value for value in found if value is not None]
    total = sum(moved.values())
    steady = memory[len(memory) // 3 :]
    return FleetReport(
        sites=len(deployment.topology.sites),
        keys=len(counts),
        cars=len(cars),
        rows=sum(counts.values()),
        moves=len(follower.moved),
        hand_overs=total,
        undone=follower.undone,
        hand_overs_per_s=round(total / drive_s, 1),
        interruption_p50_ms=quantile(stopped, 0.5),
        interruption_p99_ms=quantile(stopped, 0.99),
        interruption_max_ms=quantile(stopped, 1.0),
        measured=len(stopped),
        duration_p50_ms=quantile(durations, 0.5),
        duration_p99_ms=quantile(durations, 0.99),
        one_way_p50_ms=quantile(links, 0.5),
        messages_per_move=round(deployment.move_messages / max(1, len(follower.moved)), 1),
        messages_per_hand_over=round(deployment.move_messages / max(1, total), 1),
        by_way={
            way: round(sum(moved[c.key] for c in cars if c.way == way) / max(1, len(cars) / len(WAYS)), 2)
            for way in WAYS
        },
        entries_early=steady[0][0],
        entries_late=memory[-1][0],
        rss_early_mb=round(steady[0][1], 1),
        rss_late_mb=round(memory[-1][1], 1),
        virtual_s=deployment.scheduler.now_ms / 1e3,
        elapsed_s=round(elapsed_s, 1),
        faults=faults,
    )


def _latency(deployment: Deployment, a: str, b: str) -> float:
    known = deployment.scenario.latency_ms
    return known.get(f"{a} {b}") or known[f"{b} {a}"]
