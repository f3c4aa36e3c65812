"""Joins of two streams with the same key: within an interval of event time, or in the same window.

Responsible for: which rows of both sides match, how long they are kept, rows that found no match.
Not responsible for: bringing both streams to one operator; `both_sides` says how each of their rows comes.

    left  ----o-------------------->      a right row matches a left one if its event time is
    right   [--lower--o----upper--]       between left + lower and left + upper, both included

A left row is kept until no right row can match it any more: the watermark has reached left + upper. Then it
is emitted alone if the join is outer and nothing matched. For right rows it is the same with right - lower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.errors import UserError
from tiercel.operators.durations import US_PER_MS, Duration, milliseconds
from tiercel.operators.plan import Plan
from tiercel.operators.time_windows import NEVER
from tiercel.operators.values import (
    LateRow,
    distinct_names,
    event_time_of,
    from_micros,
    from_stored,
    key_fields,
    row_of,
    stored_type,
    timer_ms,
    to_micros,
    to_stored,
)
from tiercel.operators.windows import TimeWindow, Window

HOW = {
    "inner": "inner",
    "left": "left",
    "leftouter": "left",
    "left_outer": "left",
    "right": "right",
    "rightouter": "right",
    "right_outer": "right",
    "full": "full",
    "outer": "full",
    "fullouter": "full",
    "full_outer": "full",
}
LEFT, RIGHT = "left", "right"


class Side(NamedTuple):
    """One stream of a join."""

    schema: t.StructType
    key: tuple[str, ...]
    event_time: str


class JoinPlan(NamedTuple):
    """A join, and how rows of both sides come to it: as columns `left` and `right`, of which one is null."""

    plan: Plan
    schema: t.StructType  # of the rows that the processor reads
    left: AsSide
    right: AsSide


class AsSide:
    """A function for `map`: the key, and all columns of a row as one struct."""

    def __init__(self, key: Sequence[str], schema: t.StructType, side: str) -> None:
        self._places = [schema.names.index(name) for name in key]
        self.schema = t.StructType([schema[name] for name in key]).add(side, schema)
        self.__name__ = f"{side} side of a join"

    def __call__(self, row: Any) -> tuple[Any, ...]:
        values = tuple(row)
        return (*[values[n] for n in self._places], values)


def plan_join(
    left: Side,
    right: Side,
    *,
    within: Duration | tuple[Duration, Duration] | None = None,
    window: Window | None = None,
    how: str = "inner",
    suffix: str = "_right",
) -> JoinPlan:
    """A join on the key of both streams. The output has the key, the left columns, the right columns."""
    if how not in HOW:
        raise UserError(f"join how={how!r}", expected="one of: inner, left, right, full")
    if left.key != right.key:
        raise UserError(
            f"join of a stream keyed by {', '.join(left.key)} with one keyed by {', '.join(right.key)}",
            expected="the same key columns",
            hint="key_by(...) gives a stream another key; map renames a column",
        )
    keys = [key_fields(side.schema, side.key, "join") for side in (left, right)]
    for one, other in zip(*keys, strict=True):
        if one.dataType != other.dataType:
            kinds = f"{one.dataType.simpleString()} and {other.dataType.simpleString()}"
            raise UserError(f"join on {one.name}, which is {kinds}", expected="one type")
    places = [event_time_of(side.schema, side.event_time, "join") for side in (left, right)]
    matching = _interval(within, window)
    output, columns = _output(left, right, suffix, windowed=window is not None)
    sides = AsSide(left.key, left.schema, LEFT), AsSide(right.key, right.schema, RIGHT)
    schema = t.StructType([*sides[0].schema.fields, sides[1].schema.fields[-1]])
    outer = (how_ := HOW[how]) in ("left", "full"), how_ in ("right", "full")
    buffers = [
        _Buffer(side.schema, place, wait, kept)
        for side, place, wait, kept in zip((left, right), places, matching.waits, outer, strict=True)
    ]
    processor = Join(len(left.key), buffers, matching, output.names, columns)
    return JoinPlan(Plan("join", processor, output, "eventTime"), schema, *sides)


class _Matching(NamedTuple):
    """Which times match: an interval of right - left, or one window."""

    lower: int
    upper: int
    window: TimeWindow | None = None

    @property
    def waits(self) -> tuple[int, int]:
        """How long a row of each side is kept behind its own time; in a window it is kept to the end."""
        return self.upper, -self.lower

    def match(self, left: int, right: int) -> bool:
        if self.window is not None:
            return self.window.pane_of(left) == self.window.pane_of(right)
        return self.lower <= right - left <= self.upper


def _interval(within: Duration | tuple[Duration, Duration] | None, window: Window | None) -> _Matching:
    if (within is None) == (window is None):
        raise UserError(
            "join without an end to waiting" if within is None else "join with both within and window",
            expected="within='10 minutes', within=('-1 minute', '5 minutes'), or window=tumbling('1 minute')",
        )
    if window is not None:
        if not isinstance(window, TimeWindow) or window.size != window.slide:
            raise UserError(
                f"join in {window!r}", expected="tumbling('...'): windows of time that do not overlap"
            )
        return _Matching(0, 0, window)
    if isinstance(within, tuple):
        if len(within) != 2:
            raise UserError(f"within {within!r}", expected="two lengths: ('-1 minute', '5 minutes')")
        lower, upper = (milliseconds(each, "within") * US_PER_MS for each in within)
    else:
        assert within is not None
        upper = milliseconds(within, "within") * US_PER_MS
        lower = -upper
    if lower > upper:
        raise UserError(f"within {within!r}", expected="a first length of at most the second: right - left")
    return _Matching(lower, upper)


def _output(
    left: Side, right: Side, suffix: str, *, windowed: bool
) -> tuple[t.StructType, tuple[list[int], list[int]]]:
    """The columns of a match, and where those of each side are in its rows."""
    output = t.StructType([left.schema[name] for name in left.key])
    if windowed:
        kind = left.schema[left.event_time].dataType
        output.add("window", t.StructType().add("start", kind).add("end", kind))
    places: tuple[list[int], list[int]] = ([], [])
    taken = {name.lower() for name in output.names}
    for n, field in enumerate(left.schema.fields):
        if field.name not in left.key:
            output.add(field.name, field.dataType)
            places[0].append(n)
            taken.add(field.name.lower())
    for n, field in enumerate(right.schema.fields):
        if field.name not in right.key:
            name = field.name + suffix if field.name.lower() in taken else field.name
            output.add(name, field.dataType)
            places[1].append(n)
    distinct_names(output.names, "join", "give another suffix='...', or rename a column with map")
    return output, places


class _Buffer:
    """The rows of one side that may still find a match: how they are read, kept and shown."""

    def __init__(self, schema: t.StructType, place: int, wait: int, outer: bool) -> None:
        kind = schema.fields[place].dataType
        self.schema, self.wait, self.outer = schema, wait, outer
        self._place, self._micros, self._show_time = place, to_micros(kind), from_micros(kind)
        self._name = schema.names[place]
        self.store, self.show = to_stored(schema), from_stored(schema)
        self.state = t.StructType().add("matched", t.BooleanType()).add("row", stored_type(schema))

    def time_of(self, given: Any) -> int:
        return self._micros(given[self._name] if isinstance(given, dict) else given[self._place])

    def bounds(self, window: TimeWindow, time: int) -> tuple[Any, Any]:
        start = window.pane_of(time)
        return self._show_time(start), self._show_time(start + window.size)


class Join(StatefulProcessor):
    """Emits pairs as they are found. State: the rows of both sides, by event time and number."""

    def __init__(
        self,
        keys: int,
        buffers: Sequence[_Buffer],
        matching: _Matching,
        names: Sequence[str],
        columns: tuple[list[int], list[int]],
    ) -> None:
        self._keys, self._buffers, self._matching, self._columns = keys, list(buffers), matching, columns
        self._row, self._window = row_of(names), row_of(["start", "end"])

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        place = t.StructType().add("time", t.LongType()).add("number", t.LongType())
        self._rows = [
            handle.getMapState(name, place, buffer.state)
            for name, buffer in zip((LEFT, RIGHT), self._buffers, strict=True)
        ]
        self._number = handle.getValueState("number", t.StructType().add("last", t.LongType()))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        watermark = timerValues.getCurrentWatermarkInMs() * US_PER_MS or NEVER
        (first,) = self._number.get() or (0,)
        number = first
        for row in rows:
            side = 0 if row[self._keys] is not None else 1
            given = row[self._keys + side]
            buffer = self._buffers[side]
            time = buffer.time_of(given)
            if time <= watermark:
                show = from_micros(t.TimestampType())
                raise LateRow(
                    f"{(LEFT, RIGHT)[side]} row with event time {show(time).isoformat()}: the watermark is "
                    f"{show(watermark).isoformat()}"
                )
            stored, matched = buffer.store(given), False
            for place, (was, other) in self._rows[1 - side].iterator():
                pair = (time, place[0]) if side == 0 else (place[0], time)
                if self._matching.match(*pair):
                    matched = True
                    if not was:
                        self._rows[1 - side].updateValue(place, (True, other))
                    yield self._pair(key, time, *((stored, other) if side == 0 else (other, stored)))
            until = self._until(side, time)
            if until > watermark:
                number += 1
                self._rows[side].updateValue((time, number), (matched, stored))
                self._handle.registerTimer(timer_ms(until))
            elif not matched and buffer.outer:
                yield self._pair(key, time, *((stored, None) if side == 0 else (None, stored)))
        if number > first:  # a key of which no row is kept has no state
            self._number.update((number,))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        watermark = max(timerValues.getCurrentWatermarkInMs(), expiredTimerInfo.getExpiryTimeInMs())
        left = 0
        for side, buffer in enumerate(self._buffers):
            for place, (matched, stored) in sorted(self._rows[side].iterator(), key=lambda kept: kept[0]):
                if self._until(side, place[0]) > watermark * US_PER_MS:
                    left += 1
                    continue
                self._rows[side].removeKey(place)
                if not matched and buffer.outer:
                    yield self._pair(key, place[0], *((stored, None) if side == 0 else (None, stored)))
        if not left:
            self._number.clear()

    def _until(self, side: int, time: int) -> int:
        """From this watermark on no row of the other side can match one with this time."""
        window = self._matching.window
        return time + self._buffers[side].wait if window is None else window.last_end(time)

    def _pair(self, key: Any, time: int, left: Any, right: Any) -> Row:
        values: list[Any] = list(key)
        if self._matching.window is not None:
            values.append(self._window(self._buffers[0].bounds(self._matching.window, time)))
        for buffer, stored, places in zip(self._buffers, (left, right), self._columns, strict=True):
            shown = None if stored is None else buffer.show(stored)
            values += [None if shown is None else shown[n] for n in places]
        return self._row(values)

    def close(self) -> None:
        """Nothing to release."""
