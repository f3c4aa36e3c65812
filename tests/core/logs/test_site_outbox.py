"""The outbox of frames for another site: numbered, retained, sent when durable, repeated, within a window."""

from __future__ import annotations

from tiercel.core.logs.site_outbox import SiteOutbox
from tiercel.core.machine.effects import Send
from tiercel.core.machine.step import Step

ROW = (b"k", 1, "x", "a", 1, 1)


class Play:
    """An outbox to `b`, and the frames it sends."""

    def __init__(self, window: int = 8, connected: bool = True) -> None:
        self.outbox = SiteOutbox("b", "op", "a@1", window)
        self.outbox.connected = connected
        self.step = Step(0.0)

    def add(self, count: int = 1, durable: bool = True, via: tuple[tuple[str, str, int], ...] = ()) -> None:
        for _ in range(count):
            n = self.outbox.add(self.step, 0, [ROW], via=via)
            if durable:
                self.outbox.durable_n = n
        self.outbox.pump(self.step)

    def sent(self) -> list[int]:
        numbers = [e.message.n for e in self.step.effects if isinstance(e, Send)]
        self.step.effects.clear()
        return numbers


def test_a_frame_leaves_only_when_it_is_durable() -> None:
    play = Play()
    play.add(2, durable=False)
    assert play.sent() == []
    assert set(play.step.puts) == {
        ("outbox", "b", "op", 1),
        ("outbox", "b", "op", 2),
        ("outbox_next", "b", "op"),
    }
    play.outbox.durable_n = 1
    play.outbox.pump(play.step)
    assert play.sent() == [1]


def test_frames_leave_in_order_and_once() -> None:
    play = Play()
    play.add(3)
    assert play.sent() == [1, 2, 3]
    play.outbox.pump(play.step)
    assert play.sent() == []


def test_unacknowledged_frames_never_exceed_the_window() -> None:
    play = Play(window=2)
    play.add(4)
    assert play.sent() == [1, 2]
    play.outbox.taken([1])
    play.outbox.pump(play.step)
    assert play.sent() == [3]
    assert play.outbox.under_way == 2


def test_a_frame_that_is_asked_for_again_and_again_keeps_its_place_behind_the_others() -> None:
    play = Play(window=1)
    play.add(3)
    order = play.sent()
    for _ in range(4):
        play.outbox.again([1])
        play.outbox.taken(order[-1:])
        play.outbox.pump(play.step)
        order += play.sent()
        play.add()
    assert order == [1, 2, 3, 1, 4]


def test_a_received_frame_is_retained_until_it_is_settled() -> None:
    play = Play()
    play.add(2)
    play.outbox.taken([1, 2])
    assert list(play.outbox.frames) == [1, 2]
    play.outbox.settled(play.step, [1])
    assert list(play.outbox.frames) == [2]
    assert ("outbox", "b", "op", 1) in play.step.deletes


def test_a_new_connection_resends_unsettled_frames_in_order() -> None:
    play = Play()
    play.add(4)
    assert play.sent() == [1, 2, 3, 4]
    play.outbox.taken([1, 2, 3])
    play.outbox.settled(play.step, [2])
    play.outbox.broken()
    play.add()
    assert play.sent() == [], "nothing is handed to a link that is down"
    play.outbox.reconnected()
    play.outbox.pump(play.step)
    assert play.sent() == [1, 3, 4, 5]


def test_settling_a_frame_twice_changes_nothing() -> None:
    play = Play()
    play.add(via=(("c", "op", 9),))
    assert play.outbox.settled(play.step, [1]) == [("c", "op", 9)]
    assert play.outbox.settled(play.step, [1, 77]) == []


def test_a_frame_settled_before_its_resend_is_not_sent_again() -> None:
    play = Play(window=1)
    play.add(2)
    play.outbox.reconnected()
    play.outbox.settled(play.step, [1])
    play.sent()
    play.outbox.pump(play.step)
    assert play.sent() == [2]


def test_a_restarted_site_resends_stored_frames_and_continues_their_numbers() -> None:
    play = Play()
    play.add(3)
    stored = dict(play.step.puts)
    again = Play(connected=False)
    for n in (2, 3):
        again.outbox.recover(n, *stored["outbox", "b", "op", n])
    again.outbox.next_n = stored["outbox_next", "b", "op"]
    again.outbox.reconnected()
    again.outbox.pump(again.step)
    assert again.sent() == [2, 3]
    again.add()
    assert again.sent() == [4]
