"""Steps: the writes and effects of one event, collected while a machine handles it.

Responsible for: one atomic write per event, and holding back messages until that write is durable.
Not responsible for: the contents of writes and messages.

    send            leaves at once, before the write is durable (dispatch to the site's own instances)
    send_durable    leaves when the write of this event, and all before it, are durable
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tiercel.core.machine.effects import Effect, Note, ReadLog, Send, SetTimer, StorageKey, Unexpected, Write
from tiercel.core.machine.names import LogReaderName, TimerName


class Step:
    """Collects puts, deletes and effects of one event."""

    __slots__ = ("after_durable", "deletes", "effects", "now_ms", "puts")

    def __init__(self, now_ms: float) -> None:
        self.now_ms = now_ms
        self.puts: dict[StorageKey, Any] = {}
        self.deletes: dict[StorageKey, None] = {}
        self.effects: list[Effect] = []
        self.after_durable: list[Effect] = []

    def put(self, key: StorageKey, value: Any) -> None:
        if self.deletes:
            self.deletes.pop(key, None)
        self.puts[key] = value

    def delete(self, key: StorageKey) -> None:
        self.puts.pop(key, None)
        self.deletes[key] = None

    def send(self, to: str, message: Any) -> None:
        self.effects.append(Send(to, message))

    def send_durable(self, to: str, message: Any) -> None:
        self.after_durable.append(Send(to, message))

    def read_log(self, inbox: str, after: int, limit: int, reader: LogReaderName) -> None:
        self.effects.append(ReadLog(inbox, after, limit, reader))

    def timer(self, name: TimerName, at_ms: float) -> None:
        self.effects.append(SetTimer(name, at_ms))

    def unexpected(self, role: str, move: str, phase: str, message: str) -> None:
        self.effects.append(Unexpected(role, move, phase, message))

    def note(self, text: str) -> None:
        self.effects.append(Note(text))


class Journal:
    """Numbers the writes of a machine, and holds effects until those writes are durable."""

    def __init__(self) -> None:
        self.written = 0
        self.durable = 0
        self._waiting: deque[tuple[int, list[Effect]]] = deque()

    def commit(self, step: Step) -> list[Effect]:
        """The effects of a step: its write first, then effects that need no durability, the rest later."""
        effects: list[Effect] = []
        if step.puts or step.deletes:
            self.written += 1
            effects.append(Write(self.written, step.puts, tuple(step.deletes)))
        effects += step.effects
        if step.after_durable:
            if self.durable >= self.written:
                effects += step.after_durable
            else:
                self._waiting.append((self.written, step.after_durable))
        return effects

    def durable_through(self, seq: int) -> list[Effect]:
        self.durable = max(self.durable, seq)
        released: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= self.durable:
            released += self._waiting.popleft()[1]
        return released
