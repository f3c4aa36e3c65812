"""The controller: concurrent and queued moves, retries, its own restart, scaling out and in."""

from __future__ import annotations

from typing import Any

import pytest

from machines_in_memory import REQUESTER, SLOTS, SmallDeployment, key_in, topology
from tiercel.control.controller import Controller, MeasuredLoad, MoveState, ScaleRequest
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.machine.events import Received
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

A, B, NEW = "op@a#0", "op@b#0", "op@b#1"
EVERYONE = ("a", "b", A, B, "controller")


def wanted(*slots: int, source: str = A, to: str = B, strategy: str = "live") -> PlannedMove:
    return PlannedMove("op", KeySet(slots=frozenset(slots)), source, to, strategy)


class Play:
    """A deployment with a controller. Its messages do not reach `deaf` sites."""

    def __init__(self, deaf: tuple[str, ...] = ()) -> None:
        self.driver = SmallDeployment(settings=Settings(moves_at_once_max=2))
        self.driver.withholds = lambda sender, to, message: sender == "controller" and to in deaf
        self.driver.start(*EVERYONE)

    @property
    def controller(self) -> Controller:
        machine: Controller = self.driver.machines["controller"]
        return machine

    def request(self, *moves: PlannedMove, **options: Any) -> list[str]:
        names, effects = self.controller.request(Plan(moves, "a test"), self.driver.now_ms, **options)
        self.driver.perform("controller", effects)
        self.driver.run()
        return names

    def scale(self, *instances: str, **options: Any) -> None:
        effects = self.controller.scale(ScaleRequest("op", instances, **options), self.driver.now_ms)
        self.driver.perform("controller", effects)
        self.driver.run()

    def launch_what_it_asks_for(self) -> None:
        """The part of Spark: start launched instances, end retired ones."""
        for name in dict.fromkeys(self.driver.launched):
            if name not in self.driver.machines:
                self.driver.start(name)
        for name in dict.fromkeys(self.driver.retired):
            if name in self.driver.machines:
                self.driver.stop(name)
        self.driver.launched.clear()
        self.driver.retired.clear()

    def states(self) -> dict[str, str]:
        return {name: tracked.state for name, tracked in self.controller.moves.items()}

    def asked(self) -> list[str]:
        asked = [x.move for s, _, x in self.driver.sent if s == "controller" and isinstance(x, m.MoveRequest)]
        return list(dict.fromkeys(asked))

    def owners(self) -> list[str]:
        """The newest entry of each slot. A site learns of moves of other sites only when it must."""
        routes = [[self.driver.route_of(key_in(slot), at=site) for site in "ab"] for slot in range(SLOTS)]
        return [max(known, key=lambda route: route.epoch).instance for known in routes]


# -- moves -------------------------------------------------------------------------------------


def test_moves_that_share_no_key_run_side_by_side() -> None:
    play = Play(deaf=("a",))
    assert play.request(wanted(0), wanted(1)) == ["m1", "m2"]
    assert play.asked() == ["m1", "m2"]
    assert set(play.states().values()) == {MoveState.ASKED.value}


def test_a_move_that_shares_a_key_with_a_running_one_is_queued() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(PlannedMove("op", KeySet(keys=frozenset({key_in(0)})), A, B))
    play.request(wanted(1))
    assert play.asked() == ["m1", "m3"]
    assert play.states() == {"m1": "asked", "m2": "queued", "m3": "asked"}


def test_a_restart_move_runs_alone() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(wanted(1, strategy="restart"))
    assert play.states() == {"m1": "asked", "m2": "queued"}


def test_a_queued_move_starts_when_the_move_before_it_has_ended() -> None:
    play = Play()
    play.request(wanted(0))
    play.request(wanted(0, source=B, to=A))
    assert play.states()["m2"] == "queued"
    play.driver.advance_ms(10_000)
    assert play.states() == {"m1": "done", "m2": "done"}
    assert play.owners() == [A, A, B, B]


def test_no_router_is_asked_before_the_request_is_durable() -> None:
    play = Play()
    play.driver.unsynced.add("controller")
    play.request(wanted(0))
    assert play.asked() == []
    play.driver.sync("controller")
    assert play.asked() == ["m1"]


def test_an_unanswered_move_request_is_repeated() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.driver.advance_ms(1_000)
    requests = [x for s, _, x in play.driver.sent if isinstance(x, m.MoveRequest)]
    assert len(requests) >= 4
    play.driver.release_withheld()
    play.driver.advance_ms(8_000)
    assert play.states() == {"m1": "done"}


@pytest.mark.parametrize("phase", ["refused", "aborted"])
def test_a_refused_or_aborted_move_is_undone_with_its_reason(phase: str) -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.driver.send("controller", m.MoveStatus("m1", phase, "no room"), "a")
    assert play.states() == {"m1": "undone"}
    assert play.controller.moves["m1"].reason == "no room"
    play.driver.send("controller", m.MoveStatus("m1", "done"), "a")
    assert play.states() == {"m1": "undone"}, "an ended move does not change"


def test_an_undone_move_is_retried_under_a_new_name_up_to_its_retries() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0), retries=1)
    play.driver.send("controller", m.MoveStatus("m1", "aborted", "x"), "a")
    assert play.states() == {"m1": "undone", "m2": "asked"}
    assert play.controller.moves["m1"].again == ("m2",), "a caller that waits for the move can follow it"
    play.driver.send("controller", m.MoveStatus("m2", "aborted", "x"), "a")
    assert play.states() == {"m1": "undone", "m2": "undone"}
    assert play.controller.moves["m2"].again == ()


def test_the_refusal_of_a_router_reaches_the_requester() -> None:
    play = Play()
    play.request(wanted(2))
    assert play.states() == {"m1": "undone"}
    assert "slot 2 is not owned by 'op@a#0'" in play.controller.moves["m1"].reason


# -- its own restart -----------------------------------------------------------------------------


def test_a_restarted_controller_resumes_its_stored_moves() -> None:
    play = Play(deaf=("a",))
    play.request(wanted(0))
    play.request(wanted(0, source=B, to=A))
    play.driver.withheld.clear()  # lost
    play.driver.withholds = lambda sender, to, message: False
    play.driver.restart("controller")
    assert play.states() == {"m1": "asked", "m2": "queued"}
    play.driver.advance_ms(10_000)
    assert play.states() == {"m1": "done", "m2": "done"}
    assert play.request(wanted(1)) == ["m3"], "names are never used twice"


def test_a_restarted_controller_learns_the_outcome_of_its_moves() -> None:
    play = Play()
    play.request(wanted(0))
    play.driver.stop("controller")
    play.driver.advance_ms(8_000)
    play.driver.start("controller")
    play.driver.advance_ms(1_000)
    assert play.states() == {"m1": "done"}
    assert play.owners() == [B, A, B, B]


def test_a_controller_refuses_an_unknown_stored_record() -> None:
    with pytest.raises(KeyError):
        Controller(topology(), SmallDeployment().settings, {("surprise",): 1})


# -- scaling -------------------------------------------------------------------------------------


def settle(play: Play, seconds: int = 12) -> None:
    for _ in range(seconds):
        play.driver.advance_ms(1_000)
        play.launch_what_it_asks_for()


def test_scaling_out_launches_instances_before_it_rebalances() -> None:
    play = Play()
    play.scale(A, B, NEW)
    assert NEW in play.driver.launched
    assert play.controller.moves == {}, "nothing moves to an instance that is not there"
    settle(play)
    assert sorted(play.owners().count(name) for name in (A, B, NEW)) == [1, 1, 2]
    assert play.controller.scales == {}
    assert set(play.states().values()) == {"done"}


def test_scaling_in_moves_all_keys_before_it_retires_an_instance() -> None:
    play = Play()
    keys = [key_in(slot) for slot in range(4)]
    for key in keys:
        play.driver.produce("a", (key, 0, "x"))
    play.scale(A)
    assert play.driver.retired == []
    settle(play)
    assert play.owners() == [A] * 4
    assert B not in play.driver.machines
    assert play.controller.retiring == {}
    for key in keys:
        play.driver.produce("a", (key, 1, "y"))
    assert [o.row[2][2] for o in play.driver.outputs()] == [1] * 4 + [2] * 4


def test_a_scaling_by_load_moves_the_heavy_slots_and_ends() -> None:
    play = Play()
    assert play.owners() == [A, A, B, B]
    load = MeasuredLoad(100.0, {0: 70.0, 1: 10.0, 2: 10.0, 3: 10.0}, speeds={A: 100.0, B: 100.0})
    play.scale(A, B, load=load)
    settle(play)
    assert play.owners() == [A, B, B, B], "the heavy slot stays, the other one of its instance leaves"
    assert play.controller.scales == {}


def test_spare_instances_stay_when_a_scaling_ends() -> None:
    play = Play()
    play.scale(A, B, NEW)
    settle(play)
    play.scale(A, B)
    settle(play)
    assert NEW not in play.driver.machines, "without being named a spare it is retired"
    play.driver.start(NEW)
    play.scale(A, B, spares=(NEW,))
    settle(play)
    assert NEW in play.driver.machines
    assert NEW not in play.owners()


def test_a_scale_request_survives_a_restart_of_the_controller() -> None:
    play = Play()
    play.scale(A, B, NEW)
    play.driver.restart("controller")
    settle(play)
    assert set(play.owners()) == {A, B, NEW}


def test_a_replacement_gets_all_keys_of_the_replaced_instance_without_rebalancing() -> None:
    play = Play()
    play.request(wanted(1))
    settle(play)
    assert play.owners() == [A, B, B, B]
    play.scale(A, NEW, replacing={B: NEW}, even=False)
    play.driver.restart("controller")  # the whole request is durable
    settle(play)
    assert play.owners() == [A, NEW, NEW, NEW]
    assert B not in play.driver.machines
    assert (play.controller.scales, play.controller.retiring) == ({}, {})


def test_a_replacement_is_refused_unless_the_request_drops_the_old_and_lists_the_new_instance() -> None:
    play = Play()
    for instances, replacing in (((A, B, NEW), {B: NEW}), ((A,), {B: NEW})):
        with pytest.raises(InvalidRequest, match=f"'{NEW}' in place of '{B}'"):
            play.scale(*instances, replacing=replacing)
    assert play.controller.scales == {}


def test_a_reply_to_an_older_status_query_does_not_answer_a_newer_one() -> None:
    """A late reply has the routes from before a move: keys seemed not to have moved."""
    play = Play()
    question, effects = play.controller.ask_status(play.driver.now_ms)
    late = m.StatusReply([], [], {}, {}, question - 1)
    play.controller.on_event(Received("a", late), play.driver.now_ms)
    assert play.controller.answered["a"] < question
    play.driver.perform("controller", effects)
    play.driver.run()
    assert play.controller.answered == {"a": question, "b": question}


# -- split moves ------------------------------------------------------------------------------------


def test_a_large_live_move_is_split_and_runs_a_few_parts_at_a_time() -> None:
    play = Play(deaf=("a",))
    keys = KeySet(keys=frozenset(b"%d" % n for n in range(200)))
    names = play.request(PlannedMove("op", keys, A, B))
    assert names == ["m1.1", "m1.2", "m1.3", "m1.4"]
    assert play.asked() == ["m1.1", "m1.2"]
    parts = [play.controller.moves[name].wanted.keys.keys for name in names]
    assert frozenset().union(*parts) == keys.keys
    assert max(map(len, parts)) == play.driver.settings.flip_keys_max


def test_a_pause_move_is_not_split() -> None:
    play = Play(deaf=("a",))
    keys = KeySet(keys=frozenset(b"%d" % n for n in range(200)))
    assert play.request(PlannedMove("op", keys, A, B, "pause")) == ["m1"]


def test_the_controller_learns_the_number_of_keys_of_each_instance() -> None:
    play = Play()
    rows = [(b"%d" % n, 0, ("x", 1)) for n in range(50)]
    play.driver.produce("a", *rows)
    play.driver.advance_ms(3_000)
    number, effects = play.controller.ask_status(play.driver.now_ms)
    play.driver.perform("controller", effects)
    play.driver.run()
    assert play.controller.answered["a"] == number
    assert play.controller.running[A] + play.controller.running[B] == len(rows)


def control(driver: SmallDeployment) -> Controller:
    machine: Controller = driver.machines["controller"]
    return machine


def request(driver: SmallDeployment, *moves: PlannedMove, **options: Any) -> list[str]:
    names, effects = control(driver).request(Plan(moves, "a test"), driver.now_ms, **options)
    driver.perform("controller", effects)
    driver.run()
    return names


def ask(driver: SmallDeployment) -> None:
    _, effects = control(driver).ask_status(driver.now_ms)
    driver.perform("controller", effects)
    driver.run()


def test_queued_moves_keep_their_order_when_the_controller_restarts() -> None:
    """Storage returns m10 before m9."""
    driver = SmallDeployment(topology(("a", "b", "c"), instances=(A, B))).start(
        "a", "b", "c", A, B, "controller"
    )
    driver.start("op@c#0")
    control(driver).next_id = 8
    driver.withholds = lambda sender, to, message: (
        sender == "controller" and isinstance(message, m.MoveRequest)
    )
    slots = KeySet(slots=frozenset((0,)))
    names = [
        *request(driver, PlannedMove("op", slots, A, B)),
        *request(driver, PlannedMove("op", slots, B, "op@c#0")),
        *request(driver, PlannedMove("op", slots, "op@c#0", A)),
    ]
    assert names == ["m8", "m9", "m10"]
    driver.disks["controller"] = dict(sorted(driver.disks["controller"].items()))
    driver.stop("controller")
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: False
    driver.start("controller")
    driver.advance_ms(20_000)
    assert {name: t.state for name, t in control(driver).moves.items()} == dict.fromkeys(names, "done")


def test_a_delayed_status_reply_does_not_replace_newer_routes() -> None:
    """The replies of one site are delayed until its slot has moved and the new owner has replied."""
    driver = SmallDeployment().start("a", "b", A, B)
    driver.withholds = lambda sender, to, message: sender == "a" and to == "controller"
    driver.start("controller")
    driver.move(KeySet(slots=frozenset((0,))), A, B)
    driver.advance_ms(5_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    ask(driver)
    assert control(driver).slots["op"][0].instance == B
    driver.release_withheld()  # all replies of a, in order
    ask(driver)
    assert sorted(control(driver).slots["op"]) == [0, 1, 2, 3]
    assert control(driver).slots["op"][0].instance == B


def scale(driver: SmallDeployment, *instances: str) -> None:
    driver.perform("controller", control(driver).scale(ScaleRequest("op", instances), driver.now_ms))
    driver.run()


def test_scaling_in_retires_an_instance_that_is_down() -> None:
    """The controller was disconnected while the keys moved, and asks again while the instance is down."""
    driver = SmallDeployment().start("a", "b", A, B, "controller")
    scale(driver, A)
    driver.withholds = lambda sender, to, message: sender == "b" and to == "controller"
    driver.advance_ms(5_000)
    assert driver.machines["b"].outgoing_moves == {}
    driver.stop(B)
    driver.withheld.clear()  # lost with the connection
    driver.withholds = lambda sender, to, message: False
    driver.advance_ms(5_000)
    assert control(driver).scales == {}
    assert driver.retired == [B], "its supervisor would restart it without need"


def retirement_without_an_answer() -> Play:
    """All keys of B have moved to A. B's router lets B go; its answers do not reach the controller yet."""
    play = Play()
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.RetirementReply)
    play.scale(A)
    settle(play)
    assert list(play.controller.retiring) == [B]
    assert any(answer.accepted for _, _, answer in play.driver.withheld)
    play.driver.restart(B)  # its router has fenced it, and its supervisor starts it again
    return play


def test_a_late_answer_to_a_retirement_does_not_end_an_instance_that_owns_keys_again() -> None:
    play = retirement_without_an_answer()
    play.request(wanted(0, to=B))
    play.driver.advance_ms(5_000)
    assert play.owners() == [B, A, A, A]
    play.driver.release_withheld()
    settle(play)
    assert B in play.driver.machines, "no process has the keys of slot 0"
    play.driver.produce("a", (key_in(0), 0, "x"))
    assert [output.row[2][2] for output in play.driver.outputs()] == [1]


def test_a_late_answer_to_a_retirement_does_not_end_an_instance_that_a_later_request_names() -> None:
    play = retirement_without_an_answer()
    late = list(play.driver.withheld)
    play.scale(A, B)
    play.driver.release_withheld()
    settle(play)
    assert B in play.driver.machines
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.RetirementReply)
    play.scale(A)  # the answers to the first retirement do not end it before its router lets it go
    settle(play)
    for _, _, answer in late:
        play.driver.send("controller", answer, "b")
    assert B not in play.driver.retired
    play.driver.release_withheld()
    settle(play)
    assert B not in play.driver.machines
    assert play.controller.retiring == {}


def test_a_late_answer_to_a_retirement_does_not_end_a_destination_that_a_queued_move_has_reached() -> None:
    """The move was queued before the takeover of its destination began, and runs after it."""
    play = Play()
    play.driver.withholds = lambda sender, to, message: (
        isinstance(message, m.RetirementReply) or (to == "a" and isinstance(message, m.MoveRequest))
    )
    play.request(wanted(0))  # it does not reach its router
    _, effects = play.controller.recover(B, (NEW,), play.driver.now_ms)
    play.driver.perform("controller", effects)
    play.driver.run()
    settle(play)
    play.driver.restart(B)
    answers = [held for held in play.driver.withheld if isinstance(held[2], m.RetirementReply)]
    play.driver.withheld.clear()
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.RetirementReply)
    play.driver.advance_ms(5_000)
    assert play.owners() == [B, A, NEW, NEW]
    for _, _, answer in [*answers, *play.driver.withheld]:
        play.driver.send("controller", answer, "b")
    settle(play)
    assert B in play.driver.machines
