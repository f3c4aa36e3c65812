"""What leaves a process with what, and what waits for company."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tiercel.core import messages as m
from tiercel.runtime import outbox as outboxes
from tiercel.runtime.outbox import Outbox

RECEIPT = m.Consumed("positions", 7)
ROWS = m.Produce("gate", 1, "positions", [(b"car-1", 0, b"row")])


class Written:
    """In place of a link: the writes, in order."""

    def __init__(self) -> None:
        self.writes: list[list[m.Message]] = []
        self.written = asyncio.Event()

    def send(self, messages: list[m.Message]) -> None:
        self.writes.append(messages)
        self.written.set()


def with_an_outbox(check: Callable[[Outbox, dict[str, Written]], Awaitable[None]]) -> None:
    async def run() -> None:
        links = {"busy": Written(), "quiet": Written()}
        outbox: Any = Outbox(links)  # type: ignore[arg-type]
        await check(outbox, links)
        outbox.close()

    asyncio.run(run())


def test_what_is_said_in_one_turn_leaves_in_one_write() -> None:
    async def check(outbox: Outbox, links: dict[str, Written]) -> None:
        outbox.say("busy", RECEIPT)
        outbox.say("busy", ROWS)
        outbox.leave()
        assert links["busy"].writes == [[RECEIPT, ROWS]]
        assert not links["quiet"].writes

    with_an_outbox(check)


def test_a_receipt_that_finds_no_company_leaves_alone() -> None:
    async def check(outbox: Outbox, links: dict[str, Written]) -> None:
        outbox.say("quiet", RECEIPT)
        outbox.leave()
        assert not links["quiet"].writes
        await links["quiet"].written.wait()
        assert links["quiet"].writes == [[RECEIPT]]

    with_an_outbox(check)


def test_one_peers_receipt_does_not_take_those_of_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link with traffic every receipt finds company, though another one's time has come."""
    monkeypatch.setattr(outboxes, "LINGER_S", 3600.0)  # the timer fires here when we say so

    async def check(outbox: Outbox, links: dict[str, Written]) -> None:
        outbox.say("quiet", RECEIPT)
        outbox.leave()
        outbox._stop_lingering()  # the first time
        outbox.say("busy", RECEIPT)
        outbox.leave()
        outbox._stop_lingering()
        assert links["quiet"].writes == [[RECEIPT]]
        assert not links["busy"].writes
        outbox.say("busy", ROWS)
        outbox.leave()
        assert links["busy"].writes == [[RECEIPT, ROWS]]
        outbox._stop_lingering()
        assert links["busy"].writes == [[RECEIPT, ROWS]]

    with_an_outbox(check)


def test_nothing_is_said_to_who_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "LINGER_S", 3600.0)

    async def check(outbox: Outbox, links: dict[str, Written]) -> None:
        outbox.say("quiet", RECEIPT)
        outbox.leave()
        outbox._stop_lingering()
        outbox.forget("quiet")
        outbox._stop_lingering()
        assert not links["quiet"].writes

    with_an_outbox(check)
