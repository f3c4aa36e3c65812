"""One checker for each promise; each compares what came out with the sequential reference.

Responsible for: which promise was broken, where, and with which records.
Not responsible for: collecting the facts (recorder.py), the reference (reference.py).

    exactly-once-input    every row a producer was promised is in its key's history once
    exactly-once-output   every output of the reference is in the output log once, and no other
    order-per-source      rows of one source keep their order within a key
    order-of-outputs      outputs of a key appear in the order of the reference
    state                 the final state of every key is the reference's, at its one owner
    one-owner             no two instances emit for a key at once
    a-move-ends           every move is done or undone, and everything becomes quiet
    undone-reason         an undone move has a reason that the faults or other requests of the run explain
    done-is-done          a move that is called done has moved its keys, one that is called undone has not
    who-runs              owners and instances that were asked for run, and no others
    bounded               no queue above its limit (asked of every machine after every event)
    model                 every output is that of a model of its operator that shares no code with the core
    event-time            watermarks reach what the scripts promise, and go no further; timers fire in time
    in-step               source and destination never differ where both have processed a key
    watermark             no row comes behind a watermark that its source had not yet reached; none goes back
    numbers               what a device's numbers skip, repeat or take back is named, and nothing else
    late-rows             a row is left out only if it is behind the watermark of its site or of a log
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import zip_longest
from typing import Any

import msgspec

from tiercel.control.controller import Controller
from tiercel.core.instance.instance import Instance
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output, Watermark
from tiercel.core.model.topology import Operator
from tiercel.sim.check.device_numbers import NumberedRows
from tiercel.sim.check.model import KeyModel, Made, decoded
from tiercel.sim.check.outcomes import not_moved, unexplained, wrong_processes
from tiercel.sim.check.published import published, views
from tiercel.sim.check.recorder import identity
from tiercel.sim.check.reference import KeyHistory, Reference
from tiercel.sim.engine.state_reader import read_versions
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.devices import STREAM
from tiercel.sim.scenario.scenario import Journey, Traffic
from tiercel.sim.workload import plain

Rows = tuple[dict[Any, int], dict[Any, tuple[Any, int]]]  # how often each row; who sent it, and its number

TIMER_SLACK_MS = 400.0  # some ticks, and a slow disk


class Violation(msgspec.Struct, frozen=True):
    """A broken promise."""

    checker: str
    text: str


def check(deployment: Deployment, quiet: bool, why: str) -> list[Violation]:
    """All violations of a run that has ended."""
    found: list[Violation] = []
    if not quiet:
        found.append(Violation("a-move-ends", f"the run did not become quiet: {why}"))
    found += [Violation("one-owner", text) for text in deployment.owner_breaches[:3]]
    found += _moves_end(deployment)
    found += [Violation("late-rows", text) for text in deployment.recorder.late_breaches[:3]]
    found += _watermarks_grow(deployment)
    found += _watermarks_reached(deployment)
    first_inputs = next(iter(deployment.topology.operators.values())).inputs
    scripts: list[Traffic | Journey] = [*deployment.scenario.traffic, *deployment.scenario.journeys]
    of_devices = NumberedRows(deployment)
    made_of: dict[str, Rows] = {}  # stream -> what an operator wrote into it
    for operator in deployment.topology.operators.values():
        scenario = deployment.scenario
        numbered = of_devices if operator.inputs == first_inputs else NumberedRows()
        expected, sources = rows_for(operator.inputs, scripts, numbered.numbers, made_of)
        code = (scenario.kinds[operator.name], scenario.coarser[operator.name])
        reference = Reference(operator, *code, deployment.recorder, scenario.encoded, scenario.joins)
        histories = reference.run()
        found += [Violation("a-move-ends", text) for text in reference.missing]
        late = deployment.recorder.late.get(operator.name, set())
        found += [Violation("numbers", text) for text in numbered.check(histories, late)]
        found += _inputs(operator, histories, reference, expected, sources, late | numbered.refused)
        found += _outputs(deployment, operator.output, histories, "outputs")
        found += _outputs(deployment, operator.dead_letters, histories, "dead_letters")
        found += _states(deployment, operator, histories)
        found += _modelled(deployment, operator, histories)
        found += _owners(deployment, operator, histories)
        found += _behind_watermark(deployment, operator, histories)
        made, made_by = made_of[operator.output] = (Counter[Any](), dict[Any, tuple[Any, int]]())
        for history in histories.values():
            for n, (key, _, payload) in enumerate(
                one for output in history.outputs for one in plain(output.row)
            ):
                made[key, _plain(payload)] += 1
                made_by[key, _plain(payload)] = ((operator.name, history.key), n)
    return found


def rows_for(
    inputs: tuple[str, ...],
    scripts: Iterable[Traffic | Journey],
    numbers: Mapping[Any, int],
    made_of: Mapping[str, Rows],
) -> Rows:
    """The rows of these streams, as an operator with these inputs sees them, and who sent each of them.

    Operators that share a stream see its rows differently if one of them has more inputs than the other.
    """
    expected: dict[Any, int] = Counter()
    sources: dict[Any, tuple[Any, int]] = {}
    for script in scripts:
        stream = script.stream if isinstance(script, Traffic) else "input"
        if stream not in inputs:
            continue
        for key, _, payload in [row for frame in script.frames for row in frame]:
            item = (key, _as_taken(inputs, stream, payload))
            if item in numbers:  # whoever brings it, it is one row of its device
                expected[item] = 1
                sources[item] = ((key, "device"), numbers[item])
            else:
                expected[item] += 1
                sources[item] = (script.name, payload[1])
    for stream in [name for name in inputs if name in made_of]:
        made, made_by = made_of[stream]
        for (key, payload), count in made.items():
            item = (key, _as_taken(inputs, stream, payload))
            expected[item] += count
            sources[item] = made_by[key, payload]
    return expected, sources


def _behind_watermark(
    deployment: Deployment, operator: Operator, histories: dict[Key, KeyHistory]
) -> list[Violation]:
    """Rows that came behind the watermark, where none may."""
    scenario, topology = deployment.scenario, deployment.topology
    late = [text for history in histories.values() for text in history.late]
    late = [text for text in late if "('dev" not in text]  # a stream without event time
    if topology.late_inputs(operator.name, any_site=scenario.settings.site_idle_ms > 0):
        pass  # these rows are dropped, from any sender
    elif any(topology.streams[stream].delay_ms is not None for stream in operator.inputs):
        late = []  # it is not in event time, so it gets them
    elif "input" in operator.inputs:
        fixed = [f"'{script.name}'" for script in scenario.traffic]  # mobile sources give no watermark
        late = [text for text in late if any(name in text for name in fixed)]
    elif scenario.journeys or STREAM in topology.streams or "sessions" in scenario.kinds.values():
        late = []  # rows of theirs, or event times that are clock times
    return [Violation("watermark", f"{operator.name}: {text} came behind the watermark") for text in late[:3]]


def _as_taken(inputs: tuple[str, ...], stream: str, payload: Any) -> Any:
    """A row as the operator sees it: with several inputs, it carries the number of its input."""
    return payload if len(inputs) == 1 else (inputs.index(stream), payload)


def _watermarks_grow(deployment: Deployment) -> list[Violation]:
    found = []
    for (site, operator), log in deployment.recorder.logs.items():
        last = -1
        for _, entry in sorted(log.items()):
            if isinstance(entry.control, Watermark):
                if entry.control.value_ms <= last:
                    text = f"{operator} at {site}: {entry.control.value_ms} comes behind {last}"
                    found.append(Violation("watermark", text))
                last = entry.control.value_ms
    return found[:3]


def _watermarks_reached(deployment: Deployment) -> list[Violation]:
    """Where producers give watermarks, the last of every log is the lowest of their last ones.

    It is further only if event time does not wait for producers at a site that was cut off.
    """
    found: list[Violation] = []
    scripts = deployment.scenario.traffic
    for operator in deployment.topology.operators.values():
        given = [s.frames[-1][-1][1] - 1 for s in scripts if s.stream in operator.inputs and s.watermarks]
        if not given or len(operator.inputs) > 1 or operator.time_mode != "eventTime":
            continue
        for site in deployment.topology.sites:
            log = deployment.recorder.logs.get((site, operator.name), {})
            marks = [e.control.value_ms for e in log.values() if isinstance(e.control, Watermark)]
            last = max(marks, default=-1)
            if last < min(given) or (last > min(given) and not deployment.scenario.settings.site_idle_ms):
                text = f"{operator.name} at {site}: the watermark is {last}, the producers gave {min(given)}"
                found.append(Violation("event-time", text))
    return found[:3]


def _plain(payload: Any) -> Any:
    return tuple(payload) if isinstance(payload, list) else payload


def _moves_end(deployment: Deployment) -> list[Violation]:
    controller = deployment.processes["controller"].machine
    if not isinstance(controller, Controller):
        return [Violation("a-move-ends", "the controller is down at the end")]
    found = [Violation("a-move-ends", f"{t.move} is still {t.state}: {t.wanted}") for t in controller.active]
    for tracked in controller.moves.values():
        if "not deterministic" in tracked.reason:  # the simulated operators are
            found.append(Violation("in-step", f"{tracked.move}: {tracked.reason}"))
    if not found:
        found += [Violation("undone-reason", text) for text in unexplained(deployment, controller)]
        found += [Violation("done-is-done", text) for text in not_moved(deployment, controller)]
        found += [Violation("who-runs", text) for text in wrong_processes(deployment, controller)]
    return found[:6]


def _inputs(
    operator: Operator,
    histories: dict[Key, KeyHistory],
    reference: Reference,
    expected: dict[Any, int],
    sources: dict[Any, tuple[Any, int]],
    left_out: Set[Any],
) -> list[Violation]:
    found: list[Violation] = []
    seen: dict[Any, int] = Counter()
    for history in histories.values():
        last: dict[Any, tuple[int, Any]] = {}
        for key, _, payload in [one for row in history.rows for one in plain(row)]:
            payload = _plain(payload)
            seen[key, payload] += 1
            source = sources.get((key, payload))
            if source is not None:
                name, n = source
                if name in last and n < last[name][0] and seen[key, payload] == 1:
                    text = f"{operator.name}: key {key!r}: {payload} came behind {last[name][1]}"
                    found.append(Violation("order-per-source", text))
                last[name] = (n, payload)
    in_logs = sum(
        len(rows) for keys in reference.by_key.values() for of in keys.values() for rows in of.values()
    )
    in_histories = sum(len(h.rows) for h in histories.values())
    if in_logs != in_histories:
        text = (
            f"{operator.name}: {in_logs - in_histories} rows are in logs of sites that did not own their keys"
        )
        found.append(Violation("one-owner", text))
    for item in expected.keys() - seen.keys() - left_out:
        found.append(Violation("exactly-once-input", f"{operator.name}: lost {item}"))
    for item, count in seen.items():
        if count > expected.get(item, 0):
            text = f"{operator.name}: {item} came {count} times, expected {expected.get(item, 0)}"
            found.append(Violation("exactly-once-input", text))
    return found[:6]


def _identity(output: Output) -> tuple[Any, ...]:
    return (output.epoch, output.offset, output.n, _plain(output.row[2]), output.row[0], output.row[1])


def _outputs(
    deployment: Deployment, stream: str, histories: dict[Key, KeyHistory], which: str
) -> list[Violation]:
    right: dict[Key, list[Output]] = {key: getattr(history, which) for key, history in histories.items()}
    found: list[Violation] = []
    for logs in views(deployment, stream):
        found += _compare(" and ".join(logs), published(deployment, logs, right, _identity), right)
    return found[:6]


def _compare(
    stream: str, emitted: dict[Key, list[Output]], right: dict[Key, list[Output]]
) -> list[Violation]:
    found: list[Violation] = []
    for key in sorted(set(right) | set(emitted)):
        expected = [_identity(o) for o in right.get(key, ())]
        got = [_identity(o) for o in emitted.get(key, ())]
        if got == expected:
            continue
        lost, extra = Counter(expected) - Counter(got), Counter(got) - Counter(expected)
        for item in list(lost)[:2]:
            found.append(Violation("exactly-once-output", f"{stream}: key {key!r}: lost {item}"))
        for item in list(extra)[:2]:
            kind = "doubled" if item in expected else "not in the reference"
            found.append(Violation("exactly-once-output", f"{stream}: key {key!r}: {kind}: {item}"))
        if not lost and not extra:
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            text = f"{stream}: key {key!r}: {got[at]} came where {expected[at]} belongs"
            found.append(Violation("order-of-outputs", text))
    return found


def _read(
    deployment: Deployment, operator: Operator, histories: dict[Key, KeyHistory]
) -> dict[Key, list[Output]]:
    """The outputs of an operator as subscribers have read them."""
    right = {key: history.outputs for key, history in histories.items()}
    return published(deployment, views(deployment, operator.output)[0], right, _identity)


def _modelled(
    deployment: Deployment, operator: Operator, histories: dict[Key, KeyHistory]
) -> list[Violation]:
    """Compare the published rows with those of the model, and look for timers that never fired."""
    scenario = deployment.scenario
    outputs = _read(deployment, operator, histories)
    found: list[Violation] = []
    for key, history in histories.items():
        model = KeyModel(operator.name, key, scenario.kinds[operator.name], scenario.coarser[operator.name])
        model.run(history.calls)
        got: list[Made] = [made for output in outputs.get(key, ()) for made in decoded(output.row)]
        if got != model.made:
            pairs = zip_longest(got, model.made)
            at, (mine, theirs) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            text = f"{operator.name}: key {key!r}: output {at} is {mine}, the model's is {theirs}"
            found.append(Violation("model", text))
        clock_ms = deployment.processes[history.owners[-1]].clock_at(deployment.scheduler.now_ms)
        overdue = [timer for timer in model.timers if timer < clock_ms - TIMER_SLACK_MS]
        if overdue and operator.time_mode == "processingTime":
            text = f"{operator.name}: key {key!r}: timers {overdue} are due, it is {clock_ms:.0f}"
            found.append(Violation("event-time", text))
    return found[:6]


def _owners(deployment: Deployment, operator: Operator, histories: dict[Key, KeyHistory]) -> list[Violation]:
    """Who emitted the outputs of a key: its owners, one after the other, none of them twice.

    A successor that serves the units of a dead source also emits for it, up to the flip at most.
    """
    found: list[Violation] = []
    emitters: dict[Key, list[str]] = {}
    for key, outputs in _read(deployment, operator, histories).items():
        seen = emitters.setdefault(key, [])
        for output in outputs:
            who = deployment.recorder.emitters.get((operator.name, *identity(output)))
            if who is not None and seen[-1:] != [who]:
                seen.append(who)
    for key, seen in emitters.items():
        known = histories[key].instances if key in histories else []
        servers = deployment.recorder.servers
        owners = iter([name for owner in known for name in (owner, *sorted(servers.get(owner, ())))])
        if not all(who in owners for who in seen):
            text = f"{operator.name}: {seen} emitted for key {key!r}, whose owners were {known}"
            found.append(Violation("one-owner", text))
    return found[:3]


def _states(deployment: Deployment, operator: Operator, histories: dict[Key, KeyHistory]) -> list[Violation]:
    found: list[Violation] = []
    holders: dict[Key, list[str]] = {}
    for name in sorted(deployment.instances):
        machine, disk = deployment.processes[name].machine, deployment.processes[name].disk
        if isinstance(machine, Instance) and machine.operator.name == operator.name:
            spaces = [machine.space, *(a.space for a in machine.receivers.values() if a.adopt is not None)]
            for space in spaces:
                read = read_versions(disk, [space.stored_at(key) for key in space.evicted])
                evicted = {place[2]: space.restored(image, place[3]) for place, (image, _) in read.items()}
                for key, state in [*space.keys.items(), *evicted.items()]:
                    holders.setdefault(key, []).append(name)
                    history = histories.get(key)
                    expected = history.state if history is not None else None
                    if expected is None or expected.digest() != state.digest():
                        values = expected.values if expected is not None else None
                        text = f"{operator.name}: key {key!r} at {name}: {state.values}, expected {values}"
                        found.append(Violation("state", text))
    for key, history in histories.items():
        owners = holders.get(key, [])
        if history.state.empty and owners:
            found.append(
                Violation("state", f"{operator.name}: key {key!r} has no state, but {owners} hold some")
            )
        elif not history.state.empty and owners != [history.instance]:
            text = f"{operator.name}: key {key!r} is held by {owners}, its owner is {history.instance}"
            found.append(Violation("state", text))
    return found[:6]
