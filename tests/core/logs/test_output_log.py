"""Output logs: the entries that a subscriber is sent."""

from __future__ import annotations

import msgspec
import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.clients import Subscriber
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Disconnected, Received
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


# -- named subscriptions -----------------------------------------------------------------------------

SHORT = Settings(stream_entries_max=5, subscription_entries_max=10, stream_tail_max=2)


class Reader:
    """A subscriber whose connection the test makes and breaks; it takes entries when it is told to."""

    def __init__(self, driver: SmallDeployment, subscription: str, after: int | None = None) -> None:
        self.driver = driver
        self.machine = Subscriber("out", "a", after, range_first=True, subscription=subscription)
        self.offsets: list[int] = []
        self._seen = 0

    def connect(self) -> None:
        self.driver.handle("a", Connected("reader"))
        self._seen = len(self.driver.sent)
        self._perform(self.machine.on_event(Connected("a"), 0.0))
        self.receive()

    def disconnect(self) -> None:
        self.machine.on_event(Disconnected("a"), 0.0)
        self.driver.handle("a", Disconnected("reader"))

    def receive(self) -> None:
        """Handle every message of the router, and those that follow from it."""
        while self._seen < len(self.driver.sent):
            sender, to, message = self.driver.sent[self._seen]
            self._seen += 1
            if (sender, to) == ("a", "reader"):
                self._perform(self.machine.on_event(Received("a", message), 0.0))

    def take(self) -> None:
        entries, effects = self.machine.take()
        self.offsets += [entry.offset for entry in entries]
        self._perform(effects)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Send)
            self.driver.send("a", effect.message, "reader")


def produce(driver: SmallDeployment, count: int, site: str = "a") -> None:
    for n in range(count):
        driver.produce(site, (key_in(0), 0, n), producer=f"p of {site}")


def acknowledged(driver: SmallDeployment, site: str = "a") -> int:
    return max([ack.seq for ack in driver.messages(site, f"p of {site}", m.ProducerAck)], default=0)


def test_a_named_subscription_that_is_away_finds_every_entry_and_goes_on_behind_its_mark() -> None:
    driver = SmallDeployment(topology(("a",)), SHORT).start()
    reader = Reader(driver, "billing", after=0)
    reader.connect()
    produce(driver, 4)
    reader.receive()
    reader.take()
    produce(driver, 1)
    reader.receive()
    reader.take()  # what was taken before is processed now
    assert driver.machines["a"].streams["out"].marks == {"billing": 4}
    reader.disconnect()
    produce(driver, 9)
    driver.restart("a")
    again = Reader(driver, "billing")
    again.connect()
    again.receive()
    again.take()
    assert again.offsets == list(range(5, 15)), "its program had not processed the fifth"


def test_producers_wait_for_a_named_subscription_that_lags_and_lose_nothing() -> None:
    driver = SmallDeployment(topology(("a", "b"), instances=("op@a#0",)), SHORT)
    driver.start("a", "b", "op@a#0")
    reader = Reader(driver, "billing", after=0)
    reader.connect()
    reader.disconnect()
    for site in ("a", "b"):
        produce(driver, 12, site)
    waiting = {site: acknowledged(driver, site) for site in ("a", "b")}
    assert 0 < waiting["a"] + waiting["b"] < 24, "at both sites: the home tells the other router"
    reader.connect()
    for _ in range(20):
        reader.receive()
        reader.take()
    assert reader.offsets == list(range(1, 25))
    assert {site: acknowledged(driver, site) for site in ("a", "b")} == {"a": 12, "b": 12}


def test_a_subscription_that_has_ended_keeps_nothing_and_releases_its_producers() -> None:
    driver = SmallDeployment(topology(("a",)), SHORT).start()
    reader = Reader(driver, "billing", after=0)
    reader.connect()
    reader.disconnect()
    produce(driver, 20)
    assert acknowledged(driver) < 20
    assert driver.machines["a"].streams["out"].first == 1
    driver.send("a", m.EndSubscription("out", "billing"), "reader")
    assert acknowledged(driver) == 20
    produce(driver, 1)
    assert driver.machines["a"].streams["out"].first > 10


@pytest.mark.parametrize("subscription", ["", "billing"])
def test_without_a_name_or_with_the_setting_an_output_log_is_trimmed_by_number(subscription: str) -> None:
    settings = msgspec.structs.replace(SHORT, subscription_entries_max=0 if subscription else 10)
    driver = SmallDeployment(topology(("a",)), settings).start()
    reader = Reader(driver, subscription, after=0)
    reader.connect()
    reader.disconnect()
    produce(driver, 20)
    assert acknowledged(driver) == 20
    assert driver.machines["a"].streams["out"].first == 16
    reader.connect()
    reader.receive()
    assert "are no longer kept" in reader.machine.refused


def test_who_asks_for_an_entry_that_is_not_there_is_answered_when_it_is() -> None:
    driver = SmallDeployment().start()
    driver.send("a", m.RangeQuery("out"), "at once")
    driver.send("a", m.RangeQuery("out", beyond=0), "waits")
    driver.send("a", m.RangeQuery("out", beyond=1), "waits longer")
    driver.send("a", m.RangeQuery("out", beyond=0), "leaves")
    driver.handle("a", Disconnected("leaves"))
    assert [reply.last for reply in driver.messages("a", "at once", m.RangeReply)] == [0]
    assert driver.messages("a", "waits", m.RangeReply) == []
    driver.produce("a", (key_in(0), 0, 1))
    assert [reply.last for reply in driver.messages("a", "waits", m.RangeReply)] == [1]
    assert driver.messages("a", "waits longer", m.RangeReply) == []
    driver.produce("a", (key_in(0), 0, 2))
    assert [reply.last for reply in driver.messages("a", "waits longer", m.RangeReply)] == [2]
    assert len(driver.messages("a", "waits", m.RangeReply)) == 1, "each question has one answer"
    assert driver.messages("a", "leaves", m.RangeReply) == []
