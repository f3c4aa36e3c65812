"""The outputs of a stream as subscribers have read them, by key: at its home, or at the sites that made them.

Responsible for: putting the logs of several sites together.
Not responsible for: judging what came (checkers.py).

The logs of two sites have no order between them. The outputs of a key that has moved are put together by the
order of the reference, but only if each log has its own in that order: otherwise they stay as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiercel.core.model.bundle import open_outputs
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output
from tiercel.sim.scenario.deployment import Deployment

Expected = Mapping[Key, Sequence[Output]]
Identify = Callable[[Output], Any]


def views(deployment: Deployment, stream: str) -> list[list[str]]:
    """The ways to read a stream: by the log at its home, and by the logs of all sites together."""
    facts = deployment.topology.streams[stream]
    sites = [log for log in deployment.topology.logs_of(stream) if log != stream]
    at_home = [] if facts.outputs_at == "site" else [[stream]]
    return [*at_home, sites] if sites else at_home


def published(
    deployment: Deployment, logs: list[str], expected: Expected, identify: Identify
) -> dict[Key, list[Output]]:
    """Key -> its outputs in these logs."""
    found: dict[Key, list[list[Output]]] = {}
    for log in logs:
        by_key: dict[Key, list[Output]] = {}
        for entry in deployment.listeners[log].entries:
            for output in open_outputs(entry.outputs):
                by_key.setdefault(output.key, []).append(output)
        for key, outputs in by_key.items():
            found.setdefault(key, []).append(outputs)
    return {key: _together(parts, expected.get(key, ()), identify) for key, parts in found.items()}


def _together(parts: list[list[Output]], expected: Sequence[Output], identify: Identify) -> list[Output]:
    if len(parts) == 1:
        return parts[0]
    place = {identify(output): n for n, output in enumerate(expected)}
    places = [[place.get(identify(output), -1) for output in part] for part in parts]
    outputs = [output for part in parts for output in part]
    if any(part != sorted(part) for part in places):
        return outputs
    return sorted(outputs, key=lambda output: place.get(identify(output), -1))
