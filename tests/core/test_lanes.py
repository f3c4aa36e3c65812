"""Frames between sites: kept, numbered, sent when durable, sent again, within a window."""

from __future__ import annotations

from tiercel.core.effects import Send
from tiercel.core.lanes import Lane
from tiercel.core.step import Step

ROW = (b"k", 1, "x", "a", 1, 1)


class Play:
    """A lane to `b`, and what it sends."""

    def __init__(self, window: int = 8, connected: bool = True) -> None:
        self.lane = Lane("b", "op", window)
        self.lane.connected = connected
        self.step = Step(0.0)

    def add(self, count: int = 1, durable: bool = True, via: tuple[tuple[str, str, int], ...] = ()) -> None:
        for _ in range(count):
            n = self.lane.add(self.step, 0, [ROW], via=via)
            if durable:
                self.lane.durable_n = n
        self.lane.pump(self.step)

    def sent(self) -> list[int]:
        numbers = [e.message.n for e in self.step.effects if isinstance(e, Send)]
        self.step.effects.clear()
        return numbers


def test_a_frame_leaves_only_when_it_is_durable() -> None:
    play = Play()
    play.add(2, durable=False)
    assert play.sent() == []
    assert set(play.step.puts) == {
        ("lane", "b", "op", 1),
        ("lane", "b", "op", 2),
        ("lane_next", "b", "op"),
    }
    play.lane.durable_n = 1
    play.lane.pump(play.step)
    assert play.sent() == [1]


def test_frames_leave_in_order_and_once() -> None:
    play = Play()
    play.add(3)
    assert play.sent() == [1, 2, 3]
    play.lane.pump(play.step)
    assert play.sent() == []


def test_no_more_is_under_way_than_the_window_allows() -> None:
    play = Play(window=2)
    play.add(4)
    assert play.sent() == [1, 2]
    play.lane.taken([1])
    play.lane.pump(play.step)
    assert play.sent() == [3]
    assert play.lane.under_way == 2


def test_a_frame_that_was_taken_is_kept_until_it_is_settled() -> None:
    play = Play()
    play.add(2)
    play.lane.taken([1, 2])
    assert list(play.lane.frames) == [1, 2]
    play.lane.settled(play.step, [1])
    assert list(play.lane.frames) == [2]
    assert ("lane", "b", "op", 1) in play.step.deletes


def test_after_a_new_connection_all_that_is_not_settled_goes_again_in_order() -> None:
    play = Play()
    play.add(4)
    assert play.sent() == [1, 2, 3, 4]
    play.lane.taken([1, 2, 3])
    play.lane.settled(play.step, [2])
    play.lane.broken()
    play.add()
    assert play.sent() == [], "nothing is handed to a link that is down"
    play.lane.reconnected()
    play.lane.pump(play.step)
    assert play.sent() == [1, 3, 4, 5]


def test_a_frame_settled_twice_changes_nothing_the_second_time() -> None:
    play = Play()
    play.add(via=(("c", "op", 9),))
    assert play.lane.settled(play.step, [1]) == [("c", "op", 9)]
    assert play.lane.settled(play.step, [1, 77]) == []


def test_a_frame_that_was_settled_while_it_was_to_be_sent_again_is_not_sent() -> None:
    play = Play(window=1)
    play.add(2)
    play.lane.reconnected()
    play.lane.settled(play.step, [1])
    play.sent()
    play.lane.pump(play.step)
    assert play.sent() == [2]


def test_a_restarted_site_goes_on_with_the_frames_and_numbers_it_stored() -> None:
    play = Play()
    play.add(3)
    stored = dict(play.step.puts)
    again = Play(connected=False)
    for n in (2, 3):
        again.lane.recover(n, *stored["lane", "b", "op", n])
    again.lane.next_n = stored["lane_next", "b", "op"]
    again.lane.reconnected()
    again.lane.pump(again.step)
    assert again.sent() == [2, 3]
    again.add()
    assert again.sent() == [4]
