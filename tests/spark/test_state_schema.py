"""State as columns, and stored state as the initial state of a processor or a fold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.model.keys import StateImage
from tiercel.core.model.log import INITIAL, Output
from tiercel.core.model.topology import Operator
from tiercel.core.state.table import StateTable
from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.rows.row_codec import RowCodec, parse_ddl
from tiercel.spark.state.declared_state import Variable
from tiercel.spark.state.external_state import stored_state_codec
from tiercel.spark.state.schema import StateForm, facts_of, same_types, schema_text, stored_name, variable_of
from tiercel.spark.state.stored_state_adapter import encode_image

READ = RowCodec("k string, n bigint", "k")
SAID = RowCodec("said string")
EVERYTHING = (
    "s string, b binary, f boolean, i int, l bigint, x double, m decimal(10,2), d date, t timestamp, "
    "u timestamp_ntz, a array<int>, p map<string,date>, q struct<x:int,y:date>"
)
FULL = (
    "s",
    b"b",
    True,
    1,
    2**40,
    0.5,
    "1.50",
    20_000,
    1_780_315_200_000_001,
    7,
    (1, None),
    (("a", 3),),
    (1, 20_000),
)
EMPTY = (None,) * 13


def test_state_of_every_type_converts_to_columns_and_back() -> None:
    variables = [
        Variable("value", "value", parse_ddl(EVERYTHING)),
        Variable("list", "list", parse_ddl(EVERYTHING), None, 100),
        Variable("map", "map", parse_ddl(EVERYTHING), parse_ddl("d date, s string"), None),
        Variable("other", "value", parse_ddl("n int")),
    ]
    key = RowCodec("k string, at timestamp", ("k", "at"))
    form = StateForm(key.schema, {variable.name: facts_of(variable) for variable in variables})
    values: dict[str, Any] = {
        "value": ("value", FULL),
        "list": ("list", ((FULL, 70), (EMPTY, 80))),
        "map": ("map", (((20_000, "a"), EMPTY), ((20_001, None), FULL))),
    }
    keyed = msgspec.msgpack.encode(("a", 1_780_315_200_000_000))
    images = [StateImage(keyed, 1, 5, values, (3, 4)), StateImage(keyed, 1, 5, {}, (9,))]
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(images), type=list[StateImage])
    batch = RowCodec(form.schema).arrow_batch([form.columns(image) for image in stored])
    first, second = batch.to_pylist()
    assert key.key_of((first["key"]["k"], first["key"]["at"])) == keyed
    assert form.reader()(first) == (values, [3, 4])
    assert form.reader()(second) == ({}, [9])


def test_stored_names_have_the_schema_version() -> None:
    assert stored_name("average", 1) == "average"
    assert variable_of(stored_name("average", 12)) == ("average", 12)
    assert variable_of("a@b") == ("a@b", 1)


def test_nullability_does_not_change_the_stored_schema() -> None:
    one, other = schema_text(parse_ddl("n int not null")), schema_text(parse_ddl("n int"))
    assert one != other
    assert same_types(one, other)
    assert not same_types(one, schema_text(parse_ddl("n bigint")))


class Begun(StatefulProcessor):
    """Tells what it begins with; would refuse to be asked about initial state."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n bigint")
        self.map = handle.getMapState("map", "n bigint", "s string", 100)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for _ in rows:
            yield Row(
                said=repr((self.value.get(), list(self.map.iterator()), list(self.handle.listTimers())))
            )

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        raise AssertionError(initialState)

    def close(self) -> None:
        """Nothing to let go."""


def told(processor: StatefulProcessor, time_mode: str, image: bytes) -> str:
    """What a processor tells of a key that begins with this."""
    initial = stored_state_codec(READ)
    inputs = (InputPlan(READ), InputPlan(initial, (), initial=True, images=True))
    plan = OperatorPlan(processor, inputs, READ.schema, SAID, time_mode)
    engine = ProcessorRunner(
        ProcessorAdapter(plan), Operator("op", ("in", "op.initial"), "out", (), time_mode=time_mode)
    )
    space = StateTable(4, lambda key: 1, *engine.about_keys)
    key, _, payload = initial.pack(("a", image))
    state, out = space.state(key), list[Output]()
    engine.call(state, key, [(key, INITIAL, (1, payload))], 5, -1, 1, out)
    engine.call(state, key, [(key, 0, (0, READ.pack(("a", 1))[2]))], 5, -1, 2, out)
    assert engine.dead_letters == []
    [output] = out
    return str(SAID.unpack(output.row[2])[0])


def test_processor_starts_from_stored_values_expiries_and_timers() -> None:
    values: dict[str, Any] = {
        "value": ("value", (7,)),
        "map": ("map", [[(1,), (("x",), 6)], [(2,), (("y",), 5)]]),
    }
    image = encode_image(values, [70, 80])
    assert told(Begun(), "processingTime", image) == "((7,), [((1,), ('x',))], [70, 80])"


def test_fold_starts_from_stored_state() -> None:
    def step(state: Any, row: Any) -> Any:
        return (state[0] + row.n,), (repr(state),)

    fold = Fold(step, (0,), "n bigint", "said string")
    assert told(fold, "none", encode_image({"state": ("value", (7,))}, [])) == "(7,)"
    assert told(fold, "none", encode_image({}, [])) == "(0,)"
