"""Small operators for simulator and tests, shaped like PySpark's StatefulProcessor, without PySpark.

Responsible for: exercising each kind of state and time, with results that depend on order, so that a
    lost, doubled or reordered row shows in every later output.
Not responsible for: benchmarks and examples (bench/operators.py, demo/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import msgspec

from tiercel.core.instance.user_code import BundleCode, Fold
from tiercel.core.model.bundle import bundled, open_bundle
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row
from tiercel.core.model.row_batch import join, singles
from tiercel.core.state.handle import Codec, Handle, kept_as_given

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, Any]).decode


class TimerValues:
    """Stands in for PySpark's TimerValues."""

    __slots__ = ("_time_ms", "_watermark_ms")

    def __init__(self, time_ms: int, watermark_ms: int) -> None:
        self._time_ms = time_ms
        self._watermark_ms = watermark_ms

    def getCurrentProcessingTimeInMs(self) -> int:
        return self._time_ms

    def getCurrentWatermarkInMs(self) -> int:
        return self._watermark_ms


class ExpiredTimer:
    """Stands in for PySpark's ExpiredTimerInfo."""

    __slots__ = ("_expiry_ms",)

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms

    def getExpiryTimeInMs(self) -> int:
        return self._expiry_ms


def encoded(rows: Iterable[Row], *, joins: bool = True) -> list[Row]:
    """Rows with their payloads as bytes, those of a key in runs: as producers send them, and instances.

    A run has one event time, so each payload takes its own along; the run has that of its first row.
    """
    first: dict[Key, int] = {}
    made: list[Row] = []
    for key, event_time, payload in rows:
        made.append(
            (key, first.setdefault(key, event_time) if joins else event_time, _encode((event_time, payload)))
        )
    return [(key, first[key], payload) for key, _, payload in join(made)] if joins else made


def plain(row: Row) -> list[Row]:
    """The rows of a run, or of a single one, as they were before they were encoded."""
    found: list[Row] = []
    for key, event_time, payload in singles(row):
        if type(payload) is bytes:
            event_time, payload = _decode(payload)
            payload = _tuples(payload)
        elif type(payload) in (tuple, list) and type(payload[-1]) is bytes and len(payload) == 2:
            event_time, inner = _decode(payload[1])  # with the number of its input
            payload = (payload[0], _tuples(inner))
        found.append((key, event_time, payload))
    return found


def in_bundles(rows: list[Row], slots: int, n: int, *, timed: bool) -> list[Row]:
    """Single encoded rows as the bundles of the nth frame: of all slots, of half of them, a quarter, ..."""
    return bundled(rows, slots, max(1, slots >> n % 4), timed=timed)


class PlainBundles:
    """How the simulated operators read bundles: their outputs may have other keys, and have event times."""

    joins = False

    def __init__(self, code: PlainCode) -> None:
        self._code = code

    def width(self, rows: int, slots: int) -> int:
        return max(1, slots >> rows % 4)

    def unpack(self, payload: Any) -> tuple[list[Key], list[Any]]:
        row: Row = (b"", 0, payload)
        singles_of = [one for each in open_bundle(row) for one in plain(each)]
        self._code.spend(len(singles_of))
        keys = [key for key, _, _ in singles_of]
        if self._code.fold is not None:
            return keys, singles_of
        return keys, [(event_time, content) for _, event_time, content in singles_of]

    def internal(self, output: Row) -> Row:
        return output

    def rows(self, key: Key, made: list[Row]) -> Iterable[Row]:
        return self._code.output_rows(key, iter(made))

    def payload(self, keys: list[Key], made: list[Any]) -> bytes:
        raise AssertionError(made)

    def advance(self, kept: Any, given: Row) -> tuple[Any, Any]:
        return self._code.processor.advance(kept, given)  # type: ignore[no-any-return]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if type(value) is list else value


class PlainCode:
    """User code whose rows are (event time, payload) and whose outputs are rows as they are.

    `folded`: a processor that has a step function too is run by that. It must not make a difference.
    `encodes`: its outputs are bytes, and those of one call are runs. A fold has a call for each row.
    `joins`: False where an operator is in event time, as then each row has its own.
    `bundles`: it reads bundles; otherwise they are taken apart for it.
    `row_ms`: the simulated time of one row; `take_spent_ms` returns the sum since its last call.
    """

    fold: Fold | None = None
    bundles: BundleCode | None = None

    def __init__(
        self,
        processor: Any,
        *,
        folded: bool = False,
        encodes: bool = False,
        row_ms: float = 0.0,
        joins: bool = True,
        bundles: bool = False,
    ) -> None:
        self.processor = processor
        self._row_ms = row_ms
        self._spent_ms = 0.0
        self._encodes = encodes
        steps = hasattr(processor, "advance")
        self._joins = joins and not steps
        if folded and steps:
            self.fold = Fold("digest", self._advance)
        if bundles:
            self.bundles = PlainBundles(self)

    def state_codec(self, name: str, schema: Any) -> Codec:
        return kept_as_given(name, schema)

    def user_key(self, key: Key) -> tuple[Key]:
        return (key,)

    def timer_key(self, user_key: tuple[Key]) -> tuple[Key]:
        return user_key

    def user_rows(self, rows: list[Row]) -> Iterator[tuple[int, Any]]:
        mine = [(one[1], one[2]) for row in rows for one in plain(row)]
        self.spend(len(mine))
        return iter(mine)

    def output_row(self, key: Key, output: Any) -> Row:
        return encoded([output])[0] if self._encodes else output

    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterable[Row]:
        return encoded(outputs, joins=self._joins) if self._encodes else outputs

    def _advance(self, kept: Any, row: Row) -> tuple[Any, list[Row]]:
        made: list[Row] = []
        self._spent_ms += self._row_ms
        for one in plain(row):
            kept, output = self.processor.advance(kept, one)
            made.append(output)
        return kept, encoded(made, joins=False) if self._encodes else made

    def spend(self, rows: int) -> None:
        """The simulated time of these rows passes."""
        self._spent_ms += self._row_ms * rows

    def take_spent_ms(self) -> float:
        """The simulated time of user code since the last call of this."""
        spent_ms, self._spent_ms = self._spent_ms, 0.0
        return spent_ms

    def timer_values(self, time_ms: int, watermark_ms: int) -> TimerValues:
        return TimerValues(time_ms, watermark_ms)

    def expired_timer(self, expiry_ms: int) -> ExpiredTimer:
        return ExpiredTimer(expiry_ms)


def mix(digest: int, value: object) -> int:
    """A running digest: it differs for ever after one value is missing, double or out of order."""
    return crc32(repr(value).encode(), digest)


class Simulated:
    """Common to all: a running digest per key, emitted for every row, to the same or a coarser key."""

    time_mode = "none"

    def __init__(self, name: str, coarser: bool = False) -> None:
        self.name = name
        self.coarser = coarser

    def init(self, handle: Handle) -> None:
        self.handle = handle
        self.digest = handle.getValueState("digest", "count long, digest long")
        self.open()

    def open(self) -> None:
        """More state variables of a kind."""

    def close(self) -> None:
        """Nothing to release."""

    def to(self, key: Key) -> Key:
        return key[:2] if self.coarser else key

    def step(self, key: Key, value: Any) -> tuple[int, int]:
        count, digest = self.digest.get() or (0, 0)
        count, digest = count + 1, mix(digest, value)
        self.digest.update((count, digest))
        return count, digest

    def handleInputRows(
        self, key: tuple[Key], rows: Iterator[tuple[int, Any]], times: TimerValues
    ) -> Iterator[Row]:
        for event_time, payload in rows:
            count, digest = self.step(key[0], payload)
            yield from self.row(key[0], event_time, payload, times)
            yield (self.to(key[0]), event_time, (self.name, key[0], count, digest))

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        yield from ()

    def handleInitialState(self, key: tuple[Key], row: tuple[int, Any], times: TimerValues) -> None:
        self.step(key[0], row[1])

    def handleExpiredTimer(
        self, key: tuple[Key], timerValues: TimerValues, expiredTimerInfo: ExpiredTimer
    ) -> Iterator[Row]:
        yield from ()


class Chained(Simulated):
    """Nothing but the running digest; as a processor, and as the step of a fold."""

    def advance(self, kept: tuple[int, int] | None, row: Row) -> tuple[tuple[int, int], Row]:
        key, event_time, payload = row
        count, digest = kept or (0, 0)
        count, digest = count + 1, mix(digest, payload)
        return (count, digest), (self.to(key), event_time, (self.name, key, count, digest))


class Forgetful(Simulated):
    """Deletes its state after every second row: keys die and are born again."""

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        if (self.digest.get() or (0,))[0] % 2 == 0:
            self.digest.clear()
        yield from ()


class Listing(Simulated):
    """Collects rows in a list and empties it at five; a map counts payload classes."""

    def open(self) -> None:
        self.items = self.handle.getListState("items", "digest long")
        self.kinds = self.handle.getMapState("kinds", "kind long", "count long")

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        self.items.appendValue((mix(0, payload),))
        kind = (mix(0, payload) % 3,)
        self.kinds.updateValue(kind, ((self.kinds.getValue(kind) or (0,))[0] + 1,))
        held = list(self.items.get())
        if len(held) == 5:
            self.items.clear()
            summary = (self.name, key, "list", mix(0, held), mix(0, list(self.kinds.iterator())))
            yield (self.to(key), event_time, summary)


class Sessions(Simulated):
    """A processing-time timer per key, pushed on by every row; its expiry ends the session."""

    time_mode = "processingTime"
    gap_ms = 120

    def open(self) -> None:
        self.recent = self.handle.getValueState("recent", "digest long", ttlDurationMs=90)

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(times.getCurrentProcessingTimeInMs() + self.gap_ms)
        seen = self.recent.get()
        self.recent.update((mix(0, payload),))
        now = times.getCurrentProcessingTimeInMs()
        yield (self.to(key), event_time, (self.name, key, "recent", seen is not None, now, self.digest.get()))

    def handleExpiredTimer(
        self, key: tuple[Key], timerValues: TimerValues, expiredTimerInfo: ExpiredTimer
    ) -> Iterator[Row]:
        count, digest = self.digest.get() or (0, 0)
        self.digest.clear()
        self.recent.clear()
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        yield (self.to(key[0]), expiry, (self.name, key[0], "session", count, digest, expiry))


class Windows(Simulated):
    """Event-time windows of 100 ms in a map, closed by a timer when the watermark has passed."""

    time_mode = "eventTime"
    width_ms = 100

    def open(self) -> None:
        self.windows = self.handle.getMapState("windows", "start long", "count long, digest long")

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        start = event_time - event_time % self.width_ms
        late = start + self.width_ms <= times.getCurrentWatermarkInMs()
        count, digest = self.windows.getValue((start,)) or (0, 0)
        self.windows.updateValue((start,), (count + 1, mix(digest, payload)))
        self.handle.registerTimer(start + self.width_ms)
        if late:
            yield (self.to(key), event_time, (self.name, key, "late", mix(0, payload)))

    def handleExpiredTimer(
        self, key: tuple[Key], timerValues: TimerValues, expiredTimerInfo: ExpiredTimer
    ) -> Iterator[Row]:
        end = expiredTimerInfo.getExpiryTimeInMs()
        count, digest = self.windows.getValue((end - self.width_ms,)) or (0, 0)
        self.windows.removeKey((end - self.width_ms,))
        yield (self.to(key[0]), end, (self.name, key[0], "window", end, count, digest))


class Relapsing(Windows):
    """A closed window registers a timer that is due already: it fires with the next watermark or row."""

    def handleExpiredTimer(
        self, key: tuple[Key], timerValues: TimerValues, expiredTimerInfo: ExpiredTimer
    ) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        if expiry % self.width_ms:
            now_ms = timerValues.getCurrentWatermarkInMs()
            yield (self.to(key[0]), now_ms + 1, (self.name, key[0], "relapse", expiry, now_ms))
        else:
            yield from super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
            self.handle.registerTimer(expiry - 1)


class Choosy(Simulated):
    """Raises on some payloads, after it has changed state: the change must not survive."""

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        if mix(0, payload) % 7 == 0:
            msg = "a payload I do not like"
            raise ValueError(msg)
        yield from ()


class Mindful(Simulated):
    """Counts the rows of a call in an attribute; the count must start at zero in each call."""

    def row(self, key: Key, event_time: int, payload: Any, times: TimerValues) -> Iterator[Row]:
        self.rows_seen = getattr(self, "rows_seen", 0) + 1
        yield (self.to(key), event_time, (self.name, key, "seen", self.rows_seen, self.digest.get()))


KINDS: dict[str, type[Simulated]] = {
    "chained": Chained,
    "forgetful": Forgetful,
    "listing": Listing,
    "sessions": Sessions,
    "windows": Windows,
    "relapsing": Relapsing,
    "choosy": Choosy,
    "mindful": Mindful,
}
