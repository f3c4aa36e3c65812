"""A scenario: everything that will be tried in one run, as data, drawn from one seed.

Responsible for: drawing deployments, traffic, moves and faults; leaving parts out (for shrink.py).
Not responsible for: running it (deployment.py), judging it (checkers.py).
"""

from __future__ import annotations

import random

import msgspec

from tiercel.core.model.topology import Operator, Stream, Topology, instance_name
from tiercel.core.settings import Settings
from tiercel.sim.workload import KINDS

SIM_SETTINGS = Settings(
    retry_ms=40.0,
    tick_ms=35.0,
    checkpoint_ms=150.0,
    move_deadline_ms=1_500.0,
    source_silence_ms=120.0,
    compare_wait_ms=150.0,
    dispatch_rows_max=24,
    read_entries_max=8,
    tail_rows_max=16,  # so that some readers find what they need there, and some do not
    backlog_rows_max=400,
    site_frames_max=6,
    outbox_frames_max=200,
    shadow_entries_max=500,
    withheld_max=60,
    stream_tail_max=12,
    publish_entries_max=8,
    chunk_keys_max=1,
    capture_pause_ms=9.0,
    chunk_bytes_max=4_096,
    chunks_unacked_max=2,
    slice_keys=2,
    trim_entries_max=4,
    flip_keys_max=4,
    moves_at_once_max=8,
)


class Traffic(msgspec.Struct, frozen=True):
    """One producer's script: frames of (key, event time, payload), sent at a steady pace."""

    name: str
    site: str
    start_ms: float
    gap_ms: float
    frames: list[list[tuple[bytes, int, tuple[str, int]]]]
    watermarks: bool
    stream: str = "input"
    delay_ms: int = 0  # of the stream
    batch: int = 0  # so many frames share a watermark, as those of a DataFrame's batch do
    pause: tuple[int, float] = (0, 0.0)  # (frame, ms): the producer pauses before this frame
    numbers: list[tuple[int, ...]] = []  # of each frame's rows, where devices number them

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.gap_ms * len(self.frames) + self.pause[1]


class Journey(msgspec.Struct, frozen=True):
    """A mobile source: its frames, and when it is where."""

    name: str
    start_ms: float
    gap_ms: float
    frames: list[list[tuple[bytes, int, tuple[str, int]]]]
    stops: list[tuple[float, str]]


class Action(msgspec.Struct, frozen=True):
    """Something that happens at a given time: a move, a request to scale, or a fault."""

    at_ms: float
    kind: str
    target: str = ""
    other: str = ""
    for_ms: float = 0.0
    strategy: str = ""
    slots: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    point: str = ""  # crash points: the step at which the role dies
    after: bool = False  # crash points: after the step's effects instead of before


MOVES = ("move", "scale", "replace")
DRAWN = tuple(kind for kind in KINDS if kind != "relapsing")  # that one is drawn by features.py


class Scenario(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    topology: Topology
    kinds: dict[str, str]  # operator -> kind of processor
    coarser: dict[str, bool]
    latency_ms: dict[str, float]  # "a b" -> latency between two sites
    durability: str
    sync_ms: float
    clock_ms: dict[str, float]  # process -> clock offset
    traffic: list[Traffic]
    journeys: list[Journey]
    actions: list[Action]
    settings: Settings = SIM_SETTINGS
    spares: tuple[str, ...] = ()  # instances that run and own no slots at first
    bytes_per_ms: dict[str, float] = {}  # "a b" -> bandwidth between two sites, where it is limited
    turn_ms: dict[str, float] = {}  # site -> its router takes what has come within such a time at once
    coming_ms: float = 0.0  # how long the values of a takeover take; the successor works before they arrive
    service_ms: dict[str, float] = {}  # operator or instance -> time of user code for one row
    mutant: str = ""  # the planted bug of the run (explore/mutants.py); empty: the real code
    drift: dict[str, float] = {}  # process -> how much too fast its clock runs
    features: tuple[str, ...] = ()  # the features of features.py that this seed has drawn
    walks: bool = False  # count the rare paths that the run walks
    encoded: bool = False  # payloads are bytes, and rows of a key that leave together are runs
    bundles: str = ""  # frames of producers are bundles: "timed", with an event time per row, or "untimed"

    @property
    def joins(self) -> bool:
        """Whether the outputs of a call leave as runs: not where a log looks at the event time of each."""
        return not any(operator.time_mode == "eventTime" for operator in self.topology.operators.values())

    def without(self, index: int) -> Scenario:
        return msgspec.structs.replace(self, actions=[a for i, a in enumerate(self.actions) if i != index])


class Options(msgspec.Struct, frozen=True):
    """Limits and probabilities for drawing a scenario."""

    strategies: tuple[str, ...] = ("live", "pause", "restart")
    faults: tuple[str, ...] = ()
    sites_max: int = 4
    sites_min: int = 1
    mutant: str = ""
    kinds: tuple[str, ...] = (*DRAWN, "sessions", "windows", "forgetful")  # drawn from, per operator
    last_kinds: tuple[str, ...] = ()  # for the second operator of a chain, if other ones
    chain: tuple[int, ...] = (1, 1, 2)  # how many operators
    journeys: tuple[int, ...] = (0, 1, 1, 2)  # how many mobile sources
    site_frames_max: int = 6
    capture_pause_ms: float = 9.0
    scales: bool = False  # also scale-out, scale-in, and links of little bandwidth
    move_slots_max: int = 5
    timed: float = 0.6  # how often, where an operator is in event time, streams make their own watermark
    recoveries: float = 0.3  # how often, in scenarios with crashes, an instance has several successors
    suspicions: float = 0.3  # how often such an instance only seems dead
    turns: float = 0.35  # how often routers take several events at once
    little_memory: float = 0.3  # how often instances may hold only a few keys in memory
    round_trips: float = 0.25  # how often keys move back and forth between two instances
    slow_code: float = 0.35  # how often user code takes time
    features: tuple[str, ...] = ()  # those of features.py that are drawn
    walks: bool = False  # count the rare paths that runs walk
    feature_share: float | None = None  # how often each of them is drawn; None: as often as it says itself
    runs: float = 0.4  # how often, where no operator is in event time, rows of a key travel as a row batch


FAULTS = (
    "crash",
    "step",
    "break",
    "partition",
    "one-way",
    "clog",
    "swizzle",
    "slow-disk",
    "full-disk",
    "mute",
    "zombie",
)


def draw(seed: int, options: Options, points: list[tuple[str, str, str, bool]] | None = None) -> Scenario:
    """The scenario of a seed. `points` are crash points; each seed with faults visits one or two of them."""
    rng = random.Random(f"scenario {seed}")
    sites = _sites(rng, options)
    names = list(sites)
    producers = {f"p{i}": rng.choice(names) for i in range(rng.randint(1, 3))}
    topology, kinds, coarser, spares = _operators(rng, sites, producers, options)
    keys = [f"{rng.choice('abcd')}{i % 3}{i}".encode() for i in range(rng.randint(6, 16))]
    weights = [1.0 / (i + 1) for i in range(len(keys))]  # the first key is hot
    traffic = [_traffic(rng, name, site, keys, weights) for name, site in producers.items()]
    journeys = [_journey(rng, f"car{i}", names, keys) for i in range(rng.choice(options.journeys))]
    end = max(t.start_ms + t.gap_ms * len(t.frames) for t in traffic)
    instances = [i for o in topology.operators.values() for i in o.instances] + list(spares)
    processes = [*names, *instances, "controller"]
    actions = _moves(rng, topology, spares, keys, options, end)
    if options.faults:
        actions += _faults(rng, options, names, instances, [t.name for t in traffic], end)
        if points and "step" in options.faults:
            actions += _step_crashes(rng, seed, actions, points, options)
    scales, bandwidth = _scales(seed, topology, spares, end) if options.scales else ([], {})
    actions += scales
    return Scenario(
        seed=seed,
        bytes_per_ms=bandwidth,
        topology=topology,
        kinds=kinds,
        coarser=coarser,
        latency_ms={
            f"{a} {b}": rng.choice((1.0, 4.0, 15.0)) for i, a in enumerate(names) for b in names[i + 1 :]
        },
        durability=rng.choice(("os", "disk", "disk")),
        sync_ms=rng.choice((0.5, 1.5, 6.0)),
        clock_ms={p: rng.choice((0.0, 0.0, 3.0, 40.0)) for p in processes},
        traffic=traffic,
        journeys=journeys,
        actions=sorted(actions, key=lambda a: a.at_ms),
        settings=msgspec.structs.replace(
            SIM_SETTINGS,
            site_frames_max=options.site_frames_max,
            capture_pause_ms=options.capture_pause_ms,
        ),
        spares=spares,
        mutant=options.mutant,
        walks=options.walks,
    )


def _sites(rng: random.Random, options: Options) -> dict[str, str | None]:
    count = rng.choice([n for n in (1, 2, 2, 3, 3, 4, 6) if options.sites_min <= n <= options.sites_max])
    sites: dict[str, str | None] = {"cloud": None}
    for i in range(1, count):
        sites[f"edge{i}"] = rng.choice(list(sites))
    return sites


def _operators(
    rng: random.Random, sites: dict[str, str | None], producers: dict[str, str], options: Options
) -> tuple[Topology, dict[str, str], dict[str, bool], tuple[str, ...]]:
    names = list(sites)
    streams = {"input": Stream("input", "cloud", logged=False, producers=producers)}
    operators: dict[str, Operator] = {}
    kinds: dict[str, str] = {}
    coarser: dict[str, bool] = {}
    spares: list[str] = []
    modes = {"sessions": "processingTime", "windows": "eventTime"}
    upstream = "input"
    for name in ["alpha", "beta"][: rng.choice(options.chain)]:
        kinds[name] = rng.choice((name == "beta" and options.last_kinds) or options.kinds)
        coarser[name] = rng.random() < 0.3
        output, dead = f"{name}.out", f"{name}.dead"
        streams[output] = Stream(output, rng.choice(names))
        streams[dead] = Stream(dead, rng.choice(names))
        chosen = [rng.choice(names) for _ in range(rng.randint(2, 4))]
        first = tuple(instance_name(name, site, i) for i, site in enumerate(chosen))
        spares += [instance_name(name, rng.choice(names), len(chosen))]
        operators[name] = Operator(
            name,
            (upstream,),
            output,
            first,
            slots=16,
            time_mode=modes.get(kinds[name], "none"),
            dead_letters=dead,
        )
        upstream = output
    return Topology(sites, streams, operators), kinds, coarser, tuple(spares)


def _frames(
    rng: random.Random, name: str, count: int, keys: list[bytes], weights: list[float] | None
) -> list[list[tuple[bytes, int, tuple[str, int]]]]:
    frames = []
    event_time, n = rng.randint(0, 50), 0
    for _ in range(count):
        frame = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            event_time += rng.choice((0, 3, 10, 40))
            n += 1
            frame.append((rng.choices(keys, weights)[0], event_time, (name, n)))
        frames.append(frame)
    return frames


def _traffic(rng: random.Random, name: str, site: str, keys: list[bytes], weights: list[float]) -> Traffic:
    count = rng.randint(25, 60)
    frames = _frames(rng, name, count, keys, weights)
    return Traffic(name, site, rng.uniform(5, 60), rng.uniform(8, 25), frames, watermarks=True)


def _journey(rng: random.Random, name: str, sites: list[str], keys: list[bytes]) -> Journey:
    frames = _frames(rng, name, rng.randint(10, 30), rng.sample(keys, 2), None)
    gap = rng.uniform(15, 40)
    stops = [(0.0, rng.choice(sites))]
    for _ in range(rng.randint(1, 4)):
        stops.append((rng.uniform(0, gap * len(frames)), rng.choice(sites)))
    return Journey(name, rng.uniform(5, 60), gap, frames, sorted(stops))


def _moves(
    rng: random.Random,
    topology: Topology,
    spares: tuple[str, ...],
    keys: list[bytes],
    options: Options,
    end: float,
) -> list[Action]:
    """Moves by slot and by key; some ask for the same keys again, some go back and forth."""
    actions: list[Action] = []
    for _ in range(rng.randint(2, 6)):
        operator = rng.choice(list(topology.operators.values()))
        instances = [*operator.instances, *(s for s in spares if s.startswith(operator.name + "@"))]
        destination = rng.choice(instances)
        strategy = rng.choice(options.strategies)
        slots: tuple[int, ...] = ()
        chosen: tuple[bytes, ...] = ()
        if rng.random() < 0.6:
            first = rng.randrange(operator.slots)
            slots = tuple(range(first, min(operator.slots, first + rng.randint(1, options.move_slots_max))))
        else:
            chosen = tuple(rng.sample(keys, rng.randint(1, 3)))
        at = rng.uniform(40, end * 0.8)
        actions.append(
            Action(at, "move", operator.name, destination, strategy=strategy, slots=slots, keys=chosen)
        )
        if rng.random() < 0.35:  # there and back again
            back = rng.choice(instances)
            again = Action(
                at + rng.uniform(5, 400),
                "move",
                operator.name,
                back,
                strategy=rng.choice(options.strategies),
                slots=slots,
                keys=chosen,
            )
            actions.append(again)
    return actions


def _faults(
    rng: random.Random,
    options: Options,
    sites: list[str],
    instances: list[str],
    producers: list[str],
    end: float,
) -> list[Action]:
    actions = []
    allowed = [f for f in options.faults if f != "step"]
    for _ in range(rng.randint(3, 6) if allowed else 0):
        kind = rng.choice(allowed)
        at = rng.uniform(20, end)
        length = rng.choice((5.0, 30.0, 150.0))
        if kind == "crash":
            who = rng.choice([*sites, *instances, *instances, "controller", *producers])
            actions.append(Action(at, kind, who, for_ms=rng.choice((2.0, 20.0, 150.0))))
        elif kind == "zombie":
            actions.append(Action(at, kind, rng.choice(instances), for_ms=rng.choice((20.0, 120.0))))
        elif kind == "mute":
            actions.append(Action(at, kind, rng.choice(instances), for_ms=rng.choice((60.0, 250.0))))
        elif kind in ("slow-disk", "full-disk"):
            actions.append(Action(at, kind, rng.choice([*sites, *instances]), for_ms=length))
        elif kind == "swizzle":
            actions.append(Action(at, kind, for_ms=length))
        else:
            a, b = rng.choice([*sites, *instances]), rng.choice(sites)
            actions.append(Action(at, kind, a, b, for_ms=length))
    return actions


def _scales(
    seed: int, topology: Topology, spares: tuple[str, ...], end: float
) -> tuple[list[Action], dict[str, float]]:
    """Requests for more, fewer or other instances, and some narrow links. Uses its own random stream."""
    rng = random.Random(f"scales {seed}")
    actions = []
    sites = list(topology.sites)
    for operator in topology.operators.values():
        if rng.random() < 0.35:
            known = [*operator.instances, *(s for s in spares if s.startswith(operator.name + "@"))]
            chosen_instances = set(rng.sample(known, rng.randint(1, len(known))))
            chosen_instances |= {
                instance_name(operator.name, rng.choice(sites), 7) for _ in range(rng.choice((0, 1, 1)))
            }
            strategy = rng.choice(("live", "live", "pause"))
            names = " ".join(sorted(chosen_instances))
            actions.append(Action(rng.uniform(60, end), "scale", operator.name, names, strategy=strategy))
    pairs = [f"{a} {b}" for i, a in enumerate(sites) for b in sites[i + 1 :]]
    return actions, {pair: 80.0 for pair in pairs if rng.random() < 0.2}


OVERLOAD_POINTS = ("Dispatch:Compare", "Dispatch:Begin", "UnitReceipt")


def _step_crashes(
    rng: random.Random,
    seed: int,
    actions: list[Action],
    points: list[tuple[str, str, str, bool]],
    options: Options,
) -> list[Action]:
    """One or two deaths at a step of a move; the strategy of a move is bent to the point's."""
    first = points[seed % len(points)]
    chosen = [first, *rng.sample(points, rng.choice((0, 1)))]
    moves = [i for i, a in enumerate(actions) if a.kind == "move"]
    crashes = []
    for strategy, role, step, after in chosen:
        index = rng.choice(moves)
        actions[index] = msgspec.structs.replace(actions[index], strategy=strategy)
        crashes.append(
            Action(
                0.0,
                "step",
                role,
                strategy=strategy,
                point=step,
                after=after,
                for_ms=rng.choice((2.0, 20.0, 150.0)),
            )
        )
    if "live" in options.strategies and rng.random() < 0.3:  # overload: nothing of it gets through
        muted = Action(0.0, "step", "source", "mute", 300.0, "live", point=rng.choice(OVERLOAD_POINTS))
        crashes.append(muted)
    return crashes
