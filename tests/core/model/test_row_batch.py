"""Row batches: rows of a key that travel as one payload, and are counted and split without a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.model.row_batch import (
    RUN_MARK,
    RUN_ROWS_MAX,
    count_rows,
    in_runs,
    is_run,
    join,
    singles,
    split,
)
from tiercel.spark.operators.folds import Fold
from tiercel.spark.rows.row_codec import decode_payloads, encode_rows
from tiercel.testing import Trial

encode = msgspec.msgpack.Encoder().encode
columns = st.tuples(st.integers(0, 99), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2))
rows = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), columns), max_size=60)
LENGTHS = [2, 15, 16, RUN_ROWS_MAX - 1, RUN_ROWS_MAX, RUN_ROWS_MAX + 1, 3 * RUN_ROWS_MAX + 1]


def packed(made: list[tuple[bytes, Any]]) -> list[tuple[Any, ...]]:
    return [(key, 0, encode(values)) for key, values in made]


@given(rows)
def test_joining_rows_into_batches_keeps_the_order_of_each_key(made: list[tuple[bytes, Any]]) -> None:
    together = join(packed(made))
    alone = [single for row in together for single in singles(row)]
    for key in (b"a", b"b", b"c"):
        assert [row for row in alone if row[0] == key] == [row for row in packed(made) if row[0] == key]
    assert count_rows(together) == len(alone) == len(made)
    assert all(count_rows([row]) <= RUN_ROWS_MAX for row in together)


@given(rows)
def test_joining_encoded_rows_equals_encoding_rows_together(made: list[tuple[bytes, Any]]) -> None:
    values = [values for _, values in made]
    together = encode_rows(values)
    assert together == in_runs([encode(each) for each in values])
    found = [tuple(tuple(v) if isinstance(v, list) else v for v in row) for row in decode_payloads(together)]
    assert found == [tuple(tuple(v) if isinstance(v, list) else v for v in row) for row in values]


def test_single_rows_of_different_keys_are_not_batched() -> None:
    apart = packed([(b"a", (1,)), (b"b", (2,))])
    assert join(apart) is apart


def test_no_encoded_row_looks_like_a_batch() -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(RUN_MARK)  # no MessagePack begins like that
    assert not any(is_run(payload) for payload in (encode((1, 2)), encode([[1], [2]]), b"", None, (0, b"")))


def test_batches_of_several_inputs_carry_the_input_number() -> None:
    (run,) = in_runs([encode((n,)) for n in range(3)])
    for payload in ((1, run), [1, run]):
        row = (b"a", 0, payload)
        assert count_rows([row]) == 3
        assert singles(row) == [(b"a", 0, (1, encode((n,)))) for n in range(3)]
    assert singles((b"a", 0, (1, encode((7,))))) == [(b"a", 0, (1, encode((7,))))]


@pytest.mark.parametrize("count", LENGTHS)
def test_batches_of_every_length_are_counted_and_split(count: int) -> None:
    payloads = [encode((n, "x")) for n in range(count)]
    runs = in_runs(payloads)
    assert [payload for run in runs for payload in split(run)] == payloads
    assert [count_rows([(b"a", 0, run)]) for run in runs[:-1]] == [RUN_ROWS_MAX] * (len(runs) - 1)
    assert count_rows([(b"a", 0, run) for run in runs]) == count
    assert runs == encode_rows([(n, "x") for n in range(count)])


@pytest.mark.parametrize(
    "payload", [b"", RUN_MARK, b"\xc1\x92\x01", b"\xc1\xff\xff\xff\xff", b"\xc1\xdc\x00\x05\x01"]
)
def test_a_malformed_batch_is_treated_as_one_row(payload: bytes) -> None:
    for given_payload in (payload, (1, payload)):
        row = (b"a", 0, given_payload)
        assert singles(row) == [row]
        assert count_rows([row]) >= 0


# -- through the core ---------------------------------------------------------------------------


class Totals(StatefulProcessor):
    """The running total of a key. A negative value raises; zero makes no output."""

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.value < 0:
                raise ValueError(row.value)
            (total,) = self._total.get() or (0,)
            self._total.update((total + row.value,))
            if row.value:
                yield Row(name=key[0], total=total + row.value)

    def close(self) -> None:
        """No resources to release."""


def step(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[str, int] | None]:
    if row.value < 0:
        raise ValueError(row.value)
    total = state[0] + row.value
    return (total,), (row.name, total) if row.value else None


def totals(form: str) -> Trial:
    processor = Totals() if form == "processor" else Fold(step, (0,), "total long", "name string, total long")
    return Trial(processor, schema="name string, value long", key="name", output="name string, total long")


values = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-1, 3)), min_size=1, max_size=40)


@pytest.mark.parametrize("form", ["processor", "fold"])
@given(made=values)
def test_a_key_makes_the_same_outputs_of_batched_and_single_rows(
    form: str, made: list[tuple[str, int]]
) -> None:
    together, alone = totals(form), totals(form)
    together.send(*made)
    for row in made:
        alone.send(row)
    for key in {name for name, _ in made}:
        assert together.outputs(key) == alone.outputs(key)
        assert together.state(key) == alone.state(key)
        assert together.dead_letters(key) == alone.dead_letters(key)


@pytest.mark.parametrize("form", ["processor", "fold"])
def test_batches_survive_moves_and_crashes(form: str) -> None:
    trial, wanted, total = totals(form), [], 0
    for turn in range(1, 5):
        trial.begin_move("a")
        trial.send(*[("a", turn)] * 20)
        trial.finish_moves()
        trial.crash(after_checkpoint=turn % 2 == 0)
        wanted += [("a", total + turn * n) for n in range(1, 21)]
        total += turn * 20
    assert [tuple(row) for row in trial.outputs("a")] == wanted


@pytest.mark.parametrize("form", ["processor", "fold"])
def test_a_malformed_batch_is_a_dead_letter_and_affects_no_other_row(form: str) -> None:
    trial = totals(form)
    trial.send(("a", 1))
    key = trial.columns.pack(("a", 1))[0]
    for payload in (RUN_MARK, b"\xc1\xdc\x00\x05\x01", b"\xc1\x92\x01\x02"):
        trial.driver.produce("site", (key, 0, payload), producer="producer", stream="input")
    trial.send(("a", 2))
    assert [tuple(row) for row in trial.outputs("a")] == [("a", 1), ("a", 3)]
    assert len(trial.driver.outputs("dead-letters")) == 4
