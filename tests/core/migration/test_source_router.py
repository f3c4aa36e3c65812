"""A move at the source router: every phase, reached by real events, against every message of the table.

A message that the table lists leads to a listed phase; a late one changes nothing; any other is reported.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from machines_in_memory import REQUESTER, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.migration.phases import DECIDED, SOURCE_ROUTER, UNKNOWN_MOVE, Answer, SourceRouterPhase
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Abort, Begin, Compare, Flip, OutputFence
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"
KEY = key_in(2)
KEYS = KeySet(slots=frozenset({2}))

EVENTS: dict[str, m.Message] = {
    "Prepared": m.Prepared("m1", -1),
    "Refused": m.Refused("m1", "no room"),
    "CaptureFrom": m.CaptureFrom("m1", 1, 1000, -1),
    "Captured": m.Captured("m1"),
    "Digests": m.Digests("m1", {}),
    "Ready": m.Ready("m1", 1, {}),
    "SourceStopped": m.SourceStopped("m1", 1),
    "StateComplete": m.StateComplete("m1"),
    "DestinationCheckpointed": m.DestinationCheckpointed("m1"),
    "DestinationReplaced": m.DestinationReplaced("m1", "op@b#7"),
    "Forgotten": m.Forgotten("m1"),
}


def chain() -> Topology:
    """`op`, and an operator that reads its outputs."""
    facts = topology(("b", "a"))
    after = Operator("after", ("out",), "last", ("after@b#0",), slots=4, dead_letters="dead")
    streams = {**facts.streams, "last": Stream("last", "b")}
    return Topology(facts.sites, streams, {**facts.operators, "after": after})


class Play:
    """Router `a` and the source. The source receives nothing, and `b`, home of the outputs, does not run."""

    def __init__(self, strategy: str = "live", facts: Topology | None = None, **settings: Any) -> None:
        self.driver = SmallDeployment(facts or chain(), Settings(**settings))
        self.driver.start("a", A)
        self.driver.produce("a", (KEY, 0, "x"))  # its output never reaches `b`
        self.driver.withholds = lambda sender, to, message: A in (sender, to)
        self.driver.move(KEYS, A, B, strategy)
        self.outgoing = self.router.outgoing_moves["m1"]

    @property
    def router(self) -> Any:
        return self.driver.machines["a"]

    def on(self, name: str) -> None:
        message = EVENTS[name]
        if name in ("CaptureFrom", "Captured", "Digests", "SourceStopped", "Forgotten"):
            message = m.FromInstance(A, 1, message)
        self.driver.send("a", message, "b" if not isinstance(message, m.FromInstance) else A)

    def outputs_arrive(self) -> None:
        for inbox in ("out", "after"):
            frames = [k[3] for k in self.driver.disks["a"] if k[:3] == ("outbox", "b", inbox)]
            if frames:
                self.driver.send("a", m.SiteFrameReceipt(inbox, "a@1", frames, frames), "b")

    def controls(self) -> list[Any]:
        return [e.control for e in self.driver.log("a") if e.control is not None]

    def notices(self) -> list[str]:
        disk = self.driver.disks["a"]
        frames = [disk[k][0] for k in sorted(k for k in disk if k[:3] == ("outbox", "b", "op"))]
        return [type(frame.notice).__name__ for frame in frames]

    def seen(self) -> Any:
        """Everything that a message could have changed."""
        move = self.outgoing
        return copy.deepcopy(
            (move.phase, move.record, move.vote, move.source_digests, move.moved, self.driver.disks["a"])
        )


STEPS: list[tuple[SourceRouterPhase, Callable[[Play], object]]] = [
    (SourceRouterPhase.PREPARING, lambda play: None),
    (SourceRouterPhase.BEGUN, lambda play: play.on("Prepared")),
    (SourceRouterPhase.SHADOWING, lambda play: play.on("CaptureFrom")),
    (SourceRouterPhase.COMPARING, lambda play: play.on("Captured")),
    (SourceRouterPhase.FLIPPED, lambda play: (play.on("Digests"), play.on("Ready"))),
    (SourceRouterPhase.CUT, lambda play: play.on("SourceStopped")),
    (SourceRouterPhase.EMITTING, lambda play: play.outputs_arrive()),
    (SourceRouterPhase.DONE, lambda play: play.on("DestinationCheckpointed")),
]


def reach(phase: SourceRouterPhase) -> Play:
    if phase is SourceRouterPhase.PREPARED:
        play = Play("pause")
        play.driver.send("a", m.Prepared("m1", 100), "b")  # a watermark that the source has not reached
        assert play.outgoing.phase is phase
        return play
    play = Play()
    if phase is SourceRouterPhase.ABORTED:
        play.on("Refused")
        return play
    for reached, take in STEPS:
        take(play)
        assert play.outgoing.phase is reached
        if reached is phase:
            return play
    raise AssertionError(phase)


# -- the matrix --------------------------------------------------------------------------------


def test_matrix_has_every_message_of_the_table() -> None:
    listed = {row.event for row in (*SOURCE_ROUTER.rows, *SOURCE_ROUTER.late)}
    assert set(EVENTS) == {event for event in listed if event[0].isupper()}


def cells(wanted: Callable[[SourceRouterPhase, str], bool]) -> pytest.MarkDecorator:
    """The phases and events that the table treats in this way."""
    found = [(p, e) for p, e in itertools.product(SourceRouterPhase, EVENTS) if wanted(p, e)]
    return pytest.mark.parametrize(("phase", "event"), found, ids=[f"{p.value}-{e}" for p, e in found])


@cells(SOURCE_ROUTER.handles)
def test_message_that_the_table_lists_leads_to_a_listed_phase(phase: SourceRouterPhase, event: str) -> None:
    play = reach(phase)
    if event == "Digests" and phase in DECIDED:
        play.outgoing.source_digests = None  # the flip did not wait for them
    if event == "Captured" and phase in DECIDED:
        play.outgoing.moved = (9, 9)  # what the source reported before
    before = play.seen()
    play.on(event)
    assert play.seen() != before
    following = {
        p for row in SOURCE_ROUTER.rows if (row.phase, row.event) == (phase, event) for p in row.next
    }
    assert play.outgoing.phase in following


@cells(lambda phase, event: phase is SourceRouterPhase.ABORTED or SOURCE_ROUTER.ignores(phase, event))
def test_late_message_changes_nothing(phase: SourceRouterPhase, event: str) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    assert play.seen() == before


@cells(
    lambda phase, event: (
        phase is not SourceRouterPhase.ABORTED
        and not SOURCE_ROUTER.handles(phase, event)
        and not SOURCE_ROUTER.ignores(phase, event)
    )
)
def test_message_that_the_table_does_not_list_is_reported_and_changes_nothing(
    phase: SourceRouterPhase, event: str
) -> None:
    play = reach(phase)
    before = play.seen()
    with pytest.raises(CoreBug, match=f"unexpected message.*{event}"):
        play.on(event)
    assert play.seen() == before


def test_message_about_an_unknown_move_is_answered_as_the_table_says() -> None:
    for event, message in EVENTS.items():
        play = reach(SourceRouterPhase.ABORTED)
        answers = len(play.driver.messages("a", A, m.AbortNotice)) + len(
            play.driver.messages("a", "b", m.AbortNotice)
        )
        play.on(event)
        after = len(play.driver.messages("a", A, m.AbortNotice)) + len(
            play.driver.messages("a", "b", m.AbortNotice)
        )
        assert (after > answers) is (UNKNOWN_MOVE[type(message).__name__].answer is Answer.ABORT), event


# -- the course of a move ---------------------------------------------------------------------------------


def test_a_live_move_writes_begin_compare_and_flip_in_this_order() -> None:
    play = reach(SourceRouterPhase.DONE)
    begin, compare, flip = play.controls()
    assert (begin, compare) == (Begin("m1"), Compare("m1"))
    assert isinstance(flip, Flip)
    assert (flip.move, flip.keys, flip.source, flip.destination, flip.begin_offset) == ("m1", KEYS, A, B, 2)
    notices = [n for n in play.notices() if n != "ShadowNotice"]
    assert notices == ["FlipToDestination", "EmitFromNotice", "DoneNotice"]
    status = play.driver.messages("a", REQUESTER, m.MoveStatus)[-1]
    assert status == m.MoveStatus("m1", "done", messages=status.messages)
    assert status.messages >= len(play.notices())


def test_outputs_that_no_operator_reads_are_fenced_and_do_not_delay_the_destination() -> None:
    play = Play(facts=topology(("b", "a")))
    for event in ("Prepared", "CaptureFrom", "Captured", "Digests", "Ready", "SourceStopped"):
        play.on(event)
    assert play.outgoing.phase is SourceRouterPhase.EMITTING
    disk = play.driver.disks["a"]
    [frame] = [value[0] for key, value in disk.items() if key[:3] == ("outbox", "b", "out")]
    notices = [value[0].notice for key, value in disk.items() if key[:3] == ("outbox", "b", "op")]
    fence = OutputFence(frame.origin, frame.n)
    assert [n.fences for n in notices if isinstance(n, m.EmitFromNotice)] == [{"out": fence}]
    play.on("DestinationCheckpointed")
    assert play.outgoing.phase is SourceRouterPhase.EMITTING, "the source's outputs have not arrived"
    play.outputs_arrive()
    play.on("DestinationCheckpointed")
    assert play.outgoing.phase is SourceRouterPhase.DONE


def test_the_destination_emits_only_once_operators_have_the_outputs_of_the_source() -> None:
    play = reach(SourceRouterPhase.CUT)
    play.driver.advance_ms(1_000)
    assert play.outgoing.phase is SourceRouterPhase.CUT
    assert "EmitFromNotice" not in play.notices()
    play.outputs_arrive()
    assert play.notices()[-1] == "EmitFromNotice"


def test_of_an_ended_move_only_the_name_and_the_outcome_are_stored() -> None:
    play = reach(SourceRouterPhase.DONE)
    play.on("Forgotten")
    assert play.driver.phase_of("m1", "source router") == ""
    assert play.driver.disks["a"]["ended", "m1"] == ("done", "")
    assert ("outgoing", "m1") not in play.driver.disks["a"]
    play.driver.move(KEYS, A, B)
    assert play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done", (
        "a name is never tried twice"
    )


@pytest.mark.parametrize("strategy", ["pause", "restart"])
def test_a_flip_first_move_flips_when_the_destination_is_prepared(strategy: str) -> None:
    play = Play(strategy)
    play.on("Prepared")
    assert play.outgoing.phase is SourceRouterPhase.FLIPPED
    assert [type(c) for c in play.controls()] == [Flip]


def test_different_digests_undo_the_move_and_name_the_key() -> None:
    play = reach(SourceRouterPhase.COMPARING)
    play.driver.send("a", m.FromInstance(A, 1, m.Digests("m1", {KEY: 1})), A)
    play.driver.send("a", m.Ready("m1", 1, {KEY: 2}), "b")
    assert play.outgoing.phase is SourceRouterPhase.ABORTED
    assert repr(KEY) in play.outgoing.record.reason


def test_a_silent_source_never_flips_uncompared() -> None:
    """Its digests may be on their way. The move waits for them, and its deadline ends it."""
    play = reach(SourceRouterPhase.COMPARING)
    play.on("Ready")
    play.driver.advance_ms(25_000)
    assert play.outgoing.phase is SourceRouterPhase.COMPARING
    play.on("Digests")
    assert play.outgoing.phase is SourceRouterPhase.FLIPPED


def overloaded(play: Play) -> None:
    """The source works on entries before Compare for longer than the limit."""
    if play.outgoing.vote is None:
        play.on("Ready")
    compare = play.outgoing.compare_offset
    for n in range(8):
        play.driver.advance_ms(190)
        outputs = m.Outputs(A, 1, n + 10, compare - 1, compare - 1, [], [], -1, False)
        play.driver.send("a", outputs, A)


def test_an_overloaded_source_flips_before_its_digests_arrive() -> None:
    play = reach(SourceRouterPhase.COMPARING)
    overloaded(play)
    assert play.outgoing.phase is SourceRouterPhase.FLIPPED


def test_digests_that_arrive_after_the_flip_are_compared_and_a_difference_is_reported() -> None:
    play = reach(SourceRouterPhase.COMPARING)
    play.driver.send("a", m.Ready("m1", 1, {KEY: 2}), "b")
    overloaded(play)
    play.driver.send("a", m.FromInstance(A, 1, m.Digests("m1", {KEY: 1})), A)
    assert play.outgoing.phase is SourceRouterPhase.FLIPPED
    assert "not deterministic" in play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].reason
    assert repr(KEY) in play.outgoing.record.reason


def test_a_source_silent_after_the_flip_is_cut_at_its_last_emitted_offset() -> None:
    play = reach(SourceRouterPhase.FLIPPED)
    play.driver.advance_ms(1_900)
    assert play.outgoing.phase is SourceRouterPhase.FLIPPED
    play.driver.advance_ms(600)
    assert play.outgoing.phase is SourceRouterPhase.CUT
    assert play.outgoing.record.last_offset == 1
    assert play.outgoing.refuses_output(2, KEY)
    assert not play.outgoing.refuses_output(1, KEY)


@pytest.mark.parametrize(
    "phase", [p for p in SourceRouterPhase if p not in (*DECIDED, SourceRouterPhase.ABORTED)]
)
def test_a_move_undecided_at_its_deadline_is_undone_and_its_keys_stay(phase: SourceRouterPhase) -> None:
    play = reach(phase)
    play.driver.advance_ms(31_000)
    assert play.outgoing.phase is SourceRouterPhase.ABORTED
    assert play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "aborted"
    assert "30000 ms" in play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].reason
    assert play.driver.owner_of(KEY, at="a") == A
    assert [isinstance(c, Abort) for c in play.controls()][-1:] == (
        [] if phase in (SourceRouterPhase.PREPARING, SourceRouterPhase.PREPARED) else [True]
    )


@pytest.mark.parametrize("phase", DECIDED)
def test_a_decided_move_survives_its_deadline_and_a_restart_of_the_router(phase: SourceRouterPhase) -> None:
    play = reach(phase)
    play.driver.advance_ms(31_000)
    play.driver.restart("a")
    play.driver.advance_ms(1_000)
    assert play.driver.phase_of("m1", "source router") in {phase.value for phase in DECIDED}
    assert play.driver.owner_of(KEY, at="a") == B
    assert not any(isinstance(c, Abort) for c in play.controls())


@pytest.mark.parametrize(
    "phase", [p for p in SourceRouterPhase if p not in DECIDED and p is not SourceRouterPhase.ABORTED]
)
def test_a_router_restart_undoes_an_undecided_move(phase: SourceRouterPhase) -> None:
    play = reach(phase)
    play.driver.restart("a")
    assert play.driver.phase_of("m1", "source router") == ""
    assert play.driver.disks["a"]["ended", "m1"] == ("aborted", "the router of a was restarted")
    assert play.driver.owner_of(KEY, at="a") == A


def test_a_full_shadow_outbox_undoes_the_move_and_loses_no_row() -> None:
    play = Play(shadow_entries_max=3)
    play.on("Prepared")
    play.on("CaptureFrom")
    for n in range(4):
        play.driver.produce("a", (KEY, n, n))
    assert play.outgoing.phase is SourceRouterPhase.ABORTED
    assert play.outgoing.record.reason == "the shadow outbox is full"
    assert len([e for e in play.driver.log("a") if e.row_count]) == 5


# -- requests ----------------------------------------------------------------------------------


def test_keys_on_the_move_are_locked_until_the_move_has_ended() -> None:
    play = reach(SourceRouterPhase.SHADOWING)
    play.driver.move(KeySet(keys=frozenset({KEY})), A, B, name="m2")
    assert "locked by move 'm1' (shadowing)" in play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].reason
    play.driver.move(KeySet(slots=frozenset({3})), A, B, name="m3")
    assert play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "preparing"
    play.driver.move(KeySet(slots=frozenset({3})), A, B, "restart", name="m4")
    assert play.driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "refused", "a restart is alone"


@pytest.mark.parametrize("strategy", ["pause", "restart"])
def test_keys_whose_state_only_the_source_has_do_not_leave_it_while_it_is_away(strategy: str) -> None:
    """It died for good: after the flip nobody would have their state, and no successor could take over."""
    driver = SmallDeployment().start("a", "b", A, B)
    driver.produce("a", (key_in(0), 0, "x"))
    driver.stop(A)
    driver.move(KeySet(slots=frozenset({0})), A, B, strategy)
    driver.advance_ms(1_000)
    assert not any(isinstance(entry.control, Flip) for entry in driver.log("a"))
    driver.advance_ms(60_000)
    assert driver.statuses["m1"].outcome is m.MoveOutcome.ABORTED
    driver.send("a", m.TakeoverRequest("r1", A, ("op@a#5",)), "controller")
    driver.start("op@a#5")
    driver.produce("a", (key_in(0), 0, "y"))
    assert [output.row[2][2] for output in driver.outputs()] == [1, 2]


def test_the_shadow_of_a_slot_has_no_rows_of_a_key_that_left_while_the_source_lagged() -> None:
    """The source is behind the flip of the key's own move when the move of its slot begins."""
    driver = SmallDeployment(topology(["a"], instances=("op@a#0", "op@a#1"))).start()
    key, beside = key_in(0), key_in(0, 1)
    source, destination = driver.owner_of(key), "op@a#1"
    assert source == "op@a#0"
    driver.produce("a", (key, 0, 0), (beside, 0, 0))
    driver.withholds = lambda sender, to, message: to == source and isinstance(message, m.Dispatch)
    driver.produce("a", (key, 0, 1), (beside, 0, 1))
    driver.move(KeySet(keys=frozenset((key,))), source, destination, "live", "m1")
    driver.machines["a"].outgoing_moves[
        "m1"
    ].behind_ms = 2_000.0  # it has worked on older entries all the time
    driver.advance_ms(3_000)
    assert driver.owner_of(key) == destination
    assert driver.machines[source].applied == 1, "it must lag"
    driver.move(KeySet(slots=frozenset((0,))), source, destination, "live", "m2")
    driver.release_withheld()
    driver.advance_ms(5_000)
    assert driver.statuses["m2"].phase == "done"
    driver.produce("a", (key, 0, 2), (beside, 0, 2))
    driver.advance_ms(1_000)
    assert [o.row[2][2] for o in driver.outputs() if o.key == key] == [1, 2, 3]
