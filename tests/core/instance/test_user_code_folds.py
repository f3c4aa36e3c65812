"""Folds: one call per row, with the same outputs and state as an equivalent processor."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest

from tiercel.core.errors import OperatorFailed
from tiercel.core.instance.user_code import Fold, ProcessorRunner
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output, Row
from tiercel.core.model.topology import Operator
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable
from tiercel.sim.workload import Chained, PlainCode


class Obedient(PlainCode):
    """Counts the rows of a key, and does as the payload asks."""

    def __init__(self) -> None:
        super().__init__(Chained("op"))
        self.failures = 0
        self.fold = Fold("count", self.advance)

    def advance(self, before: Any, row: Row) -> tuple[Any, Any]:
        key, _, payload = row
        (count,) = before or (0,)
        match payload:
            case "raise":
                raise ValueError("no")
            case "raise twice":
                self.failures += 1
                if self.failures <= 2:
                    raise ValueError("not yet")
            case "forget":
                return None, (key, 0, "forgotten")
            case "silent":
                return (count + 1,), None
            case int():
                return (count + 1,), [(key, 0, (n, count + 1)) for n in range(payload)]
        return (count + 1,), (key, 0, (payload, count + 1))


class Play:
    """Entries for any keys, processed as an instance does it."""

    def __init__(self, code: PlainCode, **policy: Any) -> None:
        self.engine = ProcessorRunner(code, Operator("op", ("in",), "out", (), **policy))
        self.space = StateTable(4, lambda key: 3, lambda key: (key,))
        self.offset = 0

    def send(self, *rows: tuple[Key, Any]) -> list[Output]:
        self.offset += 1
        out: list[Output] = []
        entry: list[Row] = [(key, 1, payload) for key, payload in rows]
        if self.engine.folds:
            _, emptied = self.engine.fold(self.space.keys, self.space.state, entry, self.offset, out)
            for key in {k for k in emptied if k in self.space.keys}:
                self.space.touched(key, self.space.keys[key], [])
            return out
        by_key: dict[Key, list[Row]] = defaultdict(list)
        for row in entry:
            by_key[row[0]].append(row)
        for key, of_key in by_key.items():
            self.engine.call(self.space.state(key), key, of_key, 0, -1, self.offset, out)
        return out

    @property
    def state(self) -> dict[Key, Any]:
        return {key: state.values for key, state in self.space.keys.items()}

    @property
    def dead_letters(self) -> list[tuple[str, Key, int, int]]:
        return [(o.row[2][0], o.key, o.offset, o.n) for o in self.engine.dead_letters]


def of_keys(outputs: list[Output]) -> dict[Key, list[Output]]:
    found: dict[Key, list[Output]] = defaultdict(list)
    for output in outputs:
        found[output.key].append(output)
    return found


def payloads_of(outputs: list[Output]) -> list[Any]:
    return [output.row[2] for output in outputs]


@pytest.mark.parametrize("seed", range(20))
def test_a_fold_makes_the_same_outputs_and_state_as_a_processor(seed: int) -> None:
    random = Random(seed)
    fold, processor = Play(PlainCode(Chained("op"), folded=True)), Play(PlainCode(Chained("op")))
    assert fold.engine.folds
    assert not processor.engine.folds
    for _ in range(20):
        rows = [(bytes([random.randrange(5)]), random.randrange(100)) for _ in range(random.randrange(1, 9))]
        assert of_keys(fold.send(*rows)) == of_keys(processor.send(*rows))
        assert fold.state == processor.state


def test_outputs_keep_the_order_of_the_rows_and_are_numbered_by_key() -> None:
    out = Play(Obedient()).send((b"a", "x"), (b"b", 2), (b"a", "silent"), (b"a", 0), (b"a", 2), (b"b", "y"))
    numbers = [(o.key, o.epoch, o.offset, o.n) for o in out]
    assert numbers == [
        (b"a", 3, 1, 0),
        (b"b", 3, 1, 0),
        (b"b", 3, 1, 1),
        (b"a", 3, 1, 1),
        (b"a", 3, 1, 2),
        (b"b", 3, 1, 2),
    ]
    assert payloads_of(out) == [("x", 1), (0, 1), (1, 1), (0, 4), (1, 4), ("y", 2)]


def test_a_row_that_raises_becomes_a_dead_letter_and_changes_no_state() -> None:
    play = Play(Obedient())
    out = play.send((b"a", "x"), (b"a", "raise"), (b"a", "y"), (b"a", "raise"), (b"b", "raise"))
    assert payloads_of(out) == [("x", 1), ("y", 2)]
    assert play.dead_letters == [
        ("ValueError: no", b"a", 1, 0),
        ("ValueError: no", b"a", 1, 1),
        ("ValueError: no", b"b", 1, 0),
    ]
    assert play.state == {b"a": {"count": (2,)}}, "a key without state is no key"


def test_a_failed_fold_is_retried_under_the_retry_policy() -> None:
    play = Play(Obedient(), on_error="retry", retries=2)
    assert payloads_of(play.send((b"a", "raise twice"), (b"a", "x"))) == [("raise twice", 1), ("x", 2)]
    assert play.dead_letters == []


def test_a_failed_fold_ends_the_process_under_the_fail_policy() -> None:
    play = Play(Obedient(), on_error="fail")
    with pytest.raises(OperatorFailed):
        play.send((b"a", "raise"))


def test_a_fold_may_delete_and_recreate_a_key_within_an_entry() -> None:
    play = Play(Obedient())
    play.send((b"a", "x"), (b"b", "x"))
    assert payloads_of(play.send((b"a", "forget"), (b"b", "forget"), (b"b", "x"))) == [
        "forgotten",
        "forgotten",
        ("x", 1),
    ]
    assert play.state == {b"b": {"count": (1,)}}
    play.send((b"c", "forget"))
    assert b"c" not in play.space.keys


def test_a_call_for_one_key_uses_the_fold() -> None:
    """A destination calls it so while the key is moving."""
    engine = ProcessorRunner(Obedient(), Operator("op", ("in",), "out", ()))
    state, out = KeyState(7, (b"a",)), []  # type: ignore[var-annotated]
    engine.call(state, b"a", [(b"a", 1, "x"), (b"a", 1, "y")], 0, -1, 5, out)
    assert [(o.offset, o.epoch, o.n, o.row[2]) for o in out] == [(5, 7, 0, ("x", 1)), (5, 7, 1, ("y", 2))]
    assert state.values == {"count": (2,)}
