"""A start on existing storage: what the deployment keeps, and which declarations may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.client.validation import home_of, site_for
from tiercel.runtime.config import Listening, parse_sites
from tiercel.runtime.deployment import Manifest
from tiercel.spark.api.graph import Graph, StreamDeclaration, codec_of
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.operators.plans import InputPlan

SITES = {"cloud": None, "edge": "cloud"}
SCHEMA = t.StructType([t.StructField("sensor", t.StringType()), t.StructField("at", t.TimestampType())])


class Silent(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None: ...


def manifest(
    found: Manifest | None,
    instances: dict[str, int],
    sites: Mapping[str, str | None] = SITES,
    schema: t.StructType = SCHEMA,
) -> Manifest:
    graph = Graph(parse_sites(sites))
    live: Any = SimpleNamespace(graph=graph, check_declaring=lambda: None)
    live.declare = graph.add_stream
    columns = codec_of("readings", schema, ("sensor",), "at")
    graph.add_input(StreamDeclaration("readings", columns, graph.root, 0))
    LiveStream(live, [("readings", InputPlan(columns))], columns).transform_with_state(
        Silent(), t.StructType([t.StructField("sensor", t.StringType())]), name="average", instances=instances
    )
    listening = Listening.of("127.0.0.1", None, None, None, graph.sites)
    return graph.manifest(Settings(), "os", listening.applied("", found), found)


def test_stream_keeps_the_site_of_its_log() -> None:
    """Declared with instances elsewhere, an operator's output was looked for where nobody had written it."""
    first = manifest(None, {"cloud": 1})
    assert home_of(first, "average.out") == "cloud"
    for instances in ({"edge": 1}, {"edge": 1, "cloud": 1}):
        again = manifest(first, instances)
        assert home_of(again, "average.out") == home_of(again, "average.dead") == "cloud"


def test_reordered_sites_change_no_log_and_no_default_site() -> None:
    """A producer that names no site was connected with another router, which knew none of its frames."""
    first = manifest(None, {"cloud": 1})
    again = manifest(first, {"cloud": 1}, sites=dict(reversed(SITES.items())))
    assert site_for(again, "readings", "") == site_for(first, "readings", "") == "cloud"
    assert home_of(again, "readings/dead") == home_of(first, "readings/dead") == "cloud"
    assert list(again.topology.sites) == list(first.topology.sites)


def test_changed_watermark_delay_is_not_a_schema_change() -> None:
    """Spark notes a DataFrame's watermark at the column: the drop-in refused to go on with another one."""

    def with_delay(delay_ms: int) -> t.StructType:
        noted = {"spark.watermarkDelayMs": delay_ms}
        return t.StructType([SCHEMA["sensor"], t.StructField("at", t.TimestampType(), True, noted)])

    first = manifest(None, {"cloud": 1}, schema=with_delay(10_000))
    again = manifest(first, {"cloud": 1}, schema=with_delay(20_000))
    assert again.id == first.id


@pytest.mark.parametrize("nullable", [True, False])
def test_changed_column_type_is_refused(nullable: bool) -> None:
    first = manifest(None, {"cloud": 1})
    other = t.StructType([t.StructField("sensor", t.LongType(), nullable), SCHEMA["at"]])
    with pytest.raises(UserError, match="another schema"):
        manifest(first, {"cloud": 1}, schema=other)
