"""One reader of a log: credit, falling behind, catching up, and what it is never sent twice."""

from __future__ import annotations

from playing import SLOTS, Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.effects import Send
from tiercel.core.feed import Feed, Phase, Tail
from tiercel.core.records import OWN, SHADOW, Entry, Row, Tick
from tiercel.core.step import Step

ME = "op@a#0"
ROWS: list[Row] = [(b"k", 1, "x"), (b"k", 2, "y")]


def entry(offset: int, part: str = ME, count: int = 1) -> Entry:
    return Entry(offset, 0, {part: ROWS[:1] * count})


def live(rows_max: int = 3, applied: int = 0) -> Feed:
    """A reader of an empty log, at its end."""
    feed = Feed(ME, rows_max, 16)
    feed.attach(1, 1)
    feed.resume(applied, {}, 0)
    feed.replay([], applied)
    assert feed.phase is Phase.LIVE
    return feed


def offer(feed: Feed, *entries: Entry) -> list[int]:
    """Offer these while it is live; returns what it is sent."""
    for e in entries:
        if feed.phase is Phase.LIVE:
            feed.offer(e, e.parts, sum(map(len, e.parts.values())))
    return flushed(feed)


def flushed(feed: Feed) -> list[int]:
    step = Step(0.0)
    feed.flush(step)
    return [e.offset for s in step.effects if isinstance(s, Send) for e in s.message.entries]


def test_a_reader_goes_through_all_phases_before_it_is_live() -> None:
    feed = Feed(ME, 3, 16)
    assert feed.phase is Phase.DETACHED
    assert not feed.wants_read()
    feed.attach(1, 1)
    assert feed.phase is Phase.FENCED
    assert not feed.wants_read(), "it has not said where it is"
    feed.resume(0, {}, 0)
    assert feed.phase is Phase.CATCHING_UP
    assert feed.wants_read()
    feed.replay([entry(1), entry(2)], 2)
    assert feed.phase is Phase.LIVE
    assert flushed(feed) == [1, 2]


def test_a_live_reader_gets_entries_as_they_are_appended() -> None:
    assert offer(live(), entry(1), entry(2)) == [1, 2]


def test_one_without_credit_falls_behind_and_reads_the_log_once_it_has_some() -> None:
    feed = live(rows_max=2)
    assert offer(feed, entry(1), entry(2), entry(3), entry(4)) == [1, 2]
    assert feed.phase is Phase.CATCHING_UP
    assert feed.cursor == 2
    assert not feed.wants_read(), "no credit"
    feed.processed(1)
    assert feed.wants_read()
    feed.replay([entry(3), entry(4)], 4)
    assert flushed(feed) == [3], "one row came back, one may go"
    assert feed.phase is Phase.CATCHING_UP
    feed.processed(3)
    feed.replay([entry(4)], 4)
    assert flushed(feed) == [4]
    assert feed.phase is Phase.LIVE
    feed.validate()


def test_an_entry_larger_than_all_credit_goes_out_whole_when_there_is_any() -> None:
    feed = live(rows_max=1)
    assert offer(feed, entry(1, count=5)) == [1]
    feed.validate()
    assert offer(feed, entry(2)) == []


def test_what_it_has_applied_is_not_sent_again() -> None:
    feed = Feed(ME, 9, 16)
    feed.attach(1, 1)
    feed.resume(2, {}, 0)
    feed.replay([entry(1), entry(2), entry(3)], 3)
    assert flushed(feed) == [3]


def test_an_arriving_move_behind_it_gets_its_part_again_and_the_own_part_stays_out() -> None:
    feed = Feed(ME, 9, 16)
    feed.attach(1, 1)
    feed.resume(5, {"m1": (OWN, 2)}, 0)
    assert feed.cursor == 2
    mixed = Entry(3, 0, {ME: ROWS, f"m1|{ME}": ROWS, "m1|other": ROWS})
    assert feed.share_of(mixed) == {f"m1|{ME}": ROWS}
    assert feed.share_of(Entry(2, 0, {f"m1|{ME}": ROWS})) == {}
    assert feed.share_of(Entry(6, 0, {ME: ROWS})) == {ME: ROWS}


def test_a_move_that_still_reads_its_shadow_gets_every_part_of_its_own_log() -> None:
    feed = Feed(ME, 9, 16)
    feed.attach(1, 1)
    feed.resume(5, {"m1": (SHADOW, 2)}, 0)
    assert feed.share_of(Entry(6, 0, {f"m1|{ME}": ROWS})) == {f"m1|{ME}": ROWS}


def test_control_records_are_replayed_and_other_readers_rows_are_not() -> None:
    feed = Feed(ME, 9, 16)
    feed.attach(1, 1)
    feed.resume(0, {}, 0)
    feed.replay([entry(1, "op@a#1"), Entry(2, 0, {}, Tick())], 2)
    assert flushed(feed) == [2]


def test_what_was_trimmed_did_not_concern_it() -> None:
    feed = Feed(ME, 9, 16)
    feed.attach(1, 1)
    feed.resume(0, {}, trimmed=7)
    assert feed.cursor == 7


def test_nothing_above_a_limit_is_sent_while_the_operator_is_halted() -> None:
    feed = live()
    feed.limit = 1
    assert offer(feed, entry(1), entry(2)) == [1]
    assert not feed.wants_read()
    feed.limit = None
    assert feed.wants_read()
    feed.replay([entry(2)], 2)
    assert flushed(feed) == [2]


def test_a_new_connection_forgets_what_was_under_way() -> None:
    feed = live(rows_max=1)
    offer(feed, entry(1))
    feed.detach()
    assert feed.phase is Phase.DETACHED
    feed.replay([entry(2)], 2)
    assert flushed(feed) == [], "an answer to a reader that has gone"
    feed.attach(1, 2)
    feed.resume(0, {}, 0)
    feed.replay([entry(1)], 1)
    assert flushed(feed) == [1]


def test_a_new_life_counts_its_flushes_anew_and_a_new_connection_does_not() -> None:
    feed = live()
    feed.flush_no = 7
    feed.attach(1, 2)
    assert feed.flush_no == 7
    feed.attach(2, 1)
    assert feed.flush_no == 0


def test_it_is_idle_when_all_it_was_sent_came_back() -> None:
    feed = live()
    assert feed.idle
    offer(feed, entry(1))
    assert not feed.idle
    feed.processed(1)
    assert feed.idle


# -- the tail ----------------------------------------------------------------------------------


def offsets_behind(tail: Tail, cursor: int) -> list[int] | None:
    found = tail.behind(cursor)
    return None if found is None else [e.offset for e in found]


def test_the_tail_keeps_nothing_while_everyone_keeps_up() -> None:
    tail, feed = Tail(10), live()
    tail.keep(entry(1), 1, [feed])
    assert offsets_behind(tail, 0) is None


def test_a_reader_that_fell_behind_finds_in_the_tail_what_it_missed() -> None:
    tail, feed = Tail(10), live(rows_max=2)
    for offset in range(1, 6):
        if feed.phase is Phase.LIVE:
            feed.offer(entry(offset), entry(offset).parts, 1)
        tail.keep(entry(offset), 1, [feed])
    assert flushed(feed) == [1, 2]
    assert feed.cursor == 2
    assert offsets_behind(tail, 2) == [3, 4, 5]
    assert not feed.wants_read(), "no credit"
    feed.processed(2)
    kept = tail.behind(feed.cursor)
    assert kept is not None
    feed.replay(kept, 5)
    assert flushed(feed) == [3, 4]
    feed.processed(4)
    feed.replay([entry(5)], 5)
    assert feed.phase is Phase.LIVE
    tail.keep(entry(6), 1, [feed])
    assert offsets_behind(tail, 5) is None, "nobody needs it any more"


def test_the_tail_lets_the_oldest_go_at_its_limit_and_then_the_log_is_read() -> None:
    tail, feed = Tail(3), Feed(ME, 3, 16)
    feed.attach(1, 1)
    feed.resume(1, {}, 0)
    for offset in range(2, 8):
        tail.keep(entry(offset), 1, [feed])
        tail.validate()
    assert offsets_behind(tail, 1) is None
    assert offsets_behind(tail, 4) == [5, 6, 7]
    assert offsets_behind(tail, 7) is None
    tail.keep(entry(8, count=2), 9, [feed])
    tail.validate()
    assert offsets_behind(tail, 7) is None, "an entry beyond the limit is not kept"
    tail.keep(entry(9), 1, [feed])
    assert offsets_behind(tail, 8) == [9]


def test_the_tail_lets_go_what_its_readers_have() -> None:
    tail, feed = Tail(100), Feed(ME, 3, 16)
    feed.attach(1, 1)
    feed.resume(0, {}, 0)
    for offset in (1, 2, 3):
        tail.keep(entry(offset), 1, [feed])
    feed.replay([entry(1), entry(2)], 3)
    tail.keep(entry(4), 1, [feed])
    assert offsets_behind(tail, 1) is None
    assert offsets_behind(tail, 2) == [3, 4]


# -- lag ----------------------------------------------------------------------------------------


def test_an_instance_knows_how_many_rows_wait_for_it_and_a_detached_one_is_waited_for() -> None:
    stage = Stage(topology(["a"], instances=(ME, "op@a#1"))).start()
    mine, other = slot_owned_by(stage, ME), slot_owned_by(stage, "op@a#1")
    stage.withholds = lambda sender, to, message: sender == ME and isinstance(message, m.Outputs)
    for count in (1, 2, 3):
        stage.produce("a", *[(key_in(mine), n, n) for n in range(count)], (key_in(other), 0, 0))
    feeds = stage.machines["a"].inboxes["op"].feeds
    assert (feeds[ME].lag_rows, feeds["op@a#1"].lag_rows) == (6, 0)
    lags = []
    for _, _, outputs in stage.withheld:
        stage.tell("a", outputs, ME)
        lags.append(stage.machines[ME].gauges()["lag"])
    assert lags == [5, 3, 0]
    stage.withholds = lambda sender, to, message: False
    stage.stop(ME)
    stage.produce("a", (key_in(mine), 0, 0))
    assert feeds[ME].lag_rows == 1
    stage.start(ME)
    assert feeds[ME].lag_rows == stage.machines[ME].gauges()["lag"] == 0


def slot_owned_by(stage: Stage, instance: str) -> int:
    slots = stage.machines["a"].inboxes["op"].table.slots
    return next(slot for slot in range(SLOTS) if slots[slot].instance == instance)


def test_what_a_reader_has_read_from_an_earlier_router_and_not_stored_is_not_trimmed() -> None:
    """Found by seed 22839: this router had sent it nothing yet, and what it had not stored was deleted."""
    stage = Stage(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    mine, other = key_in(0), key_in(SLOTS - 1)
    stage.produce("a", (mine, 0, 1))
    stage.restart("a")
    stage.produce("a", (other, 0, 2))
    inbox = stage.machines["a"].inboxes["op"]
    readers = {inbox.table.route(key).instance: inbox.readers for key in (mine, other)}
    assert len(readers) == 2, "each key has a reader of its own"
    idle = inbox.table.route(mine).instance
    assert inbox.feeds[idle].idle
    assert inbox.trim_point() <= inbox.readers[idle].applied < inbox.feeds[idle].last_sent
