"""Crash points: every step of every strategy's protocol, and a scenario in which its role dies there.

Responsible for: finding the steps that moves really take, and one run per death at each of them.
Not responsible for: the list itself (crash_points_table.py), what a step is called (recorder.py).

    discover --small runs without deaths--> STEPS (crash_points_table.py) --x before/after--> CRASH_POINTS
                                                                                            |
    enumerate_points: point x place (one site, two) x downtime --> the small run with that death

The router of a move within one site plays two roles at once. A step that only one of the roles
takes when the sites differ belongs to that role alone: else one death would count twice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from tiercel.core.migration.strategies import PRINCIPAL, STRATEGIES
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name
from tiercel.sim.explore.crash_points_table import STEPS
from tiercel.sim.explore.run import run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import SIM_SETTINGS, Action, Scenario, Traffic

ROLES = ("controller", "source", "destination", "origin", "target")
DOWNTIMES_MS = (20.0, 200.0)  # back before anyone notices; longer than `source_silence_ms`
MOVE_MS, SECOND_MOVE_MS = 130.0, 330.0
KEYS = tuple(f"k{i}".encode() for i in range(6))
SLOTS = 4

Step = tuple[str, str, str]  # strategy, role, name of the step


class CrashPoint(NamedTuple):
    """A role of a move dies at a step, before its effects or after them."""

    strategy: str
    role: str
    step: str
    after: bool

    def __str__(self) -> str:
        return f"{self.strategy}/{self.role}/{self.step}/{'after' if self.after else 'before'}"


def points_of(steps: Iterable[Step]) -> list[CrashPoint]:
    return [CrashPoint(*step, after) for step in steps for after in (False, True)]


CRASH_POINTS: list[CrashPoint] = points_of(
    (strategy, role, step)
    for strategy, roles in STEPS.items()
    for role, steps in roles.items()
    for step in steps
)


# -- small scenarios ------------------------------------------------------------------------------


class Sketch(NamedTuple):
    """A small scenario: where, how, and what disturbs its move so that rarer steps are taken."""

    name: str
    strategy: str
    sites: int
    by_key: bool = False
    durability: str = "disk"
    faults: tuple[Action, ...] = ()
    settings: tuple[tuple[str, float], ...] = ()


def sketches(strategy: str) -> list[Sketch]:
    """All small scenarios of a strategy; a step is looked for in the plain ones first."""
    found = []
    for sites in (1, 2):
        plain = Sketch("plain", strategy, sites)
        found += [plain, plain._replace(name="by key", by_key=True)]
        found.append(plain._replace(name="os", durability="os"))
        for name, faults in _disturbances(strategy, sites).items():
            found.append(plain._replace(name=name, faults=faults))
        tight = (("move_deadline_ms", 3.0),)
        found.append(plain._replace(name="deadline", settings=tight))
    return sorted(found, key=lambda s: (s.name != "plain", s.sites))


def _disturbances(strategy: str, sites: int) -> dict[str, tuple[Action, ...]]:
    destination = instance_name("alpha", _site(sites, 1), 1)

    def death(role: str, step: str, for_ms: float, after: bool = True) -> Action:
        return Action(0.0, "step", role, strategy=strategy, point=step, after=after, for_ms=for_ms)

    return {
        "destination down": (Action(MOVE_MS - 5.0, "crash", destination, for_ms=60.0),),
        "destination dies": (death("destination", "Prepare", 300.0),),
        "destination never answers": (death("destination", "Prepare", 1_800.0, after=False),),
        "destination dies late": (death("destination", "Dispatch:Adopt", 200.0),),
        "destination dies with state": (death("destination", "Chunk", 200.0, after=False),),
        "source dies": (death("source", "Dispatch:Begin", 30.0),),
        "source dies late": (death("source", "Dispatch:Flip", 200.0, after=False),),
        "origin dies": (death("origin", "Prepared", 20.0, after=False),),
        "origin is away": (death("origin", "Prepared", 150.0, after=False),),
        "controller dies": (death("controller", "Durable>MoveRequest", 20.0),),
    }


def _site(sites: int, number: int) -> str:
    return "edge1" if sites == 2 and number == 1 else "cloud"


def scenario_of(sketch: Sketch) -> Scenario:
    """The scenario of a sketch: six keys in steady traffic, a move of two slots or two keys, one more."""
    names = ["cloud", "edge1"][: sketch.sites]
    producers = {f"p{i}": names[i % len(names)] for i in range(2)}
    instances = tuple(instance_name("alpha", _site(sketch.sites, i), i) for i in range(2))
    kind = "chained" if sketch.by_key else "sessions"
    operator = Operator(
        "alpha", ("input",), "alpha.out", instances, slots=SLOTS, dead_letters="alpha.dead",
        time_mode="none" if sketch.by_key else "processingTime",
    )  # fmt: skip
    streams = {
        "input": Stream("input", "cloud", logged=False, producers=producers),
        "alpha.out": Stream("alpha.out", "cloud"),
        "alpha.dead": Stream("alpha.dead", names[-1]),
    }
    sites: dict[str, str | None] = {name: None if name == "cloud" else "cloud" for name in names}
    slots, keys = ((), KEYS[:2]) if sketch.by_key else (tuple(range(SLOTS // 2)), ())
    names_of_copies = zip(instances, instances[::-1], strict=True)
    standbys = [Action(20.0, "standby", *pair) for pair in names_of_copies]
    moves = standbys if STRATEGIES[sketch.strategy].copies else []
    moves += [
        Action(at, "move", "alpha", to, strategy=sketch.strategy, slots=slots, keys=keys)
        for at, to in ((MOVE_MS, instances[1]), (SECOND_MOVE_MS, instances[0]))
    ]
    return Scenario(
        seed=1,
        topology=Topology(sites, streams, {"alpha": operator}),
        kinds={"alpha": kind},
        coarser={"alpha": False},
        latency_ms={"cloud edge1": 4.0},
        durability=sketch.durability,
        sync_ms=1.5,
        clock_ms={},
        traffic=[_traffic(name, site, i) for i, (name, site) in enumerate(producers.items())],
        journeys=[],
        actions=sorted([*moves, *sketch.faults], key=lambda a: a.at_ms),
        settings=msgspec.structs.replace(SIM_SETTINGS, **dict(sketch.settings)),
    )


def _traffic(name: str, site: str, number: int) -> Traffic:
    frames: list[list[tuple[bytes, int, tuple[str, int]]]] = []
    for n in range(60):
        first, second = KEYS[(n + number) % len(KEYS)], KEYS[(2 * n + number) % len(KEYS)]
        frames.append([(first, 10 * n, (name, 2 * n)), (second, 10 * n + 3, (name, 2 * n + 1))])
    return Traffic(name, site, 10.0 + 3.0 * number, 10.0, frames, watermarks=True)


# -- discovery ------------------------------------------------------------------------------------


def _steps(sketch: Sketch) -> set[Step]:
    scenario = scenario_of(sketch)
    deployment = Deployment(scenario)
    run(scenario, deployment=deployment)
    return deployment.steps_seen


def _without_synonyms(one: set[Step], two: set[Step]) -> set[Step]:
    """A step seen only within one site, under both roles of its router, is one step, not two."""
    found = set(two)
    other = {"origin": "target", "target": "origin"}
    for strategy, role, step in one - two:
        twin = (strategy, other.get(role, ""), step)
        if twin in two or (role == "target" and twin in one):
            continue
        found.add((strategy, role, step))
    return found


def _order(step: Step) -> tuple[str, int, str]:
    return step[0], ROLES.index(step[1]), step[2]


def discover_steps(strategies: Iterable[str]) -> list[Step]:
    found: set[Step] = set()
    for strategy in strategies:
        seen: dict[int, set[Step]] = {1: set(), 2: set()}
        for sketch in sketches(strategy):
            seen[sketch.sites] |= _steps(sketch)
        found |= _without_synonyms(seen[1], seen[2])
    return sorted(found, key=_order)


def discover(strategies: Iterable[str]) -> list[CrashPoint]:
    """The crash points of the steps that the small scenarios take."""
    return points_of(discover_steps(strategies))


def table_of(steps: Iterable[Step]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Steps in the form that crash_points_table.py keeps them."""
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for strategy, role, step in steps:
        roles = table.setdefault(strategy, {})
        roles[role] = (*roles.get(role, ()), step)
    return table


# -- enumeration ----------------------------------------------------------------------------------


def enumerate_points(strategies: Iterable[str] = tuple(STEPS)) -> Iterator[tuple[CrashPoint, Scenario]]:
    """For each point the scenarios in which that death happens: at one site and at two, short and long."""
    for strategy in strategies:
        first: dict[tuple[Step, int], Sketch] = {}
        for sketch in sketches(strategy):
            for step in sorted(_steps(sketch)):
                first.setdefault((step, sketch.sites), sketch)
        for point in CRASH_POINTS:
            if point.strategy != strategy:
                continue
            for sites in (1, 2):
                base = first.get((point[:3], sites))
                if base is not None:
                    yield from ((point, with_death(base, point, for_ms)) for for_ms in DOWNTIMES_MS)


def with_death(sketch: Sketch, point: CrashPoint, for_ms: float) -> Scenario:
    """A sketch's scenario with one death more, which comes first of those at the same step."""
    scenario = scenario_of(sketch)
    death = Action(
        0.0, "step", point.role, strategy=point.strategy, point=point.step, after=point.after, for_ms=for_ms
    )
    return msgspec.structs.replace(scenario, actions=[death, *scenario.actions])


def render_table(steps: Iterable[Step]) -> str:
    """The constant of crash_points_table.py as source text."""
    lines = ["STEPS: dict[str, dict[str, tuple[str, ...]]] = {"]
    for strategy, roles in table_of(steps).items():
        lines.append(f'    "{strategy}": {{')
        for role, names in roles.items():
            texts = textwrap.wrap(" ".join(names), 92, break_long_words=False, break_on_hyphens=False)
            lines += [
                f'        "{role}": _names(',
                *(f'            "{text}",' for text in texts),
                "        ),",
            ]
        lines.append("    },")
    return "\n".join([*lines, "}"])


if __name__ == "__main__":  # after a change of the protocol: the table as it should be now
    print(render_table(discover_steps(PRINCIPAL)))
