"""RIoTBench: messages like those of its data sets, and tasks against their definitions."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from tiercel import UserError
from tiercel.apps.app import POSITION, parse_options
from tiercel.apps.riot import chained, oracle, tasks
from tiercel.apps.riot.app import RiotApp, RiotOptions
from tiercel.apps.riot.generator import BASE, DATASETS, MESSAGE, Messages
from tiercel.spark.operators.folds import Fold
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import Trial

CITY, TAXI = DATASETS["city"], DATASETS["taxi"]


def rows_of(dataset: str, n: int) -> list[tuple[Any, ...]]:
    return [row for _, row in islice(Messages(DATASETS[dataset], 1).rows(100), n)]


def observation(value: float | None, n: int, field: str = "dust") -> tuple[Any, ...]:
    return (n, "s1", field, value, BASE + datetime.timedelta(seconds=n))


def folded(step: Any, initial: Any, state: str, output: str, rows: list[Any], schema: str) -> list[Any]:
    """The outputs of a fold, with a move and a crash inside."""
    fold = Fold(step, initial, parse_ddl(state), parse_ddl(output))
    trial = Trial(fold, schema=schema, key="sensor", output=output)
    half = len(rows) // 2
    trial.send(*rows[:half])
    trial.move("s1")
    trial.crash()
    trial.send(*rows[half:])
    return trial.outputs()


def named(rows: Sequence[Sequence[Any]], schema: str = MESSAGE) -> list[Any]:
    row_type = msgspec.defstruct("Named", parse_ddl(schema).names)
    return [row_type(*row) for row in rows]


def stepped(
    step: Any, initial: Any, rows: Sequence[Sequence[Any]], schema: str, key: Sequence[int]
) -> list[tuple[Any, ...]]:
    """The outputs of a step function, by hand: a state for each key."""
    states: dict[tuple[Any, ...], Any] = {}
    found = []
    for row, one in zip(rows, named(rows, schema), strict=True):
        place = tuple(row[n] for n in key)
        states[place], output = step(states.get(place) or initial, one)
        if output is not None:
            found.append(output)
    return found


def test_messages_have_the_sizes_and_missing_values_of_the_public_samples() -> None:
    rows = rows_of("city", 3_000)
    assert 360 < np.mean([len(row[2]) for row in rows]) < 410  # 382 in the public sample
    parse = tasks.Parse(CITY, checked=True)
    row_type = msgspec.defstruct("Message", ["msgid", "sensor", "senml", "model", "at"])
    values = [one for row in rows for one in parse(row_type(*row))]
    assert len(values) == 15_000
    share = np.mean([value[3] is None for value in values])
    assert 0.18 < share < 0.32  # 24 % in the public sample
    assert Counter(row[1] for row in rows_of("taxi", 3_000))["s0"] > 100


def test_messages_are_a_function_of_the_seed() -> None:
    assert rows_of("city", 1_200) == rows_of("city", 1_200)
    assert [row for _, row in islice(Messages(CITY, 2).rows(100), 5)] != rows_of("city", 5)


def test_a_missing_value_is_the_mean_of_the_last_five() -> None:
    values = [None, 10.0, 20.0, None, 30.0, 40.0, 50.0, 60.0, None]
    found = folded(
        tasks.Interpolate(5),
        ([],),
        "last array<double>",
        tasks.OBSERVATION,
        [observation(value, n) for n, value in enumerate(values)],
        tasks.OBSERVATION,
    )
    assert [row.value for row in found] == [0.0, 10.0, 20.0, 15.0, 30.0, 40.0, 50.0, 60.0, 40.0]


def test_the_observations_of_a_message_come_together_in_the_order_of_the_schema() -> None:
    fold = Fold(
        tasks.Join(CITY),
        ([], []),
        parse_ddl("places array<int>, values array<double>"),
        parse_ddl(tasks.JOINED),
    )
    trial = Trial(fold, schema=tasks.OBSERVATION, key="msgid", output=tasks.JOINED)
    names = ["dust", "temperature", "light", "airquality_raw", "humidity"]
    trial.send(*[observation(float(n), 1, name) for n, name in enumerate(names)])
    [row] = trial.outputs()
    assert row["values"] == [1.0, 4.0, 2.0, 0.0, 3.0]
    assert row.annotation == "region-1"
    assert not trial.state(1)


def test_a_block_average_is_emitted_when_the_block_is_full() -> None:
    rows = [observation(float(n), n) for n in range(11)]
    found = folded(
        tasks.BlockAverage(5),
        (0, 0, 0.0),
        "block bigint, count int, total double",
        tasks.AVERAGE,
        rows,
        tasks.OBSERVATION,
    )
    assert [(row.n, row["mean"]) for row in found] == [(0, 2.0), (1, 7.0)]


def test_the_kalman_filter_comes_close_to_a_constant_and_the_line_predicts_it() -> None:
    rows = [observation(20.0, n) for n in range(30)]
    state = "n bigint, estimate double, error double"
    found = folded(tasks.kalman, (0, 0.0, tasks.FIRST_ERROR), state, tasks.FILTERED, rows, tasks.OBSERVATION)
    assert [row.n for row in found] == list(range(1, 31))
    assert found[0].value == pytest.approx(20 * 30.125 / 30.445)
    assert found[-1].value == pytest.approx(20.0)
    line = folded(
        tasks.regress,
        ([],),
        "last array<double>",
        tasks.PREDICTED,
        [("s1", "dust", n, 3.0 * n, BASE) for n in range(1, 14)],
        tasks.FILTERED,
    )
    assert [(row.n, row["mean"]) for row in line] == [
        (n, pytest.approx(3.0 * (n + 5.5))) for n in (11, 12, 13)
    ]


@pytest.mark.parametrize("count", [0, 3, 10, 11, 40])
def test_the_oracle_predicts_what_the_filter_and_the_line_predict(count: int) -> None:
    values = np.random.default_rng(count).normal(20, 5, count)
    rows = [observation(float(value), n) for n, value in enumerate(values)]
    filtered = stepped(tasks.kalman, (0, 0.0, tasks.FIRST_ERROR), rows, tasks.OBSERVATION, (1, 2))
    wanted = stepped(tasks.regress, ([],), filtered, tasks.FILTERED, (0, 1))
    group = pd.DataFrame(rows, columns=parse_ddl(tasks.OBSERVATION).names).astype(
        {"at": "datetime64[ns, UTC]"}
    )
    found = oracle._predictions(group.assign(**{POSITION: range(count)}))
    assert list(found["n"]) == [row[2] for row in wanted]
    assert list(found["mean"]) == pytest.approx([row[3] for row in wanted])
    assert str(found["at"].dtype).startswith("datetime64")  # also without rows: Arrow would refuse it


def test_loglog_estimates_the_number_of_sensors() -> None:
    registers = bytearray(tasks.REGISTERS)
    for n in range(20_000):
        bucket, rank = tasks.bucket_and_rank(f"s{n}")
        registers[bucket] = max(registers[bucket], rank)
    assert 15_000 < tasks.estimate(bytes(registers)) < 25_000


def test_a_new_model_counts_from_its_place_among_the_messages_of_its_sensor() -> None:
    def message(n: int, air: float) -> tuple[Any, ...]:
        entries = [{"n": name, "v": str(air)} for name in CITY.fields]
        return (n, "s1", msgspec.json.encode({"e": entries}).decode(), None, BASE)

    rows = [message(1, 20.0), message(2, 20.0), (0, "s1", None, 2, BASE), message(3, 20.0)]
    found = folded(
        tasks.Predict(CITY),
        (0, 0, 0.0, None, None),
        "model int, count int, total double, average double, before double",
        tasks.PREDICTION,
        rows,
        MESSAGE,
    )
    assert [(row.msgid, row.predicted, row["class"]) for row in found] == [
        (1, 19, "VeryGood"),
        (2, 19, "VeryGood"),
        (3, 22, "VeryGood"),
    ]


@pytest.mark.parametrize("name", ["city", "taxi"])
def test_chained_tasks_give_what_the_separate_ones_give(name: str) -> None:
    dataset = DATASETS[name]
    rows = [row for _, row in islice(Messages(dataset, 7).rows(100), 150)]
    messages = [(n, f"{sensor[0]}{int(sensor[1:]) % 3}", *rest) for n, sensor, *rest in rows]
    checked = [one for row in named(messages) for one in tasks.Parse(dataset, checked=True)(row)]
    separate = stepped(tasks.Interpolate(dataset.interpolate), ([],), checked, tasks.OBSERVATION, (1, 2))
    joined = stepped(tasks.Join(dataset), ([], []), separate, tasks.OBSERVATION, (0,))
    etl = folded(chained.Etl(dataset), ([],), "last array<array<double>>", tasks.JOINED, messages, MESSAGE)
    assert sorted(map(tuple, etl)) == sorted(joined)

    plain = [one for row in named(messages) for one in tasks.Parse(dataset, checked=False)(row)]
    means = stepped(tasks.BlockAverage(dataset.block), (0, 0, 0.0), plain, tasks.OBSERVATION, (1, 2))
    filtered = stepped(tasks.kalman, (0, 0.0, tasks.FIRST_ERROR), plain, tasks.OBSERVATION, (1, 2))
    ahead = stepped(tasks.regress, ([],), filtered, tasks.FILTERED, (0, 1))
    found = folded(
        chained.Statistics(dataset),
        chained.NO_STATISTICS,
        chained.STATISTICS_STATE,
        chained.STATISTICS,
        messages,
        MESSAGE,
    )
    fields = list(dataset.fields)
    averages = {
        (row.sensor, field, row.n // dataset.block - 1): value
        for row in found
        for field, value in zip(fields, row.averages or [], strict=False)
    }
    predictions = {
        (row.sensor, field, row.n): value
        for row in found
        for field, value in zip(fields, row.predictions or [], strict=False)
    }
    assert averages == {row[:3]: pytest.approx(row[3]) for row in means}
    assert predictions == {row[:3]: pytest.approx(row[3]) for row in ahead}
    assert len(predictions) > 50


def test_a_sensor_is_active_once_in_each_window_and_field() -> None:
    text = msgspec.json.encode({"e": [{"n": name, "v": "1"} for name in CITY.fields]}).decode()
    times = [0, 1, 9_999, 10_000, 25_000]
    rows = [(n, "s1", text, None, BASE + datetime.timedelta(milliseconds=ms)) for n, ms in enumerate(times)]
    found = folded(chained.Active(CITY), (0, 0), "end bigint, seen int", chained.ACTIVE, rows, MESSAGE)
    assert [(row.field, row.at) for row in found] == [
        (field, BASE + datetime.timedelta(milliseconds=ms))
        for ms in (0, 10_000, 25_000)
        for field in CITY.fields
    ]


def test_an_unknown_dataflow_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match="dataflow = 'train'"):
        parse_options(RiotApp(), {"dataflow": "train"})


def test_only_prediction_gets_models() -> None:
    for dataflow, wanted in (("etl", 0), ("pred", 500)):
        events = islice(RiotApp().generate(RiotOptions(dataflow=dataflow), 1, 100), 1_000)
        assert sum(row[3] is not None for _, _, row in events) == wanted
