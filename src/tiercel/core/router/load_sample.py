"""The load of one operator's rows that enter at one site: how many, in which slots, of which keys.

Responsible for: a count of all rows; a sample of them by slot and by key, in bounded memory; rates that
    forget what is older than some seconds.
Not responsible for: readers and what waits for them (core/logs), reporting it (runtime/process/metrics.py).

One row in many is looked at, some 200 a second, so that the path of the others stays as short as it was. A
stride that is a prime meets no rhythm of a producer. Keys are counted by the space-saving sketch: a new key
takes the place of the lightest one, with its count as possible error, and only the count above the error is
reported.
"""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

import msgspec

from tiercel.core.model.bundle import is_bundle, keys_of
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row
from tiercel.core.model.routing import slot_of
from tiercel.core.model.row_batch import count_rows

T = TypeVar("T")

STRIDES = (1, 3, 7, 13, 29, 61, 127, 251, 509, 1_021, 2_039, 4_093)  # one row of so many is sampled
STRIDE_AT_FIRST = 61
SAMPLES_MIN = 5  # of a slot or key, with what is left of older ones: fewer say nothing about its load
SAMPLES_PER_S = 200
KEYS_MAX = 64  # counted at once
FADE = 0.8  # part of a count that is left after a second
SLOTS_REPORTED_MAX = 64
KEYS_REPORTED_MAX = 16
SENT_ON_MAX = 8_192  # keys counted at once; others are counted when they come again
SENT_ON_REPORTED_MAX = 512  # in one report; others follow in the next one
NEGLIGIBLE = 1.0  # rows per second: such a count is forgotten


class ReaderLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one instance gets to read."""

    arrived: int  # rows logged for it, by this incarnation of the router
    lag_rows: int  # of them, not processed
    oldest_at_ms: int  # log time of the oldest one that was not processed; 0: none


class InboxLoad(msgspec.Struct, frozen=True):
    """The load of one operator at one site."""

    entered: int  # rows that entered at this site, by this incarnation of the router
    slots: dict[int, float]  # heaviest slots of them -> rows per second
    keys: list[tuple[Key, float]]  # heaviest keys of them, heaviest first
    readers: dict[str, ReaderLoad]
    sent_on: list[tuple[Key, int]] = []  # keys whose rows went on to their owner at another site -> rows


class LoadSample:
    """Counts and samples the rows of one operator that enter at one site."""

    def __init__(self, slots: int) -> None:
        self._slot_count = slots
        self.entered = 0
        self._entered_before = 0
        self._stride = self._until_next = STRIDE_AT_FIRST
        self._sent_on: dict[Key, int] = {}
        self._slots: dict[int, float] = {}
        self._keys: dict[Key, float] = {}
        self._errors: dict[Key, float] = {}  # of keys that took the place of another one

    def count_sent_on(self, rows: list[Row]) -> None:
        """Count rows, by key, that go on to their owner at another site. Other rows are not looked at."""
        counts = self._sent_on
        for row in rows:
            if row[0] in counts or len(counts) < SENT_ON_MAX:
                counts[row[0]] = counts.get(row[0], 0) + 1

    def take_sent_on(self) -> list[tuple[Key, int]]:
        """Some of what was counted, oldest keys first; it is forgotten then."""
        keys = list(islice(self._sent_on, SENT_ON_REPORTED_MAX))
        return [(key, self._sent_on.pop(key)) for key in keys]

    def count(self, rows: list[Row], count: int) -> None:
        """Count rows that enter, `count` of them with those inside row batches."""
        self.entered += count
        if rows and (is_bundle(rows[0][0]) or is_bundle(rows[-1][0])):
            self._count_bundles(rows)
            return
        self._until_next -= len(rows)
        if self._until_next <= 0:
            self._sample(rows)

    def _count_bundles(self, rows: list[Row]) -> None:
        """Count the rows of bundles one by one; bundles with no row to look at stay closed."""
        for row in rows:
            count = count_rows([row]) if is_bundle(row[0]) else 1
            self._until_next -= count
            if self._until_next <= 0:
                self._sample([(key, 0, None) for key in keys_of(row)] if is_bundle(row[0]) else [row])

    def _sample(self, rows: list[Row]) -> None:
        place = len(rows) + self._until_next - 1
        while place < len(rows):
            row = rows[place]
            key = keys_of(row)[0] if is_bundle(row[0]) else row[0]  # a bundle between other rows
            self._add(key, count_rows([row]) * self._stride)
            place += self._stride
        self._until_next = place - len(rows) + 1

    def _add(self, key: Key, weight: float) -> None:
        slot = slot_of(key, self._slot_count)
        self._slots[slot] = self._slots.get(slot, 0.0) + weight
        keys = self._keys
        if key in keys:
            keys[key] += weight
        elif len(keys) < KEYS_MAX:
            keys[key] = weight
        else:
            lightest = min(keys, key=keys.__getitem__)
            least = keys.pop(lightest)
            self._errors.pop(lightest, None)
            keys[key] = least + weight
            self._errors[key] = least

    def each_second(self) -> tuple[dict[int, float], list[tuple[Key, float]]]:
        """The heaviest slots and keys in rows per second. Call it once a second: older counts fade."""
        to_rate = 1 - FADE  # a count is the sum of what is left of all seconds
        enough = SAMPLES_MIN * self._stride
        slots = _heaviest({s: n for s, n in self._slots.items() if n >= enough}, SLOTS_REPORTED_MAX)
        certain = {key: count - self._errors.get(key, 0.0) for key, count in self._keys.items()}
        keys = _heaviest({key: n for key, n in certain.items() if n >= enough}, KEYS_REPORTED_MAX)
        per_sample = (self.entered - self._entered_before) / SAMPLES_PER_S
        self._entered_before = self.entered
        self._stride = next((stride for stride in STRIDES if stride >= per_sample), STRIDES[-1])
        found = (
            {slot: round(count * to_rate, 1) for slot, count in slots},
            [(key, round(count * to_rate, 1)) for key, count in keys],
        )
        self._slots = {slot: count * FADE for slot, count in self._slots.items() if count > NEGLIGIBLE}
        self._keys = {key: count * FADE for key, count in self._keys.items() if count > NEGLIGIBLE}
        self._errors = {key: error * FADE for key, error in self._errors.items() if key in self._keys}
        return found


def _heaviest(counts: dict[T, float], limit: int) -> list[tuple[T, float]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:limit]
