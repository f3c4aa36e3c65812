"""Scenario features about the graph of operators: chains of three, fan-out, several inputs.

Responsible for: drawing them from the random stream that they are given.
Not responsible for: which seeds have them (features.py), the first one or two operators (scenario.py).
"""

from __future__ import annotations

import random

import msgspec

from tiercel.core.model.topology import Operator, Stream, instance_name
from tiercel.sim.scenario.scenario import Action, Options, Scenario

replace = msgspec.structs.replace

NAME = "gamma"
MODES = {"sessions": "processingTime", "windows": "eventTime"}


def third_operator(scenario: Scenario, rng: random.Random, options: Options) -> Scenario:
    """One more operator: behind the last, or beside another one on the same stream."""
    topology = scenario.topology
    known = list(topology.operators.values())
    inputs = rng.choice([(known[-1].output,), (known[-1].output,), known[0].inputs, known[-1].inputs])
    sites = list(topology.sites)
    plain = [kind for kind in options.kinds if kind not in MODES]
    kind = rng.choice(plain if scenario.encoded else options.kinds)
    instances = tuple(instance_name(NAME, rng.choice(sites), n) for n in range(rng.randint(2, 3)))
    output, dead = f"{NAME}.out", f"{NAME}.dead"
    operator = Operator(
        NAME, inputs, output, instances, slots=16, time_mode=MODES.get(kind, "none"), dead_letters=dead
    )
    streams = {
        **topology.streams,
        output: Stream(output, rng.choice(sites)),
        dead: Stream(dead, rng.choice(sites)),
    }
    end_ms = max(script.end_ms for script in scenario.traffic)
    actions = []
    for _ in range(rng.randint(1, 3)):
        first = rng.randrange(operator.slots)
        slots = tuple(range(first, min(operator.slots, first + rng.randint(1, 6))))
        to, strategy = rng.choice(instances), rng.choice(options.strategies)
        actions.append(Action(rng.uniform(40, end_ms), "move", NAME, to, strategy=strategy, slots=slots))
    return replace(
        scenario,
        topology=replace(topology, streams=streams, operators={**topology.operators, NAME: operator}),
        kinds={**scenario.kinds, NAME: kind},
        coarser={**scenario.coarser, NAME: rng.random() < 0.3},
        actions=sorted([*scenario.actions, *actions], key=lambda action: action.at_ms),
    )
