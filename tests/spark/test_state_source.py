"""The format "tiercel-state": typed columns, past times, and filters that read only the keys they need."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualNullSafe, EqualTo, GreaterThan, In
from rocksdict import Options, Rdict

import tiercel
from tiercel.admin import backup, history
from tiercel.chaos.steady_traffic import OPERATOR, declare
from tiercel.core.machine.effects import Write
from tiercel.core.machine.stored import CheckpointHeader, LogReader
from tiercel.core.model.keys import StateImage
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.errors import UserError
from tiercel.runtime.backup.point_in_time import PastState
from tiercel.runtime.deployment import DeploymentDir, Manifest, StreamFacts
from tiercel.runtime.storage.codec import encode_key
from tiercel.runtime.storage.store import Store
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.state_source import StateQuery, StateReader, key_codec, variables
from tiercel.spark.sources.stream_source import register
from tiercel.spark.state.declared_state import DeclaredState, Variable
from tiercel.spark.state.external_state import stored_state_codec
from tiercel.spark.state.schema import facts_of

A, B = "op@cloud#1", "op@cloud#2"
INSTANCE = f"{OPERATOR}@cloud#1"
SLOTS = 16
KEYS = RowCodec("k string, n int", ("k", "n"))
VALUE = "total bigint, at timestamp, cost decimal(10,2)"
NOON_US = 1_780_315_200_000_000
NOON = datetime.datetime.fromtimestamp(NOON_US // 1_000_000)  # noqa: DTZ006  as collect() gives it


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def key_of(n: int) -> bytes:
    return KEYS.key_of((f"k{n}", n))


def write(deployment: DeploymentDir, instance: str, count: int, generation: int = 1) -> None:
    """Keys 0 to 9 count to `count`; instance A has the even ones."""
    puts: dict[Any, Any] = {("checkpoint",): CheckpointHeader(generation, 5, 1, 0, 0, [])}
    for n in range(0 if instance == A else 1, 10, 2):
        values: dict[str, Any] = {"total": ("value", (count, NOON_US, "1.50"))}
        if n == 0:
            values["recent"] = ("list", (((1,), 70), ((2,), 80)))
            values["by_day"] = ("map", (((20_000,), (5, "x")), ((20_001,), (6, None))))
        image = StateImage(key_of(n), 1, 5, values, (99, 100) if n == 0 else ())
        puts["state", slot_of(image.key, SLOTS), image.key, generation] = image
    store = Store(deployment.process(instance), "os")
    store.add(Write(1, puts))
    store.close()


@pytest.fixture
def deployment(tmp_path: Path) -> DeploymentDir:
    operator = Operator("op", ("in",), "op.out", (A, B), slots=SLOTS, time_mode="processingTime")
    streams = {"in": Stream("in", "cloud"), "op.out": Stream("op.out", "cloud", logged=True)}
    variables = [
        Variable("total", "value", parse_ddl(VALUE)),
        Variable("recent", "list", parse_ddl("n int"), None, 100),
        Variable("by_day", "map", parse_ddl("n int, s string"), parse_ddl("day date")),
        Variable("never", "value", parse_ddl("n int")),
    ]
    deployment = DeploymentDir(tmp_path / "storage")
    facts = StreamFacts(parse_ddl("k string, n int, v double").json(), ("k", "n"))
    topology = Topology({"cloud": None}, streams, {"op": operator})
    deployment.write(
        Manifest("test", topology, {"in": facts}, state={"op": {v.name: facts_of(v) for v in variables}})
    )
    deployment.set_desired_instances([A, B])
    for instance in (A, B):
        write(deployment, instance, 1)
    router = Store(deployment.process("cloud"), "os")
    readers = {("reader", "op", instance): LogReader(1, 5, {}) for instance in (A, B)}
    router.add(Write(1, {("head", "op"): (5, 0, -1), **readers}))
    router.close()
    return deployment


def state(spark: SparkSession, deployment: DeploymentDir | None, **options: str) -> DataFrame:
    reader = spark.read.format("tiercel-state").option("operator", "op").options(**options)
    return (reader if deployment is None else reader.option("storage", str(deployment.directory))).load()


def spoil(deployment: DeploymentDir, instance: str, n: int) -> None:
    """The stored value of a key cannot be decoded any more."""
    db = Rdict(str(deployment.process(instance)), Options(raw_mode=True))
    db.put(encode_key(("state", slot_of(key_of(n), SLOTS), key_of(n), 1)), b"\xc1")
    db.close()


# -- columns -----------------------------------------------------------------------------------


def test_layout_columns_has_a_typed_column_per_variable(
    spark: SparkSession, deployment: DeploymentDir
) -> None:
    frame = state(spark, deployment, layout="columns")
    assert (
        "total:struct<total:bigint,at:timestamp,cost:decimal(10,2)>" in frame.schema["state"].simpleString()
    )
    rows = {row.key.n: row for row in frame.collect()}
    assert sorted(rows) == list(range(10))
    first = rows[0]
    assert tuple(first.state.total)[:2] == (1, NOON)
    assert str(first.state.total.cost) == "1.50"
    assert [(tuple(each.value), each.expiry_ms) for each in first.state.recent] == [((1,), 70), ((2,), 80)]
    assert {key.day: tuple(value) for key, value in first.state.by_day.items()} == {
        datetime.date(2024, 10, 4): (5, "x"),
        datetime.date(2024, 10, 5): (6, None),
    }
    assert (first.state.never, list(first.timers), first.instance) == (None, [99, 100], A)
    assert (rows[3].state.recent, rows[3].instance) == (None, B)
    assert frame.where("state.total.total = 1 AND array_contains(timers, 99)").count() == 1


# -- filters -----------------------------------------------------------------------------------


def test_filter_on_the_key_reads_only_that_key(spark: SparkSession, deployment: DeploymentDir) -> None:
    for n in (2, 5, 7):
        spoil(deployment, A if n % 2 == 0 else B, n)
    for layout, condition, found in (
        ("variables", "key.k = 'k4' AND key.n = 4", [4]),
        ("columns", "key.k IN ('k4', 'k3') AND key.n IN (3, 4, 6)", [3, 4]),
        ("columns", "key.k = 'k4' AND key.n <=> 4 AND slot < 0", []),
    ):
        rows = state(spark, deployment, layout=layout).where(condition).select("key.n").distinct().collect()
        assert sorted(row.n for row in rows) == found, condition
    with pytest.raises(PySparkException, match=r"(?s)op@cloud#.*cannot be decoded"):
        state(spark, deployment).where("key.n = 4").collect()  # not the whole key: all are read


def test_filters_that_are_not_pushed_down_are_correct(spark: SparkSession, deployment: DeploymentDir) -> None:
    for condition, found in (
        ("key.n = 4 OR key.k = 'k5'", [4, 5]),
        ("length(key.k) = 2 AND key.n % 5 = 0", [0, 5]),
        ("key.k > 'k3' AND NOT (key.n IN (0, 1, 2, 3, 4, 5, 6, 7))", [8, 9]),
    ):
        rows = state(spark, deployment, layout="columns").where(condition).select("key.n").collect()
        assert sorted(row.n for row in rows) == found


def test_pushed_filters_select_keys(deployment: DeploymentDir) -> None:
    def asked(*filters: Any) -> list[bytes] | None:
        reader = StateReader(StateQuery.of({"storage": str(deployment.directory), "operator": "op"}))
        assert list(reader.pushFilters(list(filters))) == list(filters)  # Spark checks each of them too
        return reader.requested_keys()

    k, n = ("key", "k"), ("key", "n")
    assert asked() is None
    assert asked(EqualTo(k, "k1")) is None
    assert asked(EqualTo(k, "k1"), GreaterThan(n, 1)) is None
    assert asked(EqualTo(k, "k1"), EqualNullSafe(n, 1)) == [key_of(1)]
    assert asked(In(k, ("k1", "k2")), EqualTo(n, 1)) == sorted([key_of(1), KEYS.key_of(("k2", 1))])
    assert asked(EqualTo(k, "k1"), In(n, (1, 2)), EqualTo(n, 1)) == [key_of(1)]
    assert asked(EqualTo(k, 1), EqualTo(n, 1)) is None  # of another type: Spark compares
    assert asked(In(k, tuple(map(str, range(200)))), In(n, tuple(range(200)))) is None  # too many


# -- past moments ------------------------------------------------------------------------------


@pytest.fixture
def copies(deployment: DeploymentDir, tmp_path: Path) -> str:
    """A backup with two states of each instance: everything counted to 1, then to 2."""
    location = str(tmp_path / "backup")
    backup(deployment.directory, location)
    for instance in (A, B):
        write(deployment, instance, 2, generation=2)
    backup(deployment.directory, location)
    for instance in (A, B):
        write(deployment, instance, 3, generation=3)
    return location


def totals(frame: DataFrame) -> set[int]:
    return {json.loads(row.value)[0] for row in frame.where("variable = 'total'").collect()}


def test_state_as_of_a_number_or_a_time_is_read_from_the_backup(
    spark: SparkSession, deployment: DeploymentDir, copies: str
) -> None:
    assert totals(state(spark, deployment)) == {3}
    assert totals(state(spark, None, backup=copies)) == {2}
    assert totals(state(spark, deployment, backup=copies, asOf=f"{A}=1")) == {1}
    states = [s for s in history(copies) if s.process in (A, B)]
    assert [(s.process, s.number, s.kind) for s in states] == [(p, n, "base") for p in (A, B) for n in (1, 2)]
    both = max(s.written for s in states if s.number == 1)
    assert totals(state(spark, deployment, backup=copies, asOf=both)) == {1}
    columns = state(spark, None, backup=copies, asOf=f"{A}=1", layout="columns")
    [row] = columns.where("key.k = 'k3' AND key.n = 3").collect()
    assert (row.state.total.total, row.instance) == (1, B)


def test_state_as_of_includes_increments_of_a_running_deployment(spark: SparkSession, tmp_path: Path) -> None:
    """Files that the deployment itself has written while rows came: a base, and increments behind it."""
    location, sensors = str(tmp_path / "backup"), range(3)

    def newest() -> PastState | None:
        return next((found for found in reversed(history(location)) if found.process == INSTANCE), None)

    def counts(as_of: str) -> dict[int, int]:
        asked = StateQuery.of({"backup": location, "operator": OPERATOR, "asOf": as_of})
        found = [(each.key, *variables(each.image)) for each in asked.stored(asked.numbers())]
        return {asked.key.key_values(key)[0]: json.loads(value or "")[0] for key, (_, _, value) in found}

    plan = {"location": location, "every_s": 0.05}
    shipped: dict[int, PastState] = {}  # by the rows of each sensor that it has
    with tiercel.start(spark, ["cloud"], tmp_path / "storage", backup=plan) as live:
        readings, _ = declare(live)
        with readings.producer("p") as producer:
            for rows in (1, 2, 3):
                producer.send_many([(sensor, rows, 0, 1.0) for sensor in sensors])
                while rows not in shipped:
                    found = newest()
                    if found and counts(f"{INSTANCE}={found.number}") == dict.fromkeys(sensors, rows):
                        shipped[rows] = found
    assert (shipped[2].kind, shipped[3].kind) == ("increment", "increment")
    for rows, found in shipped.items():
        for as_of in (f"{INSTANCE}={found.number}", found.written):
            assert counts(as_of) == dict.fromkeys(sensors, rows)
    frame = state(spark, None, backup=location, operator=OPERATOR, layout="columns", asOf=shipped[2].written)
    assert {row.key.sensor: row.state.average["count"] for row in frame.collect()} == dict.fromkeys(
        sensors, 2
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"asOf": "op@cloud#1=7"}, r"no such state\nexpected: op@cloud#1=1\|2 .*; op@cloud#2=1\|2"),
        ({"asOf": "7"}, "no such state"),
        ({"asOf": "op@cloud#9=1"}, "no such state"),
        ({"asOf": "yesterday"}, "asOf 'yesterday'\nexpected: a time in ISO 8601, or op@cloud#1=1"),
        ({"asOf": "2020-01-01T00:00:00Z"}, "before the first state"),
        ({"layout": "rows"}, "layout"),
        ({"operator": "other"}, "no operator 'other'"),
    ],
)
def test_unknown_operator_or_state_is_refused_with_known_ones(
    deployment: DeploymentDir, copies: str, options: dict[str, str], reason: str
) -> None:
    given = {"storage": str(deployment.directory), "backup": copies, "operator": "op"} | options
    with pytest.raises(UserError, match=f"(?s){reason}"):
        StateReader(StateQuery.of(given)).partitions()


def test_as_of_needs_a_backup_of_the_same_deployment(
    deployment: DeploymentDir, copies: str, tmp_path: Path
) -> None:
    options = {"storage": str(deployment.directory), "operator": "op"}
    with pytest.raises(UserError, match="without a backup"):
        StateQuery.of(options | {"asOf": "1"})
    other = DeploymentDir(tmp_path / "other")
    other.write(Manifest("another", deployment.manifest().topology, deployment.manifest().streams))
    with pytest.raises(UserError, match="the backup of another deployment"):
        StateQuery.of(options | {"storage": str(other.directory), "backup": copies})
    with pytest.raises(UserError, match="holds no backup"):
        StateQuery.of({"backup": str(tmp_path / "nowhere"), "operator": "op"})


def test_damaged_backup_file_is_named(spark: SparkSession, deployment: DeploymentDir, copies: str) -> None:
    [file] = Path(copies).glob("processes/op*231/base.000000000001.*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="no such state"):
        StateQuery.of({"backup": copies, "operator": "op", "asOf": f"{A}=1"}).numbers()
    assert totals(state(spark, None, backup=copies, asOf=f"{A}=2")) == {2}


# -- what is no state ----------------------------------------------------------------------------


def test_incomplete_export_and_invalid_checkpoint_are_refused(
    spark: SparkSession, deployment: DeploymentDir, tmp_path: Path
) -> None:
    out = tmp_path / "export"
    assert tiercel.export_state(deployment.directory, "op", str(out), spark=spark).keys == 10
    kept = tiercel.read_exported_state(spark, str(out))
    columns = stored_state_codec(key_codec(deployment.manifest(), "op"))
    total = Variable("total", "value", parse_ddl(VALUE))
    with pytest.raises(UserError, match="has the state variable 'by_day', which operator 'op' lacks"):
        kept.packed("op", DeclaredState((total,)), "processingTime", columns, {})
    others = frozenset(["by_day", "recent", "never"])
    with pytest.raises(UserError, match="has timers, operator 'op' has time mode none"):
        kept.packed("op", DeclaredState((total,), others), "none", columns, {})
    with pytest.raises(UserError, match=r"state of keys k:string,n:int\nexpected: .*: k:string"):
        kept.packed(
            "op", DeclaredState((total,), others), "none", stored_state_codec(RowCodec("k string", "k")), {}
        )
    parts = sorted(out.glob("keys/*.parquet"))
    parts[0].write_bytes(parts[0].read_bytes()[:-40])
    with pytest.raises(UserError, match=r"cannot be read|has 0 keys"):
        tiercel.read_exported_state(spark, str(out))
    parts[0].unlink()
    with pytest.raises(UserError, match="has 0 keys\nexpected: 10"):
        tiercel.read_exported_state(spark, str(out))
    for nowhere in (tmp_path / "nowhere", out / "keys"):
        with pytest.raises(UserError, match="is no complete export"):
            tiercel.read_exported_state(spark, str(nowhere))
        with pytest.raises(UserError, match=r"cannot be read|has no stateful operator"):
            tiercel.read_spark_state(spark, nowhere)
