"""Scenario features about overload: small limits, slow consumers, large state, many cars, mute peers.

Responsible for: drawing each of them from the random stream that it is given.
Not responsible for: which seeds have them (features.py), carrying them out (deployment.py).
"""

from __future__ import annotations

import random

import msgspec

from tiercel.sim.scenario.scenario import Action, Journey, Options, Scenario

replace = msgspec.structs.replace

LIMITS: dict[str, tuple[int, ...]] = {
    "numbered_keys_max": (1, 3),
    "backlog_rows_max": (6, 20, 60),
    "outbox_frames_max": (3, 10, 40),
    "site_frames_max": (1, 2, 4),
    "dispatch_rows_max": (1, 4),
    "stream_tail_max": (2, 6),
    "publish_entries_max": (1, 3),
}
HELD_LIMITS: dict[str, tuple[int, ...]] = {
    "held_rows_max": (1, 2, 8),
    "withheld_max": (2, 8, 20),
    "site_frames_max": (1, 2, 4),
}


def small_limits(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Some limits are so small that the traffic of a run reaches them."""
    return _limited(scenario, rng, LIMITS)


def small_buffers(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Few rows may be held, and few outputs withheld, while others are under way."""
    return _limited(scenario, rng, HELD_LIMITS)


def small_shadows(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Few entries of a move may be shadowed."""
    return _limited(scenario, rng, {"shadow_entries_max": (4, 12, 40)})


def _limited(scenario: Scenario, rng: random.Random, of: dict[str, tuple[int, ...]]) -> Scenario:
    chosen = rng.sample(list(of), rng.randint(1, min(4, len(of))))
    limits = {name: rng.choice(of[name]) for name in chosen}
    return replace(scenario, settings=replace(scenario.settings, **limits))


def short_output_logs(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Output logs keep few entries, and a subscriber is out of reach for a while."""
    streams = [s for s in scenario.topology.streams.values() if s.logged and s.outputs_at != "site"]
    actions = list(scenario.actions)
    for stream in rng.sample(streams, min(2, len(streams))):
        at_ms = rng.uniform(40, 400)
        listener = f"listener {stream.name}"
        actions.append(Action(at_ms, "partition", stream.home, listener, for_ms=rng.choice((100.0, 500.0))))
    limit = rng.choice((10, 20, 40))
    return replace(
        scenario,
        settings=replace(scenario.settings, stream_entries_max=limit, stream_tail_max=6),
        actions=sorted(actions, key=lambda action: action.at_ms),
    )


def slow_consumers(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Each row takes some instances so long that rows wait for them, at least for a while."""
    instances = [name for operator in scenario.topology.operators.values() for name in operator.instances]
    slow = rng.sample(instances, rng.randint(1, min(3, len(instances))))
    times_ms = {name: rng.choice((2.0, 6.0, 15.0)) for name in slow}
    return replace(scenario, service_ms={**scenario.service_ms, **times_ms})


def large_state(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """A move takes several chunks, each of as many keys as its bytes allow."""
    settings = replace(
        scenario.settings,
        chunk_keys_max=rng.choice((2, 4, 64)),
        chunk_bytes_max=rng.choice((1, 150, 400)),
        chunks_unacked_max=rng.choice((1, 2, 4)),
        flip_keys_max=rng.choice((4, 64)),
    )
    return replace(scenario, settings=settings)


def many_cars(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """A dozen mobile sources that share keys, and change their site often. Some of them crash."""
    sites = list(scenario.topology.sites)
    keys = sorted({row[0] for script in scenario.traffic for frame in script.frames for row in frame})
    cars, actions = list(scenario.journeys), list(scenario.actions)
    for number in range(len(cars), len(cars) + rng.randint(3, 8)):
        car = _car(rng, f"car{number}", sites, keys)
        cars.append(car)
        if "crash" in options.faults and rng.random() < 0.3:
            at_ms = car.start_ms + rng.uniform(0, car.gap_ms * len(car.frames))
            actions.append(Action(at_ms, "crash", car.name, for_ms=rng.choice((2.0, 40.0))))
    return replace(scenario, journeys=cars, actions=sorted(actions, key=lambda action: action.at_ms))


def _car(rng: random.Random, name: str, sites: list[str], keys: list[bytes]) -> Journey:
    frames, n, event_time = [], 0, rng.randint(0, 50)
    own = rng.sample(keys, min(2, len(keys)))
    for _ in range(rng.randint(8, 20)):
        frame = []
        for _ in range(rng.choice((1, 1, 3))):
            n, event_time = n + 1, event_time + rng.choice((0, 5, 30))
            frame.append((rng.choice(own), event_time, (name, n)))
        frames.append(frame)
    gap_ms = rng.uniform(10, 40)
    stops = [(rng.uniform(0, gap_ms * len(frames)), rng.choice(sites)) for _ in range(rng.randint(2, 6))]
    return Journey(name, rng.uniform(5, 80), gap_ms, frames, [(0.0, rng.choice(sites)), *sorted(stops)])


MUTED_AT = ("Prepare", "Chunk", "Dispatch:Adopt", "Dispatch:Begin", "EmitFrom", "Shadow")


def mute_destinations(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """At some step of a move nothing of its destination gets through any more, or its disk is slow."""
    strategies = [action.strategy for action in scenario.actions if action.kind == "move"]
    muted = [
        Action(
            0.0,
            "step",
            "destination",
            rng.choice(("mute", "mute", "slow")),
            rng.choice((60.0, 200.0, 600.0)),
            rng.choice(strategies),
            point=rng.choice(MUTED_AT),
        )
        for _ in range(rng.randint(1, 2) if strategies else 0)
    ]
    return replace(scenario, actions=sorted([*scenario.actions, *muted], key=lambda action: action.at_ms))
