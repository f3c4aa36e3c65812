"""One log: what is dropped, what is held, what travels on, and what comes home in order."""

from __future__ import annotations

from playing import BOSS, Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.effects import SetTimer
from tiercel.core.inbox import Inbox
from tiercel.core.lanes import Inbound
from tiercel.core.readers import Reader
from tiercel.core.records import INITIAL, Entry, KeySet, Route, Row, TableUpdate, Tick, Watermark
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.core.step import Step

A, B, C = "op@a#0", "op@b#0", "op@c#0"
HERE, THERE = key_in(0), key_in(3)


class Play:
    """The inbox of site `a`, which owns slots 0 and 1; `b` owns the others."""

    def __init__(self) -> None:
        operator = topology().operators["op"]
        self.inbox = Inbox("op", "a", RoutingTable.initial(operator), Settings())
        self.step = Step(5.0)
        self.frames = 0

    def intake(self, *rows: Row) -> dict[str, list[Row]]:
        return self.inbox.intake(self.step, list(rows))

    def frame(self, *rows: Row) -> tuple[dict[str, list[Row]], TableUpdate | None, Inbound]:
        """A frame of stamped rows; returns what travels on, what its sender learns, and the frame."""
        self.frames += 1
        inbound = Inbound(("c", "op", self.frames))
        onward, correction = self.inbox.sequence(self.step, list(rows), (inbound,))
        return onward, correction, inbound

    def log(self) -> list[Entry]:
        return [self.step.puts["inbox", "op", o] for o in range(1, self.inbox.offset + 1)]

    def payloads(self) -> list[list[object]]:
        return [[row[2] for rows in e.parts.values() for row in rows] for e in self.log()]


def row(n: int, key: bytes = HERE, epoch: int = 1, origin: str = "c") -> Row:
    return (key, 0, n, origin, n, epoch)


# -- rows that enter here ----------------------------------------------------------------------


def test_rows_that_arrive_together_are_one_entry() -> None:
    play = Play()
    assert play.intake((HERE, 1, "x"), (key_in(1), 2, "y")) == {}
    assert play.log() == [Entry(1, 5, {A: [(HERE, 1, "x"), (key_in(1), 2, "y")]})]
    assert play.step.puts["head", "op"] == (1, 5, -1)


def test_a_row_of_another_site_is_numbered_per_key_and_not_appended() -> None:
    play = Play()
    assert play.intake((THERE, 1, "x"), (THERE, 2, "y")) == {
        "b": [(THERE, 1, "x", "a", 1, 1), (THERE, 2, "y", "a", 2, 1)]
    }
    assert play.intake((key_in(2), 3, "z")) == {"b": [(key_in(2), 3, "z", "a", 1, 1)]}
    assert play.log() == []
    assert play.step.puts["count", "op", THERE] == 2


def test_log_time_never_runs_backwards() -> None:
    play = Play()
    play.intake((HERE, 1, "x"))
    play.step.now_ms = 2.0
    play.inbox.tick(play.step)
    assert [e.time_ms for e in play.log()] == [5, 5]
    assert play.log()[1].control == Tick()


def test_a_watermark_is_remembered_by_the_log() -> None:
    play = Play()
    play.inbox.append(play.step, {}, Watermark(40))
    assert play.step.puts["head", "op"] == (1, 5, 40)


# -- rows from elsewhere -----------------------------------------------------------------------


def test_a_row_that_is_known_is_dropped_and_its_frame_is_settled() -> None:
    play = Play()
    play.frame(row(1))
    onward, correction, inbound = play.frame(row(1))
    assert (onward, correction, inbound.held) == ({}, None, 0)
    assert play.payloads() == [[1]]


def test_a_row_that_came_early_is_held_until_the_gap_is_closed() -> None:
    play = Play()
    _, _, third = play.frame(row(3))
    _, _, second = play.frame(row(2))
    assert play.payloads() == []
    assert (second.held, third.held) == (1, 1)
    play.frame(row(1))
    assert play.payloads() == [[1, 2, 3]]
    assert (second.held, third.held) == (0, 0)
    assert play.inbox.held == {}
    assert play.step.puts["mark", "op", HERE] == {"c": 3}


def test_an_early_row_that_comes_twice_settles_both_its_frames() -> None:
    play = Play()
    _, _, first = play.frame(row(2))
    _, _, again = play.frame(row(2))
    play.frame(row(1))
    assert play.payloads() == [[1, 2]]
    assert (first.held, again.held) == (0, 0)


def test_a_gap_of_one_origin_or_key_holds_up_no_other() -> None:
    play = Play()
    play.frame(row(2))
    play.frame(row(1, origin="d"))
    play.frame(row(1, key=key_in(1)))
    assert play.payloads() == [[1], [1]]


def test_a_row_for_a_newer_owner_travels_on_and_its_sender_learns_the_whole_slot() -> None:
    play = Play()
    key = key_in(0, 1)
    play.inbox.update_table(play.step, TableUpdate({0: Route(B, 4)}, {key: Route(C, 6)}))
    onward, correction, _ = play.frame(row(1))
    assert onward == {"b": [(HERE, 0, 1, "c", 1, 4)]}
    assert correction == TableUpdate({0: Route(B, 4)}, {key: Route(C, 6)})


def test_a_row_that_knows_more_than_we_waits() -> None:
    play = Play()
    onward, correction, inbound = play.frame(row(1, key=THERE, epoch=2))
    assert (onward, correction, inbound.held) == ({}, None, 1)
    assert [held.row for held in play.inbox.release_waiting()] == [row(1, key=THERE, epoch=2)]
    assert inbound.held == 0


def test_initial_state_comes_before_a_row_of_its_key_that_overtook_it() -> None:
    play = Play()
    play.frame((HERE, 7, "tuple", "c", 2, 1))
    play.frame((HERE, INITIAL, "initial", "c", 1, 1))
    assert play.payloads() == [["initial", "tuple"]]


# -- keys that leave and come back ---------------------------------------------------------------


def test_the_marks_of_a_key_leave_with_it_and_its_early_rows_travel_on() -> None:
    play = Play()
    play.frame(row(1), row(1, key=key_in(1)))
    _, _, early = play.frame(row(3))

    def leaves(key: bytes) -> bool:
        return key == HERE

    assert play.inbox.give_marks(play.step, leaves) == {HERE: {"c": 1}}
    assert ("mark", "op", HERE) in play.step.deletes
    assert [held.row[4] for held in play.inbox.drop_held(leaves)] == [3]
    assert early.held == 0
    assert play.inbox.marks == {key_in(1): {"c": 1}}


def test_a_key_that_comes_home_takes_new_rows_behind_its_old_ones() -> None:
    play = Play()
    assert play.intake((THERE, 0, "old")) == {"b": [(THERE, 0, "old", "a", 1, 1)]}
    play.inbox.update_table(play.step, TableUpdate({}, {THERE: Route(A, 2)}))
    play.inbox.install_marks(play.step, {THERE: {}}, lambda key: key == THERE)
    assert play.inbox.returning == {THERE}
    assert play.intake((THERE, 0, "new")) == {"a": [(THERE, 0, "new", "a", 2, 2)]}, "into the lane to itself"
    play.frame((THERE, 0, "new", "a", 2, 2))
    assert play.payloads() == []
    play.frame((THERE, 0, "old", "a", 1, 2))
    assert play.payloads() == [["old", "new"]]
    assert play.inbox.returning == set()
    assert play.intake((THERE, 0, "newest")) == {}
    assert play.payloads() == [["old", "new"], ["newest"]]


def test_a_key_whose_rows_are_all_there_comes_home_at_once() -> None:
    play = Play()
    play.intake((THERE, 0, "old"))
    play.inbox.update_table(play.step, TableUpdate({}, {THERE: Route(A, 2)}))
    play.inbox.install_marks(play.step, {THERE: {"a": 1}}, lambda key: key == THERE)
    assert play.inbox.returning == set()


# -- trimming ----------------------------------------------------------------------------------


def test_an_entry_is_deleted_when_every_checkpoint_covers_it_and_it_is_durable() -> None:
    play = Play()
    play.inbox.readers = {A: Reader(1, 2, {}), "op@a#1": Reader(1, 3, {"m1": 1})}
    for n in range(4):
        play.intake((HERE, n, n))
    assert play.inbox.trim_point() == 0, "nothing is durable"
    play.inbox.durable = 4
    assert play.inbox.trim_point() == 1, "an arriving move has read no further"
    play.inbox.readers["op@a#1"] = Reader(1, 3, {})
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == 2
    assert [k for k in play.step.deletes if k[0] == "inbox"] == [("inbox", "op", 1), ("inbox", "op", 2)]
    play.inbox.trim_floor = lambda: 2
    play.inbox.readers[A] = Reader(1, 4, {})
    assert play.inbox.trim_point() == 2, "a shadow feed still reads from there"


def test_a_long_log_is_trimmed_in_several_steps() -> None:
    play = Play()
    most = play.inbox.settings.trim_entries_max
    for n in range(most + 1):
        play.intake((HERE, n, n))
    play.inbox.durable = most + 1
    play.inbox.readers = {A: Reader(1, most + 1, {})}
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == most
    timers = [e.name for e in play.step.effects if isinstance(e, SetTimer)]
    assert timers == ["trim|op"]
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == most + 1
    assert len([e for e in play.step.effects if isinstance(e, SetTimer)]) == 1


# -- through a whole move ------------------------------------------------------------------------


def test_rows_reach_a_moved_key_from_both_sites_once_and_in_order_of_each() -> None:
    stage = Stage().start()
    for n in range(3):
        stage.produce("a", (HERE, n, n))
        stage.produce("b", (HERE, n, n), producer="q")
    stage.withholds = lambda sender, to, message: (sender, to) == ("b", "a")
    stage.produce("b", (HERE, 3, 3), producer="q")
    stage.withholds = lambda sender, to, message: False
    stage.move(KeySet(slots=frozenset({0})), A, B)
    stage.pass_ms(3_000)
    stage.deliver()
    stage.produce("b", (HERE, 4, 4), producer="q")
    stage.produce("a", (HERE, 5, 5))
    stage.pass_ms(3_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    assert [o.row[2][2] for o in stage.outputs()] == list(range(1, 10))
    for router in ("a", "b"):
        assert stage.machines[router].inbound == {}
        assert all(not lane.frames for lane in stage.machines[router].lanes.values())
