"""The controller: side by side or in turn, undone or tried again, its own restart, growing and shrinking."""

from __future__ import annotations

from typing import Any

import pytest

from playing import Stage, key_in, topology
from tiercel.control.controller import Controller, MoveState, Scale
from tiercel.control.planner import pieces
from tiercel.control.plans import Plan, WantedMove
from tiercel.core import messages as m
from tiercel.core.events import Received
from tiercel.core.faults import InvalidRequest
from tiercel.core.records import KeySet
from tiercel.core.settings import Settings

A, B, NEW = "op@a#0", "op@b#0", "op@b#1"
EVERYONE = ("a", "b", A, B, "controller")


def wanted(*slots: int, source: str = A, to: str = B, strategy: str = "live") -> WantedMove:
    return WantedMove("op", KeySet(slots=frozenset(slots)), source, to, strategy)


class Play:
    """A deployment with a controller. `deaf` sites do not hear it."""

    def __init__(self, deaf: tuple[str, ...] = ()) -> None:
        self.stage = Stage(settings=Settings(moves_at_once_max=2))
        self.stage.withholds = lambda sender, to, message: sender == "controller" and to in deaf
        self.stage.start(*EVERYONE)

    @property
    def controller(self) -> Controller:
        machine: Controller = self.stage.machines["controller"]
        return machine

    def request(self, *moves: WantedMove, **options: Any) -> list[str]:
        names, effects = self.controller.request(Plan(moves, "a test"), self.stage.now_ms, **options)
        self.stage.perform("controller", effects)
        self.stage.run()
        return names

    def scale(self, *instances: str, **options: Any) -> None:
        effects = self.controller.scale(Scale("op", instances, **options), self.stage.now_ms)
        self.stage.perform("controller", effects)
        self.stage.run()

    def launch_what_it_asks_for(self) -> None:
        """Spark's part: start what is to be launched, end what is retired."""
        for name in dict.fromkeys(self.stage.launched):
            if name not in self.stage.machines:
                self.stage.start(name)
        for name in dict.fromkeys(self.stage.retired):
            if name in self.stage.machines:
                self.stage.stop(name)
        self.stage.launched.clear()
        self.stage.retired.clear()

    def states(self) -> dict[str, str]:
        return {name: tracked.state for name, tracked in self.controller.moves.items()}

    def asked(self) -> list[str]:
        asked = [x.move for s, _, x in self.stage.sent if s == "controller" and isinstance(x, m.MoveRequest)]
        return list(dict.fromkeys(asked))

    def owners(self) -> list[str]:
        """As the newest entry of each slot says; a site learns of others' moves only when it must."""
        tables = [self.stage.machines[site].inboxes["op"].table.slots for site in ("a", "b")]
        return [max(routes, key=lambda r: r.epoch).instance for routes in zip(*tables, strict=True)]


# -- moves -------------------------------------------------------------------------------------


def test_moves_that_share_no_key_run_side_by_side() -> None:
    play = Play(deaf=("a",))
    assert play.request(wanted(0), wanted(1)) == ["m1", "m2"]
    assert play.asked() == ["m1", "m2"]
    assert set(play.states().values()) == {MoveState.ASKED.value}


def test_a_move_that_shares_a_key_with_a_running_one_waits_its_turn() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(WantedMove("op", KeySet(keys=frozenset({key_in(0)})), A, B))
    play.request(wanted(1))
    assert play.asked() == ["m1", "m3"]
    assert play.states() == {"m1": "asked", "m2": "queued", "m3": "asked"}


def test_a_move_that_restarts_the_operator_is_alone() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(wanted(1, strategy="restart"))
    assert play.states() == {"m1": "asked", "m2": "queued"}


def test_the_next_in_the_queue_begins_when_the_move_before_it_has_ended() -> None:
    play = Play()
    play.request(wanted(0))
    play.request(wanted(0, source=B, to=A))
    assert play.states()["m2"] == "queued"
    play.stage.pass_ms(10_000)
    assert play.states() == {"m1": "done", "m2": "done"}
    assert play.owners() == [A, A, B, B]


def test_nobody_is_asked_before_the_wish_is_durable() -> None:
    play = Play()
    play.stage.unsynced.add("controller")
    play.request(wanted(0))
    assert play.asked() == []
    play.stage.sync("controller")
    assert play.asked() == ["m1"]


def test_a_router_that_does_not_answer_is_asked_again() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.stage.pass_ms(1_000)
    requests = [x for s, _, x in play.stage.sent if isinstance(x, m.MoveRequest)]
    assert len(requests) >= 4
    play.stage.deliver()
    play.stage.pass_ms(8_000)
    assert play.states() == {"m1": "done"}


@pytest.mark.parametrize("phase", ["refused", "aborted"])
def test_a_move_that_was_refused_or_aborted_is_undone_and_says_why(phase: str) -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.stage.tell("controller", m.MoveStatus("m1", phase, "no room"), "a")
    assert play.states() == {"m1": "undone"}
    assert play.controller.moves["m1"].reason == "no room"
    play.stage.tell("controller", m.MoveStatus("m1", "done"), "a")
    assert play.states() == {"m1": "undone"}, "what has ended stays so"


def test_a_move_that_was_undone_is_tried_again_under_a_new_name_as_often_as_wanted() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0), retries=1)
    play.stage.tell("controller", m.MoveStatus("m1", "aborted", "x"), "a")
    assert play.states() == {"m1": "undone", "m2": "asked"}
    assert play.controller.moves["m1"].again == ("m2",), "whoever waits for the move can follow it"
    play.stage.tell("controller", m.MoveStatus("m2", "aborted", "x"), "a")
    assert play.states() == {"m1": "undone", "m2": "undone"}
    assert play.controller.moves["m2"].again == ()


def test_a_real_refusal_reaches_the_one_who_asked() -> None:
    play = Play()
    play.request(wanted(2))
    assert play.states() == {"m1": "undone"}
    assert "slot 2 is not owned by 'op@a#0'" in play.controller.moves["m1"].reason


# -- its own restart -----------------------------------------------------------------------------


def test_a_restarted_controller_goes_on_from_what_it_stored() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(wanted(0, source=B, to=A))
    play.stage.withheld.clear()  # lost
    play.stage.withholds = lambda sender, to, message: False
    play.stage.restart("controller")
    assert play.states() == {"m1": "asked", "m2": "queued"}
    play.stage.pass_ms(10_000)
    assert play.states() == {"m1": "done", "m2": "done"}
    assert play.request(wanted(1)) == ["m3"], "names are never used twice"


def test_a_restarted_controller_learns_how_a_move_ended_meanwhile() -> None:
    play = Play()
    play.request(wanted(0))
    play.stage.stop("controller")
    play.stage.pass_ms(8_000)
    play.stage.start("controller")
    play.stage.pass_ms(1_000)
    assert play.states() == {"m1": "done"}
    assert play.owners() == [B, A, B, B]


def test_what_it_did_not_write_it_refuses_to_read() -> None:
    with pytest.raises(KeyError):
        Controller(topology(), Stage().settings, {("surprise",): 1})


# -- scaling -------------------------------------------------------------------------------------


def settle(play: Play, seconds: int = 12) -> None:
    for _ in range(seconds):
        play.stage.pass_ms(1_000)
        play.launch_what_it_asks_for()


def test_growing_launches_what_is_missing_and_then_evens_the_load_out() -> None:
    play = Play()
    play.scale(A, B, NEW)
    assert NEW in play.stage.launched
    assert play.controller.moves == {}, "nothing moves to an instance that is not there"
    settle(play)
    assert sorted(play.owners().count(name) for name in (A, B, NEW)) == [1, 1, 2]
    assert play.controller.scales == {}
    assert set(play.states().values()) == {"done"}


def test_shrinking_moves_everything_away_and_then_retires() -> None:
    play = Play()
    keys = [key_in(slot) for slot in range(4)]
    for key in keys:
        play.stage.produce("a", (key, 0, "x"))
    play.scale(A)
    assert play.stage.retired == []
    settle(play)
    assert play.owners() == [A] * 4
    assert B not in play.stage.machines
    assert play.controller.retiring == set()
    for key in keys:
        play.stage.produce("a", (key, 1, "y"))
    assert [o.row[2][2] for o in play.stage.outputs()] == [1] * 4 + [2] * 4


def test_a_wish_survives_a_restart_of_the_controller() -> None:
    play = Play()
    play.scale(A, B, NEW)
    play.stage.restart("controller")
    settle(play)
    assert set(play.owners()) == {A, B, NEW}


def test_one_in_place_of_another_takes_over_and_an_uneven_load_stays_uneven() -> None:
    play = Play()
    play.request(wanted(1))
    settle(play)
    assert play.owners() == [A, B, B, B]
    play.scale(A, NEW, replacing={B: NEW}, even=False)
    play.stage.restart("controller")  # what is wanted is durable, all of it
    settle(play)
    assert play.owners() == [A, NEW, NEW, NEW]
    assert B not in play.stage.machines
    assert (play.controller.scales, play.controller.retiring) == ({}, set())


def test_who_is_replaced_must_go_and_who_replaces_it_must_be_wanted() -> None:
    play = Play()
    for instances, replacing in (((A, B, NEW), {B: NEW}), ((A,), {B: NEW})):
        with pytest.raises(InvalidRequest, match=f"'{NEW}' in place of '{B}'"):
            play.scale(*instances, replacing=replacing)
    assert play.controller.scales == {}


def test_an_answer_to_an_older_question_is_not_taken_for_one_to_a_newer() -> None:
    """Keys that had just moved seemed to be where they were: a late answer told the table from before."""
    play = Play()
    question, effects = play.controller.ask_status(play.stage.now_ms)
    late = m.StatusReply([], [], {}, {}, question - 1)
    play.controller.on_event(Received("a", late), play.stage.now_ms)
    assert play.controller.answered["a"] < question
    play.stage.perform("controller", effects)
    play.stage.run()
    assert play.controller.answered == {"a": question, "b": question}


# -- pieces ------------------------------------------------------------------------------------


def test_a_large_live_move_goes_in_pieces_a_few_at_a_time() -> None:
    play = Play(deaf=("a",))
    keys = KeySet(keys=frozenset(b"%d" % n for n in range(200)))
    names = play.request(WantedMove("op", keys, A, B))
    assert names == ["m1.1", "m1.2", "m1.3", "m1.4"]
    assert play.asked() == ["m1.1", "m1.2"]
    parts = [play.controller.moves[name].wanted.keys.keys for name in names]
    assert frozenset().union(*parts) == keys.keys
    assert max(map(len, parts)) == play.stage.settings.piece_keys


def test_a_move_that_stops_its_keys_anyway_goes_in_one_piece() -> None:
    play = Play(deaf=("a",))
    keys = KeySet(keys=frozenset(b"%d" % n for n in range(200)))
    assert play.request(WantedMove("op", keys, A, B, "pause")) == ["m1"]


def test_slots_go_in_as_many_pieces_as_their_keys_need() -> None:
    slots = KeySet(slots=frozenset(range(8)))
    assert pieces(slots, 64, 0.0) == [slots], "nothing is known of its keys: it has none"
    assert [sorted(p.slots) for p in pieces(slots, 64, 20.0)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [sorted(p.slots) for p in pieces(slots, 64, 1e6)] == [[n] for n in range(8)]


def test_the_controller_knows_how_many_keys_an_instance_has() -> None:
    play = Play()
    rows = [(b"%d" % n, 0, ("x", 1)) for n in range(50)]
    play.stage.produce("a", *rows)
    play.stage.pass_ms(3_000)
    number, effects = play.controller.ask_status(play.stage.now_ms)
    play.stage.perform("controller", effects)
    play.stage.run()
    assert play.controller.answered["a"] == number
    assert play.controller.running[A] + play.controller.running[B] == len(rows)
