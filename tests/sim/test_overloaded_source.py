"""A source that is seconds behind gives keys away: in virtual time, so that the figures are exact."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.settings import Settings
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import Action, Scenario, Traffic

SOURCE, DESTINATION = "alpha@cloud#0", "alpha@cloud#1"
KEYS = 200
ROW_MS = 1.0  # of user code
FRAME_ROWS, FRAME_MS = 15, 10.0  # one and a half times what the source can process
BEGIN_MS, MOVED_MS, END_MS, OVER_MS = 4_000.0, 20_000.0, 24_000.0, 40_000.0


def longest_silences_ms(strategy: str, share: float) -> tuple[float, float]:
    """The longest time without an output of the moved keys: before the move, and from its request on."""
    operator = Operator(
        "alpha", ("input",), "alpha.out", (SOURCE, DESTINATION), slots=256, dead_letters="alpha.dead"
    )
    streams = {
        "input": Stream("input", "cloud", logged=False, producers={"p0": "cloud"}),
        "alpha.out": Stream("alpha.out", "cloud"),
        "alpha.dead": Stream("alpha.dead", "cloud"),
    }
    table, rng = RoutingTable.initial(operator), random.Random(1)
    every = [f"key{n:05}".encode() for n in range(3 * KEYS)]
    keys = [key for key in every if table.route(key).instance == SOURCE][:KEYS]
    moved = set(rng.sample(keys, int(share * KEYS)))
    frames = [
        [(rng.choice(keys), int(n * FRAME_MS), ("p0", n * FRAME_ROWS + row)) for row in range(FRAME_ROWS)]
        for n in range(int(END_MS / FRAME_MS))
    ]
    scenario = Scenario(
        seed=1,
        topology=Topology({"cloud": None}, streams, {"alpha": operator}),
        kinds={"alpha": "chained"},
        coarser={"alpha": False},
        latency_ms={},
        durability="os",
        sync_ms=0.5,
        clock_ms={},
        traffic=[Traffic("p0", "cloud", 0.0, FRAME_MS, frames, watermarks=False)],
        journeys=[],
        actions=[
            Action(MOVED_MS, "move", "alpha", DESTINATION, strategy=strategy, keys=tuple(sorted(moved)))
        ],
        settings=Settings(),
        service_ms={"alpha": ROW_MS},
    )
    deployment = Deployment(scenario)
    deployment.scheduler.run(until_ms=OVER_MS, steps_max=5_000_000)
    listener = deployment.listeners["alpha.out"]
    seen = [
        seen_ms
        for entry, seen_ms in zip(listener.entries, listener.seen_ms, strict=True)
        for output in entry.outputs
        if output.key in moved
    ]
    gaps = [(later - earlier, earlier) for earlier, later in pairwise(sorted(seen))]
    assert sum(len([row for row in frame if row[0] in moved]) for frame in frames) == len(seen)
    before = max(gap for gap, at in gaps if BEGIN_MS < at < MOVED_MS - 1_000)
    return before, max(gap for gap, at in gaps if at >= MOVED_MS - 100)


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("strategy", ["live", "pause", "push", "fetch"])
def test_a_source_ten_seconds_behind_gives_keys_away_without_a_silence(strategy: str, share: float) -> None:
    """The rows that wait for a key's state are processed in slices, and control messages come in between."""
    floor_ms, silence_ms = longest_silences_ms(strategy, share)
    assert silence_ms <= floor_ms + 60.0
