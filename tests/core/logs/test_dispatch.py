"""The dispatch cursor of one reader: credit, falling behind, catching up, no entry twice; the tail cache."""

from __future__ import annotations

from tiercel.core.logs.dispatch import DispatchCursor, DispatchPhase, TailCache
from tiercel.core.machine.effects import Send
from tiercel.core.machine.step import Step
from tiercel.core.model.log import OWN, SHADOW, Entry, MovePart, Row, Tick

ME = "op@a#0"
ROWS: list[Row] = [(b"k", 1, "x"), (b"k", 2, "y")]


def entry(offset: int, part: str = ME, count: int = 1) -> Entry:
    return Entry(offset, 0, {part: ROWS[:1] * count})


def live(rows_max: int = 3, applied: int = 0) -> DispatchCursor:
    """A reader of an empty log, at its end."""
    reader = DispatchCursor(ME, rows_max, 16)
    reader.attach(1, 1)
    reader.resume(applied, {}, 0)
    reader.replay([], applied)
    assert reader.phase is DispatchPhase.LIVE
    return reader


def offer(reader: DispatchCursor, *entries: Entry) -> list[int]:
    """Offer entries while the reader is live; returns the offsets that it is sent."""
    for e in entries:
        if reader.phase is DispatchPhase.LIVE:
            reader.offer(e, e.parts, sum(map(len, e.parts.values())))
    return flushed(reader)


def flushed(reader: DispatchCursor) -> list[int]:
    step = Step(0.0)
    reader.flush(step)
    return [e.offset for s in step.effects if isinstance(s, Send) for e in s.message.entries]


def test_a_reader_goes_through_all_phases_before_it_is_live() -> None:
    reader = DispatchCursor(ME, 3, 16)
    assert reader.phase is DispatchPhase.DETACHED
    assert not reader.wants_read()
    reader.attach(1, 1)
    assert reader.phase is DispatchPhase.FENCED
    assert not reader.wants_read(), "it has not resumed yet"
    reader.resume(0, {}, 0)
    assert reader.phase is DispatchPhase.CATCHING_UP
    assert reader.wants_read()
    reader.replay([entry(1), entry(2)], 2)
    assert reader.phase is DispatchPhase.LIVE
    assert flushed(reader) == [1, 2]


def test_a_live_reader_gets_entries_as_they_are_appended() -> None:
    assert offer(live(), entry(1), entry(2)) == [1, 2]


def test_a_reader_without_credit_falls_behind_and_catches_up_from_the_log() -> None:
    reader = live(rows_max=2)
    assert offer(reader, entry(1), entry(2), entry(3), entry(4)) == [1, 2]
    assert reader.phase is DispatchPhase.CATCHING_UP
    assert reader.cursor == 2
    assert not reader.wants_read(), "no credit"
    reader.processed(1)
    assert reader.wants_read()
    reader.replay([entry(3), entry(4)], 4)
    assert flushed(reader) == [3], "one row of credit came back"
    assert reader.phase is DispatchPhase.CATCHING_UP
    reader.processed(3)
    reader.replay([entry(4)], 4)
    assert flushed(reader) == [4]
    assert reader.phase is DispatchPhase.LIVE
    reader.validate()


def test_an_entry_larger_than_the_credit_is_sent_whole_if_any_credit_is_left() -> None:
    reader = live(rows_max=1)
    assert offer(reader, entry(1, count=5)) == [1]
    reader.validate()
    assert offer(reader, entry(2)) == []


def test_applied_entries_are_not_sent_again() -> None:
    reader = DispatchCursor(ME, 9, 16)
    reader.attach(1, 1)
    reader.resume(2, {}, 0)
    reader.replay([entry(1), entry(2), entry(3)], 3)
    assert flushed(reader) == [3]


def test_an_incoming_move_behind_its_reader_gets_only_its_own_part_again() -> None:
    reader = DispatchCursor(ME, 9, 16)
    reader.attach(1, 1)
    reader.resume(5, {"m1": (OWN, 2)}, 0)
    assert reader.cursor == 2
    mine = MovePart("m1", ME, ROWS)
    mixed = Entry(3, 0, {ME: ROWS}, None, (mine, MovePart("m1", "other", ROWS)))
    assert reader.share_of(mixed) == ({}, (mine,))
    assert reader.share_of(Entry(2, 0, {}, None, (mine,))) == ({}, ())
    assert reader.share_of(Entry(6, 0, {ME: ROWS})) == ({ME: ROWS}, ())


def test_a_move_that_still_reads_its_shadow_gets_every_part_of_its_own_log() -> None:
    reader = DispatchCursor(ME, 9, 16)
    reader.attach(1, 1)
    reader.resume(5, {"m1": (SHADOW, 2)}, 0)
    mine = MovePart("m1", ME, ROWS)
    assert reader.share_of(Entry(6, 0, {}, None, (mine,))) == ({}, (mine,))


def test_a_replay_has_control_records_and_no_rows_of_other_readers() -> None:
    reader = DispatchCursor(ME, 9, 16)
    reader.attach(1, 1)
    reader.resume(0, {}, 0)
    reader.replay([entry(1, "op@a#1"), Entry(2, 0, {}, Tick())], 2)
    assert flushed(reader) == [2]


def test_a_reader_starts_behind_the_trimmed_entries() -> None:
    reader = DispatchCursor(ME, 9, 16)
    reader.attach(1, 1)
    reader.resume(0, {}, trimmed=7)
    assert reader.cursor == 7


def test_a_paused_reader_gets_no_entry_above_the_limit() -> None:
    reader = live()
    reader.limit = 1
    assert offer(reader, entry(1), entry(2)) == [1]
    assert not reader.wants_read()
    reader.limit = None
    assert reader.wants_read()
    reader.replay([entry(2)], 2)
    assert flushed(reader) == [2]


def test_a_new_connection_resends_unacknowledged_entries() -> None:
    reader = live(rows_max=1)
    offer(reader, entry(1))
    reader.detach()
    assert reader.phase is DispatchPhase.DETACHED
    reader.replay([entry(2)], 2)
    assert flushed(reader) == [], "a read for a reader that has detached"
    reader.attach(1, 2)
    reader.resume(0, {}, 0)
    reader.replay([entry(1)], 1)
    assert flushed(reader) == [1]


def test_a_new_incarnation_resets_the_flush_number_and_a_new_connection_does_not() -> None:
    reader = live()
    reader.flush_no = 7
    reader.attach(1, 2)
    assert reader.flush_no == 7
    reader.attach(2, 1)
    assert reader.flush_no == 0


def test_a_reader_is_idle_when_it_has_processed_all_that_was_sent() -> None:
    reader = live()
    assert reader.idle
    offer(reader, entry(1))
    assert not reader.idle
    reader.processed(1)
    assert reader.idle


# -- the tail ----------------------------------------------------------------------------------


def offsets_behind(tail: TailCache, cursor: int) -> list[int] | None:
    found = tail.behind(cursor)
    return None if found is None else [e.offset for e in found]


def test_the_tail_cache_is_empty_while_all_readers_are_live() -> None:
    tail, reader = TailCache(10), live()
    tail.keep(entry(1), 1, [reader])
    assert offsets_behind(tail, 0) is None


def test_a_reader_that_fell_behind_catches_up_from_the_tail_cache() -> None:
    tail, reader = TailCache(10), live(rows_max=2)
    for offset in range(1, 6):
        if reader.phase is DispatchPhase.LIVE:
            reader.offer(entry(offset), entry(offset).parts, 1)
        tail.keep(entry(offset), 1, [reader])
    assert flushed(reader) == [1, 2]
    assert reader.cursor == 2
    assert offsets_behind(tail, 2) == [3, 4, 5]
    assert not reader.wants_read(), "no credit"
    reader.processed(2)
    cached = tail.behind(reader.cursor)
    assert cached is not None
    reader.replay(cached, 5)
    assert flushed(reader) == [3, 4]
    reader.processed(4)
    reader.replay([entry(5)], 5)
    assert reader.phase is DispatchPhase.LIVE
    tail.keep(entry(6), 1, [reader])
    assert offsets_behind(tail, 5) is None, "no reader needs it any more"


def test_the_tail_cache_drops_its_oldest_entries_at_its_limit() -> None:
    tail, reader = TailCache(3), DispatchCursor(ME, 3, 16)
    reader.attach(1, 1)
    reader.resume(1, {}, 0)
    for offset in range(2, 8):
        tail.keep(entry(offset), 1, [reader])
        tail.validate()
    assert offsets_behind(tail, 1) is None
    assert offsets_behind(tail, 4) == [5, 6, 7]
    assert offsets_behind(tail, 7) is None
    tail.keep(entry(8, count=2), 9, [reader])
    tail.validate()
    assert offsets_behind(tail, 7) is None, "an entry above the limit is not cached"
    tail.keep(entry(9), 1, [reader])
    assert offsets_behind(tail, 8) == [9]


def test_the_tail_cache_drops_entries_that_all_readers_have() -> None:
    tail, reader = TailCache(100), DispatchCursor(ME, 3, 16)
    reader.attach(1, 1)
    reader.resume(0, {}, 0)
    for offset in (1, 2, 3):
        tail.keep(entry(offset), 1, [reader])
    reader.replay([entry(1), entry(2)], 3)
    tail.keep(entry(4), 1, [reader])
    assert offsets_behind(tail, 1) is None
    assert offsets_behind(tail, 2) == [3, 4]
