"""One write per event, and nothing is said that rests on what is not durable."""

from __future__ import annotations

from tiercel.core.effects import Effect, Send, Write
from tiercel.core.step import Journal, Step


def commit(journal: Journal, **said: str) -> list[Effect]:
    """One event: maybe a write, something said at once, something said when durable."""
    step = Step(0.0)
    if "put" in said:
        step.put(("t", said["put"]), 1)
    if "now" in said:
        step.send("peer", said["now"])
    if "durably" in said:
        step.send_durable("peer", said["durably"])
    return journal.commit(step)


def test_the_write_of_an_event_goes_first_and_what_rests_on_it_waits() -> None:
    journal = Journal()
    effects = commit(journal, put="x", now="early", durably="late")
    assert effects == [Write(1, {("t", "x"): 1}), Send("peer", "early")]
    assert journal.durable_through(1) == [Send("peer", "late")]
    assert journal.durable_through(1) == []


def test_what_is_said_durably_waits_for_the_writes_of_earlier_events_too() -> None:
    journal = Journal()
    commit(journal, put="x")
    assert commit(journal, durably="rests on x") == []
    assert journal.durable_through(1) == [Send("peer", "rests on x")]


def test_with_nothing_to_wait_for_it_goes_at_once() -> None:
    journal = Journal()
    assert commit(journal, durably="hello") == [Send("peer", "hello")]
    commit(journal, put="x")
    journal.durable_through(1)
    assert commit(journal, durably="again") == [Send("peer", "again")]


def test_several_events_are_released_in_order_and_only_as_far_as_the_disk_is() -> None:
    journal = Journal()
    for n in (1, 2, 3):
        commit(journal, put=str(n), durably=f"about {n}")
    assert journal.durable_through(2) == [Send("peer", "about 1"), Send("peer", "about 2")]
    assert journal.durable_through(1) == [], "late news of the disk changes nothing"
    assert journal.durable_through(3) == [Send("peer", "about 3")]


def test_an_event_that_writes_nothing_has_no_number() -> None:
    journal = Journal()
    assert commit(journal, now="hi") == [Send("peer", "hi")]
    assert journal.written == 0


def test_the_last_word_about_a_place_counts() -> None:
    step = Step(0.0)
    step.put(("t", 1), "a")
    step.delete(("t", 1))
    step.delete(("t", 2))
    step.put(("t", 2), "b")
    assert Journal().commit(step) == [Write(1, {("t", 2): "b"}, (("t", 1),))]
