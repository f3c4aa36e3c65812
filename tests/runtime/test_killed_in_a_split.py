"""Killed at any step of a split or a merge, nothing is lost, and it can be asked for again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small import INSTANCE, assert_once_and_in_order, make_place, run_rows
from tiercel.state import merge, ranges, split

STEPS = (
    "want",
    0,
    1,
    2,
    3,
    4,
)  # whom it wants, then what it writes: destination, router, routes of two, source


def die(monkeypatch: pytest.MonkeyPatch, step: str | int, call: Callable[[], object]) -> None:
    """In the midst of this call, before this step."""
    written, whole = 0, ranges._write

    def write(*arguments: Any) -> None:
        nonlocal written
        if written == step:
            raise KeyboardInterrupt
        written += 1
        whole(*arguments)

    def want(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranges, "_write", write)
        if step == "want":
            patch.setattr(ranges.Place, "want", want)
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_killed_in_a_split_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | int, again: bool
) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 70), 70)
    die(monkeypatch, step, lambda: split(place.directory, INSTANCE))
    if again:
        split(place.directory, INSTANCE)
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    assert_once_and_in_order(run_rows(place, 140, 70), 210)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_killed_in_a_merge_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | int, again: bool
) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    run_rows(place, 0, 70)
    second = split(place.directory, INSTANCE).destination
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    die(monkeypatch, step, lambda: merge(place.directory, INSTANCE, second))
    if again:
        merge(place.directory, INSTANCE, second)
    assert_once_and_in_order(run_rows(place, 140, 70), 210)
    assert_once_and_in_order(run_rows(place, 210, 70), 280)
