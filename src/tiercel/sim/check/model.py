"""A second reference, which shares no code with the core: what each simulated operator does to one key.

Responsible for: state, timers, time to live and outputs of one key, written down once more, plainly.
Not responsible for: the order of a key's rows and times (reference.py takes it from the logs), comparing
    (checkers.py).

The first reference calls the core's own code, so it cannot see what is wrong in there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

RUN_MARK = 0xC1  # of a payload that holds several rows

Made = tuple[bytes, int, Any]  # an output: key, event time, payload


class Call(NamedTuple):
    """What happened to a key at one entry of its log: rows, or (without rows) that time passed."""

    rows: list[tuple[bytes, int, Any]]
    due_ms: int  # timers up to here fire
    time_ms: int
    watermark_ms: int


def decoded(row: tuple[bytes, int, Any]) -> list[Made]:
    """The single rows of a row, with payloads as they were before they were encoded."""
    key, event_time, payload = row
    if isinstance(payload, list | tuple) and len(payload) == 2 and type(payload[1]) is bytes:
        at, value = msgspec.msgpack.decode(payload[1])  # with the number of its input
        return [(key, at, (payload[0], _frozen(value)))]
    if type(payload) is not bytes:
        return [(key, event_time, _frozen(payload))]
    several = (
        msgspec.msgpack.decode(payload[1:]) if payload[0] == RUN_MARK else [msgspec.msgpack.decode(payload)]
    )
    return [(key, at, _frozen(value)) for at, value in several]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _chain(digest: int, value: object) -> int:
    return crc32(repr(value).encode(), digest)


class KeyModel:
    """One key of one operator."""

    def __init__(self, operator: str, key: bytes, kind: str, coarser: bool) -> None:
        self.name, self.key = operator, key
        self.to = key[:2] if coarser else key
        self.count = self.digest = 0  # zero rows: there is no such state
        self.items: list[tuple[int]] = []
        self.kinds: dict[tuple[int], tuple[int]] = {}
        self.windows: dict[int, tuple[int, int]] = {}
        self.recent: tuple[tuple[int], int] | None = None  # (value, when it expires)
        self.timers: set[int] = set()
        self.made: list[Made] = []
        self._on_row: Callable[[int, Any, Call, int], None] = getattr(self, f"_{kind}_row", self._plain_row)
        self._on_timer: Callable[[int, Call], None] = getattr(self, f"_{kind}_timer", self._plain_timer)

    def run(self, calls: list[Call]) -> None:
        for call in calls:
            for n, (_, event_time, payload) in enumerate(one for row in call.rows for one in decoded(row)):
                self._on_row(event_time, payload, call, n + 1)
            for expiry in sorted(timer for timer in self.timers if timer <= call.due_ms):
                if expiry in self.timers:
                    self._on_timer(expiry, call)
                    self.timers.discard(expiry)

    def _emit(self, event_time: int, *payload: Any) -> None:
        self.made.append((self.to, event_time, (self.name, self.key, *payload)))

    def _step(self, payload: Any) -> tuple[int, int]:
        self.count, self.digest = self.count + 1, _chain(self.digest, payload)
        return self.count, self.digest

    def _plain_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        self._emit(event_time, *self._step(payload))

    def _plain_timer(self, expiry: int, call: Call) -> None:
        raise AssertionError(expiry)

    def _forgetful_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        count, digest = self._step(payload)
        if count % 2 == 0:
            self.count = self.digest = 0
        self._emit(event_time, count, digest)

    def _listing_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        made = self._step(payload)
        code = _chain(0, payload)
        self.items.append((code,))
        kind = (code % 3,)
        self.kinds[kind] = (self.kinds.get(kind, (0,))[0] + 1,)
        if len(self.items) == 5:
            items, self.items = self.items, []
            self._emit(event_time, "list", _chain(0, items), _chain(0, sorted(self.kinds.items())))
        self._emit(event_time, *made)

    def _sessions_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        made = self._step(payload)
        self.timers = {call.time_ms + 120}
        seen = self.recent is not None and self.recent[1] > call.time_ms
        self.recent = ((_chain(0, payload),), call.time_ms + 90)
        self._emit(event_time, "recent", seen, call.time_ms, made)
        self._emit(event_time, *made)

    def _sessions_timer(self, expiry: int, call: Call) -> None:
        count, digest = self.count, self.digest
        self.count = self.digest = 0
        self.recent = None
        self._emit(expiry, "session", count, digest, expiry)

    def _windows_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        made = self._step(payload)
        start = event_time // 100 * 100
        count, digest = self.windows.get(start, (0, 0))
        self.windows[start] = (count + 1, _chain(digest, payload))
        self.timers.add(start + 100)
        if start + 100 <= call.watermark_ms:
            self._emit(event_time, "late", _chain(0, payload))
        self._emit(event_time, *made)

    def _windows_timer(self, expiry: int, call: Call) -> None:
        count, digest = self.windows.pop(expiry - 100, (0, 0))
        self._emit(expiry, "window", expiry, count, digest)

    _relapsing_row = _windows_row

    def _relapsing_timer(self, expiry: int, call: Call) -> None:
        if expiry % 100:
            self._emit(call.watermark_ms + 1, "relapse", expiry, call.watermark_ms)
        else:
            self._windows_timer(expiry, call)
            self.timers.add(expiry - 1)

    def _choosy_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        if _chain(0, payload) % 7:
            self._plain_row(event_time, payload, call, n)

    def _mindful_row(self, event_time: int, payload: Any, call: Call, n: int) -> None:
        made = self._step(payload)
        self._emit(event_time, "seen", n, made)
        self._emit(event_time, *made)
