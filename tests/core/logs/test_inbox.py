"""The inbox log of a site: rows that are appended, dropped, held or forwarded, and keys that return."""

from __future__ import annotations

from machines_in_memory import REQUESTER, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.site_outbox import FrameId, InboundFrame
from tiercel.core.machine.effects import SetTimer
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import LogReader
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import INITIAL, Entry, Row, Tick, Watermark
from tiercel.core.model.routing import Route, RouteUpdate, RoutingTable
from tiercel.core.settings import Settings

A, B, C = "op@a#0", "op@b#0", "op@c#0"
HERE, THERE = key_in(0), key_in(3)


class Play:
    """The inbox of site `a`, which owns slots 0 and 1; `b` owns the others."""

    def __init__(self) -> None:
        operator = topology().operators["op"]
        self.inbox = Inbox("op", "a", RoutingTable.initial(operator), Settings())
        self.step = Step(5.0)
        self.frames = 0

    def append_or_forward(self, *rows: Row) -> dict[str, list[Row]]:
        return self.inbox.append_or_forward(self.step, list(rows))

    def frame(self, *rows: Row) -> tuple[dict[str, list[Row]], RouteUpdate | None, InboundFrame]:
        """A frame of stamped rows; returns forwarded rows, the correction for its sender, and the frame."""
        self.frames += 1
        inbound = InboundFrame(FrameId("c", "op", self.frames))
        onward, correction = self.inbox.sequence(self.step, list(rows), (inbound,))
        return onward, correction, inbound

    def returns(self, marks: dict[bytes, dict[str, int]]) -> None:
        """Keys come back to this site, with the marks of their last sequencer."""
        keys = KeySet(keys=frozenset(marks))
        self.inbox.sequencer.install_marks(self.step, marks, keys, lambda key: True)

    def log(self) -> list[Entry]:
        return [self.step.puts["inbox", "op", o] for o in range(1, self.inbox.offset + 1)]

    def payloads(self) -> list[list[object]]:
        return [[row[2] for row in e.all_rows()] for e in self.log()]


def row(n: int, key: bytes = HERE, epoch: int = 1, origin: str = "c") -> Row:
    return (key, 0, n, origin, n, epoch)


# -- rows that enter here ----------------------------------------------------------------------


def test_rows_that_arrive_together_are_one_entry() -> None:
    play = Play()
    assert play.append_or_forward((HERE, 1, "x"), (key_in(1), 2, "y")) == {}
    assert play.log() == [Entry(1, 5, {A: [(HERE, 1, "x"), (key_in(1), 2, "y")]})]
    assert play.step.puts["head", "op"] == (1, 5, -1)


def test_a_row_of_another_site_is_numbered_per_key_and_not_appended() -> None:
    play = Play()
    assert play.append_or_forward((THERE, 1, "x"), (THERE, 2, "y")) == {
        "b": [(THERE, 1, "x", "a", 1, 1), (THERE, 2, "y", "a", 2, 1)]
    }
    assert play.append_or_forward((key_in(2), 3, "z")) == {"b": [(key_in(2), 3, "z", "a", 1, 1)]}
    assert play.log() == []
    assert play.step.puts["count", "op", THERE] == 2


def test_log_time_never_runs_backwards() -> None:
    play = Play()
    play.append_or_forward((HERE, 1, "x"))
    play.step.now_ms = 2.0
    play.inbox.tick(play.step)
    assert [e.time_ms for e in play.log()] == [5, 5]
    assert play.log()[1].control == Tick()


def test_the_head_of_the_log_holds_its_watermark() -> None:
    play = Play()
    play.inbox.append(play.step, {}, Watermark(40))
    assert play.step.puts["head", "op"] == (1, 5, 40)


# -- rows from elsewhere -----------------------------------------------------------------------


def test_a_duplicate_row_is_dropped_and_its_frame_is_settled() -> None:
    play = Play()
    play.frame(row(1))
    onward, correction, inbound = play.frame(row(1))
    assert (onward, correction, inbound.held) == ({}, None, 0)
    assert play.payloads() == [[1]]


def test_an_early_row_is_held_until_the_gap_is_closed() -> None:
    play = Play()
    _, _, third = play.frame(row(3))
    _, _, second = play.frame(row(2))
    assert play.payloads() == []
    assert (second.held, third.held) == (1, 1)
    play.frame(row(1))
    assert play.payloads() == [[1, 2, 3]]
    assert (second.held, third.held) == (0, 0)
    assert play.inbox.sequencer.held == {}
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


def test_a_row_of_a_moved_key_is_forwarded_and_its_sender_gets_the_whole_slot() -> None:
    play = Play()
    key = key_in(0, 1)
    play.inbox.update_table(play.step, RouteUpdate({0: Route(B, 4)}, {key: Route(C, 6)}))
    onward, correction, _ = play.frame(row(1))
    assert onward == {"b": [(HERE, 0, 1, "c", 1, 4)]}
    assert correction == RouteUpdate({0: Route(B, 4)}, {key: Route(C, 6)})


def test_a_row_with_a_newer_epoch_waits_for_the_table() -> None:
    play = Play()
    onward, correction, inbound = play.frame(row(1, key=THERE, epoch=2))
    assert (onward, correction, inbound.held) == ({}, None, 1)
    assert [held.row for held in play.inbox.sequencer.release_waiting()] == [row(1, key=THERE, epoch=2)]
    assert inbound.held == 0


def test_initial_state_comes_before_a_row_of_its_key_that_overtook_it() -> None:
    play = Play()
    play.frame((HERE, 7, "tuple", "c", 2, 1))
    play.frame((HERE, INITIAL, "initial", "c", 1, 1))
    assert play.payloads() == [["initial", "tuple"]]


# -- keys that leave and return ------------------------------------------------------------------


def test_a_moving_key_takes_its_sequence_marks_and_its_held_rows_are_forwarded() -> None:
    play = Play()
    play.frame(row(1), row(1, key=key_in(1)))
    _, _, early = play.frame(row(3))

    keys = KeySet(keys=frozenset({HERE}))

    def leaves(key: bytes) -> bool:
        return key == HERE

    assert play.inbox.sequencer.give_marks(play.step, keys, leaves) == {HERE: {"c": 1}}
    assert ("mark", "op", HERE) in play.step.deletes
    assert [held.row[4] for held in play.inbox.sequencer.drop_held(keys, leaves)] == [3]
    assert early.held == 0
    assert play.inbox.sequencer.marks == {key_in(1): {"c": 1}}


def test_a_returning_key_takes_new_rows_after_its_forwarded_ones() -> None:
    play = Play()
    assert play.append_or_forward((THERE, 0, "old")) == {"b": [(THERE, 0, "old", "a", 1, 1)]}
    play.inbox.update_table(play.step, RouteUpdate({}, {THERE: Route(A, 2)}))
    play.returns({THERE: {}})
    assert set(play.inbox.sequencer.awaiting_own_rows) == {THERE}
    assert play.append_or_forward((THERE, 0, "new")) == {"a": [(THERE, 0, "new", "a", 2, 2)]}, (
        "into the site's outbox to itself"
    )
    play.frame((THERE, 0, "new", "a", 2, 2))
    assert play.payloads() == []
    play.frame((THERE, 0, "old", "a", 1, 2))
    assert play.payloads() == [["old", "new"]]
    assert not play.inbox.sequencer.awaiting_own_rows
    assert play.append_or_forward((THERE, 0, "newest")) == {}
    assert play.payloads() == [["old", "new"], ["newest"]]


def test_a_returning_key_without_forwarded_rows_waits_for_none() -> None:
    play = Play()
    play.append_or_forward((THERE, 0, "old"))
    play.inbox.update_table(play.step, RouteUpdate({}, {THERE: Route(A, 2)}))
    play.returns({THERE: {"a": 1}})
    assert not play.inbox.sequencer.awaiting_own_rows


# -- trimming ----------------------------------------------------------------------------------


class Shadow:
    """A move that still reads behind offset 2."""

    def shadow_appended(self, step: Step, entry: Entry) -> None:
        pass

    def trim_floor(self) -> int:
        return 2


def test_an_entry_is_trimmed_once_it_is_durable_and_every_checkpoint_covers_it() -> None:
    play = Play()
    play.inbox.readers = {A: LogReader(1, 2, {}), "op@a#1": LogReader(1, 3, {"m1": 1})}
    for n in range(4):
        play.append_or_forward((HERE, n, n))
    assert play.inbox.trim_point() == 0, "nothing is durable"
    play.inbox.durable = 4
    assert play.inbox.trim_point() == 1, "an incoming move has read no further"
    play.inbox.readers["op@a#1"] = LogReader(1, 3, {})
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == 2
    assert [k for k in play.step.deletes if k[0] == "inbox"] == [("inbox", "op", 1), ("inbox", "op", 2)]
    play.inbox.shadow_readers["m2"] = Shadow()
    play.inbox.readers[A] = LogReader(1, 4, {})
    assert play.inbox.trim_point() == 2, "a shadow reader still reads from there"


def test_a_long_log_is_trimmed_in_several_steps() -> None:
    play = Play()
    most = play.inbox.settings.trim_entries_max
    for n in range(most + 1):
        play.append_or_forward((HERE, n, n))
    play.inbox.durable = most + 1
    play.inbox.readers = {A: LogReader(1, most + 1, {})}
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == most
    timers = [e.name for e in play.step.effects if isinstance(e, SetTimer)]
    assert timers == [Timer(TimerKind.TRIM, "op")]
    play.inbox.trim(play.step)
    assert play.inbox.trimmed == most + 1
    assert len([e for e in play.step.effects if isinstance(e, SetTimer)]) == 1


# -- through a whole move ------------------------------------------------------------------------


def test_rows_from_both_sites_reach_a_moved_key_once_and_in_order() -> None:
    driver = SmallDeployment().start()
    for n in range(3):
        driver.produce("a", (HERE, n, n))
        driver.produce("b", (HERE, n, n), producer="q")
    driver.withholds = lambda sender, to, message: (sender, to) == ("b", "a")
    driver.produce("b", (HERE, 3, 3), producer="q")
    driver.withholds = lambda sender, to, message: False
    driver.move(KeySet(slots=frozenset({0})), A, B)
    driver.advance_ms(3_000)
    driver.release_withheld()
    driver.produce("b", (HERE, 4, 4), producer="q")
    driver.produce("a", (HERE, 5, 5))
    driver.advance_ms(3_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    assert [o.row[2][2] for o in driver.outputs()] == list(range(1, 10))
    for router in ("a", "b"):
        assert driver.machines[router].state.inbound == {}
        assert all(not outbox.frames for outbox in driver.machines[router].outboxes.values())


def test_an_early_route_update_does_not_replace_the_previous_owner_before_the_flip() -> None:
    """Site `a` learns the new owner of the slot before the flip of its own key arrives."""
    driver = SmallDeployment(topology(("a", "b", "c", "d"), instances=(A,)))
    driver.start("a", "b", "c", "d", A, "op@b#0", "op@c#0", "op@d#0")
    key, beside = key_in(0), key_in(0, 1)
    slot = KeySet(slots=frozenset((0,)))
    only = KeySet(keys=frozenset((key,)))

    def done(site: str, keys: KeySet, source: str, to: str, name: str) -> None:
        driver.move(keys, source, to, "pause", name)
        driver.advance_ms(3_000)
        assert driver.messages(site, REQUESTER, m.MoveStatus)[-1].phase in ("done", "emitting"), name

    driver.produce("a", (key, 0, 0), (beside, 0, 0))
    done("a", only, A, "op@b#0", "m1")
    done("a", slot, A, "op@c#0", "m2")
    # from here on no frame of b reaches a
    driver.withholds = lambda sender, to, message: (
        sender == "b" and to == "a" and isinstance(message, m.SiteFrame)
    )
    driver.move(only, "op@b#0", A, "pause", "m3")
    driver.produce("c", (key, 0, 1), producer="q")  # b corrects c: the key is a's
    assert (driver.owner_of(key, at="c"), driver.route_of(key, at="c").epoch) == (A, 3)
    driver.move(slot, "op@c#0", "op@d#0", "pause", "m4")
    driver.advance_ms(1_000)
    driver.produce("a", (beside, 0, 1))  # c corrects a
    assert driver.owner_of(beside, at="a") == "op@d#0"
    driver.release_withheld()
    driver.advance_ms(10_000)
    assert (driver.owner_of(key, at="a"), driver.route_of(key, at="a").epoch) == (A, 3)
    driver.produce("a", (key, 0, 2))
    driver.advance_ms(10_000)
    assert [o.row[2][2] for o in driver.outputs() if o.key == key] == [1, 2, 3]
