"""Cutting a failing scenario down to a short one that still breaks the same promise.

Responsible for: what can be left out, and how a scenario reads as a script.
Not responsible for: whether a scenario fails (run.py).

    actions (in halves, then one by one) -> journeys -> producers -> the last operator -> frames from
    the end -> clock offsets -> actions once more; each cut is kept if the same checker still fails
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tiercel.sim.explore.campaign import run_safely
from tiercel.sim.scenario import site_faults
from tiercel.sim.scenario.scenario import Action, Journey, Scenario, Traffic

RUNS_MAX = 200  # some ten seconds

replace = msgspec.structs.replace


class Shrunk(msgspec.Struct, frozen=True):
    """The short scenario, what it still breaks, and what it took to find it."""

    scenario: Scenario
    checker: str
    text: str
    runs: int


class Shrinker:
    """Tries cuts until none is left to try or the allowance of runs is used up."""

    def __init__(self, scenario: Scenario, checker: str, text: str, runs_max: int) -> None:
        self.scenario = scenario
        self.checker = checker
        self.text = text
        self.runs = 0
        self.runs_max = runs_max

    def keeps(self, candidate: Scenario) -> bool:
        """Whether the candidate still fails; if so it takes the place of the scenario."""
        if self.runs >= self.runs_max or candidate == self.scenario:
            return False
        self.runs += 1
        for violation in run_safely(candidate).violations:
            if violation.checker == self.checker:
                self.scenario, self.text = candidate, violation.text
                return True
        return False

    def cut_actions(self) -> None:
        """Leave out ever smaller parts, from the end on (ddmin)."""
        size = len(self.scenario.actions)
        while size >= 1 and self.runs < self.runs_max:
            end = len(self.scenario.actions)
            while end > 0:
                actions = self.scenario.actions
                begin = max(0, end - size)
                self.keeps(replace(self.scenario, actions=actions[:begin] + actions[end:]))
                end = begin
            size //= 2

    def cut_each(self, candidates: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Take the first cut that works and start over, until none works."""
        while any(self.keeps(candidate) for candidate in candidates(self.scenario)):
            continue

    def run(self) -> None:
        while True:
            before = self.scenario
            self.cut_actions()
            for candidates in (_fewer_journeys, _fewer_producers, _fewer_operators, _fewer_frames, _plainer):
                self.cut_each(candidates)
            if self.scenario == before or self.runs >= self.runs_max:
                return


def shrink(scenario: Scenario, runs_max: int = RUNS_MAX) -> Shrunk | None:
    """A short scenario that breaks the promise that this one breaks first; None if it breaks none."""
    violations = run_safely(scenario).violations
    if not violations:
        return None
    shrinker = Shrinker(scenario, violations[0].checker, violations[0].text, runs_max)
    shrinker.run()
    return Shrunk(shrinker.scenario, shrinker.checker, shrinker.text, shrinker.runs)


# -- what can be left out ------------------------------------------------------------------------------


def _fewer_journeys(scenario: Scenario) -> Iterator[Scenario]:
    for gone in scenario.journeys:
        yield replace(scenario, journeys=[j for j in scenario.journeys if j is not gone])


def _fewer_producers(scenario: Scenario) -> Iterator[Scenario]:
    """A producer goes with its watermarks and with the faults that hit it."""
    for gone in scenario.traffic if len(scenario.traffic) > 1 else ():
        topology = scenario.topology
        stream = topology.streams["input"]
        fewer = {name: site for name, site in stream.producers.items() if name != gone.name}
        streams = {**topology.streams, "input": replace(stream, producers=fewer)}
        yield replace(
            scenario,
            topology=replace(topology, streams=streams),
            traffic=[t for t in scenario.traffic if t is not gone],
            actions=[a for a in scenario.actions if gone.name not in (a.target, a.other)],
        )


def _fewer_operators(scenario: Scenario) -> Iterator[Scenario]:
    """The last operator goes if another one is left."""
    topology = scenario.topology
    if len(topology.operators) < 2:
        return
    *left, last = topology.operators.values()
    streams = {n: s for n, s in topology.streams.items() if n not in (last.output, last.dead_letters)}

    def of_last(name: str) -> bool:
        return name == last.name or name.startswith(f"{last.name}@")

    yield replace(
        scenario,
        topology=replace(topology, streams=streams, operators={o.name: o for o in left}),
        spares=tuple(s for s in scenario.spares if not of_last(s)),
        actions=[a for a in scenario.actions if not (of_last(a.target) or of_last(a.other))],
    )


def _fewer_frames(scenario: Scenario) -> Iterator[Scenario]:
    """Each script loses a half, a quarter, … of its frames, from the end."""

    def shorter(count: int) -> Iterator[int]:
        for divisor in (2, 4, 8, 16):
            if count >= divisor:
                yield count - count // divisor

    for i, script in enumerate(scenario.traffic):
        for left in shorter(len(script.frames)):
            traffic = [*scenario.traffic]
            traffic[i] = replace(script, frames=script.frames[:left])
            yield replace(scenario, traffic=traffic)
    for i, journey in enumerate(scenario.journeys):
        for left in shorter(len(journey.frames)):
            journeys = [*scenario.journeys]
            journeys[i] = replace(journey, frames=journey.frames[:left])
            yield replace(scenario, journeys=journeys)


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    if any(scenario.clock_ms.values()):
        yield replace(scenario, clock_ms={})
    if scenario.drift:
        yield replace(scenario, drift={})
    if scenario.service_ms:
        yield replace(scenario, service_ms={})
    if scenario.turn_ms:
        yield replace(scenario, turn_ms={})
    if any(scenario.coarser.values()):
        yield replace(scenario, coarser=dict.fromkeys(scenario.coarser, False))


# -- how it reads --------------------------------------------------------------------------------------


def render(scenario: Scenario) -> str:
    """The scenario as a script: its processes, its traffic, and its actions with their times."""
    topology = scenario.topology
    lines = [f"seed {scenario.seed}, durability {scenario.durability}, a sync takes {scenario.sync_ms} ms"]
    lines += [f"site {name}" + (f" below {up}" if up else "") for name, up in topology.sites.items()]
    lines += [f"link {pair.replace(' ', ' - ')}: {ms} ms" for pair, ms in scenario.latency_ms.items()]
    if scenario.features:
        lines.append(f"with {', '.join(scenario.features)}")
    lines += [f"each row takes {name} {ms} ms" for name, ms in scenario.service_ms.items()]
    lines += [f"clock of {name} runs {100 * by:g} % too fast" for name, by in scenario.drift.items()]
    lines += [f"clock of {name} is {ms} ms ahead" for name, ms in scenario.clock_ms.items() if ms]
    for operator in topology.operators.values():
        kind = scenario.kinds[operator.name] + (" to coarser keys" if scenario.coarser[operator.name] else "")
        spare = [s for s in scenario.spares if s.startswith(f"{operator.name}@")]
        more = f", without slots at first: {', '.join(spare)}" if spare else ""
        lines.append(
            f"operator {operator.name} ({kind}) {', '.join(operator.inputs)} -> {operator.output} at "
            f"{topology.streams[operator.output].home}: {', '.join(operator.instances)}{more}"
        )
    for stream in topology.streams.values():
        if stream.delay_ms is not None:
            idle = "" if stream.idle_ms is None else f", idle after {stream.idle_ms} ms"
            lines.append(f"stream {stream.name}: watermark {stream.delay_ms} ms behind its newest row{idle}")
    lines += [f"router of {site} takes what comes within {ms} ms" for site, ms in scenario.turn_ms.items()]
    lines += [_of_script(script, f"at {script.site}") for script in scenario.traffic]
    for journey in scenario.journeys:
        stops = ", ".join(f"{site} from {at:.0f} ms" for at, site in journey.stops)
        lines.append(_of_script(journey, f"travels: {stops}"))
    lines += [_of_action(action) for action in scenario.actions]
    return "\n".join(lines)


def _of_script(script: Traffic | Journey, where: str) -> str:
    rows = sum(map(len, script.frames))
    if isinstance(script, Traffic) and script.pause[1]:
        where += f", silent for {script.pause[1]:.0f} ms before frame {script.pause[0] + 1}"
    keys = sorted({row[0].decode(errors="replace") for frame in script.frames for row in frame})
    return (
        f"producer {script.name} {where}: {len(script.frames)} frames, {rows} rows, "
        f"from {script.start_ms:.1f} ms every {script.gap_ms:.1f} ms, keys {' '.join(keys)}"
    )


def _of_action(action: Action) -> str:
    at = f"{action.at_ms:8.1f} ms  "
    if action.kind == "move":
        which = (
            f"slots {_numbers(action.slots)}" if action.slots else f"keys {b' '.join(action.keys).decode()}"
        )
        return f"{at}move {which} of {action.target} to {action.other} ({action.strategy})"
    if action.kind == "replace":
        gone, new = action.point.split()
        return f"{at}replace {gone} by {new} ({action.strategy})"
    if action.kind == "scale":
        return f"{at}scale {action.target} to {action.other} ({action.strategy or 'live'})"
    if action.kind == "step":
        if action.other in site_faults.KINDS:
            who = f"the site of the {action.target} of a {action.strategy} move"
            return f"{'':>10}  {action.other}: {who}, at {action.point}, for {action.for_ms:.0f} ms"
        if action.other in ("mute", "slow"):
            who = f"{action.target} of a {action.strategy} move"
            return f"{'':>10}  the {who} is {action.other} from {action.point} on, for {action.for_ms:.0f} ms"
        when = "after" if action.after else "before"
        who = f"{action.target} of a {action.strategy} move"
        lasting = "for good" if action.other == "die" else f"for {action.for_ms:.0f} ms"
        return f"{'':>10}  the {who} dies {when} {action.point}, {lasting}"
    other = f" - {action.other}" if action.other else ""
    lasting = f" for {action.for_ms:.0f} ms" if action.for_ms else ""
    return f"{at}{action.kind} {action.target}{other}{lasting}"


def _numbers(slots: tuple[int, ...]) -> str:
    if len(slots) > 2 and slots == tuple(range(slots[0], slots[-1] + 1)):
        return f"{slots[0]}-{slots[-1]}"
    return " ".join(map(str, slots))
