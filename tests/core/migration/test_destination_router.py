"""A move at the destination router: every phase, reached by real events, against every message of the table.

A message that the table lists leads to a listed phase; a late one changes nothing; any other is reported.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from machines_in_memory import SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.migration.phases import DESTINATION_ROUTER, UNKNOWN_MOVE, Answer, DestinationRouterPhase
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import Route, RouteUpdate

A, B = "op@a#0", "op@b#0"
KEYS = KeySet(slots=frozenset({0}))
PREPARE = m.Prepare("m1", "op", KEYS, A, B, "live", RouteUpdate({0: Route(A, 1)}, {}))

FROM_DESTINATION: dict[str, m.Message] = {
    "Prepared": m.Prepared("m1", -1),
    "Ready": m.Ready("m1", 1, {}),
    "StateComplete": m.StateComplete("m1"),
    "DestinationCheckpointed": m.DestinationCheckpointed("m1"),
}
FROM_SOURCE_ROUTER: dict[str, m.Message] = {"Prepare": PREPARE, "AbortNotice": m.AbortNotice("m1")}
NOTICES: dict[str, m.AnyNotice] = {
    "ShadowNotice": m.ShadowNotice("m1", 7, 1000, [(key_in(0), 0, "x")], None),
    "EmittedNotice": m.EmittedNotice("m1", 7),
    "FlipToDestination": m.FlipToDestination(
        "m1", 9, 1000, -1, RouteUpdate({0: Route(B, 2)}, {}), {}, PREPARE
    ),
    "EmitFromNotice": m.EmitFromNotice("m1", 8),
    "ResumeNotice": m.ResumeNotice("m1"),
    "ServedByNotice": m.ServedByNotice("m1", "op@a#7"),
    "DoneNotice": m.DoneNotice("m1"),
    "AbortedNotice": m.AbortedNotice("m1"),
}
EVENTS = [*FROM_DESTINATION, *FROM_SOURCE_ROUTER, *NOTICES]


class Play:
    """Router `b` and the destination. Router `a` does not run, and the destination receives nothing."""

    def __init__(self) -> None:
        self.driver = SmallDeployment().start("b", B)
        self.driver.withholds = lambda sender, to, message: B in (sender, to)
        self.frames = 0
        self.on("Prepare")
        self.incoming = self.router.incoming_moves["m1"]

    @property
    def router(self) -> Any:
        return self.driver.machines["b"]

    def on(self, name: str) -> None:
        if name in NOTICES:
            self.frames += 1
            self.driver.send("b", m.SiteFrame("op", "a@1", self.frames, [], NOTICES[name]), "a")
        elif name in FROM_SOURCE_ROUTER:
            self.driver.send("b", FROM_SOURCE_ROUTER[name], "a")
        else:
            self.driver.send("b", m.FromInstance(B, 1, FROM_DESTINATION[name]), B)

    def seen(self) -> Any:
        """Everything that a message could have changed, and the number of messages sent except receipts."""
        move = self.incoming
        sent = [
            message
            for _, to, message in self.driver.sent
            if to != "b" and not isinstance(message, m.SiteFrameReceipt | m.FromInstance)
        ]
        return copy.deepcopy(
            (move.phase, move.record, move.shadow, move.settled, self.driver.disks["b"], len(sent))
        )


STEPS: list[tuple[DestinationRouterPhase, str]] = [
    (DestinationRouterPhase.SHADOWING, "Prepared"),
    (DestinationRouterPhase.ADOPTABLE, "Ready"),
    (DestinationRouterPhase.ADOPTED, "FlipToDestination"),
    (DestinationRouterPhase.MERGED, "DoneNotice"),
]
PHASES = [DestinationRouterPhase.PREPARING, *(phase for phase, _ in STEPS)]


def reach(phase: DestinationRouterPhase) -> Play:
    play = Play()
    for reached, event in STEPS:
        if play.incoming.phase is phase:
            break
        play.on(event)
        assert play.incoming.phase is reached
    assert play.incoming.phase is phase
    return play


def cells(wanted: Callable[[DestinationRouterPhase, str], bool]) -> pytest.MarkDecorator:
    """The phases and events that the table treats in this way."""
    found = [(p, e) for p, e in itertools.product(PHASES, EVENTS) if wanted(p, e)]
    return pytest.mark.parametrize(("phase", "event"), found, ids=[f"{p.value}-{e}" for p, e in found])


def test_matrix_has_every_message_of_the_table() -> None:
    listed = {row.event for row in (*DESTINATION_ROUTER.rows, *DESTINATION_ROUTER.late)}
    assert set(EVENTS) == {event for event in listed if event[0].isupper()}


@cells(DESTINATION_ROUTER.handles)
def test_message_that_the_table_lists_leads_to_a_listed_phase(
    phase: DestinationRouterPhase, event: str
) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    flip_first = event == "ShadowNotice" and phase is DestinationRouterPhase.ADOPTED
    if event != "ResumeNotice" and not flip_first:  # of other strategies than `live`
        assert play.seen() != before
    (row,) = [row for row in DESTINATION_ROUTER.rows if (row.phase, row.event) == (phase, event)]
    assert play.incoming.phase in row.next


@cells(DESTINATION_ROUTER.ignores)
def test_late_message_changes_nothing(phase: DestinationRouterPhase, event: str) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    assert play.seen() == before


@cells(lambda p, e: not DESTINATION_ROUTER.handles(p, e) and not DESTINATION_ROUTER.ignores(p, e))
def test_message_that_the_table_does_not_list_is_reported_and_changes_nothing(
    phase: DestinationRouterPhase, event: str
) -> None:
    play = reach(phase)
    before = play.seen()
    with pytest.raises(CoreBug, match=f"unexpected message.*{event}"):
        play.on(event)
    assert play.seen() == before


@pytest.mark.parametrize("event", [event for event in EVENTS if event != "Prepare"])
def test_message_about_an_unknown_move_is_answered_as_the_table_says(event: str) -> None:
    play = Play()
    play.on("AbortedNotice")
    assert play.driver.phase_of("m1", "destination router") == ""
    play.driver.sent.clear()
    play.on(event)
    answers = {
        Answer.ABORT: any(isinstance(x, m.AbortNotice) for _, _, x in play.driver.sent),
        Answer.REFUSE: bool(play.driver.messages("b", "a", m.Refused)),
        Answer.ADOPT: play.driver.phase_of("m1", "destination router") == "adopted",
    }
    given = [answer for answer, is_given in answers.items() if is_given]
    assert (given or [Answer.IGNORE]) == [UNKNOWN_MOVE[event].answer]


@pytest.mark.parametrize("phase", PHASES)
def test_phase_survives_a_restart_of_the_router_from_the_vote_on(phase: DestinationRouterPhase) -> None:
    play = reach(phase)
    play.driver.restart("b")
    durable = phase not in (DestinationRouterPhase.PREPARING, DestinationRouterPhase.SHADOWING)
    assert play.driver.phase_of("m1", "destination router") == (phase.value if durable else "")
