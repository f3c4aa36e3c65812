"""An unmodified processor behind the core: it sees what Spark would show it, and yields what was declared."""

from __future__ import annotations

import copy
import datetime
import decimal
import pickle
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.model.keys import StateImage
from tiercel.core.model.log import INITIAL, Output
from tiercel.core.model.row_batch import split
from tiercel.core.model.topology import Operator
from tiercel.core.state.table import StateTable
from tiercel.errors import UserError
from tiercel.spark.operators.plans import OperatorPlan, Transform
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.operators.transforms import Identity, union_schema
from tiercel.spark.rows.row_codec import DEAD_LETTER_SCHEMA, RowCodec, parse_ddl
from tiercel.spark.state.declared_state import Variable, check_processor

NOON = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
CARS = RowCodec("car string, speed double, at timestamp", "car", "at")
SAID = RowCodec("said string")


class Scripted(StatefulProcessor):
    """Calls a function with the processor, the key, the rows and the times; what it says is the output."""

    def __init__(self, script: Any, on_timer: Any = None) -> None:
        self.script = script
        self.on_timer = on_timer

    def init(self, handle: Any) -> None:
        self.handle = handle
        kinds = "t timestamp, n timestamp_ntz, d date, m decimal(10,2), a array<int>, p map<string,date>"
        self.value = handle.getValueState("value", kinds + ", s struct<x:int,y:date>")
        self.list = handle.getListState("list", "d date")
        self.map = handle.getMapState("map", "d date", "m decimal(10,2), n int")
        self.plain = handle.getValueState("plain", "n bigint, x double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from self.script(self, key, rows, timerValues) or ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from self.on_timer(self, key, timerValues, expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.plain.update((initialState.n, 0.0))

    def close(self) -> None:
        """Nothing to let go."""


class Play:
    """One operator without a router: rows in, outputs and dead letters out."""

    def __init__(
        self,
        processor: StatefulProcessor,
        *inputs: InputPlan,
        output: RowCodec = SAID,
        time_mode: str = "none",
        pandas: bool = False,
    ) -> None:
        self.inputs = inputs or (InputPlan(CARS),)
        plan = OperatorPlan(processor, self.inputs, union_schema(self.inputs), output, time_mode, pandas)
        self.adapter = ProcessorAdapter(pickle.loads(cloudpickle.dumps(plan)))  # type: ignore[no-untyped-call]
        names = tuple(f"in{n}" for n in range(len(self.inputs)))
        self.engine = ProcessorRunner(self.adapter, Operator("op", names, "out", (), time_mode=time_mode))
        self.space = StateTable(4, lambda key: 1, *self.engine.about_keys)
        self.output = output
        self.offset = 0

    def send(self, *rows: Any, number: int = 0, time_ms: int = 5, watermark_ms: int = -1) -> list[Any]:
        """One call; what it said, row by row."""
        plan = self.inputs[number]
        packed = []
        for row in rows:
            key, time, payload = plan.codec.pack(row)
            wired = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
            tagged = wired if len(self.inputs) == 1 else [number, wired]
            packed.append((key, INITIAL if plan.initial else time, tagged))
        out: list[Output] = []
        self.offset += 1
        state = self.space.state(packed[0][0])
        self.engine.call(state, packed[0][0], packed, time_ms, watermark_ms, self.offset, out)
        self.space.touched(packed[0][0], state, self.engine.handle.new_timers)
        return [self.output.unpack(payload) for o in out for payload in split(o.row[2])]

    def restore(self) -> None:
        """All state leaves and comes back, over the wire."""
        images = [state.image(key, 1, 0, -1) for key, state in self.space.keys.items()]
        wire = msgspec.msgpack.encode(images)
        self.space = StateTable(4, lambda key: 1, *self.engine.about_keys)
        for image in msgspec.msgpack.decode(wire, type=list[StateImage]):
            self.space.install(image, 1)

    @property
    def reasons(self) -> list[str]:
        return [letter.row[2][0] for letter in self.engine.dead_letters]


def car(name: str = "a", speed: float = 1.0, at: datetime.datetime = NOON) -> dict[str, Any]:
    return {"car": name, "speed": speed, "at": at}


def say(*things: Any) -> list[Row]:
    return [Row(said=repr(thing)) for thing in things]


# -- what user code sees -----------------------------------------------------------------------


def test_processor_gets_rows_and_a_tuple_as_key() -> None:
    def script(_: Any, key: Any, rows: Any, times: Any) -> Any:
        for row in rows:
            assert isinstance(row, Row)
            assert row.asDict() == car()
            yield from say(type(key).__name__, key, row.car, row["at"] == NOON, row[1])

    said = Play(Scripted(script)).send(car())
    assert [s for (s,) in said] == ["'tuple'", "('a',)", "'a'", "True", "1.0"]


def test_processor_sees_nested_columns_as_in_spark() -> None:
    columns = RowCodec("k int, m map<string,date>, s struct<x:int,y:date>, a array<int>", "k")
    day = datetime.date(2026, 1, 2)

    def script(_: Any, key: Any, rows: Any, times: Any) -> Any:
        for row in rows:
            assert row.m == [("a", day)]
            assert row.s == {"x": 1, "y": day}
            yield row

    play = Play(Scripted(script), InputPlan(columns), output=columns)
    row = (1, {"a": day}, (1, day), [1])
    assert play.send(row) == [row]


def test_processor_gets_the_times_of_its_time_mode() -> None:
    def script(_: Any, key: Any, rows: Any, times: Any) -> Any:
        return say((times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()))

    for mode, early, later in (
        ("none", (-1, -1), (-1, -1)),
        ("processingTime", (5, 0), (5, 0)),
        ("eventTime", (5, 0), (5, 7)),
    ):
        play = Play(Scripted(script), time_mode=mode)
        assert play.send(car()) == [(repr(early),)]
        assert play.send(car(), watermark_ms=7) == [(repr(later),)]


def test_expired_timer_has_its_key_as_a_row() -> None:
    def script(self: Any, key: Any, rows: Any, times: Any) -> Any:
        self.handle.registerTimer(3)

    def on_timer(self: Any, key: Any, times: Any, info: Any) -> Any:
        return say((key.car, key, info.getExpiryTimeInMs()))

    play = Play(Scripted(script, on_timer), time_mode="processingTime")
    assert play.send(car()) == [("('a', Row(car='a'), 3)",)]


# -- state -------------------------------------------------------------------------------------

DAY = datetime.date(2026, 1, 2)
NAIVE = datetime.datetime(2026, 1, 2, 3)  # noqa: DTZ001
STORED = (NOON, NAIVE, DAY, decimal.Decimal("1.5"), [1, None], {"a": DAY}, Row(x=1, y=DAY))


def test_state_of_every_type_survives_encoding() -> None:
    def store(self: Any, key: Any, rows: Any, times: Any) -> None:
        self.value.update(STORED)
        self.list.appendValue((DAY,))
        self.map.updateValue((DAY,), (decimal.Decimal("2"), 3))
        self.plain.update([5, 6])

    def look(self: Any, key: Any, rows: Any, times: Any) -> Any:
        moment, *others = self.value.get()
        assert moment.tzinfo is None  # as in Spark: in the zone of the process
        assert moment.timestamp() == NOON.timestamp()
        assert tuple(others) == STORED[1:]
        assert others[-1].y == DAY
        assert list(self.list.get()) == [(DAY,)]
        found = self.map.getValue((DAY,))
        assert (found.m, found.n) == (decimal.Decimal("2"), 3)
        assert list(self.map.iterator()) == [((DAY,), (decimal.Decimal("2.00"), 3))]
        assert list(self.map.keys()) == [(DAY,)]
        assert self.map.containsKey((DAY,))
        plain = self.plain.get()
        assert (type(plain), plain, type(plain[1])) == (tuple, (5, 6.0), float)
        return say("all there")

    def script(self: Any, key: Any, rows: Any, times: Any) -> Any:
        return (store if next(rows).speed == 0 else look)(self, key, rows, times)

    play = Play(Scripted(script))
    play.send(car(speed=0))
    for _ in range(2):
        assert play.send(car()) == [("'all there'",)], play.reasons
        play.restore()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((1.5, 1.0), "column plain.n: 1.5 (float)"),
        ((1,), "plain has 1 values"),
        ((1, object()), "column plain.x"),
        ({"n": 1, "x": 1.0}, "column plain: {'n'"),
        (None, "column plain: None"),
        (5, "column plain: 5"),
    ],
)
def test_invalid_state_value_fails_the_call(value: Any, said: str) -> None:
    play = Play(Scripted(lambda self, key, rows, times: self.plain.update(value)))
    play.send(car())
    assert said in play.reasons[0]
    assert not play.space.keys


class Forgets(Scripted):
    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.deleteIfExists("old")


def test_variable_deleted_in_init_is_gone_from_loaded_keys() -> None:
    play = Play(Forgets(None))
    key = CARS.key_of(("a", 1.0, NOON))
    kept = {"plain": ("value", (1, 1.0)), "old": ("value", (1,))}
    play.space.install(StateImage(key, 1, 0, kept, ()), 1)
    assert play.space.keys[key].values == {"plain": (1, 1.0)}
    play.space.install(StateImage(key, 1, 0, {"old": ("value", (1,))}, ()), 1)
    assert not play.space.keys


# -- outputs -----------------------------------------------------------------------------------


def test_output_columns_are_matched_by_name_and_give_key_and_time() -> None:
    output = RowCodec("n int, city string, at timestamp", "city", "at")
    rows = [
        Row(at=NOON, extra=1, city="x"),
        Row("n", "city", "at")(1, "y", NOON),
    ]
    play = Play(Scripted(lambda *_: rows), output=output)
    assert play.send(car()) == [(None, "x", NOON), (1, "y", NOON)]
    key, time_ms, _ = play.adapter.output_row(b"", rows[0])
    assert output.key_values(key) == ("x",)
    assert time_ms == int(NOON.timestamp() * 1000)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (Row(said=3), "column said: 3 (int)\nexpected: string"),
        (("x",), "a Row with the columns: said"),
        ({"said": "x"}, "a Row with the columns: said"),
        (Row("x"), "a Row with the columns: said"),
    ],
)
def test_invalid_output_fails_the_call(output: Any, said: str) -> None:
    play = Play(Scripted(lambda *_: [output]))
    assert play.send(car()) == []
    assert said in play.reasons[0]


def test_dead_letter_holds_the_original_row() -> None:
    play = Play(Scripted(lambda *_: 1 / 0))
    play.send(car())
    (letter,) = play.engine.dead_letters
    columns = RowCodec(DEAD_LETTER_SCHEMA)
    reason, key, offset, row = columns.values(msgspec.msgpack.decode(msgspec.msgpack.encode(letter.row[2])))
    assert columns.payload((reason, key, offset, row)) == letter.row[2]
    assert (reason, CARS.key_values(key), offset) == ("ZeroDivisionError: division by zero", ("a",), 1)
    assert CARS.unpack(msgspec.msgpack.decode(row)) == tuple(car().values())


# -- several inputs, initial state, steps ------------------------------------------------------


def test_a_processor_of_several_inputs_sees_their_union() -> None:
    rates = InputPlan(RowCodec("factor double, car string", "car"))

    def script(_: Any, key: Any, rows: Any, times: Any) -> Any:
        return say(*[tuple(row) for row in rows])

    play = Play(Scripted(script), InputPlan(RowCodec("car string, speed double", "car")), rates)
    assert play.send({"car": "a", "speed": 2.0}) == [("('a', 2.0, None)",)]
    assert play.send({"car": "a", "factor": 3.0}, number=1) == [("('a', None, 3.0)",)]


def test_inputs_with_different_types_of_a_column_are_refused() -> None:
    with pytest.raises(UserError, match="column n is int in one input and string in another"):
        union_schema([InputPlan(RowCodec("n int")), InputPlan(RowCodec("n string"))])


def test_initial_state_may_have_other_columns_than_the_input() -> None:
    initial = InputPlan(RowCodec("car string, n bigint", "car"), initial=True)

    def script(self: Any, key: Any, rows: Any, times: Any) -> Any:
        return say((self.plain.get(), [len(row) for row in rows]))

    play = Play(Scripted(script), InputPlan(CARS), initial)
    assert play.send({"car": "a", "n": 7}, number=1) == []
    assert play.send(car()) == [("((7, 0.0), [3])",)]


def test_transforms_run_in_front_of_the_processor() -> None:
    halves = parse_ddl("car string, half double")
    steps = (
        Transform("filter", lambda row: row.speed > 1),
        Transform("flat_map", lambda row: [row, row], None),
        Transform("map", lambda row: {"car": row.car, "half": row.speed / 2}, halves),
    )
    plan = InputPlan(CARS, steps)
    output = RowCodec(plan.schema, "car")
    play = Play(Identity(), plan, output=output)
    assert play.send(car(speed=1), car(speed=3)) == [("a", 1.5), ("a", 1.5)]
    assert not play.space.keys


def test_no_call_is_made_if_a_filter_drops_all_rows() -> None:
    def script(_: Any, key: Any, rows: Any, times: Any) -> Any:
        return say(next(rows).speed)

    play = Play(Scripted(script), InputPlan(CARS, (Transform("filter", lambda row: row.speed > 1),)))
    assert play.send(car(speed=1)) == []
    assert play.send(car(speed=2)) == [("2.0",)]
    assert play.reasons == []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Transform("map", lambda row: (1, 2)), "has 2 values"),
        (Transform("map", lambda row: {"car": "a"}), "column map(<lambda>).speed is missing"),
        (Transform("map", lambda row: (1, 1.0, NOON)), "column map(<lambda>).car: 1 (int)"),
        (Transform("filter", lambda row: None), "does the function return something?"),
        (Transform("flat_map", lambda row: row), "an iterable of rows"),
        (Transform("flat_map", lambda row: None), "an iterable of rows"),
        (Transform("map", lambda row: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_failing_transform_fails_the_call(step: Transform, said: str) -> None:
    play = Play(Identity(), InputPlan(CARS, (step,)), output=RowCodec(CARS.schema, "car"))
    assert play.send(car()) == []
    assert said in play.reasons[0]


# -- pandas ------------------------------------------------------------------------------------


class Totals(StatefulProcessor):
    """As written for transformWithStateInPandas."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "speed double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        import pandas

        for frame in rows:
            total = (self.total.get() or (0.0,))[0] + frame["speed"].sum()
            self.total.update((total,))
            self.handle.registerTimer(9)
            yield pandas.DataFrame({"car": key[0], "total": [total], "at": [frame["at"].max()]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        import pandas

        yield pandas.DataFrame({"car": [key[0]], "total": [float("nan")]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.total.update((initialState["speed"].iloc[0],))

    def close(self) -> None:
        """Nothing to let go."""


def test_pandas_processor_takes_and_yields_frames() -> None:
    initial = InputPlan(RowCodec("car string, speed double", "car"), initial=True)
    output = RowCodec("car string, total double, at timestamp")
    play = Play(Totals(), InputPlan(CARS), initial, output=output, time_mode="processingTime", pandas=True)
    play.send({"car": "a", "speed": 10.0}, number=1)
    assert play.send(car(speed=1), car(speed=2)) == [("a", 13.0, NOON)], play.reasons
    assert play.send(car(speed=1), time_ms=9) == [("a", 14.0, NOON), ("a", None, None)]
    assert play.reasons == []


# -- before it runs ----------------------------------------------------------------------------


def test_trial_call_of_init_finds_declared_state_without_side_effects() -> None:
    processor = Scripted(None)
    before = copy.copy(vars(processor))
    variables = check_processor(processor)
    assert vars(processor) == before
    assert [(v.name, v.kind) for v in variables] == [
        ("value", "value"),
        ("list", "list"),
        ("map", "map"),
        ("plain", "value"),
    ]
    keys, values = parse_ddl("d date"), parse_ddl("m decimal(10,2), n int")
    assert variables[2] == Variable("map", "map", values, keys, None)


class Broken(Identity):
    def __init__(self, init: Any) -> None:
        self._init = init

    def init(self, handle: Any) -> None:
        self._init(handle)


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (Identity, r"write Identity\(\)"),
        (object(), "derive its class"),
        (Broken(lambda handle: 1 / 0), "init of Broken failed: ZeroDivisionError"),
        (Broken(lambda handle: handle.getValueState("x", "n blob")), "unknown type 'blob'"),
        (Broken(lambda handle: handle.getValueState("x", "n int", 5)), "time mode processingTime"),
        (Broken(lambda handle: [handle.getListState("x", "n int") for _ in "ab"]), "named twice"),
        (Broken(n for n in ()), "can be pickled"),
    ],
)
def test_processor_that_cannot_run_is_refused_at_declaration(processor: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_processor(processor)
    assert re.search(said, str(refused.value))


def test_an_unknown_time_mode_is_refused() -> None:
    with pytest.raises(UserError, match="time mode 'soon'"):
        check_processor(Identity(), "soon")
