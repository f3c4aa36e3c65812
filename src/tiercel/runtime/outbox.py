"""What a process is about to say, by peer: it leaves in as few frames as possible.

Responsible for: messages that become one, one write per peer and turn, what may wait for company.
Not responsible for: what is said and when it may be (host.py), connections (peers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tiercel.core.messages import Message
from tiercel.runtime.link import Link
from tiercel.runtime.wire import CAN_LINGER, merged

LINGER_S = 0.002  # so long, and up to twice, may what nobody waits for wait for company: a write costs most


class Outbox:
    """Everything said and not sent."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._said: dict[str, list[Message]] = {}
        self._alone: set[str] = set()  # whose receipts have found no company since the timer fired last
        self._linger: asyncio.TimerHandle | None = None

    def say(self, to: str, message: Message) -> None:
        said = self._said.get(to)
        if said is None:
            self._said[to] = [message]
            return
        both = merged(said[-1], message)
        if both is None:
            said.append(message)
        else:
            said[-1] = both

    def say_at_once(self, to: str, message: Message) -> None:
        link = self._links.get(to)
        if link is not None:
            link.send([message])

    def leave(self) -> None:
        """Everything that was said so far, in one write per peer; a receipt alone waits for company."""
        if not self._said:
            return
        staying: dict[str, list[Message]] = {}
        for peer, messages in self._said.items():
            if len(messages) == 1 and type(messages[0]) in CAN_LINGER:
                staying[peer] = messages
            else:
                self._alone.discard(peer)
                self._send(peer, messages)
        self._said = staying
        if staying and self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._stop_lingering)

    def _stop_lingering(self) -> None:
        """Only who was here last time leaves: on a busy link company comes before the second time."""
        alone, self._alone = self._alone, set()
        for peer in alone:
            self._send(peer, self._said.pop(peer))
        self._alone.update(self._said)
        self._linger = None
        if self._said:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._stop_lingering)

    def _send(self, peer: str, messages: list[Message]) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.send(messages)

    def forget(self, peer: str) -> None:
        self._said.pop(peer, None)
        self._alone.discard(peer)

    def close(self) -> None:
        self._said, self._alone = {}, set()
        if self._linger is not None:
            self._linger.cancel()
