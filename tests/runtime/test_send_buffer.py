"""Messages that leave a process together, and acknowledgements that wait for other messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tiercel.core import messages as m
from tiercel.runtime.process import send_buffer as send_buffer
from tiercel.runtime.process.send_buffer import SendBuffer

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


def with_an_send_buffer(check: Callable[[SendBuffer, dict[str, Written]], Awaitable[None]]) -> None:
    async def run() -> None:
        links = {"busy": Written(), "quiet": Written()}
        buffer: Any = SendBuffer(links)  # type: ignore[arg-type]
        await check(buffer, links)
        buffer.close()

    asyncio.run(run())


def test_messages_of_one_turn_leave_in_one_write() -> None:
    async def check(buffer: SendBuffer, links: dict[str, Written]) -> None:
        buffer.add("busy", RECEIPT)
        buffer.add("busy", ROWS)
        buffer.flush()
        assert links["busy"].writes == [[RECEIPT, ROWS]]
        assert not links["quiet"].writes

    with_an_send_buffer(check)


def test_lone_acknowledgement_is_sent_after_the_linger_time() -> None:
    async def check(buffer: SendBuffer, links: dict[str, Written]) -> None:
        buffer.add("quiet", RECEIPT)
        buffer.flush()
        assert not links["quiet"].writes
        await links["quiet"].written.wait()
        assert links["quiet"].writes == [[RECEIPT]]

    with_an_send_buffer(check)


def test_lingering_acknowledgements_of_peers_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link with traffic every receipt finds company, though another one's time has come."""
    monkeypatch.setattr(send_buffer, "LINGER_S", 3600.0)  # the timer fires here when we say so

    async def check(buffer: SendBuffer, links: dict[str, Written]) -> None:
        buffer.add("quiet", RECEIPT)
        buffer.flush()
        buffer._flush_lingering()  # the first time
        buffer.add("busy", RECEIPT)
        buffer.flush()
        buffer._flush_lingering()
        assert links["quiet"].writes == [[RECEIPT]]
        assert not links["busy"].writes
        buffer.add("busy", ROWS)
        buffer.flush()
        assert links["busy"].writes == [[RECEIPT, ROWS]]
        buffer._flush_lingering()
        assert links["busy"].writes == [[RECEIPT, ROWS]]

    with_an_send_buffer(check)


def test_nothing_is_sent_to_a_forgotten_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_buffer, "LINGER_S", 3600.0)

    async def check(buffer: SendBuffer, links: dict[str, Written]) -> None:
        buffer.add("quiet", RECEIPT)
        buffer.flush()
        buffer._flush_lingering()
        buffer.forget("quiet")
        buffer._flush_lingering()
        assert not links["quiet"].writes

    with_an_send_buffer(check)
