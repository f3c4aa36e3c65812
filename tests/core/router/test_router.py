"""Batches of events at a router: events that share a step have the same effects as one by one."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.machine.effects import Effect, Send, StorageKey, Write
from tiercel.core.machine.events import Connected, Durable, Event, LogRead, Received
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Output
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings

FIRST, SECOND, NEXT = "op@a#0", "op@a#1", "next@a#0"
READERS = {FIRST: "op", SECOND: "op", NEXT: "next"}
KEYS = [b"k%d" % n for n in range(12)]
TOPOLOGY = Topology(
    {"a": None},
    {"out": Stream("out", "a"), "end": Stream("end", "a")},
    {
        "op": Operator("op", ("in",), "out", (FIRST, SECOND), slots=16),
        "next": Operator("next", ("out",), "end", (NEXT,), slots=16),
    },
)


class Driven:
    """A router with a disk, and its messages: all entries and outputs, the last of each other kind."""

    def __init__(self) -> None:
        self.router = Router("a", TOPOLOGY, Settings(dispatch_rows_max=40, publish_entries_max=30), 1, {})
        self.disk: dict[StorageKey, Any] = {}
        self.sent: dict[tuple[str, str], list[Any]] = {}
        self.writes = 0
        for reader, inbox in READERS.items():
            for event in (
                Connected(reader),
                Received(reader, m.Attach(reader, 1, 1)),
                Received(reader, m.Resume(reader, 1, 1, 0, {}, -1)),
                LogRead(inbox, reader, []),
            ):
                self.perform(self.router.on_event(event, 0.0))
        self.perform(self.router.on_event(Connected("client"), 0.0))
        for stream in ("out", "end"):
            self.perform(self.router.on_event(Received("client", m.Subscribe(stream, 0)), 0.0))
        self.settle(0.0)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self.writes += 1
                    self.disk |= effect.puts
                    for key in effect.deletes:
                        self.disk.pop(key, None)
                case Send(to=to, message=m.Dispatch() | m.Publish() as message):
                    self.sent.setdefault((to, type(message).__name__), []).extend(message.entries)
                case Send(to=to, message=message):
                    self.sent[to, type(message).__name__] = [message]
                case _:
                    pass

    def settle(self, now_ms: float) -> None:
        self.perform(self.router.on_event(Durable(self.router.journal.written), now_ms))

    def one_by_one(self, events: list[Event], now_ms: float) -> None:
        for event in events:
            self.perform(self.router.on_event(event, now_ms))
        self.settle(now_ms)

    def together(self, events: list[Event], now_ms: float) -> None:
        waiting = deque(events)
        while waiting:
            self.perform(self.router.on_events(waiting, now_ms))
        self.settle(now_ms)


def traffic(seed: int) -> list[list[Event]]:
    """Turns of a host: rows, outputs, receipts, and sometimes another message between them."""
    rng = random.Random(seed)
    turns: list[list[Event]] = []
    seq = 0
    flushes = dict.fromkeys(READERS, 0)
    through = dict.fromkeys(READERS, 0)
    for turn in range(1, 60):
        events: list[Event] = []
        for _ in range(rng.randint(1, 25)):
            kind = rng.randrange(8)
            reader = rng.choice([*READERS])
            if kind < 3:
                again = seq > 0 and rng.random() < 0.2
                seq += not again
                rows = [(rng.choice(KEYS), turn, n) for n in range(rng.randint(0, 6))]
                number = rng.randint(1, seq) if again else seq
                events.append(Received("client", m.Produce("client", number, "in", rows)))
            elif kind < 6:
                flushes[reader] += 1
                through[reader] += rng.randint(0, 2)
                offset = max(1, through[reader] - rng.randint(0, 1))
                outputs = [
                    Output(offset, rng.choice(KEYS), 1, n, (rng.choice(KEYS), turn, n))
                    for n in range(rng.randint(0, 4))
                ]
                events.append(
                    Received(
                        reader,
                        m.Outputs(
                            reader, 1, flushes[reader], through[reader], offset, outputs, [], -1, timers=False
                        ),
                    )
                )
            elif kind < 7:
                events.append(Received("client", m.Consumed(rng.choice(("out", "end")), rng.randint(0, 40))))
            else:
                events.append(Received("client", m.Hello("client")))
        turns.append(events)
    return turns


@pytest.mark.parametrize("seed", range(20))
def test_events_handled_in_one_step_have_the_same_effects_as_one_by_one(seed: int) -> None:
    single, gathered = Driven(), Driven()
    for now_ms, events in enumerate(traffic(seed)):
        single.one_by_one(events, now_ms)
        gathered.together(events, now_ms)
        assert gathered.disk == single.disk
        assert gathered.sent == single.sent
    assert gathered.writes < single.writes
    assert single.sent["client", "Publish"], "the traffic comes through"


class Unreadable(list[Output]):
    def __iter__(self) -> Any:
        reason = "no outputs"
        raise ProtocolViolation(reason)


def test_an_invalid_message_does_not_undo_the_other_events_of_its_batch() -> None:
    driven, other = Driven(), Driven()
    rows = [(KEYS[0], 1, "x")]
    before = Received("client", m.Produce("client", 1, "in", rows))
    bad = Received(
        FIRST,
        m.Outputs(FIRST, 1, 1, 1, 1, Unreadable([Output(1, KEYS[0], 1, 0, rows[0])]), [], -1, timers=False),
    )
    after = Received("client", m.Produce("client", 2, "in", rows))
    waiting: deque[Event] = deque([before, bad, after])
    driven.perform(driven.router.on_events(waiting, 1.0))
    assert list(waiting) == [bad, after], "the step ends before it"
    with pytest.raises(ProtocolViolation, match="no outputs"):
        driven.router.on_events(waiting, 1.0)
    assert list(waiting) == [after], "it is gone"
    driven.perform(driven.router.on_events(waiting, 1.0))
    driven.settle(1.0)
    other.one_by_one([before, after], 1.0)
    assert (driven.disk, driven.sent) == (other.disk, other.sent)


def test_events_are_not_batched_while_a_move_is_in_progress() -> None:
    driven = Driven()
    request = m.MoveRequest("m1", "op", KeySet(keys=frozenset(KEYS[:1])), FIRST, SECOND, "live", 1e6)
    driven.one_by_one([Received("client", request)], 1.0)
    assert driven.router.outgoing_moves or driven.router.incoming_moves
    waiting: deque[Event] = deque(
        Received("client", m.Produce("client", seq, "in", [(KEYS[0], 1, "x")])) for seq in (1, 2)
    )
    driven.perform(driven.router.on_events(waiting, 1.0))
    assert len(waiting) == 1
