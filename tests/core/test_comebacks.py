"""Transcripts of schedules in which a promise broke: who was retired, who came back, who heard late."""

from __future__ import annotations

from typing import Any

import pytest

from playing import BOSS, Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.effects import LoadCheckpoint
from tiercel.core.events import Disconnected
from tiercel.core.faults import LostCheckpoint
from tiercel.core.records import KeySet

A, B = "op@a#0", "op@b#0"
ALL_OF_A = KeySet(slots=frozenset((0, 1)))


def counts(stage: Stage) -> list[int]:
    return [output.row[2][2] for output in stage.outputs()]


def retired_before_it_forgot(name: str = A) -> Stage:
    """All keys of A have moved to B; A has a checkpoint behind the flip, and is retired before it forgets."""
    stage = Stage(kind="forgetful").start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    stage.move(ALL_OF_A, A, B, "pause")
    stage.pass_ms(12_000)
    assert stage.machines["a"].departures["m1"].phase.value == "done"
    stage.tell("a", m.Retirement(A))
    assert stage.said("a", BOSS, m.RetirementReply) == [m.RetirementReply(A, True)]
    stage.withheld.clear()
    stage.withholds = lambda sender, to, message: False
    return stage


@pytest.mark.parametrize("strategy", ["live", "pause"])
def test_who_was_retired_and_died_before_its_first_checkpoint_begins_anew_though_nothing_was_logged(
    strategy: str,
) -> None:
    """It is as old as the place where it began: nothing was logged since, for its site had no keys."""
    stage = retired_before_it_forgot()
    stage.stop(A)
    stage.start(A)  # wanted again: a newcomer
    stage.produce("a", (key_in(0), 0, 1))  # B has no state of it any more
    stage.withholds = lambda sender, to, message: isinstance(message, m.Chunk | m.EndOfKeys)
    stage.tell("b", m.MoveRequest("m2", "op", ALL_OF_A, B, A, strategy, 30_000.0))
    stage.restart(A)  # it dies before it has stored anything
    assert not stage.machines[A].space.has(key_in(0)), "a copy of a key that is not its own"
    stage.deliver()
    stage.pass_ms(8_000)
    if strategy == "live":
        stage.tell("b", m.MoveRequest("m3", "op", ALL_OF_A, B, A, strategy, 30_000.0))
        stage.pass_ms(8_000)
    assert stage.machines["a"].inboxes["op"].table.route(key_in(0)).instance == A
    stage.produce("a", (key_in(0), 0, 2))
    stage.pass_ms(8_000)
    assert counts(stage) == [1, 2, 1]


DEAD, OTHER, HEIR = "op@a#0", "op@a#1", "op@a#2"


def test_an_heir_that_is_retired_before_its_first_checkpoint_is_no_heir_any_more() -> None:
    """It gave all away at once. Whoever it succeeded would wait for it for ever."""
    stage = Stage(topology(("a",), "forgetful", instances=(DEAD, OTHER)), kind="forgetful").start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.pass_ms(3_000)
    stage.stop(DEAD)
    stage.tell("a", m.Succession("r1", DEAD, (HEIR,)))
    stage.unsynced.add(HEIR)  # its disk is slow
    stage.start(HEIR)
    stage.move(ALL_OF_A, HEIR, OTHER, "pause")
    stage.pass_ms(3_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    stage.tell("a", m.Retirement(HEIR))
    assert stage.said("a", BOSS, m.RetirementReply) == [m.RetirementReply(HEIR, True)]
    stage.stop(HEIR)
    stage.start(DEAD)
    assert DEAD in stage.machines["a"].inboxes["op"].readers, "nobody needs what it has stored"
    stage.unsynced.discard(HEIR)
    stage.start(HEIR)
    assert not stage.machines[HEIR].space.has(key_in(0)), "a copy of a key that is not its own"


def test_an_heir_that_was_here_before_emits_what_the_dead_did_not() -> None:
    """The dead one has emitted nothing yet; its heir has a mark of an earlier time, when it owned nothing."""
    stage = Stage(topology(("a",), instances=(DEAD, OTHER))).start("a", OTHER)
    for n in range(3):
        stage.produce("a", (key_in(2), 0, n))
    stage.start(DEAD)
    stage.vanish(DEAD)
    stage.give("a", Disconnected(DEAD))
    for n in range(3):
        stage.produce("a", (key_in(0), 0, n))
    stage.start(HEIR)  # a spare one, for a while
    stage.pass_ms(100)
    stage.stop(HEIR)
    stage.tell("a", m.Succession("r1", DEAD, (HEIR,)))
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    stage.start(HEIR)
    stage.pass_ms(3_000)
    assert [o.row[2][2] for o in stage.outputs() if o.key == key_in(0)] == [1, 2, 3]


def test_an_abort_while_the_destination_loads_is_heard() -> None:
    """It has voted, died and come back; it is told nothing while it loads, and its reply is of before."""
    stage = Stage().start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.Ready) and sender == "b"
    stage.move(ALL_OF_A, A, B)
    stage.pass_ms(1_500)
    assert stage.machines["b"].arrivals["m1"].phase.value == "adoptable"
    held: list[Any] = []
    stage.stop(B)
    perform = stage.perform

    def slowly(name: str, effects: Any) -> None:
        later = [e for e in effects if name == B and isinstance(e, LoadCheckpoint)]
        held.extend(later)
        perform(name, [e for e in effects if e not in later])

    stage.perform = slowly  # type: ignore[method-assign]
    stage.start(B)
    assert held
    stage.restart(A)  # the source falls: the move is undone
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "aborted"
    stage.perform = perform  # type: ignore[method-assign]
    stage.withheld.clear()
    stage.withholds = lambda sender, to, message: False
    perform(B, held)
    stage.run()
    stage.pass_ms(3_000)
    assert not stage.machines[B].arriving, "it was told that this is over"
    stage.move(ALL_OF_A, A, B, name="m2")
    stage.pass_ms(5_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    stage.tell("b", m.MoveRequest("m3", "op", ALL_OF_A, B, A, "live", 10_000.0))
    stage.pass_ms(20_000)
    assert stage.said("b", BOSS, m.MoveStatus)[-1].phase == "done"


def test_a_slot_that_leaves_does_not_take_along_what_a_key_left_behind() -> None:
    """The key moved before its slot did, and both moves are known when router and source start again."""
    stage = Stage().start()
    key, beside = key_in(0), key_in(0, 1)
    stage.produce("a", (key, 0, 0), (beside, 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    stage.move(KeySet(keys=frozenset((key,))), A, B, "live", "m7.2")
    stage.pass_ms(3_000)
    assert stage.machines["a"].departures["m7.2"].phase.value == "done"
    stage.produce("a", (key, 0, 1))
    stage.withholds = lambda sender, to, message: isinstance(message, m.Forget | m.Chunk)
    stage.move(KeySet(slots=frozenset((0,))), A, B, "pause", "m10")
    stage.pass_ms(3_000)
    assert stage.machines["a"].departures["m10"].phase.value == "emitting"
    stage.disks["a"] = dict(sorted(stage.disks["a"].items(), key=lambda item: [*map(str, item[0])]))
    stage.stop(A)
    stage.restart("a")
    stage.withheld.clear()
    stage.withholds = lambda sender, to, message: False
    stage.start(A)
    stage.pass_ms(5_000)
    assert stage.disks["a"]["ended", "m10"] == ("done", "")
    stage.produce("a", (key, 0, 2))
    stage.pass_ms(1_000)
    assert [o.row[2][2] for o in stage.outputs() if o.key == key] == [1, 2, 3]


def test_what_an_heir_had_seen_when_it_was_here_before_is_no_promise_of_its_heritage() -> None:
    """As a spare it had read on; the dead one had not, and its heir makes those outputs now."""
    stage = Stage(topology(("a",), "windows", instances=(DEAD, OTHER)), kind="windows").start()
    stage.start(HEIR)
    stage.withholds = lambda sender, to, message: to == DEAD and isinstance(message, m.Dispatch)
    stage.produce("a", (key_in(0), 10, 0), watermark_ms=5)
    stage.produce("a", (key_in(2), 200, 0), watermark_ms=100)
    router = stage.machines["a"]
    assert router.output_promise("op") == -1
    stage.stop(HEIR)
    stage.stop(DEAD)
    stage.tell("a", m.Succession("r1", DEAD, (HEIR,)))
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    assert router.output_promise("op") == -1, "the row at 10 has not been processed"
    stage.start(HEIR)
    stage.pass_ms(3_000)
    assert router.output_promise("op") == 100


def test_an_heir_of_one_whose_checkpoint_is_lost_does_not_begin_with_nothing() -> None:
    stage = Stage(topology(("a",), instances=(DEAD, OTHER))).start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.pass_ms(3_000)
    assert stage.machines["a"].inboxes["op"].readers[DEAD].stored
    stage.stop(DEAD)
    stage.disks[DEAD].clear()
    stage.tell("a", m.Succession("r1", DEAD, (HEIR,)))
    with pytest.raises(LostCheckpoint):
        stage.start(HEIR)


def test_a_source_that_was_out_of_reach_when_its_move_was_undone_lets_go_of_what_it_captured() -> None:
    stage = Stage().start()
    stage.produce("a", (key_in(0), 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.ChunkReceipt | m.EndOfKeys)
    stage.move(ALL_OF_A, A, B)
    stage.pass_ms(100)
    assert stage.machines[A].leaving["m1"].chunks
    stage.restart("a")
    assert stage.disks["a"]["ended", "m1"][0] == "aborted"
    stage.pass_ms(60_000)
    assert not stage.machines[A].leaving


def test_who_is_retired_by_a_message_that_came_late_does_not_wait_for_ever() -> None:
    """The first answer ended it; it was wanted again, and then the same question arrived once more."""
    stage = Stage(topology(("a",), instances=(DEAD, OTHER))).start()
    stage.start(HEIR)
    stage.tell("a", m.Retirement(HEIR))
    stage.restart(HEIR)
    stage.tell("a", m.Retirement(HEIR))  # late
    stage.pass_ms(60_000)
    stage.move(ALL_OF_A, DEAD, HEIR)
    stage.pass_ms(60_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
