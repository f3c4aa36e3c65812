"""One write per event; a durable send leaves when all writes before it are durable."""

from __future__ import annotations

from tiercel.core.machine.effects import Effect, Send, Write
from tiercel.core.machine.step import Journal, Step


def commit(journal: Journal, **parts: str) -> list[Effect]:
    """One event: maybe a write, a message sent at once, a message sent when durable."""
    step = Step(0.0)
    if "put" in parts:
        step.put(("t", parts["put"]), 1)
    if "now" in parts:
        step.send("peer", parts["now"])
    if "durably" in parts:
        step.send_durable("peer", parts["durably"])
    return journal.commit(step)


def test_durable_sends_wait_for_the_write_of_their_event() -> None:
    journal = Journal()
    effects = commit(journal, put="x", now="early", durably="late")
    assert effects == [Write(1, {("t", "x"): 1}), Send("peer", "early")]
    assert journal.durable_through(1) == [Send("peer", "late")]
    assert journal.durable_through(1) == []


def test_durable_sends_wait_for_the_writes_of_earlier_events() -> None:
    journal = Journal()
    commit(journal, put="x")
    assert commit(journal, durably="rests on x") == []
    assert journal.durable_through(1) == [Send("peer", "rests on x")]


def test_a_durable_send_without_pending_writes_leaves_at_once() -> None:
    journal = Journal()
    assert commit(journal, durably="hello") == [Send("peer", "hello")]
    commit(journal, put="x")
    journal.durable_through(1)
    assert commit(journal, durably="again") == [Send("peer", "again")]


def test_durable_sends_leave_in_order_as_their_writes_become_durable() -> None:
    journal = Journal()
    for n in (1, 2, 3):
        commit(journal, put=str(n), durably=f"about {n}")
    assert journal.durable_through(2) == [Send("peer", "about 1"), Send("peer", "about 2")]
    assert journal.durable_through(1) == [], "an older report of the disk changes nothing"
    assert journal.durable_through(3) == [Send("peer", "about 3")]


def test_an_event_without_writes_takes_no_sequence_number() -> None:
    journal = Journal()
    assert commit(journal, now="hi") == [Send("peer", "hi")]
    assert journal.written == 0


def test_the_last_change_to_a_storage_key_wins() -> None:
    step = Step(0.0)
    step.put(("t", 1), "a")
    step.delete(("t", 1))
    step.delete(("t", 2))
    step.put(("t", 2), "b")
    assert Journal().commit(step) == [Write(1, {("t", 2): "b"}, (("t", 1),))]
