"""Speeds of instances: several views count, one does not."""

from __future__ import annotations

from tiercel.control.speeds import VIEWS, Speeds
from tiercel.control.view import InstanceView, OperatorView, View

A, B = "op@cloud#1", "op@cloud#2"


def view(*rates: float, names: tuple[str, ...] = (A, B)) -> View:
    instances = tuple(
        InstanceView(name, rate=rate, busy=0.5) for name, rate in zip(names, rates, strict=True)
    )
    return View(0.0, {"op": OperatorView("op", instances)})


def speeds_after(views: list[View]) -> dict[str, float]:
    speeds = Speeds()
    for seen in views:
        speeds.add(seen)
    return speeds.of(views[-1].operators["op"])


def test_one_second_in_which_an_instance_was_stopped_does_not_make_it_slow() -> None:
    assert speeds_after([view(500, 500)] * 6 + [view(500, 10)]) == {A: 1_000.0, B: 1_000.0}


def test_an_instance_that_is_slow_for_long_is_slow() -> None:
    assert speeds_after([view(500, 500)] * 6 + [view(500, 100)] * VIEWS) == {A: 1_000.0, B: 200.0}


def test_too_few_views_and_idle_instances_say_nothing() -> None:
    assert speeds_after([view(500, 500)] * 2) == {}
    assert speeds_after([view(500, 0)] * 5) == {A: 1_000.0}


def test_an_instance_that_has_left_is_forgotten() -> None:
    views = [view(500, 100)] * 5 + [view(500, names=(A,))] + [view(500, 500)] * 2
    assert speeds_after(views) == {A: 1_000.0}
