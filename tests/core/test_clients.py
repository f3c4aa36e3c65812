"""Producers and subscribers: numbering, repeats, rivals of the same name, gaps, credit."""

from __future__ import annotations

import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.clients import Producer, Subscriber
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Disconnected, Received
from tiercel.core.model.log import StreamEntry

HOME = "cloud"


def entries(*offsets: int) -> list[StreamEntry]:
    return [StreamEntry(offset, []) for offset in offsets]


def publish(subscriber: Subscriber, *offsets: int) -> list[object]:
    event = Received(HOME, m.Publish("out", entries(*offsets)))
    return [effect.message for effect in subscriber.on_event(event, 0.0) if isinstance(effect, Send)]


def test_a_producer_stops_when_frames_it_never_sent_are_acknowledged() -> None:
    producer = Producer("p", HOME)
    producer.on_event(Connected(HOME), 0.0)
    producer.on_event(Received(HOME, m.ProducerAck("p", 7, "")), 0.0)  # sent by an earlier program
    assert (producer.acknowledged, producer.rival) == (7, False)
    assert len(producer.submit("in", [])) == 1
    producer.on_event(Disconnected(HOME), 0.0)
    producer.submit("in", [])  # 9, never sent
    producer.on_event(Connected(HOME), 0.0)
    assert producer.on_event(Received(HOME, m.ProducerAck("p", 9, "")), 0.0) == []
    assert producer.rival
    assert producer.submit("in", []) == []


def test_a_producer_ignores_acknowledgements_for_an_earlier_program_of_its_name() -> None:
    """Found by seed 11058: the newer program used numbers again that the older one had used.

    The router then takes the new row for a duplicate, and the row is lost.
    """
    producer = Producer("p", HOME, "newer")
    producer.on_event(Connected(HOME), 0.0)
    assert producer.on_event(Received(HOME, m.ProducerAck("p", 3)), 0.0) == []
    assert producer.on_event(Received(HOME, m.ProducerAck("p", 3, "older")), 0.0) == []
    assert not producer.greeted
    producer.on_event(Received(HOME, m.ProducerAck("p", 4, "newer")), 0.0)
    (sent,) = producer.submit("in", [(b"k", 0, 1)])
    assert isinstance(sent, Send)
    assert sent.message.seq == 5
    assert not producer.rival


class Programs:
    """Programs that use one producer name, one at a time, with a real router."""

    def __init__(self) -> None:
        self.driver = SmallDeployment(topology(["a"])).start()

    def connect(self, program: Producer) -> None:
        self.deliver(program, program.on_event(Connected("a"), 0.0))

    def submit(self, program: Producer, row: int, *, lost: bool = False) -> None:
        effects = program.submit("in", [(key_in(0), row, row)])
        if not lost:
            self.deliver(program, effects)

    def deliver(self, program: Producer, effects: list[Effect]) -> None:
        """Deliver the messages of a program, and its messages in response to the answers."""
        messages = [effect.message for effect in effects if isinstance(effect, Send)]
        for message in messages:
            before = len(self.driver.sent)
            self.driver.send("a", message, program.name)
            answers = [answer for _, to, answer in self.driver.sent[before:] if to == program.name]
            for answer in answers:
                self.deliver(program, program.on_event(Received("a", answer), 0.0))

    def rows(self) -> list[object]:
        entries = [entry for key, entry in self.driver.disks["a"].items() if key[:2] == ("inbox", "op")]
        return [row[2] for entry in entries for row in entry.all_rows()]


@pytest.mark.parametrize("router_restarts", [False, True])
def test_a_producer_stops_after_another_program_took_its_name(
    router_restarts: bool,
) -> None:
    """Both programs use the same numbers: the router would take rows of the older one for duplicates."""
    programs, older, newer = Programs(), Producer("p", "a", "older"), Producer("p", "a", "newer")
    programs.connect(older)
    programs.submit(older, 1, lost=True)
    older.on_event(Disconnected("a"), 0.0)
    programs.connect(newer)
    programs.submit(newer, 2)
    assert (newer.acknowledged, newer.rival) == (1, False)
    newer.on_event(Disconnected("a"), 0.0)
    if router_restarts:
        programs.driver.restart("a")
    programs.connect(older)
    assert (older.acknowledged, older.rival) == (0, True)
    programs.submit(older, 3)
    programs.connect(newer)
    programs.submit(newer, 4)
    assert (newer.acknowledged, newer.rival) == (2, False)
    assert programs.rows() == [2, 4]


def test_a_restarted_producer_takes_its_name_over_even_if_its_first_greeting_was_lost() -> None:
    programs, first, second = Programs(), Producer("p", "a", "first"), Producer("p", "a", "second")
    programs.connect(first)
    programs.submit(first, 1)
    second.on_event(Connected("a"), 0.0)  # its greeting is lost
    second.on_event(Disconnected("a"), 0.0)
    programs.submit(first, 2)
    programs.connect(second)
    assert (second.acknowledged, second.rival) == (2, False)
    programs.submit(second, 3)
    assert programs.rows() == [1, 2, 3]


def test_a_subscriber_refuses_a_gap_and_drops_duplicates() -> None:
    subscriber = Subscriber("out", HOME)
    subscriber.on_event(Connected(HOME), 0.0)
    assert publish(subscriber, 1, 2) == [m.Consumed("out", 2)]
    assert publish(subscriber, 2, 3) == [m.Consumed("out", 3)]
    assert [entry.offset for entry in subscriber.entries] == [1, 2, 3]
    assert publish(subscriber, 6, 7) == []
    assert subscriber.refused == "entries 4 to 5 of the stream 'out' were deleted before they were read"
    assert publish(subscriber, 8) == []
    assert [entry.offset for entry in subscriber.entries] == [1, 2, 3]


def test_a_subscriber_with_a_full_buffer_asks_for_no_more() -> None:
    subscriber = Subscriber("out", HOME, entries_max=2)
    subscriber.on_event(Connected(HOME), 0.0)
    assert publish(subscriber, 1) == [m.Consumed("out", 1)]
    assert publish(subscriber, 2) == []
    taken, effects = subscriber.take()
    assert [entry.offset for entry in taken] == [1, 2]
    assert effects == [Send(HOME, m.Consumed("out", 2))]
    assert subscriber.take() == ([], [])


def test_a_subscriber_to_new_entries_keeps_its_offset_when_it_reconnects() -> None:
    subscriber = Subscriber("out", HOME, None)
    assert subscriber.on_event(Connected(HOME), 0.0) == [Send(HOME, m.RangeQuery("out"))]
    reply = Received(HOME, m.RangeReply("out", 1, 5))
    assert subscriber.on_event(reply, 0.0) == [Send(HOME, m.Subscribe("out", 5))]
    subscriber.on_event(Disconnected(HOME), 0.0)
    subscriber.on_event(Connected(HOME), 0.0)
    reply = Received(HOME, m.RangeReply("out", 1, 9))
    assert subscriber.on_event(reply, 0.0) == [Send(HOME, m.Subscribe("out", 5))]
