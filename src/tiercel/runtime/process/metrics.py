"""Metrics of each process, once a second, as lines of JSON in the deployment's directory.

Responsible for: the lines, the files and their size, reading lines back by time.
Not responsible for: the counters (`gauges` of a router and an instance), when a line is written (host.py),
    CPU time (cpu_time.py).

    gauges: counters that only grow --difference over a second--> rates --> NAME.jsonl
    loads: rows that enter and wait, by operator, of a router           --> NAME.inbox.jsonl
                                                             at 5 MB --> NAME.1.jsonl, replacing the last

The same lines go to the controller over the wire (gauges.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from tiercel.core.model.topology import operator_of, site_of
from tiercel.core.router.load_sample import InboxLoad
from tiercel.runtime.process.cpu_time import CpuTime, cores_here
from tiercel.runtime.replication.primary import Replication

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 5 * 1024 * 1024  # some eight hours of one process; twice that is kept
BLOCK_BYTES = 64 * 1024  # read at once from the end of a file
OVERLAP_S = 10  # two incarnations of a process may write side by side for a moment
SETTLED_S = 1.5  # older seconds are complete: every process has written its line, or never will


@runtime_checkable
class Measured(Protocol):
    """A machine with counters."""

    def gauges(self) -> Mapping[str, float]:
        """Counters that only grow (rows, outputs, waited_ms, waited) and values of now (all others)."""


@runtime_checkable
class Loaded(Protocol):
    """A machine that other machines read from: a router."""

    def loads(self) -> Mapping[str, InboxLoad]:
        """The load of each operator here; called once a second."""


LinkLine = tuple[float | None, float, float]  # round trip in ms, bytes per second sent and received


class MetricsLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process in one second."""

    at_ms: int
    site: str
    process: str
    kind: str  # router | instance | inbox (one operator at a router)
    operator: str | None
    rate: float  # rows per second
    outputs: float  # per second
    latency_ms: float | None  # from a row's log time until its processing began; None: no rows
    lag: int | None  # rows in the inboxes that were not processed: all of a site's, or those of an instance
    state_keys: int | None
    state_bytes: int | None  # estimated from a few keys
    busy: float  # share of the time in which its loop had work
    moves: int  # under way
    hot_keys: int | None = None  # decoded in memory; the others are read back when they are needed
    read_back: float | None = None  # keys per second
    replica: str | None = None  # that follows it; empty: none does now; None: the deployment has no replicas
    replica_behind: int | None = None  # committed batches that it has not acknowledged
    unexpected: int = 0  # messages that no transition of a move allows, since the process started
    cpu: float | None = None  # share of the time in which its loop had a core
    stolen: float | None = None  # share of the time in which its loop waited for a core; None: not measured
    cores: int | None = None  # that it may use
    arrivals: float | None = None  # inbox: rows per second that entered the deployment here
    oldest_ms: float | None = None  # inbox: age of the oldest row that was not processed
    heavy_slots: dict[int, float] | None = None  # inbox: rows per second that entered here, sampled
    heavy_keys: list[tuple[bytes, float]] | None = None  # likewise, heaviest first
    readers: dict[str, tuple[float, int, float]] | None = None  # instance -> arrivals, lag, oldest_ms
    sent_on: list[tuple[bytes, int]] | None = None  # inbox: keys with an owner elsewhere -> rows since
    links: dict[str, LinkLine] | None = None  # router: other sites whose routers are connected
    executor: str | None = None  # of Spark, that runs it
    gauges: float | None = None  # share of the time that it spent on the lines of the second before


class Meter:
    """Writes the lines of one process."""

    def __init__(
        self, directory: Path, name: str, machine: object, replication: Replication | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._machine = machine if isinstance(machine, Measured) else None
        self._loaded = machine if isinstance(machine, Loaded) else None
        self._cpu = CpuTime()
        self._loads: Mapping[str, InboxLoad] = {}
        self._replication = replication
        self._second = int(time.time())
        self._path = directory / f"{name}.jsonl"
        self._inbox_path = directory / f"{name}.inbox.jsonl"
        self._at_s = time.monotonic()
        self._busy_s = 0.0
        self._before: Mapping[str, float] = {}
        self.unexpected = 0
        self.executor: str | None = None
        self.last: MetricsLine | None = None  # the line of the last second

    def is_due(self) -> bool:
        """Whether a second has begun whose line is not written."""
        return self._machine is not None and int(time.time()) != self._second

    def tick(
        self, busy_s: float, links: dict[str, LinkLine] | None = None, spent: float | None = None
    ) -> list[bytes]:
        """Write the lines of a second, and return them as they are written; none if it is not due."""
        if self._machine is None or not self.is_due():
            return []
        self._second = int(time.time())
        return self.write(self._machine.gauges(), busy_s, links, spent)

    def write(
        self,
        gauges: Mapping[str, float],
        busy_s: float,
        links: dict[str, LinkLine] | None = None,
        spent: float | None = None,
    ) -> list[bytes]:
        """Write the lines, and return them."""
        now_s = time.monotonic()
        took_s = max(now_s - self._at_s, 1e-3)
        line = self.last = self._line(gauges, busy_s, took_s)
        spent = None if spent is None else round(spent, 5)
        more = {"links": links or None, "gauges": spent, "executor": self.executor}
        mine = [msgspec.json.encode(msgspec.structs.replace(line, **more))]
        inboxes = self._inbox_lines(self._loaded.loads(), took_s) if self._loaded is not None else []
        of_inboxes = [msgspec.json.encode(line) for line in inboxes]
        self._at_s, self._busy_s, self._before = now_s, busy_s, gauges
        try:
            _append(self._path, mine)
            if of_inboxes:
                _append(self._inbox_path, of_inboxes)
        except OSError as error:  # a full disk is no reason to stop working
            log.warning("%s cannot write its metrics: %s", self._name, error)
        return mine + of_inboxes

    def _inbox_lines(self, loads: Mapping[str, InboxLoad], took_s: float) -> list[MetricsLine]:
        """One line for each operator that rows enter for, or wait for."""
        now_ms = int(time.time() * 1e3)
        lines = []
        for operator, load in loads.items():
            before = self._loads.get(operator)
            readers: dict[str, tuple[float, int, float]] = {}
            for name, reader in load.readers.items():
                known = before.readers.get(name) if before is not None else None
                arrived = reader.arrived - (known.arrived if known is not None else 0)
                waits_ms = float(now_ms - reader.oldest_at_ms) if reader.oldest_at_ms else 0.0
                readers[name] = (round(max(0, arrived) / took_s, 1), reader.lag_rows, max(0.0, waits_ms))
            entered = load.entered - (before.entered if before is not None else 0)
            lines.append(
                MetricsLine(
                    at_ms=now_ms,
                    site=self._name,
                    process=self._name,
                    kind="inbox",
                    operator=operator,
                    rate=round(sum(reader[0] for reader in readers.values()), 1),
                    outputs=0.0,
                    latency_ms=None,
                    lag=sum(reader[1] for reader in readers.values()),
                    state_keys=None,
                    state_bytes=None,
                    busy=0.0,
                    moves=0,
                    arrivals=round(max(0, entered) / took_s, 1),
                    oldest_ms=max((reader[2] for reader in readers.values()), default=0.0),
                    heavy_slots=load.slots,
                    heavy_keys=load.keys,
                    readers=readers,
                    sent_on=load.sent_on or None,
                )
            )
        self._loads = loads
        return lines

    def _line(self, gauges: Mapping[str, float], busy_s: float, took_s: float) -> MetricsLine:
        cpu, stolen = self._cpu.shares(took_s)
        grown = {name: value - self._before.get(name, 0) for name, value in gauges.items()}
        is_instance = "@" in self._name
        waited = grown.get("waited", 0)
        replica, behind = (None, None) if self._replication is None else self._replication.progress()
        line = MetricsLine(
            at_ms=int(time.time() * 1e3),
            site=site_of(self._name) if is_instance else self._name,
            process=self._name,
            kind="instance" if is_instance else "router",
            operator=operator_of(self._name) if is_instance else None,
            rate=round(grown.get("rows", 0) / took_s, 1),
            outputs=round(grown.get("outputs", 0) / took_s, 1),
            latency_ms=round(grown["waited_ms"] / waited, 3) if waited else None,
            lag=_whole(gauges.get("lag")),
            state_keys=_whole(gauges.get("state_keys")),
            state_bytes=_whole(gauges.get("state_bytes")),
            busy=round(min(1.0, (busy_s - self._busy_s) / took_s), 4),
            moves=int(gauges.get("moves", 0)),
            hot_keys=_whole(gauges.get("hot_keys")),
            read_back=round(grown["read_back"] / took_s, 1) if "read_back" in grown else None,
            replica=replica,
            replica_behind=behind,
            unexpected=self.unexpected,
            cpu=cpu,
            stolen=stolen,
            cores=cores_here(),
        )
        return line


def _append(path: Path, lines: Sequence[bytes]) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b"".join(line + b"\n" for line in lines))
        size = file.tell()
    if size > FILE_BYTES_MAX:
        path.replace(path.with_suffix(".1.jsonl"))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def settled_until_s() -> int:
    """The last second whose lines will not change any more."""
    return int(time.time() - SETTLED_S)


def first_second(directory: Path) -> int:
    """The second of the oldest line that is kept; now, if there is none."""
    oldest = [line.at_ms // 1000 for line in map(_first_line, _files(directory)) if line is not None]
    return min(oldest, default=settled_until_s())


def read_lines(directory: Path, after_s: int, until_s: int) -> list[MetricsLine]:
    """Lines of the seconds `after_s < second <= until_s`, by time and process: each time the same."""
    found = {
        (line.at_ms, line.process, line.kind, line.operator or ""): line
        for path in _files(directory)
        for line in _lines_since(path, after_s)
        if after_s < line.at_ms // 1000 <= until_s
    }
    return [found[key] for key in sorted(found)]


def last_lines(directory: Path) -> dict[str, MetricsLine]:
    """The line of each process that has written one a moment ago."""
    now_s = int(time.time())
    lines = read_lines(directory, now_s - OVERLAP_S, now_s + 1)
    return {line.process: line for line in lines if line.kind != "inbox"}


def _files(directory: Path) -> list[Path]:
    """Newer files first, so that a file replaced in between is read twice, and not missed."""
    return sorted(directory.glob("*.jsonl"), key=lambda path: path.name.endswith(".1.jsonl"))


def _lines_since(path: Path, after_s: int) -> Iterator[MetricsLine]:
    """Lines from the newest one backwards: a reader that keeps up reads and decodes only a few."""
    for text in _lines_backwards(path):
        line = _decoded(text)
        if line is not None:
            if line.at_ms // 1000 <= after_s - OVERLAP_S:
                return
            yield line


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, last one first. It is read in blocks from its end."""
    try:
        with path.open("rb") as file:
            left, rest = file.seek(0, 2), b""
            while left:
                size = min(left, BLOCK_BYTES)
                left -= size
                file.seek(left)
                lines = (file.read(size) + rest).split(b"\n")
                rest = lines[0]
                yield from (line for line in reversed(lines[1:]) if line)
            if rest:
                yield rest
    except FileNotFoundError:
        return  # it was replaced in this moment


def _first_line(path: Path) -> MetricsLine | None:
    return next(filter(None, map(_decoded, _content(path).splitlines())), None)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""  # it was replaced in this moment


def _decoded(text: bytes) -> MetricsLine | None:
    try:
        return msgspec.json.decode(text, type=MetricsLine)
    except msgspec.DecodeError:
        return None  # a process died while it wrote this
