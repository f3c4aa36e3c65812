"""What was declared: streams, operators, and who reads what. Becomes a topology and a manifest.

Responsible for: names, defaults, refusing what cannot work, comparing with what a directory holds.
Not responsible for: the objects users hold (streams.py), running it (live.py).
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from tiercel.core.faults import InvalidRequest
from tiercel.core.records import Key
from tiercel.core.settings import Settings
from tiercel.core.topology import Operator, Stream, Topology, instance_name
from tiercel.errors import UserError
from tiercel.runtime.addresses import EVERY_ADDRESS
from tiercel.runtime.place import Durability, Manifest, StreamFacts, VariableFacts, letters_of
from tiercel.runtime.tls import TlsFiles, TlsWish, parse_tls
from tiercel.spark.border import InputPlan, OperatorPlan
from tiercel.spark.kept_state import PackedState
from tiercel.spark.processors import DeclaredState
from tiercel.spark.schema import FEED_LETTER_SCHEMA, Columns, Schema
from tiercel.spark.upgrading import StatePlan, continued

TIME_MODES = ("none", "processingTime", "eventTime")
ON_ERROR = ("dead-letter", "fail", "retry")

PORT_MAX = 65_535
WATERMARK = "spark.watermarkDelayMs"  # in the metadata of a column

_UNITS_MS = {"millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


@dataclasses.dataclass(frozen=True)
class StreamDeclaration:
    """A stream as it was declared."""

    name: str
    columns: Columns
    home: str
    delay_ms: int | None = None
    written_by: str = ""
    logged: bool = False
    idle_ms: int | None = None
    images: bool = False
    letters_of: str = ""


@dataclasses.dataclass(frozen=True)
class OperatorDeclaration:
    """An operator as it was declared."""

    operator: Operator
    plan: OperatorPlan
    initial: DataFrame | PackedState | None = None
    state: DeclaredState = dataclasses.field(default_factory=DeclaredState)


class Listening(NamedTuple):
    """The address of every process, and what routers have of their own: a fixed port, a known address."""

    bind: str
    ports: dict[str, int]
    advertise: dict[str, str]
    tls: TlsFiles | Literal[False] | None = None  # None: as it was
    driver: str = ""  # its host: others are reached at their address toward it

    @classmethod
    def of(
        cls,
        bind: str,
        ports: Mapping[str, int] | None,
        advertise: Mapping[str, str] | None,
        tls: TlsWish,
        sites: Mapping[str, str | None],
    ) -> Listening:
        by_site = parse_ports(ports or {}, sites), parse_advertise(advertise or {}, sites)
        return cls(bind, *by_site, parse_tls(tls))

    def applied(self, driver: str, found: Manifest | None) -> Listening:
        """For this driver. A deployment that has TLS keeps it: nobody loses it by saying nothing."""
        tls = self.tls
        if tls is None and found is not None and found.tls is not None:
            tls = found.tls.check()
        return self._replace(driver=driver, tls=tls or None)


class Graph:
    """Everything that was declared so far."""

    def __init__(self, sites: Mapping[str, str | None]) -> None:
        self.sites = dict(sites)
        self.streams: dict[str, StreamDeclaration] = {}
        self.operators: dict[str, OperatorDeclaration] = {}

    @property
    def root(self) -> str:
        return next(iter(self.sites))

    def add_stream(self, declared: StreamDeclaration) -> None:
        self._check_name("stream", declared.name)
        self.streams[declared.name] = declared

    def add_input(self, declared: StreamDeclaration) -> None:
        """A stream that feeds write, and one for the rows they refuse: it is empty until there is one."""
        self.add_stream(declared)
        name, columns = letters_of(declared.name), Columns(FEED_LETTER_SCHEMA)
        self.streams[name] = StreamDeclaration(
            name, columns, declared.home, logged=True, letters_of=declared.name
        )

    def refuse_letters(self, stream: str, operator: str) -> None:
        """Dead letters are in a log, and go to no operator."""
        declared = self.streams[stream]
        if declared.letters_of or stream == f"{declared.written_by}.dead":
            raise UserError(
                f"operator {operator!r} would read the dead letters {stream!r}",
                expected="a stream of rows with a key",
                hint="read them as they are: dead_letters.dataframe() or dead_letters.subscribe()",
            )

    def add_operator(self, declared: OperatorDeclaration) -> None:
        self._check_name("operator", declared.operator.name)
        self.operators[declared.operator.name] = declared

    def _check_name(self, what: str, name: str) -> None:
        if name in self.streams or name in self.operators:
            raise UserError(f"{name!r} is declared twice", expected=f"a new name for this {what}")
        if not name or set(name) & set("|@#>~/"):
            raise UserError(f"{what} name {name!r}", expected="a name without any of | @ # > ~ /")

    def check_site(self, site: str) -> str:
        if site not in self.sites:
            raise _unknown_site("", site, self.sites)
        return site

    def instances(self, operator: str, wanted: Any) -> tuple[str, ...]:
        """The names of so many instances at each site."""
        if wanted is not None and not isinstance(wanted, Mapping):
            example = f'{{"{self.root}": 2}}'
            raise UserError(
                f"instances of {operator!r}: {wanted!r}", expected=f"how many at which site, as in {example}"
            )
        counts = {self.root: 1} if wanted is None else dict(wanted)
        for site, count in counts.items():
            self.check_site(site)
            check_whole(f"instances of {operator!r} at {site!r}", count, 0)
        names = tuple(
            instance_name(operator, s, n) for s, count in counts.items() for n in range(1, count + 1)
        )
        if not names:
            raise UserError(f"operator {operator!r} would have no instance", expected="at least one")
        return names

    def plan_of(self, operator: str) -> OperatorPlan:
        """What its instances need. The key of an output that no operator reads is not worth making."""
        plan = self.operators[operator].plan
        output = self.operators[operator].operator.output
        if any(output in other.operator.inputs for other in self.operators.values()):
            return plan
        return dataclasses.replace(plan, output=Columns(plan.output.schema))

    def keep_initial(self, found: Manifest, is_given: Callable[[str], bool]) -> None:
        """An operator that got its initial state has it as an input for good; it need not be said again."""
        for name, declared in list(self.operators.items()):
            stream = f"{name}.initial"
            facts = found.streams.get(stream)
            if facts is None or stream in self.streams or not is_given(name):
                continue
            columns = Columns.of(facts)
            read = InputPlan(columns, (), initial=True, images=facts.images)
            plan = dataclasses.replace(declared.plan, inputs=(*declared.plan.inputs, read))
            inputs = (*declared.operator.inputs, stream)
            operator = msgspec.structs.replace(declared.operator, inputs=inputs)
            self.operators[name] = dataclasses.replace(declared, operator=operator, plan=plan)
            home = found.topology.streams[stream].home
            self.add_stream(StreamDeclaration(stream, columns, home, images=facts.images))

    def state_facts(self, found: Manifest | None) -> dict[str, dict[str, VariableFacts]]:
        """How each operator's state is stored from now on; its plan is told."""
        known = {} if found is None else found.state
        for name, declared in self.operators.items():
            upgrades = declared.plan.state.upgrades
            facts = continued(name, declared.state, known.get(name), upgrades)
            plan = dataclasses.replace(declared.plan, state=StatePlan(facts, upgrades))
            self.operators[name] = dataclasses.replace(declared, plan=plan)
        return {name: declared.plan.state.facts for name, declared in self.operators.items()}

    # -- what it becomes ----------------------------------------------------------------------

    def topology(self) -> Topology:
        streams = {
            d.name: Stream(d.name, d.home, d.logged, {}, d.delay_ms, d.idle_ms, bool(d.letters_of))
            for d in self.streams.values()
        }
        operators = {name: d.operator for name, d in self.operators.items()}
        try:
            return Topology(self.sites, streams, operators).validate()
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal

    def manifest(
        self, settings: Settings, durability: Durability, listening: Listening, found: Manifest | None
    ) -> Manifest:
        """The manifest of this graph; over one that was found, only streams and operators may be new."""
        facts = {
            d.name: StreamFacts(
                d.columns.schema.json(),
                d.columns.key,
                d.columns.event_time,
                tuple(self.sites),
                d.written_by,
                d.images,
                d.letters_of,
            )
            for d in self.streams.values()
        }
        made = Manifest(uuid.uuid4().hex, self.topology(), facts, settings, durability, **listening._asdict())
        made = made if found is None else self._continued(made, found)
        return msgspec.structs.replace(made, state=self.state_facts(found))

    def _continued(self, made: Manifest, found: Manifest) -> Manifest:
        def refuse(what: str) -> None:
            raise UserError(
                f"the storage belongs to another deployment: {what}",
                expected="the same sites, streams and operators as before, or more of them",
                hint="choose another storage=, or declare what it holds",
            )

        if made.topology.sites != found.topology.sites:
            refuse(f"its sites are {found.topology.sites}, not {made.topology.sites}")
        facts_by_stream, streams = dict(made.streams), dict(made.topology.streams)
        for name, facts in found.streams.items():
            if name not in made.streams:
                refuse(f"it has the stream {name!r}, which is not declared")
            now = made.streams[name]
            alike = _without_delay(now.schema) == _without_delay(facts.schema)
            if not alike or (now.key, now.event_time) != (facts.key, facts.event_time):
                refuse(f"its stream {name!r} has another schema, key or event time")
            # where its log is, and where producers begin that name no site, is history as well
            facts_by_stream[name] = msgspec.structs.replace(now, sites=facts.sites)
            if name in found.topology.streams:
                streams[name] = msgspec.structs.replace(streams[name], home=found.topology.streams[name].home)
        operators = dict(made.topology.operators)
        for name, was in found.topology.operators.items():
            if name not in operators:
                refuse(f"it has the operator {name!r}, which is not declared")
            now_operator = operators[name]
            for fact in ("inputs", "output", "slots", "time_mode"):
                if getattr(now_operator, fact) != getattr(was, fact):
                    refuse(f"its operator {name!r} has other {fact}: {getattr(was, fact)!r}")
            # where its slots began is history; live.scale changes how many instances there are now
            operators[name] = msgspec.structs.replace(now_operator, instances=was.instances)
        topology = Topology(found.topology.sites, streams, operators)
        return msgspec.structs.replace(
            made, id=found.id, topology=topology, streams=facts_by_stream, given=found.given
        )


# -- small parsers of what users write --------------------------------------------------------


def columns_of(what: str, schema: Schema, key: Sequence[str], event_time: str = "") -> Columns:
    """The columns of a stream, and an error that says whose they are if they cannot be."""
    parsed = parse_schema(schema, f"schema of {what}")
    try:
        return Columns(parsed, key, event_time)
    except UserError as error:
        hint = error.hint or f"change the schema or what names its columns: {parsed.simpleString()}"
        raise UserError(f"{what}: {error.what}", expected=error.expected, hint=hint) from error


def _unknown_site(where: str, site: str, sites: Mapping[str, str | None]) -> UserError:
    hint = "sites are named once, where a deployment starts: tiercel.start(spark, sites=[...])"
    return UserError(f"{where}unknown site {site!r}", expected=f"one of: {', '.join(sites)}", hint=hint)


def parse_schema(schema: Schema, what: str) -> StructType:
    """A StructType, or DDL text as Spark reads it."""
    if isinstance(schema, StructType):
        return schema
    hint = "columns are written as in CREATE TABLE, types as Spark SQL names them"
    if not isinstance(schema, str):
        raise UserError(
            f"{what}: {schema!r}", expected="a StructType, or text like 'car string, speed double'", hint=hint
        )
    expected = "'name type, name type, ...', as in 'car string, speed double'"
    try:
        parsed = StructType.fromDDL(schema)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{what} {schema!r}: {reason}", expected=expected, hint=hint) from error
    if not isinstance(parsed, StructType):
        raise UserError(f"{what} {schema!r} is one type", expected=expected, hint=hint)
    return parsed


def parse_sites(sites: Sequence[str] | Mapping[str, str | None]) -> dict[str, str | None]:
    """`["cloud", "edge-1"]`: the first is the parent of the others; or a map from site to parent."""
    if isinstance(sites, str):
        sites = [sites]
    found: dict[str, str | None] = {}
    if isinstance(sites, Mapping):
        found.update(sites)
    else:
        found.update({site: None if n == 0 else sites[0] for n, site in enumerate(sites)})
    if not found:
        raise UserError("no site was named", expected='at least one, as in sites=["cloud"]')
    for site, parent in found.items():
        if type(site) is not str or not site or set(site) & set("|@#>~/"):
            raise UserError(f"site name {site!r}", expected="a name without any of | @ # > ~ /")
        if parent is not None and parent not in found:
            raise UserError(f"the parent {parent!r} of site {site!r} is no site", expected=", ".join(found))
    return found


def parse_ports(ports: Mapping[str, int], sites: Mapping[str, str | None]) -> dict[str, int]:
    """Site -> the port where its router listens."""
    if not isinstance(ports, Mapping):
        raise UserError(f"ports = {ports!r}", expected='a port for each site, as in ports={"cloud": 7400}')
    for site, port in ports.items():
        if site not in sites:
            raise _unknown_site("ports: ", site, sites)
        if type(port) is not int or not 0 <= port <= PORT_MAX:
            raise UserError(f"port {port!r} of site {site!r}", expected=f"0 (any that is free) to {PORT_MAX}")
    return dict(ports)


def parse_advertise(addresses: Mapping[str, str], sites: Mapping[str, str | None]) -> dict[str, str]:
    """Site -> the address at which its router is reached."""
    if not isinstance(addresses, Mapping):
        raise UserError(f"advertise = {addresses!r}", expected='addresses by site: {"cloud": "10.0.0.5"}')
    for site, address in addresses.items():
        if site not in sites:
            raise _unknown_site("advertise: ", site, sites)
        if type(address) is not str or address in EVERY_ADDRESS:
            what = f"advertise: {address!r} for site {site!r}"
            raise UserError(what, expected="an address or host name that others can dial")
    return dict(addresses)


def parse_delay(delay: str | float | timedelta, what: str = "delay") -> int:
    """`"10 seconds"`, a timedelta, or seconds; in ms."""
    given = delay
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if isinstance(delay, int | float) and not isinstance(delay, bool) and delay >= 0:
        return int(delay * 1000)
    if isinstance(delay, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", delay.lower())
        if found and found[2] in _UNITS_MS:
            return int(float(found[1]) * _UNITS_MS[found[2]])
    raise UserError(f"{what} {given!r}", expected='something like "10 seconds", a timedelta, or seconds')


def _without_delay(schema: str) -> object:
    """A stream's schema without its DataFrame's watermark, which Spark notes there: it may change."""
    found = msgspec.json.decode(schema)
    for column in found["fields"]:
        column.get("metadata", {}).pop(WATERMARK, None)
    return found


def watermark_delay_ms(frame: DataFrame, column: str) -> int | None:
    """The delay of `withWatermark`, which Spark notes at the column; None if there is none."""
    if column not in frame.columns:
        return None
    delay = frame.schema[column].metadata.get(WATERMARK)
    return None if delay is None else int(delay)


def key_packer(columns: Columns) -> Callable[[object], Key]:
    """From keys as users write them, a value or a tuple of them, to the form the core has them in."""
    fields: list[StructField] = [columns.schema[name] for name in columns.key]
    pack = Columns(StructType(fields), columns.key).pack  # made once: it takes longer than a thousand keys

    def key_bytes(key: object) -> Key:
        values = key if isinstance(key, tuple | list) else (key,)
        if len(values) != len(fields):
            names = ", ".join(columns.key)
            raise UserError(f"key {key!r} has {len(values)} columns", expected=f"{len(fields)}: ({names})")
        return pack(tuple(values))[0]

    return key_bytes


def check_choice(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{what} {value!r}", expected=f"one of: {', '.join(allowed)}")


def check_whole(what: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UserError(f"{what}: {value!r}", expected=f"a whole number, {least} or more")
