"""What clients keep, repeat and refuse, event by event."""

from __future__ import annotations

from tiercel.core import messages as m
from tiercel.core.clients import Producer, Subscriber
from tiercel.core.effects import Send
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
    producer.on_event(Received(HOME, m.ProducerMark("p", 7)), 0.0)  # an earlier life's
    assert (producer.acknowledged, producer.rival) == (7, False)
    assert len(producer.submit("in", [])) == 1
    producer.on_event(Disconnected(HOME), 0.0)
    producer.submit("in", [])  # 9, never sent
    producer.on_event(Connected(HOME), 0.0)
    assert producer.on_event(Received(HOME, m.ProducerMark("p", 9)), 0.0) == []
    assert producer.rival
    assert producer.submit("in", []) == []


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
