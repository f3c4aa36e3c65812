"""The view of a running deployment: its metrics lines and routing tables as a policy sees them.

Responsible for: one view from what the processes have written and the routers have reported.
Not responsible for: the figures themselves (runtime/process/metrics.py), deciding (control/governor.py).

An instance that is attached and owns nothing is a spare. An instance without a line is in the view with
zeros: it has just started, or is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tiercel.control.mobility import Sighting
from tiercel.control.view import EntryLoad, HotKey, InstanceView, OperatorView, SiteView, View
from tiercel.core.model.keys import Key
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import Topology, operator_of
from tiercel.runtime.process.metrics import MetricsLine, last_inboxes, last_lines, recent_inboxes


class LoadReader:
    """Reads the metrics of one deployment."""

    def __init__(self, directory: Path, topology: Topology) -> None:
        self._directory, self._topology = directory, topology
        self._seen_ms: dict[tuple[str, str], int] = {}  # site, operator -> newest line that was taken

    def sightings(self, operator: str) -> list[Sighting]:
        """Keys of an operator whose rows went on to an owner at another site, each line once."""
        found = []
        for line in recent_inboxes(self._directory):
            place = (line.site, line.operator or "")
            if line.operator == operator and line.at_ms > self._seen_ms.get(place, 0):
                self._seen_ms[place] = line.at_ms
                at_s = line.at_ms / 1e3
                found += [Sighting(key, line.site, rows, at_s) for key, rows in line.sent_on or ()]
        return found

    def view(
        self,
        at_s: float,
        running: set[str],
        routes: Mapping[str, tuple[Mapping[int, Route], Mapping[Key, Route]]],
        changing: Mapping[str, str],
        *,
        free_slots: int | None = None,
        failed: Mapping[str, str] | None = None,
    ) -> View:
        lines, inboxes = last_lines(self._directory), last_inboxes(self._directory)
        operators = {}
        for name in self._topology.operators:
            slots, overrides = routes[name]
            owned = Counter(route.instance for route in slots.values())
            owned.update(route.instance for route in overrides.values())
            here = sorted(i for i in running if operator_of(i) == name)
            working = [i for i in here if owned[i] or not slots]
            of_operator = {site: line for (site, operator), line in inboxes.items() if operator == name}
            operators[name] = OperatorView(
                name,
                tuple(_instance(i, lines.get(i), of_operator, owned[i]) for i in working),
                {site: _entering(line) for site, line in of_operator.items()},
                {slot: route.instance for slot, route in slots.items()},
                {key: route.instance for key, route in overrides.items()},
                tuple(i for i in here if i not in working),
                changing.get(name, ""),
            )
        sites = {
            site: SiteView(site, parent, _cores(lines.get(site)), free_slots)
            for site, parent in self._topology.sites.items()
        }
        return View(at_s, operators, sites, dict(failed or {}))


def _instance(
    name: str, line: MetricsLine | None, inboxes: Mapping[str, MetricsLine], slots: int
) -> InstanceView:
    found = next((i.readers[name] for i in inboxes.values() if i.readers and name in i.readers), None)
    arrivals, lag, oldest_ms = found or (0.0, 0, 0.0)
    if line is None:
        return InstanceView(name, arrivals=arrivals, backlog_rows=lag, oldest_ms=oldest_ms, slots=slots)
    return InstanceView(
        name,
        arrivals,
        line.rate,
        line.busy,
        line.cpu,
        line.stolen or 0.0,
        lag,
        oldest_ms,
        line.state_bytes or 0,
        line.state_keys or 0,
        slots,
    )


def _entering(line: MetricsLine) -> EntryLoad:
    keys = tuple(HotKey(key, rate) for key, rate in line.heavy_keys or ())
    return EntryLoad(line.arrivals or 0.0, line.heavy_slots or {}, keys)


def _cores(line: MetricsLine | None) -> int:
    return 0 if line is None else line.cores or 0
