"""The row codec: invalid rows are refused by column, valid rows survive encoding."""

from __future__ import annotations

import datetime
import decimal
import math
import pickle
import re
from typing import Any

import msgspec
import numpy
import pandas
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql import types as t

from tiercel.core.model.row_batch import join
from tiercel.errors import UserError
from tiercel.runtime.deployment import StreamFacts
from tiercel.spark.rows.arrow_rows import ArrowRows
from tiercel.spark.rows.columnar import WholeColumns
from tiercel.spark.rows.row_codec import BadRow, RowCodec, parse_ddl
from tiercel.spark.rows.values import View

NOON = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
DDL = "car string, speed double, n bigint, at timestamp"
ROW = {"car": "a", "speed": 70.0, "n": 3, "at": NOON}


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


FIRST, LAST = datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30)  # noqa: DTZ001  in every zone

TYPES: list[tuple[t.DataType, st.SearchStrategy[Any]]] = [
    (t.StringType(), st.text()),
    (t.BinaryType(), st.binary()),
    (t.BooleanType(), st.booleans()),
    (t.ByteType(), whole(8)),
    (t.ShortType(), whole(16)),
    (t.IntegerType(), whole(32)),
    (t.LongType(), whole(64)),
    (t.FloatType(), st.floats(width=32, allow_nan=False)),
    (t.DoubleType(), st.floats(allow_nan=False)),
    (t.DecimalType(20, 3), st.decimals(-(10**16), 10**16, places=3, allow_nan=False)),
    (t.DateType(), st.dates()),
    (t.TimestampType(), st.datetimes(FIRST, LAST, timezones=st.just(datetime.UTC))),
    (t.TimestampNTZType(), st.datetimes()),
]


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[t.DataType, Any]:
    """Any type that a stream carries, with a value of it."""
    kind, strategy = draw(typed(depth))
    return kind, draw(st.none() | strategy)


def typed(depth: int) -> st.SearchStrategy[tuple[t.DataType, st.SearchStrategy[Any]]]:
    simple = st.sampled_from(TYPES)
    if not depth:
        return simple
    inner = typed(depth - 1)
    return st.one_of(
        simple,
        inner.map(lambda e: (t.ArrayType(e[0]), st.lists(st.none() | e[1], max_size=4))),
        st.tuples(simple, inner).map(
            lambda kv: (t.MapType(kv[0][0], kv[1][0]), st.dictionaries(kv[0][1], kv[1][1], max_size=4))
        ),
        st.lists(inner, min_size=1, max_size=3).map(as_struct),
    )


def as_struct(parts: list[tuple[t.DataType, Any]]) -> tuple[t.DataType, st.SearchStrategy[Any]]:
    names = [f"f{n}" for n in range(len(parts))]
    kind = t.StructType([t.StructField(n, p[0]) for n, p in zip(names, parts, strict=True)])
    return kind, st.tuples(*[p[1] for p in parts]).map(lambda values: Row(*names)(*values))


@given(typed_values())
def test_value_survives_encoding_and_decoding(typed_value: tuple[t.DataType, Any]) -> None:
    kind, value = typed_value
    columns = RowCodec(t.StructType([t.StructField("x", kind)]))
    wire = msgspec.msgpack.encode(columns.payload((value,)))
    (back,) = columns.values(msgspec.msgpack.decode(wire))
    assert back == value
    assert type(back) is type(value) or isinstance(value, Row)


@given(typed_values(), st.sampled_from([View.INPUT, View.STATE]))
def test_value_that_user_code_sees_is_accepted_back(typed_value: tuple[t.DataType, Any], view: View) -> None:
    kind, value = typed_value
    payload = RowCodec(t.StructType([t.StructField("x", kind)])).payload((value,))
    columns = RowCodec(t.StructType([t.StructField("x", kind)]), view=view)
    assert columns.payload(columns.values(payload)) == payload


@given(typed_values())
def test_arrow_batch_has_the_same_values(typed_value: tuple[t.DataType, Any]) -> None:
    kind, value = typed_value
    columns = RowCodec(t.StructType([t.StructField("x", kind)]))
    batch = columns.arrow_batch([msgspec.msgpack.decode(msgspec.msgpack.encode(columns.payload((value,))))])
    assert batch.num_rows == 1
    if not isinstance(kind, t.ArrayType | t.MapType | t.StructType):
        assert batch.column(0).to_pylist() == [value]


def test_arrow_batch_without_rows_has_the_schema() -> None:
    assert RowCodec(DDL).arrow_batch([]).schema.names == ["car", "speed", "n", "at"]


@pytest.mark.parametrize("row", [ROW, Row(**ROW), tuple(ROW.values()), list(ROW.values())])
def test_row_may_be_a_dict_a_row_or_a_sequence(row: Any) -> None:
    columns = RowCodec(DDL, "car", "at")
    key, time_ms, payload = columns.pack(row)
    assert columns.key_values(key) == ("a",)
    assert time_ms == int(NOON.timestamp() * 1000)
    assert columns.unpack(payload) == tuple(ROW.values())


def test_columns_are_matched_by_name() -> None:
    columns = RowCodec(DDL, "car", "at")
    backwards = dict(reversed(ROW.items()))
    assert columns.pack(backwards) == columns.pack(Row(**backwards)) == columns.pack(ROW)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": "x"}, "column n: 'x' (str)"),
        ({"n": 1.5}, "column n: 1.5 (float)"),
        ({"n": True}, "column n: True (bool)"),
        ({"n": 1 << 63}, "column n: 9223372036854775808 (int)"),
        ({"car": 1}, "column car: 1 (int)"),
        ({"car": "\ud800"}, "text that UTF-8 can hold"),
        ({"speed": "70"}, "column speed: '70' (str)"),
        ({"at": NOON.replace(tzinfo=None)}, "timestamp_ntz"),
        ({"at": None}, "column at: None"),
        ({"at": datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC)}, "from 1970 on"),
        ({"other": 1}, "unknown column other: 1"),
    ],
)
def test_invalid_value_is_refused_with_its_column(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow) as refused:
        RowCodec(DDL, "car", "at").pack({**ROW, **change})
    assert said in str(refused.value)


def test_missing_column_is_refused_by_name() -> None:
    with pytest.raises(BadRow, match="column n is missing"):
        RowCodec(DDL).pack({k: v for k, v in ROW.items() if k != "n"})


def test_row_of_wrong_length_is_refused() -> None:
    with pytest.raises(BadRow, match="has 2 values"):
        RowCodec(DDL).pack(("a", 1.0))
    with pytest.raises(BadRow, match="a sequence of: car"):
        RowCodec(DDL).pack(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("x int not null", None),
        ("x int", 1 << 31),
        ("x smallint", 1 << 15),
        ("x tinyint", -129),
        ("x float", 1e39),
        ("x decimal(4,2)", decimal.Decimal("1.234")),
        ("x decimal(4,2)", decimal.Decimal("100")),
        ("x decimal(4,2)", decimal.Decimal("NaN")),
        ("x decimal(4,2)", 1.5),
        ("x date", NOON),
        ("x timestamp_ntz", NOON),
        ("x boolean", 1),
        ("x binary", "text"),
        ("x array<int>", "12"),
        ("x array<int>", [1, "2"]),
        ("x map<string,int>", {None: 1}),
        ("x map<string,int>", {"a": "b"}),
        ("x struct<y:int>", {"z": 1}),
        ("x struct<y:int>", {"y": 1, "z": 1}),
    ],
)
def test_values_outside_their_type_are_refused(ddl: str, value: Any) -> None:
    with pytest.raises(BadRow, match="column x"):
        RowCodec(ddl).pack({"x": value})


def test_lossless_conversions_are_accepted() -> None:
    columns = RowCodec("d double, n int, f float, m decimal(5,2), b boolean, s struct<y:int>")
    row = (1, numpy.int64(2), 0.1, 3, numpy.True_, {"y": 1})
    d, n, f, m, b, s = columns.values(columns.payload(row))
    assert (d, type(d), n, type(n), m, b, s) == (1.0, float, 2, int, decimal.Decimal("3.00"), True, (1,))
    assert f == float(numpy.float32(0.1))
    assert s.y == 1


def test_batch_is_split_into_valid_and_invalid_rows() -> None:
    packed, refused = RowCodec(DDL, "car", "at").pack_all([ROW, {**ROW, "n": "x"}, ROW])
    assert len(packed) == 2
    assert [(index, row["n"], type(reason)) for index, row, reason in refused] == [(1, "x", BadRow)]


def test_equal_numbers_are_one_key() -> None:
    columns = RowCodec("x double", "x")
    assert columns.key_of((0.0,)) == columns.key_of((-0.0,))
    assert columns.key_of((math.nan,)) == columns.key_of((-math.nan,))


def test_key_may_be_of_any_type_and_null() -> None:
    columns = RowCodec("at timestamp, day date, s string", ("at", "s"))
    assert columns.key_values(columns.key_of((NOON, None, None))) == (NOON, None)


@pytest.mark.parametrize(
    ("ddl", "key", "event_time", "said"),
    [
        (DDL, "bus", "", "'bus' is not in the schema"),
        (DDL, ("car", "car"), "", "each column once"),
        (DDL, "car", "n", "event time column 'n'"),
        ("m map<string,int>", "m", "", "key column 'm'"),
        ("a int, A int", (), "", "there twice"),
        ("a map<array<int>,int>", (), "", "keys that Python can look up"),
    ],
)
def test_invalid_declaration_is_refused(ddl: str, key: Any, event_time: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        RowCodec(ddl, key, event_time)
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", [t.NullType(), t.VariantType(), t.DayTimeIntervalType(), t.CharType(3)])
def test_unsupported_type_is_refused_at_declaration(kind: t.DataType) -> None:
    with pytest.raises(UserError, match=r"column x\[\]"):
        RowCodec(t.StructType([t.StructField("x", t.ArrayType(kind))]))


def test_codec_is_made_from_a_manifest_and_survives_pickling() -> None:
    columns = RowCodec(DDL, "car", "at")
    assert RowCodec.of(StreamFacts(columns.schema.json(), ("car",), "at")) == columns
    assert pickle.loads(pickle.dumps(columns)) == columns


# -- schemas as text ---------------------------------------------------------------------------


def test_ddl_is_parsed_as_by_spark() -> None:
    text = "`a b` INT NOT NULL COMMENT 'c', x: decimal(10,2), y map<string,array<struct<p:int,q long>>>"
    inner = t.StructType([t.StructField("p", t.IntegerType()), t.StructField("q", t.LongType())])
    assert parse_ddl(text) == t.StructType(
        [
            t.StructField("a b", t.IntegerType(), nullable=False, metadata={"comment": "c"}),
            t.StructField("x", t.DecimalType(10, 2)),
            t.StructField("y", t.MapType(t.StringType(), t.ArrayType(inner))),
        ]
    )


@pytest.mark.parametrize("kind", [kind for kind, _ in TYPES], ids=lambda kind: kind.simpleString())
def test_every_type_can_be_parsed_from_its_name(kind: t.DataType) -> None:
    assert parse_ddl(f"x {kind.simpleString()}") == t.StructType([t.StructField("x", kind)])


@pytest.mark.parametrize(
    "text", ["", "a", "a int b int", "a int,", "a blob", "a array<int", "a $", "a decimal(x)"]
)
def test_invalid_ddl_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="schema "):
        parse_ddl(text)


def test_packing_a_tuple_does_not_make_the_text_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made for every row, for a message that hardly ever is needed: three quarters of a producer."""
    columns = RowCodec("sensor bigint, value double", "sensor")
    wanted = columns.pack({"sensor": 1, "value": 2.0})

    def asked(self: object) -> str:
        raise AssertionError

    monkeypatch.setattr(t.StructType, "simpleString", asked)
    assert columns.pack((1, 2.0)) == columns.pack([1, 2.0]) == wanted


@pytest.mark.parametrize(
    ("ddl", "key", "time", "rows"),
    [
        ("sensor bigint, value double", ("sensor",), "", [(n % 3, float(n)) for n in range(200)]),
        ("sensor bigint, value double", ("sensor",), "", [{"value": 1.0, "sensor": 1}, [1, 2.0], (2, 3.0)]),
        ("a string, b int, c string", ("c", "a"), "", [("x", n, "yz"[n % 2]) for n in range(9)]),
        (
            "x double, n int",
            ("x",),
            "",
            [(v, n) for n, v in enumerate([0.0, float("nan"), -0.0, -float("nan")] * 3)],
        ),
        (
            "x array<double>, n int",
            ("x",),
            "",
            [([v], n) for n, v in enumerate([0.0, float("nan"), -0.0] * 3)],
        ),
        ("car string, at timestamp", ("car",), "at", [("a", NOON)] * 3),
    ],
    ids=["one key column", "names and orders", "several", "numbers that are equal", "within", "event time"],
)
def test_gathered_rows_equal_joined_packed_rows(
    ddl: str, key: tuple[str, ...], time: str, rows: list[Any]
) -> None:
    columns = RowCodec(ddl, key, time)
    packed, _ = columns.pack_all(rows)
    gathered = columns.gather(columns.take(rows))
    assert gathered == (packed if time else join(packed))
    assert (len(gathered) < len(rows)) == (not time)


@pytest.mark.parametrize("bad", [{"n": "x"}, {"at": None}, {"at": NOON - datetime.timedelta(days=40_000)}])
def test_take_refuses_a_batch_with_an_invalid_row(bad: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=f"column {next(iter(bad))}"):
        RowCodec(DDL, "car", "at").take([ROW, {**ROW, **bad}])


COLUMNS = {"sensor": [1, 2, 1], "value": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    "given",
    [
        COLUMNS,
        {"value": (1.0, 2.0, 3.0), "sensor": numpy.array([1, 2, 1], dtype=numpy.int32)},
        {"sensor": [1, 2, 1], "value": numpy.array([1, 2, 3])},
        {name: numpy.array(column) for name, column in COLUMNS.items()},
        pandas.DataFrame(COLUMNS),
        pyarrow.table(COLUMNS),
    ],
    ids=["lists", "others", "whole numbers", "numpy", "pandas", "arrow"],
)
def test_whole_columns_give_the_same_rows(given: Any) -> None:
    columns = RowCodec("sensor bigint, value double", "sensor")
    rows = WholeColumns(columns).rows(given)
    assert rows == [(1, 1.0), (2, 2.0), (1, 3.0)]
    assert {type(value) for row in rows for value in row} == {int, float}


@pytest.mark.parametrize(
    ("ddl", "column", "said"),
    [
        ("x int", [1, 1 << 31], "column x: 2147483648"),
        ("x int", numpy.array([1 << 31]), "column x: 2147483648"),
        ("x int", [1, True], "column x: True"),
        ("x bigint", numpy.array([1.5]), "column x: 1.5"),
        ("x double", ["a"], "column x: 'a'"),
        ("x string", ["a", "\ud800"], "column x: "),
        ("x boolean", [1], "column x: 1"),
        ("x int not null", [None], "column x: None"),
        ("x int", "12", "column x: '12' (str)"),
    ],
)
def test_whole_column_is_checked_like_rows(ddl: str, column: Any, said: str) -> None:
    columns = RowCodec(ddl, "x")
    with pytest.raises(BadRow, match=re.escape(said)):
        WholeColumns(columns).rows({"x": column})


def test_whole_columns_accept_the_values_of_rows() -> None:
    given = {"car": ["é", None], "speed": [1.0, None], "n": [1, 2], "at": [NOON, NOON]}
    by_row = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    for columns in (RowCodec(DDL, "car", "at"), RowCodec(DDL, "car")):
        assert WholeColumns(columns).rows(given) == columns.take(by_row)
    assert WholeColumns(RowCodec(DDL)).rows({name: [] for name in given}) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sensor": [1]}, "columns: sensor"),
        ({**COLUMNS, "more": [1, 2, 3]}, "columns: sensor, value, more"),
        ({"sensor": [1], "value": [1.0, 2.0]}, "columns of different lengths: sensor 1, value 2"),
        (5, "int has no columns"),
    ],
)
def test_invalid_columns_are_refused(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        WholeColumns(RowCodec("sensor bigint, value double", "sensor")).rows(given)


def test_arrow_batches_with_event_times_are_taken_by_column_as_row_by_row() -> None:
    codec = RowCodec("sensor bigint, at timestamp, value double", "sensor", "at")
    schema = pyarrow.schema(
        [("sensor", pyarrow.int64()), ("at", pyarrow.timestamp("us", "UTC")), ("value", pyarrow.float64())]
    )
    day = datetime.datetime(2026, 11, 18, tzinfo=datetime.UTC)
    good = [{"sensor": n, "at": day + datetime.timedelta(seconds=n), "value": n / 2} for n in range(50)]
    rows, refused = ArrowRows(codec).rows(pyarrow.RecordBatch.from_pylist(good, schema=schema))
    assert rows == codec.take(good)
    assert refused == []
    for bad in (None, datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC)):
        mixed = [*good[:3], {"sensor": 7, "at": bad, "value": 1.0}, *good[3:5]]
        rows, refused = ArrowRows(codec).rows(pyarrow.RecordBatch.from_pylist(mixed, schema=schema))
        assert rows == codec.take(good[:5])
        assert [(n, "an event time from 1970 on" in str(reason)) for n, _, reason in refused] == [(3, True)]
    assert ArrowRows(codec).rows(pyarrow.RecordBatch.from_pylist([], schema=schema)) == ([], [])
