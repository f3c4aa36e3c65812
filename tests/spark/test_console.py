"""The controller's thread and the driver's: what one has not finished, the other does not see."""

from __future__ import annotations

from typing import Any

from tiercel.bench.averages import SITE, topology
from tiercel.core import messages as m
from tiercel.core.events import Received
from tiercel.core.settings import Settings
from tiercel.spark.console import Watched


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
