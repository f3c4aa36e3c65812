"""The topology: sites, streams and operators of a deployment, and their names.

Responsible for: static facts and the naming scheme. The name of an instance contains its site.
Not responsible for: the owners of keys (routing.py), which change; the topology does not.
"""

from __future__ import annotations

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.settings import Settings

ON_ERROR = ("dead-letter", "fail", "retry")
OUTPUTS_AT = ("home", "site", "both")


class Stream(msgspec.Struct, frozen=True):
    """A named flow of tuples. `home` is the one site that holds its log for subscribers."""

    name: str
    home: str
    logged: bool = True
    producers: dict[str, str] = {}  # producers that give watermarks -> their site; the stream waits for all
    delay_ms: int | None = None  # watermark = newest event time at a site - this; None: producers give it
    idle_ms: int | None = None  # the watermark ignores a site without rows for this long; None: it waits
    # Its log holds rows that feeds refused, not outputs of an operator. Stored under the name it always had.
    holds_dead_letters: bool = msgspec.field(default=False, name="letters")
    outputs_at: str = "home"  # where its log is: at its home, at each site that makes its rows, or both
    gap_ms: int | None = None  # devices number its rows, and a gap closes after this; None: they do not
    first_number: int = 1  # of each device
    dead_letters: str = ""  # stream for numbers that are missing or went backwards
    in_query: bool = False  # an operator inside a user's query writes it: outputs of timers wait for a batch

    def own_log_at(self, site: str) -> str:
        """The name of the log of what this site makes; empty: there is no such log."""
        return "" if not self.logged or self.outputs_at == "home" else f"{self.name}@{site}"

    @property
    def is_numbered(self) -> bool:
        """Whether devices number the rows, so that any producer at any site may bring them."""
        return self.gap_ms is not None


class Operator(msgspec.Struct, frozen=True):
    """An operator, the streams that it reads, and the stream that it writes."""

    name: str
    inputs: tuple[str, ...]
    output: str
    instances: tuple[str, ...]  # the initial ones; slots are spread over them
    slots: int = 4096
    deterministic: bool = True
    dead_letters: str = ""  # stream for rows that user code refused
    time_mode: str = "none"  # none | processingTime | eventTime
    on_error: str = "dead-letter"  # dead-letter | fail | retry: the treatment of a call that raised
    retries: int = 0  # with retry: the number of immediate retries; then the row is a dead letter
    memory_bytes_max: int = 0  # of each instance's decoded state; 0: as the settings say
    late_rows: bool = False  # user code sees rows behind the watermark too, and refuses them itself
    broadcast: str = ""  # a small stream whose last row each row of the operator carries

    @property
    def numbers_inputs(self) -> bool:
        """Whether rows carry the number of their input, and with a broadcast stream its last row."""
        return len(self.inputs) > 1 or bool(self.broadcast)

    def memory_limit(self, settings: Settings) -> int:
        """Bytes of decoded state that an instance may hold in memory; 0: no limit."""
        return self.memory_bytes_max or settings.memory_bytes_max


class Topology(msgspec.Struct, frozen=True):
    """All of a deployment's static facts."""

    sites: dict[str, str | None]  # site -> parent site
    streams: dict[str, Stream]
    operators: dict[str, Operator]

    def validate(self) -> Topology:
        """Refuse ambiguous names, and names with characters that separate names of parts and outboxes."""
        for name in [*self.sites, *self.streams, *self.operators]:
            if not name or set(name) & set("|@#>~"):
                raise InvalidRequest(f"the name {name!r}", "expected one without any of | @ # > ~")
        for name in self.operators.keys() & self.streams.keys():
            raise InvalidRequest(f"{name!r} is a stream and an operator", "expected different names")
        for operator in self.operators.values():
            if operator.on_error not in ON_ERROR:
                raise InvalidRequest(
                    f"operator {operator.name}: on_error {operator.on_error!r}",
                    f"expected one of: {', '.join(ON_ERROR)}",
                )
            if operator.retries < 0:
                raise InvalidRequest(
                    f"operator {operator.name}: {operator.retries} retries", "expected 0 or more"
                )
            if operator.memory_bytes_max < 0:
                what = f"operator {operator.name}: memory_bytes_max {operator.memory_bytes_max}"
                raise InvalidRequest(what, "expected 0 (as the settings say) or bytes")
        for stream in self.streams.values():
            if stream.outputs_at not in OUTPUTS_AT:
                what = f"stream {stream.name}: outputs_at {stream.outputs_at!r}"
                raise InvalidRequest(what, f"expected one of: {', '.join(OUTPUTS_AT)}")
            if stream.gap_ms is not None and stream.gap_ms <= 0:
                raise InvalidRequest(f"stream {stream.name}: gap {stream.gap_ms} ms", "expected more than 0")
        return self

    def broadcast_to(self, stream: str) -> tuple[str, ...]:
        """The operators whose rows carry the last row of this stream."""
        return tuple(o.name for o in self.operators.values() if o.broadcast == stream)

    def is_above(self, site: str, other: str) -> bool:
        """Whether a site is the parent of another one, or further up."""
        above = self.sites[other]
        return above is not None and (above == site or self.is_above(site, above))

    def logs_at(self, site: str) -> tuple[str, ...]:
        """The output logs of a site: of streams that have their home there, and of what the site makes."""
        streams = [stream for stream in self.streams.values() if stream.logged]
        at_home = [s.name for s in streams if s.home == site and s.outputs_at != "site"]
        return (*at_home, *(log for s in streams if (log := s.own_log_at(site))))

    def logs_of(self, stream: str) -> dict[str, str]:
        """The output logs of a stream, each with its site."""
        facts = self.streams.get(stream)
        if facts is None or not facts.logged:
            return {}
        logs = {log: site for site in self.sites if (log := facts.own_log_at(site))}
        return logs if facts.outputs_at == "site" else {facts.name: facts.home, **logs}

    def consumers(self, stream: str) -> tuple[str, ...]:
        return tuple(o.name for o in self.operators.values() if stream in o.inputs)

    def timed_inputs(self, operator: str) -> tuple[str, ...]:
        """The inputs whose watermark follows from their event times."""
        inputs = [self.streams[name] for name in self.operators[operator].inputs if name in self.streams]
        return tuple(stream.name for stream in inputs if stream.delay_ms is not None)

    def late_inputs(self, operator: str, *, any_site: bool = False) -> frozenset[int]:
        """The inputs whose late rows are dropped here: this is the first event-time operator behind them.

        `any_site`: event time does not wait for a site that is cut off, so any row of it may be late.
        """
        facts = self.operators[operator]
        if facts.time_mode != "eventTime" or facts.late_rows:
            return frozenset()
        if any_site:
            return frozenset(range(len(facts.inputs)))
        return frozenset(n for n, stream in enumerate(facts.inputs) if self._has_late_rows(stream))

    def _has_late_rows(self, stream: str) -> bool:
        if stream in self.streams and self.streams[stream].delay_ms is not None:
            return True
        writer = self.producer_of(stream)
        if writer is None or self.operators[writer].time_mode == "eventTime":
            return False
        return any(self._has_late_rows(name) for name in self.operators[writer].inputs)

    def producer_of(self, stream: str) -> str | None:
        """The operator that writes a stream; None for a stream that producers write."""
        for operator in self.operators.values():
            if operator.output == stream:
                return operator.name
        return None

    def operator(self, name: str) -> Operator:
        if name not in self.operators:
            raise InvalidRequest.unknown("operator", name, sorted(self.operators))
        return self.operators[name]

    def site(self, name: str) -> str:
        if name not in self.sites:
            raise InvalidRequest.unknown("site", name, sorted(self.sites))
        return name


def instance_name(operator: str, site: str, number: int) -> str:
    return f"{operator}@{site}#{number}"


def site_of(instance: str) -> str:
    return instance.rpartition("@")[2].partition("#")[0]


def operator_of(instance: str) -> str:
    return instance.rpartition("@")[0]
