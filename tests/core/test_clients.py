"""What clients keep, repeat and refuse, event by event."""

from __future__ import annotations

import pytest

from playing import Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.clients import Producer, Subscriber
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Connected, Disconnected, Received
from tiercel.core.records import StreamEntry

HOME = "cloud"


def entries(*offsets: int) -> list[StreamEntry]:
    return [StreamEntry(offset, []) for offset in offsets]


def publish(subscriber: Subscriber, *offsets: int) -> list[object]:
    event = Received(HOME, m.Publish("out", entries(*offsets)))
    return [effect.message for effect in subscriber.on_event(event, 0.0) if isinstance(effect, Send)]


def test_a_producer_that_meets_numbers_it_never_sent_has_a_rival_and_sends_no_more() -> None:
    producer = Producer("p", HOME)
    producer.on_event(Connected(HOME), 0.0)
    producer.on_event(Received(HOME, m.ProducerMark("p", 7, "")), 0.0)  # an earlier life's
    assert (producer.acknowledged, producer.rival) == (7, False)
    assert len(producer.submit("in", [])) == 1
    producer.on_event(Disconnected(HOME), 0.0)
    producer.submit("in", [])  # 9, never sent
    producer.on_event(Connected(HOME), 0.0)
    assert producer.on_event(Received(HOME, m.ProducerMark("p", 9, "")), 0.0) == []
    assert producer.rival
    assert producer.submit("in", []) == []


def test_what_an_earlier_program_of_its_name_is_told_late_is_not_where_a_producer_begins() -> None:
    """Found by seed 11058: one frame of it was durable, another was not yet; both numbers were taken anew.

    With one frame in between, the router would have taken the new row for one that it has: it was lost.
    """
    producer = Producer("p", HOME, "newer")
    producer.on_event(Connected(HOME), 0.0)
    assert producer.on_event(Received(HOME, m.ProducerMark("p", 3)), 0.0) == []
    assert producer.on_event(Received(HOME, m.ProducerMark("p", 3, "older")), 0.0) == []
    assert not producer.greeted
    producer.on_event(Received(HOME, m.ProducerMark("p", 4, "newer")), 0.0)
    (sent,) = producer.submit("in", [(b"k", 0, 1)])
    assert isinstance(sent, Send)
    assert sent.message.seq == 5
    assert not producer.rival


class Programs:
    """Programs that use one producer name, one at a time, with a router that really works."""

    def __init__(self) -> None:
        self.stage = Stage(topology(["a"])).start()

    def connect(self, program: Producer) -> None:
        self.say(program, program.on_event(Connected("a"), 0.0))

    def submit(self, program: Producer, row: int, *, lost: bool = False) -> None:
        effects = program.submit("in", [(key_in(0), row, row)])
        if not lost:
            self.say(program, effects)

    def say(self, program: Producer, effects: list[Effect]) -> None:
        """What it sends, and all that follows from the answers."""
        said = [effect.message for effect in effects if isinstance(effect, Send)]
        for message in said:
            before = len(self.stage.sent)
            self.stage.tell("a", message, program.name)
            answers = [answer for _, to, answer in self.stage.sent[before:] if to == program.name]
            for answer in answers:
                self.say(program, program.on_event(Received("a", answer), 0.0))

    def rows(self) -> list[object]:
        entries = [entry for key, entry in self.stage.disks["a"].items() if key[:2] == ("inbox", "op")]
        return [row[2] for entry in entries for rows in entry.parts.values() for row in rows]


@pytest.mark.parametrize("router_restarts", [False, True])
def test_a_producer_whose_frames_are_under_way_while_another_program_takes_its_name_is_told(
    router_restarts: bool,
) -> None:
    """Their numbers are the same: the router would take the older's rows for those it has."""
    programs, older, newer = Programs(), Producer("p", "a", "older"), Producer("p", "a", "newer")
    programs.connect(older)
    programs.submit(older, 1, lost=True)
    older.on_event(Disconnected("a"), 0.0)
    programs.connect(newer)
    programs.submit(newer, 2)
    assert (newer.acknowledged, newer.rival) == (1, False)
    newer.on_event(Disconnected("a"), 0.0)
    if router_restarts:
        programs.stage.restart("a")
    programs.connect(older)
    assert (older.acknowledged, older.rival) == (0, True)
    programs.submit(older, 3)
    programs.connect(newer)
    programs.submit(newer, 4)
    assert (newer.acknowledged, newer.rival) == (2, False)
    assert programs.rows() == [2, 4]


def test_a_producer_that_was_never_answered_and_one_that_is_started_again_take_the_name() -> None:
    programs, first, second = Programs(), Producer("p", "a", "first"), Producer("p", "a", "second")
    programs.connect(first)
    programs.submit(first, 1)
    second.on_event(Connected("a"), 0.0)  # its first word is lost
    second.on_event(Disconnected("a"), 0.0)
    programs.submit(first, 2)
    programs.connect(second)
    assert (second.acknowledged, second.rival) == (2, False)
    programs.submit(second, 3)
    assert programs.rows() == [1, 2, 3]


def test_a_subscriber_refuses_a_gap_and_drops_what_it_has() -> None:
    subscriber = Subscriber("out", HOME)
    subscriber.on_event(Connected(HOME), 0.0)
    assert publish(subscriber, 1, 2) == [m.Consumed("out", 2)]
    assert publish(subscriber, 2, 3) == [m.Consumed("out", 3)]
    assert [entry.offset for entry in subscriber.entries] == [1, 2, 3]
    assert publish(subscriber, 6, 7) == []
    assert subscriber.refused == "entries 4 to 5 of the stream 'out' were deleted before they were read"
    assert publish(subscriber, 8) == []
    assert [entry.offset for entry in subscriber.entries] == [1, 2, 3]


def test_a_subscriber_asks_for_no_more_until_what_came_is_taken() -> None:
    subscriber = Subscriber("out", HOME, entries_max=2)
    subscriber.on_event(Connected(HOME), 0.0)
    assert publish(subscriber, 1) == [m.Consumed("out", 1)]
    assert publish(subscriber, 2) == []
    taken, effects = subscriber.take()
    assert [entry.offset for entry in taken] == [1, 2]
    assert effects == [Send(HOME, m.Consumed("out", 2))]
    assert subscriber.take() == ([], [])


def test_a_subscriber_from_now_on_keeps_its_place_when_it_reconnects_before_the_first_entry() -> None:
    subscriber = Subscriber("out", HOME, None)
    assert subscriber.on_event(Connected(HOME), 0.0) == [Send(HOME, m.RangeQuery("out"))]
    reply = Received(HOME, m.RangeReply("out", 1, 5))
    assert subscriber.on_event(reply, 0.0) == [Send(HOME, m.Subscribe("out", 5))]
    subscriber.on_event(Disconnected(HOME), 0.0)
    subscriber.on_event(Connected(HOME), 0.0)
    reply = Received(HOME, m.RangeReply("out", 1, 9))
    assert subscriber.on_event(reply, 0.0) == [Send(HOME, m.Subscribe("out", 5))]
