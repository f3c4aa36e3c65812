"""A move at the source's router: every phase, reached by real events, and what each of them refuses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from playing import BOSS, Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.departures import DECIDED, Phase
from tiercel.core.records import Abort, Begin, Compare, Flip, KeySet
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
    "Cut": m.Cut("m1", 1),
    "Installed": m.Installed("m1"),
    "Settled": m.Settled("m1"),
    "Forgotten": m.Forgotten("m1"),
}
ACCEPTED: dict[Phase, set[str]] = {
    Phase.PREPARING: {"Prepared", "Refused"},
    Phase.SHADOWING: {"Refused", "CaptureFrom"},  # Captured too, once it is known where the capture began
    Phase.COMPARING: {"Refused", "Digests", "Ready"},
    Phase.FLIPPED: {"Cut", "Installed"},
    Phase.CUT: {"Installed"},
    Phase.EMITTING: {"Installed", "Settled"},
    Phase.DONE: {"Installed", "Settled", "Forgotten"},
    Phase.ABORTED: set(),
}


class Play:
    """Router `a` and the source; the source hears nothing, and `b`, home of the outputs, is not there."""

    def __init__(self, strategy: str = "live", **settings: Any) -> None:
        self.stage = Stage(topology(("b", "a")), Settings(**settings))
        self.stage.start("a", A)
        self.stage.produce("a", (KEY, 0, "x"))  # its output is under way to `b` for ever
        self.stage.withholds = lambda sender, to, message: A in (sender, to)
        self.stage.move(KEYS, A, B, strategy)
        self.departure = self.router.departures["m1"]

    @property
    def router(self) -> Any:
        return self.stage.machines["a"]

    def on(self, name: str) -> None:
        message = EVENTS[name]
        if name in ("CaptureFrom", "Captured", "Digests", "Cut", "Forgotten"):
            message = m.Said(A, 1, message)
        self.stage.tell("a", message, "b" if not isinstance(message, m.Said) else A)

    def outputs_arrive(self) -> None:
        frames = [k[3] for k in self.stage.disks["a"] if k[:3] == ("lane", "b", "out")]
        assert frames
        self.stage.tell("a", m.LaneReceipt("out", frames, frames), "b")

    def controls(self) -> list[Any]:
        return [e.control for e in self.stage.log("a") if e.control is not None]

    def notices(self) -> list[str]:
        disk = self.stage.disks["a"]
        frames = [disk[k][0] for k in sorted(k for k in disk if k[:3] == ("lane", "b", "op"))]
        return [type(frame.notice).__name__ for frame in frames]

    def seen(self) -> Any:
        """All that an event could have changed."""
        d = self.departure
        return copy.deepcopy(
            (d.phase, d.record, d.prepared, d.vote, d.source_digests, d.captured, self.stage.disks["a"])
        )


STEPS: list[tuple[Phase, Callable[[Play], object]]] = [
    (Phase.PREPARING, lambda play: None),
    (Phase.SHADOWING, lambda play: play.on("Prepared")),
    (Phase.COMPARING, lambda play: (play.on("CaptureFrom"), play.on("Captured"))),
    (Phase.FLIPPED, lambda play: (play.on("Digests"), play.on("Ready"))),
    (Phase.CUT, lambda play: play.on("Cut")),
    (Phase.EMITTING, lambda play: play.outputs_arrive()),
    (Phase.DONE, lambda play: play.on("Settled")),
]


def reach(phase: Phase) -> Play:
    play = Play()
    if phase is Phase.ABORTED:
        play.on("Refused")
        return play
    for reached, take in STEPS:
        take(play)
        assert play.departure.phase is reached
        if reached is phase:
            return play
    raise AssertionError(phase)


# -- the matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "event"),
    [(p, e) for p, e in itertools.product(Phase, EVENTS) if e not in ACCEPTED[p]],
    ids=lambda x: x.value if isinstance(x, Phase) else x,
)
def test_an_event_that_a_phase_refuses_changes_nothing(phase: Phase, event: str) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    assert play.seen() == before


@pytest.mark.parametrize(
    ("phase", "event"),
    [(p, e) for p in Phase for e in sorted(ACCEPTED[p]) if (p, e) != (Phase.DONE, "Forgotten")],
    ids=lambda x: x.value if isinstance(x, Phase) else x,
)
def test_an_event_that_a_phase_takes_changes_something(phase: Phase, event: str) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    assert play.seen() != before


# -- the story ---------------------------------------------------------------------------------


def test_a_live_move_writes_begin_compare_and_flip_in_this_order() -> None:
    play = reach(Phase.DONE)
    begin, compare, flip = play.controls()
    assert (begin, compare) == (Begin("m1"), Compare("m1"))
    assert isinstance(flip, Flip)
    assert (flip.move, flip.keys, flip.source, flip.destination, flip.begin_offset) == ("m1", KEYS, A, B, 2)
    told = [n for n in play.notices() if n != "ShadowNotice"]
    assert told == ["FlippedNotice", "EmitFromNotice", "DoneNotice"]
    assert play.stage.said("a", BOSS, m.MoveStatus)[-1] == m.MoveStatus("m1", "done")


def test_the_destination_emits_only_once_the_outputs_of_the_source_have_arrived() -> None:
    play = reach(Phase.CUT)
    play.stage.pass_ms(1_000)
    assert play.departure.phase is Phase.CUT
    assert "EmitFromNotice" not in play.notices()
    play.outputs_arrive()
    assert play.notices()[-1] == "EmitFromNotice"


def test_what_is_over_is_remembered_by_name_only() -> None:
    play = reach(Phase.DONE)
    play.on("Forgotten")
    assert play.router.departures == {}
    assert play.stage.disks["a"]["ended", "m1"] == ("done", "")
    assert ("departure", "m1") not in play.stage.disks["a"]
    play.stage.move(KEYS, A, B)
    assert play.stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done", "a name is never tried twice"


@pytest.mark.parametrize("strategy", ["pause", "restart"])
def test_a_flip_first_move_flips_when_the_destination_is_prepared(strategy: str) -> None:
    play = Play(strategy)
    play.on("Prepared")
    assert play.departure.phase is Phase.FLIPPED
    assert [type(c) for c in play.controls()] == [Flip]


def test_digests_that_differ_undo_the_move_and_name_the_key() -> None:
    play = reach(Phase.COMPARING)
    play.stage.tell("a", m.Said(A, 1, m.Digests("m1", {KEY: 1})), A)
    play.stage.tell("a", m.Ready("m1", 1, {KEY: 2}), "b")
    assert play.departure.phase is Phase.ABORTED
    assert repr(KEY) in play.departure.record.reason


def test_a_source_that_owes_its_digest_is_not_waited_for_for_ever() -> None:
    play = reach(Phase.COMPARING)
    play.on("Ready")
    play.stage.pass_ms(900)
    assert play.departure.phase is Phase.COMPARING
    play.stage.pass_ms(600)
    assert play.departure.phase is Phase.FLIPPED


def test_a_source_that_is_silent_after_the_flip_is_taken_over_at_what_it_emitted() -> None:
    play = reach(Phase.FLIPPED)
    play.stage.pass_ms(1_900)
    assert play.departure.phase is Phase.FLIPPED
    play.stage.pass_ms(600)
    assert play.departure.phase is Phase.CUT
    assert play.departure.record.cut == 1
    assert play.departure.refuses_output(2, KEY)
    assert not play.departure.refuses_output(1, KEY)


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (*DECIDED, Phase.ABORTED)])
def test_a_move_that_is_not_decided_in_time_is_undone_and_its_keys_stay(phase: Phase) -> None:
    play = reach(phase)
    play.stage.pass_ms(31_000)
    assert play.departure.phase is Phase.ABORTED
    assert play.stage.said("a", BOSS, m.MoveStatus)[-1].phase == "aborted"
    assert "30000 ms" in play.stage.said("a", BOSS, m.MoveStatus)[-1].reason
    assert play.router.inboxes["op"].table.route(KEY).instance == A
    assert [isinstance(c, Abort) for c in play.controls()][-1:] == (
        [] if phase is Phase.PREPARING else [True]
    )


@pytest.mark.parametrize("phase", DECIDED)
def test_a_decided_move_survives_its_deadline_and_a_restart_of_the_router(phase: Phase) -> None:
    play = reach(phase)
    play.stage.pass_ms(31_000)
    play.stage.restart("a")
    play.stage.pass_ms(1_000)
    assert play.router.departures["m1"].phase in DECIDED
    assert play.router.inboxes["op"].table.route(KEY).instance == B
    assert not any(isinstance(c, Abort) for c in play.controls())


@pytest.mark.parametrize("phase", [p for p in Phase if p not in DECIDED and p is not Phase.ABORTED])
def test_a_move_that_was_not_decided_is_undone_by_a_restart_of_the_router(phase: Phase) -> None:
    play = reach(phase)
    play.stage.restart("a")
    assert play.router.departures == {}
    assert play.router.ended["m1"] == ("aborted", "the router of a was restarted")
    assert play.router.inboxes["op"].table.route(KEY).instance == A


def test_a_shadow_lane_that_is_full_undoes_the_move_and_nothing_else() -> None:
    play = Play(shadow_entries_max=3)
    play.on("Prepared")
    play.on("CaptureFrom")
    for n in range(4):
        play.stage.produce("a", (KEY, n, n))
    assert play.departure.phase is Phase.ABORTED
    assert play.departure.record.reason == "the shadow lane is full"
    assert len([e for e in play.stage.log("a") if e.parts]) == 5


SPARE = "op@a#2"  # owns nothing


def restart_without_the_spare() -> Stage:
    """A restart move that waits for nothing but the relaunch of the spare: that hears of no Halt."""
    stage = Stage(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    stage.start(SPARE)
    stage.withholds = lambda sender, to, message: to == SPARE and isinstance(message, m.Halt)
    source = stage.machines["a"].inboxes["op"].table.route(KEY).instance
    stage.move(KEYS, source, "op@a#1" if source == "op@a#0" else "op@a#0", "restart")
    stage.pass_ms(2_000)
    assert list(stage.machines["a"].inboxes["op"].pauses["m1"].awaited) == [SPARE]
    return stage


def assert_the_restart_ends(stage: Stage) -> None:
    stage.pass_ms(2_000)
    assert stage.disks["a"]["ended", "m1"] == ("done", "")
    assert stage.machines["a"].inboxes["op"].pauses == {}
    assert not any(place[0] == "pause" for place in stage.disks["a"])


@pytest.mark.parametrize("router_restarts", [False, True])
def test_a_restart_does_not_wait_for_one_that_was_retired_meanwhile(router_restarts: bool) -> None:
    """Found by seed 3881: nobody starts it again, so dispatch stood still for ever."""
    stage = restart_without_the_spare()
    stage.tell("a", m.Retirement(SPARE))
    assert stage.said("a", BOSS, m.RetirementReply) == [m.RetirementReply(SPARE, True)]
    stage.stop(SPARE)
    if router_restarts:
        stage.restart("a")
    assert_the_restart_ends(stage)


def test_a_restart_does_not_wait_for_one_that_is_gone_and_owned_nothing() -> None:
    stage = restart_without_the_spare()
    stage.stop(SPARE)
    assert_the_restart_ends(stage)


def test_a_restart_does_not_wait_for_one_that_came_after_it_was_retired_and_went_unheard() -> None:
    """Its Attach was under way when it was retired, and the router died before it heard that it was gone."""
    stage = Stage(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    stage.start(SPARE)
    stage.tell("a", m.Retirement(SPARE))
    stage.tell("a", m.Attach(SPARE, stage.lives[SPARE], 1), SPARE)
    assert SPARE in stage.machines["a"].inboxes["op"].readers
    stage.vanish(SPARE)
    stage.restart("a")
    assert SPARE not in stage.machines["a"].inboxes["op"].readers
    source = stage.machines["a"].inboxes["op"].table.route(KEY).instance
    stage.move(KEYS, source, "op@a#1" if source == "op@a#0" else "op@a#0", "restart")
    assert_the_restart_ends(stage)


# -- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"operator": "nobody"}, "unknown operator 'nobody'; expected one of: op"),
        ({"strategy": "teleport"}, "unknown strategy 'teleport'; expected one of: live, pause, restart"),
        ({"keys": KeySet()}, "the key set is empty"),
        ({"keys": KeySet(slots=frozenset({9}))}, "slot 9 is out of range for op; expected 0 to 3"),
        ({"keys": KeySet(slots=frozenset({0}))}, "slot 0 is not owned by 'op@a#0'; its owner is 'op@b#0'"),
        ({"keys": KeySet(keys=frozenset({key_in(0)}))}, f"key {key_in(0)!r} is not owned by 'op@a#0'"),
        ({"destination": A}, "move from 'op@a#0' to itself"),
        ({"destination": "op@mars#0"}, "unknown site 'mars'; expected one of: a, b"),
        ({"destination": "other@b#0"}, "'other@b#0' is not an instance of 'op'"),
    ],
)
def test_a_request_that_cannot_be_is_refused_for_good_and_moves_nothing(
    change: dict[str, Any], reason: str
) -> None:
    stage = Stage(topology(("b", "a"))).start("a", A)
    before = copy.deepcopy(stage.disks["a"])
    wanted = {"operator": "op", "keys": KEYS, "source": A, "destination": B, "strategy": "live", **change}
    stage.tell("a", m.MoveRequest("m1", **wanted, deadline_ms=1000.0))
    (status,) = stage.said("a", BOSS, m.MoveStatus)
    assert status.phase == "refused"
    assert reason in status.reason
    assert stage.machines["a"].departures == {}
    refusal = {("ended", "m1"): ("refused", status.reason)}  # should the same request come again
    assert stage.disks["a"] == before | refusal


def test_keys_on_the_move_are_locked_until_the_move_has_ended() -> None:
    play = reach(Phase.SHADOWING)
    play.stage.move(KeySet(keys=frozenset({KEY})), A, B, name="m2")
    assert "locked by move 'm1' (shadowing)" in play.stage.said("a", BOSS, m.MoveStatus)[-1].reason
    play.stage.move(KeySet(slots=frozenset({3})), A, B, name="m3")
    assert play.stage.said("a", BOSS, m.MoveStatus)[-1].phase == "preparing"
    play.stage.move(KeySet(slots=frozenset({3})), A, B, "restart", name="m4")
    assert play.stage.said("a", BOSS, m.MoveStatus)[-1].phase == "refused", "a restart is alone"
