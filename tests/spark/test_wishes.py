"""Wishes that the controller has lost, or that nobody carries out any more: never told as fulfilled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from small import until
from tiercel.bench.averages import topology
from tiercel.control.plans import Plan, WantedMove
from tiercel.core.records import KeySet
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.place import Manifest, Place
from tiercel.spark import wishes
from tiercel.spark.console import Console
from tiercel.spark.moves import Moving
from tiercel.spark.wishes import Wishes

FIRST = "average@cloud#1"


class Host:
    """The processes of a deployment, on paper."""

    def __init__(self) -> None:
        self.names = [FIRST]
        self.failures: dict[str, str] = {}
        self.submissions: dict[str, int] = {}
        self.waiting: list[str] = []
        self.start_s_max = ("START_S_MAX", 90.0)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    """Of a deployment whose router does not run: what is asked of it stays open."""
    place = Place(tmp_path / "storage")
    place.write(Manifest("test", topology(2), {}, Settings()))
    console = Console(place, lambda _: None, lambda _: None)
    yield console
    console.end()


@pytest.fixture
def asking(console: Console, monkeypatch: pytest.MonkeyPatch) -> Wishes:
    monkeypatch.setattr(wishes, "check_slots", lambda *_, **__: None)
    graph: Any = SimpleNamespace(
        operators={"average": None},
        instances=lambda operator, wanted: tuple(f"{operator}@cloud#{n + 1}" for n in range(wanted["cloud"])),
    )
    backend: Any = SimpleNamespace(application="paper")
    host: Any = Host()
    return Wishes(backend, graph, console, host, lambda _: None)


def begin_again(console: Console) -> None:
    """The controller fails, and starts again."""
    lives = console.lives
    console._loop.call_soon_threadsafe(console._host._fail, OSError("no space left on device"))
    until(lambda: console.lives > lives and not console._failure)


def test_a_recovery_that_was_never_stored_is_not_told_as_done(asking: Wishes, console: Console) -> None:
    """`recover` returned the names of instances that nobody had started."""
    console.recover = lambda *_: "r99"  # type: ignore[method-assign]
    with pytest.raises(UserError, match="was not taken over"):
        asking.recover(FIRST, 2)


def test_a_scaling_that_was_never_stored_is_not_told_as_done(asking: Wishes, console: Console) -> None:
    console.scale = lambda *_: None  # type: ignore[method-assign]
    scaling = asking.scale("average", {"cloud": 2}, "live")
    begin_again(console)
    with pytest.raises(UserError, match="the controller failed"):
        scaling.wait(5.0)


def test_a_scaling_that_was_carried_out_before_the_controller_failed_is_done(
    asking: Wishes, console: Console
) -> None:
    console.scale = lambda *_: None  # type: ignore[method-assign]
    scaling = asking.scale("average", {"cloud": 1}, "live")
    begin_again(console)
    assert scaling.wait(5.0) >= 0


@pytest.mark.parametrize("wish", ["recover", "scale", "move"])
def test_who_waits_for_a_wish_is_told_when_the_deployment_ends(
    wish: str, asking: Wishes, console: Console
) -> None:
    """`recover` waited for ever."""
    told: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            if wish == "recover":
                asking.recover(FIRST, 2)
            elif wish == "scale":
                asking.scale("average", {"cloud": 2}, "live").wait()
            else:
                asked(console).wait()
        except UserError as error:
            told.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait()
    until(lambda: console.moves() or console._controller.recoveries or console._controller.scales)
    console.end()
    thread.join(5.0)
    assert not thread.is_alive()
    assert "the deployment was stopped" in str(told[0])


def asked(console: Console) -> Moving:
    wanted = WantedMove("average", KeySet(slots=frozenset([1])), FIRST, "average@cloud#2")
    return Moving(console, console.request(Plan((wanted,), "a test"), 0, None))
