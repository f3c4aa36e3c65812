"""Transcripts of schedules in which late or stale news broke a promise: routers, clients, the controller."""

from __future__ import annotations

from typing import Any

from playing import BOSS, Stage, key_in, topology
from tiercel.control.controller import Controller, Scale
from tiercel.control.plans import Plan, WantedMove
from tiercel.core import messages as m
from tiercel.core.events import Disconnected
from tiercel.core.records import KeySet, Route
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"
ALL_OF_A = KeySet(slots=frozenset((0, 1)))


# -- who holds up whom -------------------------------------------------------------------------


def test_who_is_gone_and_owns_nothing_does_not_slow_producers_down() -> None:
    stage = Stage(topology(("a",), instances=(A,)), Settings(backlog_rows_max=10)).start()
    spare = "op@a#1"
    stage.start(spare)
    stage.produce("a", (key_in(0), 0, 0))
    stage.stop(spare)
    for n in range(30):
        stage.produce("a", (key_in(0), 0, n + 1))
    stage.pass_ms(5_000)
    assert len(stage.outputs()) == 31, "all of it was processed"
    assert stage.machines["a"].inboxes["op"].backlog_rows == 0
    assert stage.said("a", "p", m.ProducerMark)[-1].seq == 31


def test_producers_go_on_when_the_one_that_was_behind_is_retired() -> None:
    """It gave its keys away and died before it was told to forget them: until then it may come back."""
    leaver = "op@a#1"
    stage = Stage(topology(("a",), instances=(A, leaver)), Settings(backlog_rows_max=10)).start()
    stage.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    stage.move(KeySet(slots=frozenset((2, 3))), leaver, A, "pause")
    stage.pass_ms(3_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    stage.stop(leaver)
    for n in range(15):
        stage.produce("a", (key_in(2), 0, n))
    stage.tell("a", m.Retirement(leaver))
    assert stage.said("a", BOSS, m.RetirementReply) == [m.RetirementReply(leaver, True)]
    stage.pass_ms(10_000)
    assert len(stage.outputs()) == 15
    assert stage.said("a", "p", m.ProducerMark)[-1].seq == 15


# -- subscribers -------------------------------------------------------------------------------


def test_what_was_read_for_an_earlier_subscription_is_not_taken_for_the_later_one() -> None:
    """Who reads on is started again from an earlier offset; an answer to its former question comes late."""
    stage = Stage(topology(("a",)), Settings(stream_tail_max=2)).start()
    for n in range(20):
        stage.produce("a", (key_in(0), 0, n))
    stage.slow_readers = {"reader"}
    stage.tell("a", m.Subscribe("out", 10), "reader")
    stage.give("a", Disconnected("reader"))
    stage.tell("a", m.Subscribe("out", 0), "reader")
    while stage.reads:
        stage.answer_read()
    offsets = [e.offset for p in stage.said("a", "reader", m.Publish) for e in p.entries]
    assert offsets[0] == 1, "entries were skipped"
    assert offsets == list(range(1, len(offsets) + 1))


# -- requests that come twice ------------------------------------------------------------------


def test_a_move_that_was_refused_does_not_happen_when_its_request_comes_again() -> None:
    """It was asked for twice because the answer was slow; whoever asked has heard that it was refused."""
    stage = Stage().start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.Chunk | m.EndOfKeys)
    stage.move(ALL_OF_A, A, B, name="m1")
    stage.move(ALL_OF_A, A, B, name="m2")
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "refused"
    stage.restart(A)  # m1 is undone
    stage.withheld.clear()
    stage.withholds = lambda sender, to, message: False
    stage.move(ALL_OF_A, A, B, name="m2")  # the same request, late
    stage.pass_ms(5_000)
    table = stage.machines["a"].inboxes["op"].table
    assert [table.slots[s].instance for s in (0, 1)] == [A, A], "the keys are where they were"


# -- the controller ----------------------------------------------------------------------------


def control(stage: Stage) -> Controller:
    machine: Controller = stage.machines["controller"]
    return machine


def request(stage: Stage, *moves: WantedMove, **options: Any) -> list[str]:
    names, effects = control(stage).request(Plan(moves, "a test"), stage.now_ms, **options)
    stage.perform("controller", effects)
    stage.run()
    return names


def ask(stage: Stage) -> None:
    _, effects = control(stage).ask_status(stage.now_ms)
    stage.perform("controller", effects)
    stage.run()


def test_moves_that_wait_their_turn_keep_it_when_the_controller_is_restarted() -> None:
    """Its store gives m10 before m9."""
    stage = Stage(topology(("a", "b", "c"), instances=(A, B))).start("a", "b", "c", A, B, "controller")
    stage.start("op@c#0")
    control(stage).next_id = 8
    stage.withholds = lambda sender, to, message: (
        sender == "controller" and isinstance(message, m.MoveRequest)
    )
    slots = KeySet(slots=frozenset((0,)))
    names = [
        *request(stage, WantedMove("op", slots, A, B)),
        *request(stage, WantedMove("op", slots, B, "op@c#0")),
        *request(stage, WantedMove("op", slots, "op@c#0", A)),
    ]
    assert names == ["m8", "m9", "m10"]
    stage.disks["controller"] = dict(sorted(stage.disks["controller"].items()))
    stage.stop("controller")
    stage.withheld.clear()
    stage.withholds = lambda sender, to, message: False
    stage.start("controller")
    stage.pass_ms(20_000)
    assert {name: t.state for name, t in control(stage).moves.items()} == dict.fromkeys(names, "done")


def test_an_older_answer_does_not_replace_what_the_new_owner_told() -> None:
    """One site's answers are slow: when they come, its slot is elsewhere, and that site has told so."""
    stage = Stage().start("a", "b", A, B)
    stage.withholds = lambda sender, to, message: sender == "a" and to == "controller"
    stage.start("controller")
    stage.move(KeySet(slots=frozenset((0,))), A, B)
    stage.pass_ms(5_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    ask(stage)
    assert control(stage).slots["op"][0].instance == B
    stage.deliver()  # all that a has said, in order
    ask(stage)
    assert sorted(control(stage).slots["op"]) == [0, 1, 2, 3]
    assert control(stage).slots["op"][0].instance == B


def scale(stage: Stage, *instances: str) -> None:
    stage.perform("controller", control(stage).scale(Scale("op", instances), stage.now_ms))
    stage.run()


def test_who_is_down_when_the_wish_is_fulfilled_is_retired_too() -> None:
    """The controller was out of reach while the keys moved, and asks again when the instance is just down."""
    stage = Stage().start("a", "b", A, B, "controller")
    scale(stage, A)
    stage.withholds = lambda sender, to, message: sender == "b" and to == "controller"
    stage.pass_ms(5_000)
    assert stage.machines["b"].departures == {}
    stage.stop(B)
    stage.withheld.clear()  # lost with the connection
    stage.withholds = lambda sender, to, message: False
    stage.pass_ms(5_000)
    assert control(stage).scales == {}
    assert stage.retired == [B], "its supervisor would start it again, for nobody"


# -- news of owners ----------------------------------------------------------------------------


def test_news_that_a_key_is_ours_does_not_make_us_forget_who_had_it() -> None:
    """Others know of a key that comes to us before its Flip is here, and tell us who has its slot now."""
    stage = Stage(topology(("a", "b", "c", "d"), instances=(A,)))
    stage.start("a", "b", "c", "d", A, "op@b#0", "op@c#0", "op@d#0")
    key, beside = key_in(0), key_in(0, 1)
    slot = KeySet(slots=frozenset((0,)))
    only = KeySet(keys=frozenset((key,)))

    def done(site: str, keys: KeySet, source: str, to: str, name: str) -> None:
        stage.move(keys, source, to, "pause", name)
        stage.pass_ms(3_000)
        assert stage.said(site, BOSS, m.MoveStatus)[-1].phase in ("done", "emitting"), name

    stage.produce("a", (key, 0, 0), (beside, 0, 0))
    done("a", only, A, "op@b#0", "m1")
    done("a", slot, A, "op@c#0", "m2")
    # from here on a hears nothing that b's lane brings
    stage.withholds = lambda sender, to, message: (
        sender == "b" and to == "a" and isinstance(message, m.LaneFrame)
    )
    stage.move(only, "op@b#0", A, "pause", "m3")
    stage.produce("c", (key, 0, 1), producer="q")  # b tells c that the key is a's
    assert stage.machines["c"].inboxes["op"].table.overrides[key] == Route(A, 3)
    stage.move(slot, "op@c#0", "op@d#0", "pause", "m4")
    stage.pass_ms(1_000)
    stage.produce("a", (beside, 0, 1))  # c tells a
    assert stage.machines["a"].inboxes["op"].table.slots[0] == Route("op@d#0", 3)
    stage.deliver()
    stage.pass_ms(10_000)
    assert stage.machines["a"].inboxes["op"].table.route(key) == Route(A, 3)
    stage.produce("a", (key, 0, 2))
    stage.pass_ms(10_000)
    assert [o.row[2][2] for o in stage.outputs() if o.key == key] == [1, 2, 3]
