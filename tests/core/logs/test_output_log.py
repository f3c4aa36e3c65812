"""Output logs: the entries that a subscriber is sent."""

from __future__ import annotations

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.machine.events import Disconnected
from tiercel.core.settings import Settings


def test_a_read_for_an_earlier_subscription_is_ignored_after_a_new_one() -> None:
    """A client subscribes again from an earlier offset; the read for its first subscription ends later."""
    driver = SmallDeployment(topology(("a",)), Settings(stream_tail_max=2)).start()
    for n in range(20):
        driver.produce("a", (key_in(0), 0, n))
    driver.slow_readers = {"reader"}
    driver.send("a", m.Subscribe("out", 10), "reader")
    driver.handle("a", Disconnected("reader"))
    driver.send("a", m.Subscribe("out", 0), "reader")
    while driver.reads:
        driver.answer_read()
    offsets = [e.offset for p in driver.messages("a", "reader", m.Publish) for e in p.entries]
    assert offsets[0] == 1, "entries were skipped"
    assert offsets == list(range(1, len(offsets) + 1))
