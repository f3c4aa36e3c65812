"""A fold behind the core: the rows that a step gets, the results that it may return."""

from __future__ import annotations

import datetime
import pickle
from random import Random
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.model.log import Output
from tiercel.core.model.topology import Operator
from tiercel.core.state.table import StateTable
from tiercel.errors import UserError
from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.plans import OperatorPlan, Transform
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.operators.transforms import union_schema
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.row_types import fast_row_type
from tiercel.testing import Trial, check_deterministic

NOON = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
CARS = RowCodec("car string, speed double", "car")
MEANS = "car string, mean double"


def mean(state: Any, row: Any) -> tuple[Any, Any]:
    if row.speed < 0:
        raise ValueError("backwards")
    count, total = state
    count, total = count + 1, total + row.speed
    return (count, total), (row.car, total / count)


def means() -> Fold:
    return Fold(mean, (0, 0.0), "count int, total double", MEANS)


def trial(fold: Fold, **options: Any) -> Trial:
    return Trial(fold, schema=CARS.schema, key="car", output=fold.output_schema, **options)


def scripted(script: Any, state: str = "n int", initial: Any = (0,), output: str = "said string") -> Trial:
    return trial(Fold(script, initial, state, output))


class Play:
    """One operator without a router; the fold as it is, or as the processor that it is too."""

    def __init__(self, fold: Fold, *inputs: InputPlan, output: RowCodec, short: bool) -> None:
        plan = OperatorPlan(fold, inputs, union_schema(inputs), output)
        self.border = ProcessorAdapter(pickle.loads(cloudpickle.dumps(plan)))  # type: ignore[no-untyped-call]
        assert self.border.fold is not None
        if not short:
            self.border.fold = None
        names = tuple(f"in{n}" for n in range(len(inputs)))
        self.engine = ProcessorRunner(self.border, Operator("op", names, "out", ()))
        self.space = StateTable(4, lambda key: 1, *self.engine.about_keys)
        self.inputs = inputs
        self.offset = 0

    def send(self, number: int, row: Any) -> list[Output]:
        key, time, payload = self.inputs[number].codec.pack(row)
        tagged = payload if len(self.inputs) == 1 else (number, payload)
        out: list[Output] = []
        self.offset += 1
        state = self.space.state(key)
        self.engine.call(state, key, [(key, time, tagged)], 0, -1, self.offset, out)
        self.space.touched(key, state, [])
        return out

    @property
    def state(self) -> dict[bytes, Any]:
        return {key: state.values for key, state in self.space.keys.items()}


# -- the real core -----------------------------------------------------------------------------


def test_fold_keeps_its_state_over_moves_and_crashes() -> None:
    cars = trial(means())
    cars.send(("a", 10.0), ("b", 1.0), ("a", 20.0))
    cars.move("a")
    cars.send(("a", 30.0), ("b", 3.0))
    cars.crash(after_checkpoint=True)
    cars.begin_move("b", "pause")
    cars.send(("a", 40.0), ("b", 5.0))
    cars.finish_moves()
    cars.crash()
    cars.send(("b", 7.0))
    assert cars.outputs("a") == [("a", 10.0), ("a", 15.0), ("a", 20.0), ("a", 25.0)]
    assert cars.outputs("b") == [("b", 1.0), ("b", 2.0), ("b", 3.0), ("b", 4.0)]
    assert cars.state("a") == {"state": Row(count=4, total=100.0)}
    assert cars.dead_letters() == []


def test_row_becomes_a_dead_letter_if_its_step_raises() -> None:
    cars = trial(means())
    cars.send(("a", 10.0), ("a", -1.0), ("a", 20.0), ("b", -2.0))
    assert cars.outputs() == [("a", 10.0), ("a", 15.0)]
    assert sorted(cars.dead_letters()) == [
        ("ValueError: backwards", ("a", -1.0)),
        ("ValueError: backwards", ("b", -2.0)),
    ]
    assert cars.known_keys() == [("a",)]


def test_nondeterministic_fold_is_detected() -> None:
    rows = [("a", float(n)) for n in range(6)]
    check_deterministic(means(), rows, schema=CARS.schema, key="car", output=MEANS)
    random = Random(1)

    def careless(state: Any, row: Any) -> tuple[Any, Any]:
        return state, (row.car, random.random())

    with pytest.raises(AssertionError):
        check_deterministic(
            Fold(careless, (0,), "n int", MEANS), rows, schema=CARS.schema, key="car", output=MEANS
        )


# -- what a step gives -------------------------------------------------------------------------


def test_step_may_emit_a_tuple_a_dict_a_row_a_list_or_none() -> None:
    forms = {
        1.0: ("a", 1.0),
        2.0: {"mean": 2.0, "car": "a"},
        3.0: Row(mean=3.0, car="a"),
        4.0: [("a", 4.0), {"car": "a", "mean": 4.5}],
        5.0: None,
        6.0: [],
        7.0: ("a", 7),  # an int is taken for a double
        8.0: ("a", None),
    }
    cars = scripted(lambda state, row: (state, forms[row.speed]), output=MEANS)
    cars.send(*[("a", speed) for speed in forms])
    expected = [1.0, 2.0, 3.0, 4.0, 4.5, 7.0, None]
    assert cars.outputs() == [("a", value) for value in expected]
    assert cars.dead_letters() == []


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (((1,), "no row"), "column *: 'no row' (str)\nexpected: a dict, a Row"),
        (((1,), ("a", "fast")), "column mean: 'fast' (str)"),
        (((1,), ("a",)), "the row has 1 values"),
        (((1,), [("a", 1.0), ("a", "fast")]), "column mean: 'fast' (str)"),
        ((("one",), None), "column state.n: 'one' (str)"),
        (((1, 2), None), "state has 2 values"),
        (((2**40,), None), "column state.n: 1099511627776 (int)"),
        (({"n": 1}, None), "column state: {'n': 1} (dict)"),
        (None, "step returned None (NoneType)\nexpected: (state, output)"),
        (7, "step returned 7 (int)"),
    ],
)
def test_invalid_result_of_a_step_becomes_a_dead_letter_and_changes_no_state(made: Any, reason: str) -> None:
    def step(state: Any, row: Any) -> Any:
        return ((5,), None) if row.speed == 0 else made

    cars = scripted(step, output=MEANS)
    cars.send(("a", 0.0), ("a", 1.0))
    [(found, row)] = cars.dead_letters()
    assert reason in found
    assert row == ("a", 1.0)
    assert cars.outputs() == []
    assert cars.state("a") == {"state": Row(n=5)}


def test_step_that_returns_no_state_deletes_the_key() -> None:
    def step(state: Any, row: Any) -> Any:
        return None if row.speed == 0 else (state[0] + 1,), (str(state[0]),)

    cars = scripted(step)
    cars.send(("a", 1.0), ("a", 0.0))
    assert cars.known_keys() == []
    cars.send(("a", 1.0), ("a", 1.0))
    assert [row.said for row in cars.outputs()] == ["0", "1", "0", "1"]
    cars.move("a")
    assert cars.state("a") == {"state": Row(n=2)}


# -- what a step is given ----------------------------------------------------------------------


def test_row_of_a_fold_is_read_by_name_and_by_index() -> None:
    def step(state: Any, row: Any) -> Any:
        car, speed = row
        assert (car, speed) == (row.car, row.speed) == (row["car"], row["speed"]) == (row[0], row[-1])
        assert row.asDict() == {"car": car, "speed": speed}
        assert len(row) == 2
        assert isinstance(state, tuple)
        return state, (repr(state),)

    cars = scripted(step)
    cars.send(("a", 1.0))
    assert cars.outputs() == [("(0,)",)]
    assert cars.dead_letters() == []


def test_columns_with_names_that_are_no_attributes_are_readable() -> None:
    kind = fast_row_type(["a b", "asDict", "columns_", "class", "x"])
    row = kind(1, 2, 3, 4, 5)
    assert row.asDict() == {"a b": 1, "asDict": 2, "columns_": 3, "class": 4, "x": 5}
    assert [row["a b"], row["asDict"], row[2], getattr(row, "class"), row.x] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]


def test_converted_values_are_the_same_in_both_forms_of_a_fold() -> None:
    columns = RowCodec("car string, at timestamp, tags array<string>", "car")

    def step(state: Any, row: Any) -> Any:
        last, tags = state
        assert row.at.tzinfo is not None
        gap = None if last is None else (row.at.replace(tzinfo=None) - last).total_seconds()
        return (row.at.replace(tzinfo=None), [*tags, *row.tags]), (row.car, row.at, gap, list(tags))

    fold = Fold(
        step,
        (None, []),
        "last timestamp, tags array<string>",
        "car string, at timestamp, gap double, tags array<string>",
    )
    cars = Trial(fold, schema=columns.schema, key="car", output=fold.output_schema)
    later = NOON + datetime.timedelta(seconds=90)
    cars.send(("a", NOON, ["x"]))
    cars.move("a")
    cars.crash(after_checkpoint=True)
    cars.send(("a", later, ["y"]))
    assert cars.dead_letters() == []
    assert cars.outputs() == [("a", NOON, None, []), ("a", later, 90.0, ["x"])]


# -- the two ways ------------------------------------------------------------------------------


def chatty(state: Any, row: Any) -> tuple[Any, Any]:
    (count,) = state
    if row.speed == 13:
        raise ValueError("thirteen")
    if row.speed == 7:
        return None, (row.car, -1.0)
    return (count + 1,), [(row.car, float(n)) for n in range(int(row.speed) % 4)]


def drop_slow(row: Any) -> bool:
    return bool(row.speed > 2)


def double(row: Any) -> list[Any]:
    return [row, {"car": row.car, "speed": row.speed + 1}]


STEPS = (Transform("filter", drop_slow), Transform("flat_map", double, CARS.schema))
LANES = RowCodec("car string, speed double, lane int", "car")


@pytest.mark.parametrize(
    "inputs",
    [(InputPlan(CARS),), (InputPlan(CARS, STEPS),), (InputPlan(CARS), InputPlan(LANES))],
    ids=["plain", "behind steps", "of two inputs"],
)
@pytest.mark.parametrize(
    "output",
    [RowCodec(MEANS), RowCodec(MEANS, "mean"), RowCodec("car string, mean double", ("mean", "car"))],
    ids=["no key", "another key", "two key columns"],
)
def test_generated_fold_equals_the_processor(inputs: tuple[InputPlan, ...], output: RowCodec) -> None:
    fold = Fold(chatty, (0,), "count long", output.schema)
    short, whole = (Play(fold, *inputs, output=output, short=which) for which in (True, False))
    random = Random(5)
    outputs = 0
    for _ in range(300):
        number = random.randrange(len(inputs))
        row: Any = (random.choice("abc"), float(random.randrange(16)))
        row = row if number == 0 else (*row, 1)
        made = short.send(number, row)
        outputs += len(made)
        assert made == whole.send(number, row)
        assert short.state == whole.state
    assert [o.row for o in short.engine.dead_letters] == [o.row for o in whole.engine.dead_letters]
    assert outputs > 100
    assert short.engine.dead_letters


# -- declaring ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((7, (0,), "n int", "said string"), "fold(7)"),
        ((mean, (0,), "count int, total double", MEANS), "initial has 1 values"),
        ((mean, ("x", 0.0), "count int, total double", MEANS), "column initial.count: 'x'"),
        ((mean, None, "count int", MEANS), "column initial: None"),
        ((mean, 0, "count int", MEANS), "column initial: 0 (int)"),
        ((mean, (0,), 7, MEANS), "schema 7"),
        ((mean, (0,), "n nonsense", MEANS), "unknown type 'nonsense'"),
    ],
)
def test_invalid_fold_is_refused_at_construction(arguments: Any, what: str) -> None:
    with pytest.raises(UserError) as refused:
        Fold(*arguments)
    assert what in str(refused.value)
