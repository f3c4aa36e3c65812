"""Optional scenario features. Each uses its own random stream, so adding one does not change existing seeds.

Responsible for: streams that make their own watermark, with late rows and silences; routers that take
    several events at once, and die within; instances that cannot keep all their keys in memory, or that
    die and have several successors; row batches; keys that move back and forth; user code that takes time.
Not responsible for: sites, operators, moves, the other faults (scenario.py); what the named features draw
    (overload.py, outages.py, devices.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tiercel.core.model.topology import Stream
from tiercel.sim.scenario import devices, graphs, outages, overload, site_faults
from tiercel.sim.scenario.scenario import Action, Options, Scenario, Traffic

replace = msgspec.structs.replace


def bundles(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Rows of many keys travel as bundles; with larger frames, so that there are some.

    Rows that devices number travel alone.
    """
    if any(script.numbers for script in scenario.traffic):
        return scenario
    timed = any(operator.time_mode == "eventTime" for operator in scenario.topology.operators.values())
    form = "timed" if timed or rng.random() < 0.5 else "untimed"
    larger = [_larger_frames(script) if rng.random() < 0.7 else script for script in scenario.traffic]
    return replace(scenario, encoded=True, bundles=form, traffic=scenario.traffic if timed else larger)


def busy_instances(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Instances take what has come within some time at once, as those of the runtime do."""
    names = [name for operator in scenario.topology.operators.values() for name in operator.instances]
    return replace(
        scenario, turn_ms={**scenario.turn_ms, **{name: rng.choice((0.3, 1.5, 5.0)) for name in names}}
    )


class Feature(NamedTuple):
    """Something that some seeds have: how often, and whether campaigns draw it unless told otherwise."""

    vary: Callable[[Scenario, random.Random, Options], Scenario]
    share: float
    by_default: bool = True

    @property
    def summary(self) -> str:
        return (self.vary.__doc__ or "").strip().partition("\n")[0]


FEATURES: dict[str, Feature] = {
    "third-operators": Feature(graphs.third_operator, 0.1),
    "many-cars": Feature(overload.many_cars, 0.1),
    "large-state": Feature(overload.large_state, 0.15),
    "small-limits": Feature(overload.small_limits, 0.15),
    "small-buffers": Feature(overload.small_buffers, 0.15),
    "small-shadows": Feature(overload.small_shadows, 0.1, by_default=False),
    "short-output-logs": Feature(overload.short_output_logs, 0.1),
    "slow-consumers": Feature(overload.slow_consumers, 0.15),
    "mute-destinations": Feature(overload.mute_destinations, 0.1),
    "replacements": Feature(outages.beside, 0.1),
    "late-news": Feature(outages.late_news, 0.15),
    "dead-for-good": Feature(outages.dead_for_good, 0.1),
    "dead-in-moves": Feature(outages.dead_in_moves, 0.1),
    "wrong-clocks": Feature(outages.wrong_clocks, 0.1),
    "zombie-routers": Feature(outages.zombie_routers, 0.1),
    "gateways": Feature(devices.gateways, 0.15),
    "cut-sites": Feature(site_faults.cut_sites, 0.2),
    "absent-sites": Feature(site_faults.absent_sites, 0.1),
    "dying-applications": Feature(site_faults.dying_applications, 0.15),
    "calm": Feature(outages.calm, 0.15),
    "bundles": Feature(bundles, 0.35),
    "busy-instances": Feature(busy_instances, 0.2),
}
DRAWN_FEATURES = tuple(name for name, feature in FEATURES.items() if feature.by_default)


def vary(scenario: Scenario, options: Options) -> Scenario:
    """The scenario with its variations, if its seed has some."""
    varied = _turns(_own_watermarks(_outputs_at(scenario), options), options)
    varied = _round_trips(_little_memory(varied, options), options)
    varied = _slow_code(_runs(_recoveries(varied, options), options), options)
    for name, feature in FEATURES.items():
        if name in options.features:
            rng = random.Random(f"{name} {scenario.seed}")
            share = feature.share if options.feature_share is None else options.feature_share
            if rng.random() < share:
                varied = replace(feature.vary(varied, rng, options), features=(*varied.features, name))
    return varied


def _outputs_at(scenario: Scenario) -> Scenario:
    """Some outputs are logged where they are made, alone or beside the log at their home."""
    rng = random.Random(f"outputs at {scenario.seed}")
    streams = {
        name: replace(stream, outputs_at=rng.choice(("home", "home", "site", "both")))
        if stream.logged
        else stream
        for name, stream in scenario.topology.streams.items()
    }
    return replace(scenario, topology=replace(scenario.topology, streams=streams))


def _own_watermarks(scenario: Scenario, options: Options) -> Scenario:
    """Streams with a delay, and perhaps an idle time-out, in place of producers that give watermarks."""
    rng = random.Random(f"event time {scenario.seed}")
    topology = scenario.topology
    timed = [o.name for o in topology.operators.values() if o.time_mode == "eventTime"]
    if not timed or rng.random() >= options.timed:
        return scenario
    names = ["input", "other"][: rng.choice((1, 1, 2))]
    drawn = {name: _stream(rng, name) for name in names}
    first = next(iter(topology.operators.values()))
    operators = {**topology.operators, first.name: replace(first, inputs=tuple(names))}
    kinds = {
        name: "relapsing" if name in timed and rng.random() < 0.3 else kind
        for name, kind in scenario.kinds.items()
    }
    return replace(
        scenario,
        topology=replace(topology, streams={**topology.streams, **drawn}, operators=operators),
        kinds=kinds,
        traffic=[_out_of_order(rng, script, drawn[rng.choice(names)]) for script in scenario.traffic],
    )


def _stream(rng: random.Random, name: str) -> Stream:
    delay_ms, idle_ms = rng.choice((0, 10, 40, 120)), rng.choice((None, None, 25, 80, 200))
    return Stream(name, "cloud", logged=False, delay_ms=delay_ms, idle_ms=idle_ms)


def _out_of_order(rng: random.Random, script: Traffic, stream: Stream) -> Traffic:
    frames = [
        [(key, max(0, at - rng.choice((0, 0, 0, 8, 35, 150))), payload) for key, at, payload in frame]
        for frame in script.frames
    ]
    return replace(
        script,
        frames=frames,
        watermarks=False,
        stream=stream.name,
        delay_ms=stream.delay_ms or 0,
        batch=rng.choice((0, 0, 3)),
        pause=(rng.randrange(len(frames)), rng.choice((0.0, 0.0, 120.0, 400.0))),
    )


def _turns(scenario: Scenario, options: Options) -> Scenario:
    """Routers that take what has come within some time at once, as those of the runtime do."""
    rng = random.Random(f"turns {scenario.seed}")
    if rng.random() >= options.turns:
        return scenario
    sites = list(scenario.topology.sites)
    end_ms = max(script.end_ms for script in scenario.traffic)
    deaths = rng.choice((0, 1, 2)) if "crash" in options.faults else 0
    actions = [
        Action(rng.uniform(20, end_ms), "in-turn", rng.choice(sites), for_ms=rng.choice((2.0, 20.0, 150.0)))
        for _ in range(deaths)
    ]
    return replace(
        scenario,
        turn_ms={site: rng.choice((0.3, 1.5, 5.0)) for site in sites},
        actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms),
    )


def _little_memory(scenario: Scenario, options: Options) -> Scenario:
    """Room for no key at all between two checkpoints, for one, or for a few.

    Where instances crash, some of them do so while they read evicted keys.
    """
    rng = random.Random(f"memory {scenario.seed}")
    if rng.random() >= options.little_memory:
        return scenario
    limit = rng.choice((1, 1_000, 3_000))
    instances = [name for operator in scenario.topology.operators.values() for name in operator.instances]
    end_ms = max(script.end_ms for script in scenario.traffic)
    deaths = rng.choice((0, 1, 2)) if "crash" in options.faults else 0
    actions = [
        Action(rng.uniform(20, end_ms), "in-read", rng.choice(instances), for_ms=rng.choice((20.0, 150.0)))
        for _ in range(deaths)
    ]
    return replace(
        scenario,
        settings=replace(scenario.settings, memory_bytes_max=limit),
        actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms),
    )


def _round_trips(scenario: Scenario, options: Options) -> Scenario:
    """Some keys move back and forth, each move so soon that some processes have not seen the end of the last.

    Where instances crash, these two crash during the moves.
    """
    rng = random.Random(f"round trips {scenario.seed}")
    operator = rng.choice(list(scenario.topology.operators.values()))
    if len(operator.instances) < 2 or rng.random() >= options.round_trips:
        return scenario
    ends = rng.sample(operator.instances, 2)
    keys = sorted({row[0] for script in scenario.traffic for frame in script.frames for row in frame})
    slots, chosen = (
        ((rng.randrange(operator.slots),), ()) if rng.random() < 0.5 else ((), (rng.choice(keys),))
    )
    at_ms = rng.uniform(40, 0.5 * max(script.end_ms for script in scenario.traffic))
    actions = []
    for n in range(rng.randint(3, 6)):
        strategy = rng.choice(options.strategies)
        actions.append(
            Action(at_ms, "move", operator.name, ends[n % 2], strategy=strategy, slots=slots, keys=chosen)
        )
        if "crash" in options.faults and rng.random() < 0.5:
            died_ms = at_ms + rng.uniform(0, 60)
            actions.append(Action(died_ms, "crash", rng.choice(ends), for_ms=rng.choice((2.0, 20.0))))
        at_ms += rng.choice((30.0, 60.0, 120.0, 250.0))
    return replace(scenario, actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms))


def _runs(scenario: Scenario, options: Options) -> Scenario:
    """Rows of a key that leave together travel as one; with larger frames, so that there are some."""
    rng = random.Random(f"runs {scenario.seed}")
    timed = any(operator.time_mode == "eventTime" for operator in scenario.topology.operators.values())
    if timed or rng.random() >= options.runs:
        return scenario
    return replace(scenario, encoded=True, traffic=[_larger_frames(script) for script in scenario.traffic])


def _larger_frames(script: Traffic) -> Traffic:
    frames, size = script.frames, 3
    events_in_step = [
        [row for frame in frames[n : n + size] for row in frame] for n in range(0, len(frames), size)
    ]
    return replace(script, frames=events_in_step, gap_ms=size * script.gap_ms)


def _slow_code(scenario: Scenario, options: Options) -> Scenario:
    """User code that takes time: rows wait in an instance, and control messages overtake them."""
    rng = random.Random(f"slow code {scenario.seed}")
    if rng.random() >= options.slow_code:
        return scenario
    times_ms = {name: rng.choice((0.2, 1.0, 1.0, 3.0)) for name in scenario.topology.operators}
    slice_ms, credit_ms = rng.choice((0.5, 2.0)), rng.choice((3.0, 15.0, 50.0))
    settings = replace(scenario.settings, slice_ms=slice_ms, dispatch_ms_max=credit_ms)
    return replace(scenario, service_ms=times_ms, settings=settings)


def _recoveries(scenario: Scenario, options: Options) -> Scenario:
    """Instances that die for good: others take over, unless a move of theirs is under way.

    Some are only believed dead: they are out of reach for a while, and come back as if nothing had happened.
    """
    rng = random.Random(f"recoveries {scenario.seed}")
    if "crash" not in options.faults or rng.random() >= options.recoveries:
        return scenario
    end_ms = max(script.end_ms for script in scenario.traffic)
    chosen = [rng.choice(operator.instances) for operator in scenario.topology.operators.values()]
    believing = random.Random(f"suspicions {scenario.seed}")
    kind = "suspect" if believing.random() < options.suspicions else "recover"
    actions = []
    for instance in chosen[: rng.choice((1, 1, 2))]:
        stem = instance.rpartition("#")[0]
        successors = " ".join(f"{stem}#{n}" for n in range(91, 91 + rng.choice((1, 2, 3))))
        back_ms = rng.choice((0.5, 5.0, 40.0, 400.0))  # when its supervisor restarts it nevertheless
        if kind == "suspect":
            back_ms = believing.choice((5.0, 60.0, 400.0, 1500.0))
        actions.append(Action(rng.uniform(60, end_ms), kind, instance, successors, back_ms))
        if rng.random() < 0.5:  # a successor dies as well, perhaps before its first checkpoint
            dead = rng.choice(successors.split())
            at_ms = actions[-1].at_ms + rng.choice((32.0, 45.0, 80.0, 200.0))
            actions.append(Action(at_ms, "crash", dead, for_ms=rng.choice((5.0, 60.0))))
    coming_ms = rng.choice((0.0, 3.0, 60.0, 400.0))
    for action in [action for action in actions if action.kind == kind]:
        if coming_ms and rng.random() < 0.5:  # it has taken a checkpoint, which must not count yet
            at_ms = action.at_ms + rng.choice((240.0, 300.0))
            actions.append(Action(at_ms, "crash", rng.choice(action.other.split()), for_ms=5.0))
    return replace(
        scenario,
        actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms),
        coming_ms=coming_ms,
    )
