"""Several messages of one turn: entries that arrived in several messages share a step."""

from __future__ import annotations

from collections import deque

from machines_in_memory import SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.machine.effects import Send
from tiercel.core.machine.events import Event, Received

A = "op@a#0"


def dispatches_that_waited(count: int) -> tuple[SmallDeployment, deque[Event]]:
    driver = SmallDeployment().start()
    driver.produce("a", (key_in(0), 0, "first"))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Dispatch)
    for n in range(count):
        driver.produce("a", (key_in(0), 0, n))
    return driver, deque(Received("a", message) for _, _, message in driver.withheld)


def test_entries_of_several_messages_have_one_step_and_one_message_of_outputs() -> None:
    driver, waiting = dispatches_that_waited(5)
    assert len(waiting) == 5
    effects = driver.machines[A].on_events(waiting, driver.now_ms)
    assert not waiting
    (outputs,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Outputs)]
    other, _ = dispatches_that_waited(5)
    other.release_withheld()
    other.advance_ms(100)
    made = [(o.offset, o.n, tuple(o.row[2])) for o in outputs.outputs]
    assert made == [(o.offset, o.n, tuple(o.row[2])) for o in other.outputs()[1:]]


def test_an_instance_that_must_read_state_takes_one_message_after_the_other() -> None:
    driver, waiting = dispatches_that_waited(3)
    driver.machines[A].space.evicted[b"elsewhere"] = 1
    driver.machines[A].on_events(waiting, driver.now_ms)
    assert len(waiting) == 2
