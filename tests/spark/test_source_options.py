"""Options and schemas of the data sources: invalid ones are refused with what would have been right."""

from __future__ import annotations

import datetime
import decimal
import re
from pathlib import Path
from typing import Any

import pytest

from tiercel.bench.operators import INPUT, OUTPUT, SITE, topology
from tiercel.core.model.keys import StateImage
from tiercel.core.model.topology import Operator, Topology
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest, StreamFacts
from tiercel.spark.api.streams import _FOLD_OPTIONS
from tiercel.spark.rows.arrow_rows import ArrowRows
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, RowCodec, parse_ddl
from tiercel.spark.sources.metrics_source import SCHEMA as METRICS
from tiercel.spark.sources.metrics_source import Metrics
from tiercel.spark.sources.state_source import State, key_codec, variables
from tiercel.spark.sources.stream_source import Streams
from tiercel.spark.sources.stream_writer import NamedBatch, column_names

READING = "sensor string not null, n int, value double"


@pytest.fixture
def deployment(tmp_path: Path) -> DeploymentDir:
    streams = {
        INPUT: StreamFacts(parse_ddl(READING).json(), ("sensor",), sites=(SITE,)),
        OUTPUT: StreamFacts(parse_ddl("average double").json(), (), written_by="average"),
        f"{INPUT}/dead": StreamFacts(parse_ddl("reason string").json(), (), dead_letters_of=INPUT),
    }
    deployment = DeploymentDir(tmp_path)
    deployment.write(Manifest("test", topology(1), streams))
    return deployment


def options(deployment: DeploymentDir, **more: Any) -> dict[str, str]:
    return {"storage": str(deployment.directory), "stream": OUTPUT} | {k: str(v) for k, v in more.items()}


def test_source_has_the_columns_of_the_stream_and_optionally_the_identity(deployment: DeploymentDir) -> None:
    assert Streams(options(deployment)).schema().simpleString() == "struct<average:double>"
    both = Streams(options(deployment, identity="TRUE")).schema().simpleString()
    assert both == "struct<average:double,_tiercel_id:string>"
    assert Streams({"Storage": str(deployment.directory), "STREAM": INPUT}).schema().names == [
        "sensor",
        "n",
        "value",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stream": "avarages"}, "no stream 'avarages' in .*\nexpected: one of: averages, readings"),
        ({"stream": ""}, "option 'stream' is missing"),
        ({"storage": ""}, "option 'storage' is missing"),
        ({"storage": "nowhere"}, "nowhere holds no deployment"),
        ({"startingOffsets": "latest"}, "option 'startingoffsets' is not known\nexpected: startingOffset"),
        ({"startingOffset": "newest"}, "startingOffset = 'newest'\nexpected: earliest, latest or an offset"),
        ({"startingOffset": "0"}, "startingOffset = '0'"),
        ({"endingOffset": "earliest"}, "endingOffset = 'earliest'\nexpected: latest or an offset"),
        ({"maxEntriesPerBatch": "-3"}, "maxEntriesPerBatch = '-3'\nexpected: a number of entries"),
        ({"identity": "maybe"}, "identity = 'maybe'\nexpected: false or true"),
    ],
)
def test_invalid_options_are_refused(deployment: DeploymentDir, given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Streams(options(deployment) | given).schema()


def test_stream_without_a_log_cannot_be_read(deployment: DeploymentDir) -> None:
    source = Streams(options(deployment) | {"stream": INPUT})
    for make in (source.reader, source.streamReader):
        with pytest.raises(UserError, match="the stream 'readings' has no log\nexpected: one"):
            make(source.schema())


def test_offsets_outside_of_what_is_kept_are_named(deployment: DeploymentDir) -> None:
    def bounds(**given: Any) -> tuple[int, int]:
        return Streams(options(deployment, **given))._read_request().bounds(11, 30)

    assert bounds() == (10, 30)
    assert bounds(startingOffset="latest") == (30, 30)
    assert bounds(startingOffset=12, endingOffset=20) == (11, 20)
    assert bounds(startingOffset=31) == (30, 30)
    for given in ({"startingOffset": 10}, {"startingOffset": 32}, {"endingOffset": 31}):
        with pytest.raises(UserError, match="a range within the retained entries: 11 to 30"):
            bounds(**given)


def test_options_of_spark_and_of_others_are_left_alone(deployment: DeploymentDir) -> None:
    Streams(options(deployment, checkpointLocation="somewhere", path="x", queryName="q")).schema()


def test_a_batch_id_is_for_dataframes_without_a_query_and_names_a_directory(
    deployment: DeploymentDir,
) -> None:
    source = Streams(options(deployment, batchId="2026/11") | {"stream": INPUT})
    schema = parse_ddl(READING)
    source.writer(schema, False)
    assert NamedBatch.of(INPUT, "2026/11", "", None).feed == "batch-readings|2026%2F11"
    with pytest.raises(UserError, match=r"batchId is given to a query\nexpected: checkpointLocation"):
        source.streamWriter(schema, False)
    with pytest.raises(UserError, match="is too long"):
        Streams(options(deployment, batchId="x" * 300) | {"stream": INPUT}).writer(schema, False)


@pytest.mark.parametrize(
    ("more", "overwrite", "said"),
    [
        ({"stream": OUTPUT}, False, "'averages' is written by the operator 'average'"),
        ({"stream": f"{INPUT}/dead"}, False, "is written by the feeds of 'readings'"),
        ({"stream": INPUT}, True, "a stream cannot be overwritten"),
        ({"stream": INPUT, "badRows": "drop"}, False, "badRows = 'drop'\nexpected: dead-letter or fail"),
    ],
)
def test_invalid_writes_are_refused(
    deployment: DeploymentDir, more: dict[str, str], overwrite: bool, said: str
) -> None:
    source = Streams(options(deployment) | more)
    for make in (source.writer, source.streamWriter):
        with pytest.raises(UserError, match=said):
            make(parse_ddl(READING), overwrite)  # type: ignore[operator]


def test_dataframe_columns_may_differ_in_order_and_case() -> None:
    columns = RowCodec(READING, ["sensor"])
    assert column_names(parse_ddl("VALUE float, Sensor string, n bigint"), columns) == [
        "value",
        "sensor",
        "n",
    ]
    with pytest.raises(UserError) as caught:
        column_names(parse_ddl("sensor string, n string, average double"), columns)
    assert "value is missing; average is unknown; n is string, not int" in str(caught.value)
    assert "select and cast" in str(caught.value)


def test_values_of_every_type_survive_arrow() -> None:
    columns = RowCodec(
        "s string, b binary, y boolean, i int, l bigint, f float, d double, c decimal(10,2), a date, "
        "at timestamp, local timestamp_ntz, xs array<struct<n: int, at: timestamp>>, "
        "m map<string, decimal(5,1)>, st struct<x: double, t: struct<y: array<int>>>"
    )
    at = datetime.datetime(2026, 6, 1, 12, 30, 0, 123456, tzinfo=datetime.UTC)
    values = [
        "ä",
        b"\x00\xff",
        True,
        1,
        1 << 60,
        0.5,
        -0.1,
        decimal.Decimal("12.30"),
        datetime.date(1969, 1, 1),
        at,
        at.replace(tzinfo=None),
        [{"n": 1, "at": at}, {"n": None, "at": None}],
        {"a": decimal.Decimal("1.5"), "b": None},
        {"x": 1.0, "t": {"y": [1, None, 3]}},
    ]
    payloads = [columns.payload(values), columns.payload([None] * len(values))]
    batch = columns.arrow_batch(payloads)
    for exact in (True, False):
        rows, bad = ArrowRows(columns, exact=exact).rows(batch)
        assert bad == []
        assert [columns.values(row) for row in rows] == [tuple(columns.unpack(p)) for p in payloads]


def test_operator_key_has_the_types_of_its_input_or_of_the_operator_before(
    deployment: DeploymentDir,
) -> None:
    manifest = deployment.manifest()
    assert key_codec(manifest, "average").schema.simpleString() == "struct<sensor:string>"
    second = Operator("second", (OUTPUT,), "out", ())
    operators = manifest.topology.operators | {"second": second, "third": Operator("third", ("x",), "y", ())}
    more = Manifest("test", Topology({SITE: None}, {}, operators), manifest.streams)
    assert key_codec(more, "second").names == ["sensor"]
    with pytest.raises(UserError, match="the key of operator 'third' has no columns"):
        key_codec(more, "third")


def test_state_and_metrics_sources_name_missing_options(deployment: DeploymentDir) -> None:
    with pytest.raises(UserError, match=r"no operator 'averages' in .*\nexpected: one of: average"):
        State({"storage": str(deployment.directory), "operator": "averages"}).schema()
    with pytest.raises(UserError, match="option 'operator' is missing\nexpected: one of: average"):
        State({"storage": str(deployment.directory)}).schema()
    with pytest.raises(UserError, match="holds no deployment"):
        Metrics({"storage": str(deployment.directory / "elsewhere")}).schema()


def test_the_guide_lists_every_column_of_the_metrics_and_of_dead_letters_and_every_option_of_a_fold() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    listed = {
        name: {cell for line in table.splitlines() for cell in re.findall("`(\\w+)`", line.split("|")[1])}
        for name, table in re.findall(r"\| ((?:column|option) of .*?) \|.*?\n((?:\|.*\n)+)", guide)
    }
    assert listed["column of `tiercel-metrics`"] == set(parse_ddl(METRICS).names)
    assert listed["column of a feed's dead letters"] == set(parse_ddl(FEED_DEAD_LETTER_SCHEMA).names)
    assert listed["option of `fold`"] == {"name", *_FOLD_OPTIONS}


def test_every_kind_of_state_is_shown_as_json() -> None:
    image = StateImage(
        b"k",
        1,
        1,
        {
            "total": ("value", (3, 1.5)),
            "last": ("list", [["a"], ["b"]]),
            "by": ("map", [[["x"], [1]], [["y"], [2]]]),
        },
    )
    assert list(variables(image)) == [
        ("by", '["x"]', "[1]"),
        ("by", '["y"]', "[2]"),
        ("last", None, '[["a"],["b"]]'),
        ("total", None, "[3,1.5]"),
    ]
    assert list(variables(StateImage(b"k", 1, 1, {}, (17,)))) == [(None, None, None)]
