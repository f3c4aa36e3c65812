"""Outgoing messages of a turn, by peer: merged, and sent in as few writes as possible.

Responsible for: merging messages, one write per peer and turn, acknowledgements that may wait.
Not responsible for: which messages may leave (host.py, durability_gate.py), connections (net/peers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tiercel.core.messages import Message
from tiercel.runtime.net.connection import Connection
from tiercel.runtime.net.wire import CAN_LINGER, merged

LINGER_S = 0.002  # an acknowledgement waits this long, at most twice, for other messages: a write costs most


class SendBuffer:
    """Messages that were not sent yet, by peer."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        self._connections = connections
        self._pending: dict[str, list[Message]] = {}
        self._lingering: set[str] = set()  # peers whose acknowledgement has waited since the timer fired last
        self._linger: asyncio.TimerHandle | None = None

    def add(self, to: str, message: Message) -> None:
        pending = self._pending.get(to)
        if pending is None:
            self._pending[to] = [message]
            return
        both = merged(pending[-1], message)
        if both is None:
            pending.append(message)
        else:
            pending[-1] = both

    def send_at_once(self, to: str, message: Message) -> None:
        connection = self._connections.get(to)
        if connection is not None:
            connection.send([message])

    def flush(self) -> None:
        """Send everything in one write per peer. A single acknowledgement waits for other messages."""
        if not self._pending:
            return
        staying: dict[str, list[Message]] = {}
        for peer, messages in self._pending.items():
            if len(messages) == 1 and type(messages[0]) in CAN_LINGER:
                staying[peer] = messages
            else:
                self._lingering.discard(peer)
                self._send(peer, messages)
        self._pending = staying
        if staying and self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._flush_lingering)

    def _flush_lingering(self) -> None:
        """Send what has waited since the last time. On a busy connection little does."""
        lingering, self._lingering = self._lingering, set()
        for peer in lingering:
            self._send(peer, self._pending.pop(peer))
        self._lingering.update(self._pending)
        self._linger = None
        if self._pending:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._flush_lingering)

    def _send(self, peer: str, messages: list[Message]) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.send(messages)

    def forget(self, peer: str) -> None:
        self._pending.pop(peer, None)
        self._lingering.discard(peer)

    def close(self) -> None:
        self._pending, self._lingering = {}, set()
        if self._linger is not None:
            self._linger.cancel()
