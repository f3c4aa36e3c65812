"""The declared graph of streams and operators, and the topology and manifest made from it.

Responsible for: names, defaults, refusing what cannot work, comparing with the deployment in a directory.
Not responsible for: the objects that users hold (streams.py), running it (deployment.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import Key
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.config import Listening, _unknown_site
from tiercel.runtime.deployment import Durability, Manifest, StreamFacts, VariableFacts, dead_letter_stream
from tiercel.spark.operators.fingerprint import code_digest
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import InputPlan
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, RowCodec, Schema
from tiercel.spark.state.declared_state import DeclaredState
from tiercel.spark.state.external_state import PackedState
from tiercel.spark.state.schema_evolution import StatePlan, next_facts

GAP = "5 seconds"  # numbers of a device may be missing for so long
WATERMARK = "spark.watermarkDelayMs"  # in the metadata of a column

_UNITS_MS = {"millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


@dataclasses.dataclass(frozen=True)
class StreamDeclaration:
    """A stream as it was declared."""

    name: str
    codec: RowCodec
    home: str
    delay_ms: int | None = None
    written_by: str = ""
    logged: bool = False
    idle_ms: int | None = None
    images: bool = False
    dead_letters_of: str = ""
    outputs_at: str = "home"
    gap_ms: int | None = None
    first_number: int = 1
    in_query: bool = False  # an operator with timers, inside a user's query, writes it


@dataclasses.dataclass(frozen=True)
class OperatorDeclaration:
    """An operator as it was declared."""

    operator: Operator
    plan: OperatorPlan
    initial: DataFrame | PackedState | None = None
    state: DeclaredState = dataclasses.field(default_factory=DeclaredState)
    resources: ResourceProfile | None = None  # of the tasks of its instances


class Graph:
    """All declarations so far."""

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
        """Add a stream that feeds write, and a stream for the rows that they refuse."""
        self.add_stream(declared)
        name, codec = dead_letter_stream(declared.name), RowCodec(FEED_DEAD_LETTER_SCHEMA)
        self.streams[name] = StreamDeclaration(
            name, codec, declared.home, logged=True, dead_letters_of=declared.name
        )

    def refuse_dead_letters(self, stream: str, operator: str) -> None:
        """Refuse an operator that reads dead letters: they are in a log, and go to no operator."""
        declared = self.streams[stream]
        if declared.dead_letters_of or stream == f"{declared.written_by}.dead":
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

    def new_name(self, name: str) -> str:
        """This name, or the first of NAME-2, NAME-3, ... that nothing has."""
        taken = self.streams.keys() | self.operators.keys()
        names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        return next(one for one in names if one not in taken)

    def check_site(self, site: str) -> str:
        if site not in self.sites:
            raise _unknown_site("", site, self.sites)
        return site

    def check_operator(self, name: str) -> None:
        if name not in self.operators:
            known = ", ".join(sorted(self.operators))
            raise UserError(f"unknown operator {name!r}", expected=f"one of: {known}")

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
        """The plan of an operator's instances. An output that no operator reads needs no key."""
        plan = self.operators[operator].plan
        output = self.operators[operator].operator.output
        if any(output in other.operator.inputs for other in self.operators.values()):
            return plan
        return dataclasses.replace(plan, output=RowCodec(plan.output.schema))

    def keep_initial(self, found: Manifest, is_given: Callable[[str], bool]) -> None:
        """Keep the input of an operator that has got its initial state, also if it is not declared again."""
        for name, declared in list(self.operators.items()):
            stream = f"{name}.initial"
            facts = found.streams.get(stream)
            if facts is None or stream in self.streams or not is_given(name):
                continue
            codec = RowCodec.of(facts)
            read = InputPlan(codec, (), initial=True, images=facts.images)
            plan = dataclasses.replace(declared.plan, inputs=(*declared.plan.inputs, read))
            inputs = (*declared.operator.inputs, stream)
            operator = msgspec.structs.replace(declared.operator, inputs=inputs)
            self.operators[name] = dataclasses.replace(declared, operator=operator, plan=plan)
            home = found.topology.streams[stream].home
            self.add_stream(StreamDeclaration(stream, codec, home, images=facts.images))

    def state_facts(self, found: Manifest | None) -> dict[str, dict[str, VariableFacts]]:
        """How each operator's state is stored from now on; updates the plans of the operators."""
        known = {} if found is None else found.state
        for name, declared in self.operators.items():
            upgrades = declared.plan.state.upgrades
            facts = next_facts(name, declared.state, known.get(name), upgrades)
            plan = dataclasses.replace(declared.plan, state=StatePlan(facts, upgrades))
            self.operators[name] = dataclasses.replace(declared, plan=plan)
        return {name: declared.plan.state.facts for name, declared in self.operators.items()}

    # -- topology and manifest ----------------------------------------------------------------------

    def resources(self) -> dict[str, ResourceProfile]:
        """The ResourceProfiles of operators that have one."""
        return {name: o.resources for name, o in self.operators.items() if o.resources is not None}

    def put_in_query(self, stream: str) -> None:
        """An operator inside a user's query writes this stream: outputs of its timers wait for a batch."""
        self.streams[stream] = dataclasses.replace(self.streams[stream], in_query=True)

    def topology(self) -> Topology:
        streams = {
            d.name: Stream(
                d.name,
                d.home,
                d.logged,
                {},
                d.delay_ms,
                d.idle_ms,
                bool(d.dead_letters_of),
                d.outputs_at,
                d.gap_ms,
                d.first_number,
                dead_letter_stream(d.name) if d.codec.sequence else "",
                d.in_query,
            )
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
        """The manifest of this graph.

        Compared with an existing one, only streams and operators may be new.
        """
        facts = {
            d.name: StreamFacts(
                d.codec.schema.json(),
                d.codec.key,
                d.codec.event_time,
                tuple(self.sites),
                d.written_by,
                d.images,
                d.dead_letters_of,
                d.codec.sequence,
            )
            for d in self.streams.values()
        }
        made = Manifest(uuid.uuid4().hex, self.topology(), facts, settings, durability, **listening._asdict())
        made = made if found is None else self._continued(made, found)
        made = msgspec.structs.replace(made, code={n: code_digest(d.plan) for n, d in self.operators.items()})
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
            named = (facts.key, facts.event_time, facts.sequence)
            if not alike or (now.key, now.event_time, now.sequence) != named:
                refuse(f"its stream {name!r} has another schema, key, event time or sequence")
            # the site of its log, and the default site of producers, do not change
            facts_by_stream[name] = msgspec.structs.replace(now, sites=facts.sites)
            if name in found.topology.streams:
                log = found.topology.streams[name]
                if log.outputs_at not in ("home", streams[name].outputs_at):
                    refuse(f"its stream {name!r} has outputs_at={log.outputs_at!r}: there are such logs")
                streams[name] = msgspec.structs.replace(streams[name], home=log.home)
        operators = dict(made.topology.operators)
        for name, was in found.topology.operators.items():
            if name not in operators:
                refuse(f"it has the operator {name!r}, which is not declared")
            now_operator = operators[name]
            for fact in ("inputs", "output", "slots", "time_mode", "broadcast"):
                if getattr(now_operator, fact) != getattr(was, fact):
                    refuse(f"its operator {name!r} has other {fact}: {getattr(was, fact)!r}")
            # the first instances of its slots do not change; live.scale changes how many there are now
            operators[name] = msgspec.structs.replace(now_operator, instances=was.instances)
        topology = Topology(found.topology.sites, streams, operators)
        return msgspec.structs.replace(
            made, id=found.id, topology=topology, streams=facts_by_stream, given=found.given
        )


# -- small parsers of what users write --------------------------------------------------------


def codec_of(
    what: str, schema: Schema, key: Sequence[str], event_time: str = "", sequence: str = ""
) -> RowCodec:
    """The codec of a stream, or an error that names the stream if its columns are wrong."""
    parsed = parse_schema(schema, f"schema of {what}")
    try:
        return RowCodec(parsed, key, event_time, sequence=sequence)
    except UserError as error:
        hint = error.hint or f"change the schema or what names its columns: {parsed.simpleString()}"
        raise UserError(f"{what}: {error.what}", expected=error.expected, hint=hint) from error


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


def parse_gap(
    stream: str, sequence: str, gap: str | float | timedelta | None, first_number: object
) -> int | None:
    """How long numbers of a device may be missing, in ms; None: devices do not number their rows."""
    if type(first_number) is not int:
        raise UserError(f"stream {stream!r}: first_number {first_number!r}", expected="a whole number")
    if not sequence:
        if gap is not None:
            what = f"stream {stream!r}: gap = {gap!r} without sequence="
            raise UserError(what, expected="sequence='column', in which devices number their rows")
        return None
    gap_ms = parse_delay(GAP if gap is None else gap, "gap")
    if gap_ms == 0:
        raise UserError(f"stream {stream!r}: gap = {gap!r}", expected="a time above 0")
    return gap_ms


def _without_delay(schema: str) -> object:
    """A stream's schema without its DataFrame's watermark, which Spark stores there."""
    found = msgspec.json.decode(schema)
    for column in found["fields"]:
        column.get("metadata", {}).pop(WATERMARK, None)
    return found


def watermark_delay_ms(frame: DataFrame, column: str) -> int | None:
    """The delay of `withWatermark`, which Spark stores in the column's metadata; None if there is none."""
    if column not in frame.columns:
        return None
    delay = frame.schema[column].metadata.get(WATERMARK)
    return None if delay is None else int(delay)


def key_packer(codec: RowCodec) -> Callable[[object], Key]:
    """A function from a key as users write it, a value or a tuple of values, to its form in the core."""
    fields: list[StructField] = [codec.schema[name] for name in codec.key]
    pack = RowCodec(StructType(fields), codec.key).pack  # made once, because that is slow

    def key_bytes(key: object) -> Key:
        values = key if isinstance(key, tuple | list) else (key,)
        if len(values) != len(fields):
            names = ", ".join(codec.key)
            raise UserError(f"key {key!r} has {len(values)} columns", expected=f"{len(fields)}: ({names})")
        return pack(tuple(values))[0]

    return key_bytes


def check_choice(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{what} {value!r}", expected=f"one of: {', '.join(allowed)}")


def check_whole(what: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UserError(f"{what}: {value!r}", expected=f"a whole number, {least} or more")
