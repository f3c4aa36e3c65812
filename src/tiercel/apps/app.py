"""What an application is: options, a generator, a graph of operators, an oracle.

Responsible for: the interface `App`, and checking the options of an application.
Not responsible for: which applications exist (catalogue.py), running one (run.py), comparing (verdict.py).

A generator gives events in order. The moment of an event is a number that never falls: milliseconds of event
time, or the number of the event. An output says by a moment which event it waited for; its latency counts
from the time at which that event was due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tiercel import Live, LiveStream, UserError

SITE = "local"  # of the embedded deployment
POSITION = "_position"  # column of the oracle's inputs: the number of the row in its stream, from 0

Values = Sequence[Any]  # of one row, in the order of the columns
Event = tuple[int, str, tuple[Any, ...]]  # moment, input stream, row
Findings = Callable[[Values], str]
KeySet = Callable[[Any, Sequence[Event]], list[Any]]  # of the options and the events that were sent


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an application: whole numbers, floats and words with defaults and limits."""


@dataclass(frozen=True)
class Output:
    """How the rows of one output stream are compared, timed and shown."""

    identity: tuple[str, ...]  # columns that tell rows apart; the other columns are compared as values
    cause: Callable[[Values], int] | None = None  # moment of the event that a row waited for
    order: str = ""  # a column that never falls within a key, if rows of a key come in order
    finding: Findings | None = None  # what a row tells a person; empty: nothing
    key: str = ""  # a column that is the key of the operator that is changed, if there is one


@dataclass(frozen=True)
class Built:
    """The streams of an application in a deployment, by the names that events and outputs use."""

    inputs: Mapping[str, LiveStream]
    outputs: Mapping[str, LiveStream]
    operator: str  # whose keys move, which is scaled, and of which an instance is killed


O = TypeVar("O", bound=Options)  # noqa: E741


class App(ABC, Generic[O]):
    """One application. An object of it has no state."""

    name: ClassVar[str]
    about: ClassVar[str]  # one line for lists
    options: type[O]
    outputs: ClassVar[Mapping[str, Output]]  # all that it can have; its options may leave some out
    key_sets: ClassVar[Mapping[str, KeySet]] = {}  # sets of keys that can move together, besides slots

    def first_events(self, options: O, seed: int) -> Iterator[Event]:
        """Events that are sent as fast as possible before the load begins: they fill the state."""
        return iter(())

    @abstractmethod
    def generate(self, options: O, seed: int, rate: int) -> Iterator[Event]:
        """Events in order, without an end; `rate` of them are one second of event time."""

    def last_events(self, options: O, moment: int) -> list[Event]:
        """Events behind the last one, with a key of their own, that close every window."""
        return []

    def load_facts(self, options: O, rate: int) -> dict[str, float]:
        """What `rate` events a second mean in the words of the application."""
        return {}

    @abstractmethod
    def build(self, live: Live, options: O, instances: Mapping[str, int]) -> Built:
        """Declare streams and operators; the operator that is changed gets these instances."""

    @abstractmethod
    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: O
    ) -> Mapping[str, DataFrame]:
        """The expected rows of each output, as a batch job over all rows of each input and their `POSITION`.

        Rows of `last_events` are among the inputs.
        """


# -- options -------------------------------------------------------------------------------------


def parse_options(app: App[Any], given: Mapping[str, Any]) -> Any:
    """The options of an application with some values given, as text or as they are."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(app.options)}
    for name in given:
        if name not in fields:
            raise UserError(
                f"{app.name}: unknown option {name!r}",
                expected=f"one of: {', '.join(sorted(fields))}" if fields else "no option",
                hint="tiercel app list shows the options of every application",
            )
    for name, value in given.items():
        try:
            msgspec.convert({name: value}, app.options, strict=False)
        except msgspec.ValidationError as refusal:
            choices = _choices(fields[name])
            limits = str(refusal).partition(" - at ")[0].removeprefix("Expected ").replace("`", "")
            raise UserError(
                f"{app.name}: {name} = {value!r}",
                expected=f"one of: {', '.join(choices)}" if choices else limits,
                hint="tiercel app list shows the options of every application",
            ) from refusal
    return msgspec.convert(dict(given), app.options, strict=False)


def _choices(field: msgspec.structs.FieldInfo) -> list[str]:
    """The words that an option may be, if it is one of some."""
    kind = msgspec.inspect.type_info(field.type)
    return [str(value) for value in getattr(kind, "values", ())]


def described_options(app: App[Any]) -> dict[str, str]:
    """Option -> its default and its limits."""
    described = {}
    for field in msgspec.structs.fields(app.options):
        info = msgspec.inspect.type_info(field.type)
        kind = info.type if isinstance(info, msgspec.inspect.Metadata) else info
        least, most = getattr(kind, "ge", None), getattr(kind, "le", None)
        choices = getattr(kind, "values", None)
        limits = f"{least:,} to {most:,}" if least is not None and most is not None else ""
        described[field.encode_name] = f"{field.default}" + (
            f" ({', '.join(map(str, choices))})" if choices else f" ({limits})" if limits else ""
        )
    return described
