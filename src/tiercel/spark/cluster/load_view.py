"""The view of a running deployment: gauges and routing tables as a policy sees them.

Responsible for: one view from what the processes and the routers have reported to the controller.
Not responsible for: the figures themselves (runtime/process/metrics.py), how they get here (runtime/process/
    gauges.py), deciding (control/governor.py).

An instance that is attached and owns nothing is a spare. An instance without a line is in the view with
zeros: it has just started, or is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from tiercel.control.mobility import Sighting
from tiercel.control.view import EntryLoad, HotKey, InstanceView, LinkView, OperatorView, SiteView, View
from tiercel.core.model.keys import Key
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import Topology, operator_of
from tiercel.runtime.process.gauges import GaugeBoard
from tiercel.runtime.process.metrics import MetricsLine

SENT_ON_MAX = 128  # keys in a view, for each operator and site; others follow when these are moved


class LoadReader:
    """Makes views of one deployment."""

    def __init__(self, board: GaugeBoard, topology: Topology, sites_here: Collection[str]) -> None:
        self._board, self._topology, self._here = board, topology, sites_here

    def sightings(self, operator: str) -> list[Sighting]:
        """Keys of an operator whose rows went on to an owner at another site, each line once."""
        return [
            Sighting(key, line.site, rows, line.at_ms / 1e3)
            for line in self._board.take_sent_on(operator)
            for key, rows in line.sent_on or ()
        ]

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
        """The view of now. `free_slots` and `failed` are those of this application."""
        lines, inboxes, elsewhere = self._board.lines(), self._board.inboxes(), self._board.sites()
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
        sites = {}
        for site, parent in self._topology.sites.items():
            line, report = lines.get(site), elsewhere.get(site)
            free = free_slots if site in self._here else 0  # its driver is silent: nothing starts there
            free = free if report is None else report.free_slots
            executor = "" if line is None else line.executor or ""
            sites[site] = SiteView(site, parent, _cores(line), free, _links(line), executor)
        lost = {name: why for report in elsewhere.values() for name, why in report.failed.items()}
        return View(at_s, operators, sites, {**lost, **(failed or {})})


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
        _cores(line),
        line.executor or "",
    )


def _entering(line: MetricsLine) -> EntryLoad:
    keys = tuple(HotKey(key, rate) for key, rate in line.heavy_keys or ())
    counted = sorted(line.sent_on or (), key=lambda item: -item[1])[:SENT_ON_MAX]
    sent_on = tuple(HotKey(key, float(rows)) for key, rows in counted)
    return EntryLoad(line.arrivals or 0.0, line.heavy_slots or {}, keys, sent_on)


def _cores(line: MetricsLine | None) -> int:
    return 0 if line is None else line.cores or 0


def _links(line: MetricsLine | None) -> dict[str, LinkView]:
    links = {} if line is None else line.links or {}
    return {site: LinkView(*link) for site, link in links.items()}
