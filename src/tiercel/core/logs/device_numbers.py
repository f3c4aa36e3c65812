"""The numbers that devices give their rows: what is missing, what came again, what went backwards.

Responsible for: how long a gap may stay open; the digests of the last rows of a key, which tell a repeated
    row from another one with the same number; what is refused, and why.
Not responsible for: the order of rows (sequencer.py), the log of refused rows (core/router/device_rows.py).

Any gateway may bring a row, so every row comes from one origin, its stream. A row at or below the mark of
its key is a repeat if it is the row that was taken under its number. Otherwise it is refused: the device has
used a number twice, its numbers went backwards, or the row came after its gap was closed. So every row that
a gateway brings is processed once, is a repeat of one that was, or is refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tiercel.core.machine.step import Step
from tiercel.core.model.key_table import KeyTable
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Row

RECENT_MAX = 64  # last rows of a key whose digests are kept
DIGEST_BYTES = 4
SKIPPED = bytes(DIGEST_BYTES)  # the digest of a number without a row

_encode = msgspec.msgpack.Encoder().encode


class RefusedNumber(NamedTuple):
    """Numbers of a key that will not be processed."""

    key: Key
    origin: str
    n: int  # of the row that came
    expected: int  # the number that was next
    payload: Any = None  # of the row, if it is the row that is refused; None: the rows before it are missing


def digest_of(payload: Any) -> bytes:
    """The digest of a row, without the number of its input and the row of a broadcast stream."""
    if type(payload) in (tuple, list) and 2 <= len(payload) <= 3 and type(payload[0]) is int:
        payload = payload[1]
    found = zlib.crc32(payload if type(payload) is bytes else _encode(payload)) or 1
    return found.to_bytes(DIGEST_BYTES)


class DeviceNumbers:
    """What one inbox knows of the rows that devices have numbered."""

    def __init__(self, inbox: str, slots: int) -> None:
        self._inbox = inbox
        self.gap_ms: Mapping[str, float] = {}  # origin of such rows -> how long a gap may stay open
        self.recent = KeyTable[dict[str, bytes]](slots)  # key -> origin -> digests up to the mark
        self._slots = slots
        self._deadlines: dict[str, KeyTable[float]] = {}  # origin -> key with a gap -> when it is closed
        self.refused: Callable[[Step, RefusedNumber], None] = lambda step, refused: None

    def recover(self, key: Key, recent: dict[str, bytes]) -> None:
        """Rule R45: a restarted router knows the last rows of a key."""
        self.recent[key] = dict(recent)

    # -- rows that are taken -----------------------------------------------------------------

    def take(self, step: Step, row: Row) -> None:
        """A row is appended: its number is the mark of its key from now on."""
        self._note(step, row[0], row[3], digest_of(row[2]))

    def _note(self, step: Step, key: Key, origin: str, digests: bytes) -> None:
        of_key = self.recent.get(key)
        if of_key is None:
            of_key = self.recent[key] = {}
        of_key[origin] = (of_key.get(origin, b"") + digests)[-RECENT_MAX * DIGEST_BYTES :]
        step.put(("recent", self._inbox, key), dict(of_key))

    # -- rows at or below the mark -----------------------------------------------------------

    def came_behind(self, step: Step, row: Row, mark: int) -> None:
        """Rule R45: a row at or below the mark is dropped only if it is the row that was taken."""
        key, origin, n = row[0], row[3], row[4]
        if not self.is_repeat(key, origin, mark - n, digest_of(row[2])):
            self.refused(step, RefusedNumber(key, origin, n, mark + 1, row[2]))

    def is_repeat(self, key: Key, origin: str, behind: int, digest: bytes) -> bool:
        """Whether the row so far behind the mark has this digest."""
        digests = self.recent.get(key, {}).get(origin, b"")
        end = len(digests) - behind * DIGEST_BYTES
        return digests[max(0, end - DIGEST_BYTES) : max(0, end)] == digest

    # -- gaps --------------------------------------------------------------------------------

    def gap_opened(self, step: Step, key: Key, origin: str) -> None:
        """A row is held, or sent back: the rows before it are missing. A gap that is open stays as it is."""
        if origin in self.gap_ms:
            of_origin = self._deadlines.get(origin)
            if of_origin is None:
                of_origin = self._deadlines[origin] = KeyTable(self._slots)
            if key not in of_origin:
                of_origin[key] = step.now_ms + self.gap_ms[origin]

    def gap_closed(self, key: Key, origin: str) -> None:
        of_origin = self._deadlines.get(origin)
        if of_origin is not None:
            of_origin.discard(key)

    def gap_skipped(self, step: Step, key: Key, origin: str, expected: int, n: int) -> None:
        """Rule R45: rows that did not come in time are named with both numbers; the next one is taken."""
        self.gap_closed(key, origin)
        self._note(step, key, origin, SKIPPED * min(n - expected, RECENT_MAX))
        self.refused(step, RefusedNumber(key, origin, n, expected))

    @property
    def next_deadline_ms(self) -> float | None:
        """When the gap that has been open for longest is closed; None: no gap is open."""
        firsts = [next(iter(keys.values())) for keys in self._deadlines.values() if keys]
        return min(firsts, default=None)

    def overdue(self, now_ms: float) -> Iterator[tuple[Key, str]]:
        """The gaps that have been open for too long; they are in the order in which they opened."""
        for origin, keys in self._deadlines.items():
            for key, deadline_ms in list(keys.items()):
                if deadline_ms > now_ms:
                    break
                yield key, origin

    # -- keys that arrive and leave ------------------------------------------------------------

    def give(self, step: Step, keys: KeySet, leaves: Callable[[Key], bool]) -> dict[Key, dict[str, bytes]]:
        """Remove and return what is known of keys that leave."""
        given = {key: self.recent[key] for key in self.recent.of(keys) if leaves(key)}
        for key in given:
            del self.recent[key]
            step.delete(("recent", self._inbox, key))
        for of_origin in self._deadlines.values():
            for key in [key for key in of_origin.of(keys) if leaves(key)]:
                del of_origin[key]  # the next sequencer holds what is held here, and waits again
        return given

    def install(self, step: Step, recent: dict[Key, dict[str, bytes]]) -> None:
        """Rule R45: what is known of a key travels with it."""
        for key, of_key in recent.items():
            self.recent[key] = dict(of_key)
            step.put(("recent", self._inbox, key), dict(of_key))
