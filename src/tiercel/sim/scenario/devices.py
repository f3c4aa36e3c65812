"""The scenario feature of devices that number their rows, and of gateways that bring them from any site.

Responsible for: which gateway brings which row, and when; rows that come twice, never, or under a number that
    was used before.
Not responsible for: which seeds have it (features.py), judging it (check/device_numbers.py).
"""

from __future__ import annotations

import random

import msgspec

from tiercel.core.model.topology import Stream
from tiercel.sim.scenario.scenario import Options, Scenario, Traffic

replace = msgspec.structs.replace

STREAM, DEAD_LETTERS = "devices", "devices/dead"
ANOTHER = 1_000  # serial numbers of rows under numbers that were used before
LATE_MS = 40.0  # how much later another gateway brings a row that one has brought
Brought = tuple[float, tuple[bytes, int, tuple[str, int]], int]  # when, row, number


def gateways(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """Devices number their rows; gateways at several sites bring them, some twice, some never."""
    sites = list(scenario.topology.sites)
    first = rng.choice((0, 1, 1))
    stream = Stream(
        STREAM,
        "cloud",
        logged=False,
        gap_ms=rng.choice((60, 250, 5_000)),
        first_number=first,
        dead_letters=DEAD_LETTERS,
    )
    dead = Stream(DEAD_LETTERS, rng.choice(sites), holds_dead_letters=True)
    topology = scenario.topology
    operator = next(iter(topology.operators.values()))
    operators = {**topology.operators, operator.name: replace(operator, inputs=(*operator.inputs, STREAM))}
    streams = {**topology.streams, STREAM: stream, DEAD_LETTERS: dead}
    where = {f"gateway{n}": rng.choice(sites) for n in range(rng.randint(2, 3))}
    brought: dict[str, list[Brought]] = {name: [] for name in where}
    for n in range(rng.randint(1, 3)):
        _drive(rng, f"dev{n}", first, brought)
    scripts = [_script(rng, name, site, brought[name]) for name, site in where.items() if brought[name]]
    # an operator that answers late rows with equal outputs would make them look repeated
    kinds = {name: "windows" if kind == "relapsing" else kind for name, kind in scenario.kinds.items()}
    return replace(
        scenario,
        kinds=kinds,
        topology=replace(topology, streams=streams, operators=operators),
        traffic=[*scenario.traffic, *scripts],
        encoded=False,  # rows of several inputs are not
    )


def _drive(rng: random.Random, device: str, first: int, brought: dict[str, list[Brought]]) -> None:
    """The rows of one device, and who brings each of them when."""
    names = list(brought)
    at_ms, event_time, now_at = rng.uniform(5, 60), rng.randint(0, 50), rng.choice(names)
    count = rng.randint(10, 28)
    for serial in range(1, count + 1):
        at_ms += rng.uniform(5, 30)
        event_time += rng.choice((0, 5, 30))
        row, number = (device.encode(), event_time, (device, serial)), first + serial - 1
        if rng.random() < 0.2:
            now_at = rng.choice(names)
        if rng.random() < 0.96:
            brought[now_at].append((at_ms, row, number))
        if rng.random() < 0.25:
            brought[rng.choice(names)].append((at_ms + rng.uniform(0, LATE_MS), row, number))
    for n in range(rng.choice((0, 0, 0, 2))):  # it has forgotten its numbers
        at_ms += rng.uniform(5, 30)
        row = (device.encode(), event_time, (device, ANOTHER + n))
        brought[now_at].append((at_ms, row, first + n))


def _script(rng: random.Random, name: str, site: str, rows: list[Brought]) -> Traffic:
    """One gateway's frames, of one row or two, in the order in which it gets them."""
    rows = sorted(rows, key=lambda one: one[0])
    frames, numbers = [], []
    while rows:
        some, rows = rows[: (size := rng.choice((1, 1, 2)))], rows[size:]
        frames.append([row for _, row, _ in some])
        numbers.append(tuple(number for _, _, number in some))
    gap_ms = rng.uniform(6, 25)
    return Traffic(
        name, site, rng.uniform(5, 60), gap_ms, frames, watermarks=False, stream=STREAM, numbers=numbers
    )
