"""The same processor under Spark's own transformWithState sees and yields the same."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.errors import UserError
from tiercel.spark.rows.row_codec import RowCodec, as_struct, parse_ddl
from tiercel.testing import Trial

NOON = datetime.datetime(2026, 6, 1, 12, 0, 0, 123456, tzinfo=datetime.UTC)
DAY = datetime.date(1969, 12, 30)
SCHEMA = (
    "k string, at timestamp, local timestamp_ntz, day date, price decimal(10,2), n tinyint, f float, "
    "b binary, tags array<int>, sizes map<string,date>, place struct<x:int,since:timestamp>, yes boolean"
)
STATE = "at timestamp, local timestamp_ntz, day date, price decimal(10,2), f float, b binary"
NESTED = "tags array<int>, sizes map<string,date>, place struct<x:int,since:timestamp>"


def row(key: str) -> tuple[Any, ...]:
    local = datetime.datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001
    price = decimal.Decimal("12.5")
    return (key, NOON, local, DAY, price, -3, 0.1, b"\0x", [1, None], {"a": DAY}, Row(x=1, since=NOON), True)


ROWS = [row("a"), row("b"), ("c", *[None] * 11)]


def seen(value: Any) -> Any:
    """A value with its types, but without the name of its zone: that is the session's in Spark, UTC here."""
    match value:
        case Row():
            return ("Row", list(value.__fields__), [seen(v) for v in value])
        case dict():
            return {"dict": [(seen(k), seen(v)) for k, v in value.items()]}
        case list() | tuple():
            return (type(value).__name__, [seen(v) for v in value])
        case datetime.datetime():
            return (value.timestamp(), value.tzinfo is None)
        case _:
            return repr(value)


class Mirror(StatefulProcessor):
    """Tells what it is shown: rows, key, times, and state of every kind."""

    def init(self, handle: Any) -> None:
        self.flat = handle.getValueState("flat", STATE)
        self.nested = handle.getValueState("nested", NESTED)
        self.list = handle.getListState("list", "at timestamp, day date")
        self.map = handle.getMapState("map", "day date", "at timestamp, price decimal(10,2)")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for got in rows:
            said = {"row": got, "key": key, "absent": self.flat.get(), "none": list(self.list.get())}
            said["times"] = (
                timerValues.getCurrentProcessingTimeInMs(),
                timerValues.getCurrentWatermarkInMs(),
            )
            self.flat.update((got.at, got.local, got.day, got.price, got.f, got.b))
            said["flat"] = self.flat.get()
            if got.tags is not None:
                place = Row(x=got.place["x"], since=got.place["since"])
                self.nested.update((got.tags, dict(got.sizes), place))
                said["nested"] = self.nested.get()
            self.list.put([(got.at, got.day), (got.at, None)])
            self.list.appendValue((None, got.day))
            said["list"] = list(self.list.get())
            for day in (DAY, NOON.date()):
                self.map.updateValue((day,), (got.at, got.price))
            said["found"] = self.map.getValue((DAY,))
            said["missing"] = self.map.getValue((datetime.date(2000, 1, 1),))
            said["map"] = sorted(self.map.iterator())[0] if got.at else None
            for what, value in said.items():
                yield Row(
                    what=what, seen=repr(seen(value)), k=key[0], day=got.day, at=got.at, extra="dropped"
                )

    def close(self) -> None:
        """Nothing to let go."""


OUTPUT = "k string, what string, seen string, day date, at timestamp, absent int"


def test_processor_sees_and_yields_the_same_as_under_spark(spark: SparkSession) -> None:
    frame = spark.createDataFrame(ROWS, SCHEMA)
    under_spark = frame.groupBy("k").transformWithState(Mirror(), OUTPUT, "update", "none").collect()
    trial = Trial(Mirror(), schema=SCHEMA, key="k", output=OUTPUT)
    for each in ROWS:
        trial.send(each)
    assert trial.dead_letters() == []
    ours = {(found.k, found.what): found for found in trial.outputs()}
    assert len(ours) == len(under_spark) > 20
    zone = RowCodec(OUTPUT)
    for theirs in under_spark:
        mine = ours[theirs.k, theirs.what]
        assert mine.seen == theirs.seen, theirs.what
        aware = theirs.at and theirs.at.astimezone(datetime.UTC)  # collect() gives local times
        assert tuple(mine) == zone.values(zone.payload((*theirs[:4], aware, theirs.absent)))


NAIVE = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001
YIELDED = [  # what Spark takes for a column of a type, beyond values of that type
    ("timestamp", NAIVE),
    ("timestamp", NOON),
    ("timestamp", 300),
    ("timestamp_ntz", NAIVE),
    ("timestamp_ntz", NOON),
    ("date", DAY),
    ("date", NAIVE),
    ("date", 300),
    ("int", 1.0),
    ("int", decimal.Decimal("7")),
    ("double", 3),
    ("double", True),
    ("float", 0.1),
    ("decimal(10,2)", decimal.Decimal("1.5")),
    ("decimal(10,2)", 3),
    ("binary", "text"),
    ("binary", bytearray(b"x")),
    ("string", "text"),
    ("array<int>", (1, None)),
    ("array<timestamp>", [NAIVE, None]),
    ("map<string,date>", {"a": NAIVE, "b": None}),
    ("struct<a:int,b:string>", {"a": 1}),
    ("struct<a:int,b:timestamp>", Row(a=1, b=NAIVE)),
    ("struct<a:int,b:array<struct<c:double>>>", {"a": 1, "b": [{"c": 1}, None]}),
    *((kind, None) for kind in ("timestamp", "int", "decimal(4,1)", "array<int>", "struct<a:int>")),
]
YIELDED_SCHEMA = "k string, " + ", ".join(f"c{n} {kind}" for n, (kind, _) in enumerate(YIELDED))


class Yields(StatefulProcessor):
    """Yields values that are not quite of the declared types."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(k=key[0], **{f"c{n}": value for n, (_, value) in enumerate(YIELDED)})

    def close(self) -> None:
        pass


def test_values_that_a_processor_yields_are_taken_as_spark_takes_them(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("a",)], "k string")
    [theirs] = frame.groupBy("k").transformWithState(Yields(), YIELDED_SCHEMA, "update", "none").collect()
    trial = Trial(Yields(), schema="k string", key="k", output=YIELDED_SCHEMA)
    trial.send(("a",))
    assert trial.dead_letters() == []
    [ours] = trial.outputs()
    codec = RowCodec(YIELDED_SCHEMA)
    [sparks] = spark.createDataFrame([ours], codec.schema).collect()  # in the zone in which Spark shows it
    assert sparks == theirs


def test_spark_accepts_our_arrow_batches(spark: SparkSession) -> None:
    columns = RowCodec(SCHEMA, "k")
    batch = columns.arrow_batch([columns.pack(each)[2] for each in ROWS])

    frame = spark.range(0, 1, 1, 1).mapInArrow(lambda batches: [batch for _ in batches], columns.schema)
    assert frame.collect() == spark.createDataFrame(ROWS, SCHEMA).collect()


@pytest.mark.parametrize("ddl", [SCHEMA, OUTPUT, STATE, NESTED, "`a b` INT NOT NULL COMMENT 'c', x: decimal"])
def test_our_ddl_parser_agrees_with_spark(spark: SparkSession, ddl: str) -> None:
    assert parse_ddl(ddl) == as_struct(ddl)


def test_schema_that_spark_cannot_parse_is_a_user_error(spark: SparkSession) -> None:
    with pytest.raises(UserError, match="schema 'a blob'"):
        as_struct("a blob")
