"""The checking subscriber of the throughput benchmark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from deployment_in_process import running
from tiercel.bench.loadgen.subscriber import SubscriberProcess, _averaged, _counted
from tiercel.bench.operators import INPUT, OUTPUT, READING, SITE, topology
from tiercel.bench.scenarios.throughput import PROCESSORS, readings
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import DeploymentDir, Manifest, StreamFacts
from tiercel.spark.api.clients import RowProducer, RowSubscriber
from tiercel.spark.cluster.task import build_host
from tiercel.spark.operators.processor_adapter import InputPlan, OperatorPlan
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.spark.rows.row_codec import RowCodec
from waiting import until as wait_until


@pytest.mark.parametrize("form", ["processor", "fold"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_subscriber_counts_every_key_and_finds_no_fault(name: str, form: str, tmp_path: Path) -> None:
    forms, schema = PROCESSORS[name]
    place, operator = DeploymentDir(tmp_path), topology(1).operators["average"]
    facts = {
        INPUT: StreamFacts(parse_ddl(READING).json(), ("sensor",), sites=(SITE,)),
        OUTPUT: StreamFacts(parse_ddl(schema).json(), (), written_by="average"),
    }
    place.write(Manifest("averages", topology(1), facts, Settings()))
    columns = RowCodec(READING, "sensor")
    counted = OperatorPlan(forms[form](), (InputPlan(columns),), columns.schema, RowCodec(schema))
    hosts = [build_host(place, SITE, None), build_host(place, operator.instances[0], counted)]
    order = [2, 0, 1]
    with running(*hosts), RowProducer(place, INPUT, name="p") as producer:
        reader = SubscriberProcess(place, OUTPUT, len(order))
        for columns_of in islice(readings(order), 4):
            producer.send_columns(columns_of)
        wait_until(lambda: reader.received == 4_000, f"only {reader.received} came")
        assert reader.end() == [1_333, 1_333, 1_334]
        with RowSubscriber(place, OUTPUT, after=0) as rows, RowSubscriber(place, OUTPUT, after=0) as values:
            found, plain = [tuple(one.row) for one in rows.poll(10)], values.poll_values(10)
            both = min(len(found), len(plain))
            assert both > 0
            assert plain[:both] == found[:both]
    assert reader.faults == 0


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (_counted, [(0, 1), (0, 2), (1, 1)], [(0, 3), (0, 3), (1, 3)]),
        (_averaged, [(0, 1, 1.0), (0, 2, 1.5), (1, 1, 1.0)], [(0, 3, 2.5), (0, 3, 2.0), (1, 3, 2.0)]),
    ],
)
def test_subscriber_finds_every_fault(
    check: Callable[..., int], right: list[tuple[float, ...]], wrong: list[tuple[float, ...]]
) -> None:
    counts = [0, 0]
    assert check(right, counts) == 0
    assert counts == [2, 1]
    assert check(wrong, counts) == len(wrong) - (check is _counted)
    assert counts == [3, 3]
