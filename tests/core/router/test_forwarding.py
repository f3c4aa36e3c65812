"""Frames between sites: limits that never close the way of what would lift them, and storage that is new."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.clients import WINDOW_FRAMES_MAX, MobileSource
from tiercel.core.logs.site_outbox import SiteOutbox
from tiercel.core.machine.effects import Effect, Send, Write
from tiercel.core.machine.events import Connected, Durable, Received
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Output, OutputFence, Row
from tiercel.core.model.routing import Route, RouteUpdate
from tiercel.core.router.recovery import as_older_copy
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings

HERE, ALSO_HERE = key_in(0), key_in(0, 1)  # owned by site a
THERE = key_in(3)  # owned by site b


def row(n: int, key: bytes = HERE, epoch: int = 1) -> Row:
    return (key, n, n, "b@1", n, epoch)


def messages(effects: Iterable[Effect]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


class Link:
    """The outbox of site b, whose frames router a takes over a connection that may break."""

    def __init__(self, window: int, held_rows_max: int) -> None:
        limits = Settings(held_rows_max=held_rows_max)
        self.router = Router("a", topology(), limits, 1, {})
        self.outbox = SiteOutbox("a", "op", "b@1", window)
        self.log: list[Row] = []
        self.most_held = 0
        self.take(Connected("b"))

    def add(self, *rows: Row) -> None:
        self.outbox.durable_n = self.outbox.add(Step(0.0), 0, list(rows))

    def take(self, event: Any) -> None:
        for effect in self.router.on_event(event, 50.0):
            match effect:
                case Write(puts=puts):
                    for key, entry in puts.items():
                        if key[:2] == ("inbox", "op"):
                            self.log += entry.all_rows()
                    self.take(Durable(effect.seq))
                case Send(to="b", message=m.SiteFrameReceipt() as receipt):
                    self.outbox.taken(receipt.taken)
                    self.outbox.again(list(receipt.again))
                    self.outbox.settled(Step(0.0), receipt.settled)
                case _:
                    pass
        sequencer = self.router.inboxes["op"].sequencer
        self.most_held = max(self.most_held, sequencer.held_rows + len(sequencer.waiting))

    def reconnect(self) -> None:
        self.outbox.reconnected()

    def send(self, frames_max: int = 1_000) -> None:
        """Send what the window allows, until nothing more may be sent."""
        for _ in range(frames_max):
            step = Step(0.0)
            self.outbox.pump(step)
            sent = messages(step.effects)
            if not sent:
                return
            for frame in sent:
                self.take(Received("b", frame))
        pytest.fail("the same frames are sent for ever")

    def numbers(self, key: bytes) -> list[int]:
        return [n for of, n, _ in self.log if of == key]


def test_a_full_hold_never_closes_the_outbox_that_brings_the_missing_row() -> None:
    link = Link(window=1, held_rows_max=1)
    for n in (5, 4, 3, 2, 1):
        link.add(row(n))
    link.reconnect()
    link.send()
    assert link.numbers(HERE) == [1, 2, 3, 4, 5]
    assert not link.outbox.frames
    assert link.most_held == 1


def test_a_row_over_the_limit_comes_again_when_it_is_next_though_the_hold_is_still_full() -> None:
    """The row that fills the hold waits for a row of the frame that was sent back."""
    link = Link(window=8, held_rows_max=1)
    link.add(row(9, ALSO_HERE))  # fills the hold for long
    link.add(row(2))
    link.add(row(1))
    link.reconnect()
    link.send()
    assert link.numbers(HERE) == [1, 2]
    assert len(link.outbox.frames) == 1


@given(st.permutations(range(12)), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_row_is_appended_once_and_in_order_under_any_limit(
    order: list[int], frame_rows: int, window: int, held: int, data: st.DataObject
) -> None:
    link = Link(window, held)
    rows = [row(n // 2 + 1, HERE if n % 2 else ALSO_HERE) for n in order]
    for first in range(0, len(rows), frame_rows):
        link.add(*rows[first : first + frame_rows])
    for _ in range(data.draw(st.integers(1, 3))):
        link.reconnect()
        link.send()
    assert link.numbers(HERE) == link.numbers(ALSO_HERE) == [1, 2, 3, 4, 5, 6]
    assert not link.outbox.frames
    assert not link.router.state.inbound
    assert link.most_held <= held


def test_rows_that_wait_for_a_newer_table_are_limited_too_and_come_again_with_the_table() -> None:
    link = Link(window=1, held_rows_max=1)
    for n in (1, 2, 3):
        link.add(row(n, THERE, epoch=2))
    link.reconnect()
    link.send()
    assert link.most_held == 1
    inbox = link.router.inboxes["op"]
    step = Step(50.0)
    inbox.update_table(step, RouteUpdate({}, {THERE: Route("op@a#0", 3)}))
    link.router.sequence_again(step, inbox, inbox.sequencer.release_waiting())
    for effect in [*step.effects, *step.after_durable]:
        if isinstance(effect, Send) and isinstance(effect.message, m.SiteFrameReceipt):
            link.outbox.again(list(effect.message.again))
            link.outbox.taken(effect.message.taken)
            link.outbox.settled(Step(0.0), effect.message.settled)
    link.send()
    assert not link.outbox.frames
    assert link.router.inboxes["op"].sequencer.marks[THERE] == {"b@1": 3}


# -- a storage that is new, or an older copy ------------------------------------------------------


def outputs(driver: SmallDeployment) -> list[int]:
    return [output.row[2][2] for output in driver.outputs()]


@pytest.mark.parametrize("disk", ["wiped", "restored"])
def test_new_rows_of_a_site_whose_storage_is_new_are_not_taken_for_repeats(disk: str) -> None:
    driver = SmallDeployment(topology(instances=("op@a#0",)))
    driver.start("a", "b", "op@a#0")
    older: dict[Any, Any] = {}
    for n in range(6):
        driver.produce("b", (HERE, n, n), producer="before")
        if n == 2:
            older = dict(driver.disks["b"])
    driver.stop("b")
    driver.disks["b"] = {} if disk == "wiped" else as_older_copy(older)
    driver.start("b")
    for n in range(6, 12):
        driver.produce("b", (HERE, n, n), producer="after")
    assert outputs(driver) == list(range(1, 13)), "the operator counts the rows of a key"


def test_a_receipt_for_a_frame_of_an_earlier_storage_settles_no_frame_of_this_one() -> None:
    driver = SmallDeployment(topology(instances=("op@a#0",)))
    driver.start("b")
    driver.produce("b", (HERE, 0, 0))
    router = driver.machines["b"]
    (outbox,) = router.outboxes.values()
    driver.send("b", m.SiteFrameReceipt("op", "b@0", [1], [1]), "a")
    assert list(outbox.frames) == [1]
    driver.send("b", m.SiteFrameReceipt("op", "b@1", [1], [1]), "a")
    assert not outbox.frames


def test_output_frames_of_a_new_storage_are_logged_and_repeats_of_the_old_one_are_not() -> None:
    driver = SmallDeployment(topology(instances=("op@b#0",)))
    driver.start("a")

    def frame(origin: str, n: int) -> m.SiteFrame:
        output = Output(n, b"k", 1, 0, (b"k", 0, (b"k", origin, n)))
        return m.SiteFrame("out", origin, n, [], None, [output])

    for origin, n in (("b@1", 1), ("b@1", 2), ("b@1", 2), ("b@4", 1), ("b@1", 1), ("b@4", 2)):
        driver.send("a", frame(origin, n), "b")
    found = [output.row[2][1:] for output in driver.outputs()]
    assert found == [("b@1", 1), ("b@1", 2), ("b@4", 1), ("b@4", 2)]


def test_outputs_behind_a_fence_wait_for_the_frame_before_them_also_over_a_restart() -> None:
    driver = SmallDeployment(topology(("a", "b", "c"), instances=("op@b#0",)))
    driver.start("a")

    def frame(site: str, n: int, after: OutputFence | None = None) -> m.SiteFrame:
        output = Output(n, b"k", 1, 0, (b"k", 0, (b"k", site, n)))
        return m.SiteFrame("out", f"{site}@1", n, [], None, [output], after)

    def receipts() -> list[tuple[list[int], list[int]]]:
        return [(r.taken, r.settled) for r in driver.messages("a", "c", m.SiteFrameReceipt)]

    driver.send("a", frame("b", 1), "b")
    driver.send("a", frame("c", 1, OutputFence("b@1", 2)), "c")
    driver.send("a", frame("c", 2), "c")
    assert [output.row[2][1:] for output in driver.outputs()] == [("b", 1), ("c", 2)]
    assert receipts() == [([1], []), ([2], [2])]
    driver.restart("a")
    driver.send("a", frame("c", 1, OutputFence("b@1", 2)), "c")
    assert receipts()[2:] == [([1], [])], "it is held, and not settled"
    driver.send("a", frame("b", 2), "b")
    assert [output.row[2][1:] for output in driver.outputs()] == [("b", 1), ("c", 2), ("b", 2), ("c", 1)]
    assert receipts()[3:] == [([1], [1])]
    driver.send("a", frame("c", 3, OutputFence("b@1", 9)), "c")
    driver.send("a", m.SiteFrame("out", "b@7", 1, [], None, []), "b")
    assert driver.outputs()[-1].row[2][1:] == ("c", 3), "a new storage of b sends no frame of the old one"


# -- mobile sources -----------------------------------------------------------------------------------


def test_a_mobile_source_without_its_counters_is_another_origin_and_loses_no_row() -> None:
    driver = SmallDeployment(topology(instances=("op@a#0",)))
    driver.start("a", "op@a#0")
    for incarnation in ("first", "second"):
        source = MobileSource("car", "a", incarnation)
        source.on_event(Connected("a"), 0.0)
        for n in range(5):
            (frame,) = messages(source.submit("in", [(HERE, n, n)]))
            driver.send("a", frame, "car")
    assert outputs(driver) == list(range(1, 11))
    receipts = driver.messages("a", "car", m.MobileReceipt)
    assert source.on_event(Received("a", receipts[0]), 0.0) == []
    assert len(source.pending) == 5, "a receipt for another incarnation says nothing about these rows"


def test_a_mobile_source_has_a_window() -> None:
    source = MobileSource("car", "a", "1")
    sent = list(source.on_event(Connected("a"), 0.0))
    for n in range(3 * WINDOW_FRAMES_MAX):
        sent += source.submit("in", [(HERE, n, n)])
    assert len(sent) == WINDOW_FRAMES_MAX
    assert source.is_full
    receipt = m.MobileReceipt("car", "car@1", [1, 2])
    assert [frame.frame for frame in messages(source.on_event(Received("a", receipt), 0.0))] == [
        WINDOW_FRAMES_MAX + 1,
        WINDOW_FRAMES_MAX + 2,
    ]
    again = msgspec.structs.replace(receipt, frames=[], again=(7,))
    assert [frame.frame for frame in messages(source.on_event(Received("a", again), 0.0))] == [7]


def test_rows_of_a_mobile_source_over_the_limit_are_asked_for_again_when_they_are_next() -> None:
    driver = SmallDeployment(topology(instances=("op@a#0",)), Settings(held_rows_max=1))
    driver.start("a", "op@a#0")
    source = MobileSource("car", "a", "1")
    source.on_event(Connected("a"), 0.0)
    frames = [messages(source.submit("in", [(HERE, n, n)]))[0] for n in range(4)]
    for frame in reversed(frames):
        driver.send("a", frame, "car")
    assert driver.machines["a"].inboxes["op"].sequencer.held_rows <= 1
    for _ in range(4):
        for receipt in driver.messages("a", "car", m.MobileReceipt):
            for frame in messages(source.on_event(Received("a", receipt), 0.0)):
                driver.send("a", frame, "car")
    assert outputs(driver) == [1, 2, 3, 4]
    assert not source.pending


def test_a_row_of_a_mobile_source_over_the_limit_follows_a_key_that_has_left() -> None:
    driver = SmallDeployment(topology(), Settings(held_rows_max=1))
    driver.start()
    source = MobileSource("car", "a", "1")
    source.on_event(Connected("a"), 0.0)
    frames = [messages(source.submit("in", [(HERE, n, n)]))[0] for n in range(3)]
    for frame in frames[:0:-1]:  # the third row is held, the second one is over the limit
        driver.send("a", frame, "car")
    driver.move(KeySet(keys=frozenset({HERE})), "op@a#0", "op@b#0", "pause")
    driver.finish_moves()
    driver.send("a", frames[0], "car")
    for receipt in driver.messages("a", "car", m.MobileReceipt):
        for frame in messages(source.on_event(Received("a", receipt), 0.0)):
            driver.send("a", frame, "car")
    assert outputs(driver) == [1, 2, 3]
    assert not driver.machines["a"].state.inbound
    assert not driver.machines["a"].inboxes["op"].sequencer.sent_back
