"""The controller in the driver: what it has not finished, others do not see; its disk gets full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from small import until
from tiercel.bench.averages import SITE, topology
from tiercel.chaos.disk import limited
from tiercel.control.controller import Scale
from tiercel.control.plans import Plan, WantedMove
from tiercel.core import messages as m
from tiercel.core.events import Received
from tiercel.core.records import KeySet
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.place import Manifest, Place
from tiercel.spark.console import Console, Watched
from tiercel.spark.moves import Moving


class Observed(Watched):
    """Notes what a waiting thread would see while an answer is being taken in."""

    seen: dict[str, int] | None = None

    def _on_status_reply(self, step: Any, site: str, reply: m.StatusReply) -> None:
        self.seen = dict(self.answered)
        super()._on_status_reply(step, site, reply)


def test_an_answer_counts_only_when_its_tables_are_there() -> None:
    """Who waited for the count read empty tables, and a move of keys divided by zero slots."""
    controller = Observed(topology(2), Settings(), {})
    controller.on_event(Received(SITE, m.StatusReply([], [], {}, {}, 1)), 0.0)
    assert controller.seen == {}
    assert controller.answered == {SITE: 1}


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    """Of a deployment whose router does not run: what is asked of it stays open."""
    place = Place(tmp_path / "storage")
    place.write(Manifest("test", topology(2), {}, Settings()))
    console = Console(place, lambda _: None, lambda _: None)
    yield console
    console.end()


def asked(console: Console, slot: int) -> Moving:
    wanted = WantedMove("average", KeySet(slots=frozenset([slot])), "average@cloud#1", "average@cloud#2")
    return Moving(console, console.request(Plan((wanted,), "a test"), 0, None))


def answers(console: Console) -> bool:
    try:
        console.wish("average")
    except UserError:
        return False
    return True


def test_a_controller_whose_disk_was_full_goes_on_with_what_it_had_stored(console: Console) -> None:
    """It was gone until the driver was started again: no move and no scaling, while all rows flowed."""
    before = asked(console, 1)
    console.scale(Scale("average", ("average@cloud#1",)))
    until(lambda: console.wish("average")[0] is not None)
    with limited([os.getpid()]):
        meanwhile = asked(console, 2)
        until(lambda: not answers(console), "it could write")
        with pytest.raises(UserError, match="does not answer"):
            console.scale(Scale("average", ("average@cloud#2",)))
    until(lambda: answers(console), "it has not come back")
    assert console.wish("average")[0] == Scale("average", ("average@cloud#1",))
    assert "queued" in before.progress() or "asked" in before.progress()
    assert meanwhile.progress()  # stored in the end or forgotten: it can be told
    assert asked(console, 3).names


def test_a_move_that_was_never_stored_is_told_as_undone(console: Console) -> None:
    (report,) = Moving(console, ["m99"]).reports()
    assert (report.state, report.reason) == (
        "undone",
        "the controller failed before it had stored the request",
    )
