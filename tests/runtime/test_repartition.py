"""A split or merge that is killed at any step loses nothing, and can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployment_in_process import INSTANCE, assert_once_and_in_order, make_place, run_rows
from tiercel.admin import merge, split
from tiercel.admin import repartition as repartition

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
    written, whole = 0, repartition._write

    def write(*arguments: Any) -> None:
        nonlocal written
        if written == step:
            raise KeyboardInterrupt
        written += 1
        whole(*arguments)

    def set_desired(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repartition, "_write", write)
        if step == "want":
            patch.setattr(repartition.DeploymentDir, "set_desired_instances", set_desired)
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_split_loses_nothing_when_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | int, again: bool
) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 70), 70)
    die(monkeypatch, step, lambda: split(place.directory, INSTANCE))
    if again:
        split(place.directory, INSTANCE)
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    assert_once_and_in_order(run_rows(place, 140, 70), 210)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_merge_loses_nothing_when_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | int, again: bool
) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
    run_rows(place, 0, 70)
    second = split(place.directory, INSTANCE).destination
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    die(monkeypatch, step, lambda: merge(place.directory, INSTANCE, second))
    if again:
        merge(place.directory, INSTANCE, second)
    assert_once_and_in_order(run_rows(place, 140, 70), 210)
    assert_once_and_in_order(run_rows(place, 210, 70), 280)
