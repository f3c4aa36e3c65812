"""Tumbling and sliding windows of event time, made of panes.

Responsible for: which panes a row changes, when a window's result is emitted, when a pane is forgotten.
Not responsible for: the aggregates (aggregates.py), sizes (windows.py).

    size 5, slide 2, pane gcd(5, 2) = 1        a row changes one pane, however many windows hold it
    panes    |0|1|2|3|4|5|6|7|
    window    [0 . . . 5)                      its result is the merge of its panes, emitted
    window        [2 . . . 7)                  when the watermark reaches its end

With an allowed lateness a window stays until the watermark reaches its end plus the lateness. A row that
arrives for it after its result was emitted makes the result come again, as it is then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.errors import UserError
from tiercel.operators.aggregates import Aggregate, BoundAggregate, bound
from tiercel.operators.durations import US_PER_MS
from tiercel.operators.plan import Plan
from tiercel.operators.values import (
    LateRow,
    distinct_names,
    event_time_of,
    from_micros,
    key_fields,
    row_of,
    timer_ms,
    to_micros,
)
from tiercel.operators.windows import TimeWindow

NEVER = -(1 << 62)  # before any time


class WindowOutput:
    """The rows that windows emit: the key, `window` with `start` and `end`, then the aggregates.

    With `window_time`, a column of that name holds the last moment of the window, as Spark's window_time.
    """

    def __init__(
        self,
        schema: t.StructType,
        key: Sequence[str],
        kind: t.DataType,
        aggregates: tuple[list[str], list[BoundAggregate]],
        what: str,
        window_time: str = "",
    ) -> None:
        self.names, self.aggregates = aggregates
        bounds = t.StructType().add("start", kind).add("end", kind)
        self.schema = t.StructType(key_fields(schema, key, what)).add("window", bounds)
        for name, aggregate in zip(self.names, self.aggregates, strict=True):
            self.schema.add(name, aggregate.result_type)
        if window_time:
            self.schema.add(window_time, kind)
        self._times = window_time != ""
        distinct_names(self.schema.names, what, "give an aggregate another name: .alias('...')")
        self._row, self._window = row_of(self.schema.names), row_of(bounds.names)
        self._show = (
            from_micros(kind) if isinstance(kind, t.TimestampType | t.TimestampNTZType) else (lambda at: at)
        )

    def row(self, key: Sequence[Any], start: int, end: int, buffers: Sequence[Any]) -> Row:
        window = self._window([self._show(start), self._show(end)])
        results = [each.result(b) for each, b in zip(self.aggregates, buffers, strict=True)]
        return self._row([*key, window, *results, *([self._show(end - 1)] if self._times else [])])

    def state(self, *before: tuple[str, t.DataType]) -> t.StructType:
        """A column for the buffer of each aggregate, behind others."""
        found = t.StructType()
        for name, kind in before:
            found.add(name, kind)
        for n, aggregate in enumerate(self.aggregates):
            found.add(f"aggregate_{n}", aggregate.state_type)
        return found

    @property
    def empty(self) -> list[Any]:
        return [each.empty for each in self.aggregates]

    def step(self, buffers: list[Any], values: Sequence[Any], order: int) -> None:
        """Take one more row into these buffers."""
        for n, aggregate in enumerate(self.aggregates):
            buffers[n] = aggregate.step(buffers[n], values, order)

    def merge(self, earlier: Sequence[Any], later: Sequence[Any]) -> list[Any]:
        return [
            each.merge(one, other) for each, one, other in zip(self.aggregates, earlier, later, strict=True)
        ]

    def refuse_without_merge(self, what: str) -> None:
        for name, aggregate in zip(self.names, self.aggregates, strict=True):
            if not aggregate.merges:
                raise UserError(
                    f"{what}: the aggregate {name!r} cannot be merged, and these windows are made of parts",
                    expected="fold(..., merge=function of an earlier and a later state)",
                )


def plan_time_windows(
    schema: t.StructType,
    key: Sequence[str],
    event_time: str,
    window: TimeWindow,
    aggregates: Sequence[Aggregate],
    *,
    lateness_ms: int = 0,
    window_time: str = "",
) -> Plan:
    """Aggregates of rows with this schema, by key and window."""
    what = "window"
    place = event_time_of(schema, event_time, what)
    kind = schema.fields[place].dataType
    output = WindowOutput(schema, key, kind, bound(aggregates, schema, what), what, window_time)
    if window.pane < window.size:
        output.refuse_without_merge("a sliding window")
    processor = TimeWindows(window, output, place, to_micros(kind), lateness_ms * US_PER_MS)
    return Plan("window", processor, output.schema, "eventTime", window_time)


class TimeWindows(StatefulProcessor):
    """Aggregates by window of event time. State: the panes, and up to which end results were emitted."""

    def __init__(
        self, window: TimeWindow, output: WindowOutput, place: int, micros: Any, lateness: int
    ) -> None:
        self._window, self._output, self._lateness = window, output, lateness
        self._place, self._micros = place, micros

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        start = t.StructType().add("start", t.LongType())
        self._panes = handle.getMapState("panes", start, self._output.state())
        self._emitted = handle.getValueState("emitted", t.StructType().add("end", t.LongType()))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        window, output, panes = self._window, self._output, self._panes
        watermark = timerValues.getCurrentWatermarkInMs() * US_PER_MS or NEVER
        emitted = self._emitted_end()
        changed: dict[int, list[Any]] = {}
        for row in rows:
            values = tuple(row)  # a Row is read by its place several times more slowly
            time = self._micros(values[self._place])
            pane = window.pane_of(time)
            if window.last_end(pane) + self._lateness <= watermark:
                raise LateRow(_late(time, window, self._lateness, watermark))
            if window.first_end(pane) + self._lateness <= watermark:
                emitted = max(emitted, watermark - self._lateness)  # its first windows are closed
                self._emitted.update((emitted,))
            buffers = changed.get(pane)
            if buffers is None:
                kept = panes.getValue((pane,))
                buffers = changed[pane] = output.empty if kept is None else list(kept)
                if kept is None:
                    self._set_timers(pane, emitted)
            output.step(buffers, values, time)
        for pane, buffers in changed.items():
            panes.updateValue((pane,), tuple(buffers))
        if emitted > NEVER:
            again = {end for pane in changed for end in self._ends(pane, NEVER, emitted)}
            yield from self._results(key, sorted(end for end in again if end + self._lateness > watermark))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        window = self._window
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        watermark = max(timerValues.getCurrentWatermarkInMs(), expiry) * US_PER_MS
        emitted = self._emitted_end()
        starts = [start for (start,), _ in self._panes.iterator()]
        due = {end for start in starts for end in self._ends(start, emitted, watermark)}
        yield from self._results(key, sorted(due))
        stay = [start for start in starts if window.last_end(start) + self._lateness > watermark]
        for start in starts:
            if start not in stay:
                self._panes.removeKey((start,))
        if not stay:
            self._emitted.clear()
            return
        self._emitted.update((max(watermark, emitted),))
        for start in stay:
            self._set_timers(start, max(watermark, emitted))

    def _emitted_end(self) -> int:
        found = self._emitted.get()
        return NEVER if found is None else int(found[0])

    def _ends(self, pane: int, above: int, up_to: int) -> range:
        """The ends of windows that hold this pane, above one time and up to another."""
        window = self._window
        first = window.first_end(pane) if above < pane else window.next_end(above)
        return range(first, min(window.last_end(pane), up_to) + 1, window.slide)

    def _set_timers(self, pane: int, emitted: int) -> None:
        """One at the next end of a window that holds the pane; one for the time when it may be forgotten."""
        window = self._window
        for end in self._ends(pane, emitted, window.last_end(pane))[:1]:
            self._handle.registerTimer(timer_ms(end))
        if self._lateness:
            self._handle.registerTimer(timer_ms(window.last_end(pane) + self._lateness))

    def _results(self, key: Any, ends: Sequence[int]) -> Iterator[Row]:
        """The results of the windows with these ends; panes that they share are read once."""
        window, output = self._window, self._output
        panes: dict[int, Any] = {}
        for end in ends:
            start, merged = end - window.size, None
            for pane in range(start, end, window.pane):
                if pane not in panes:
                    panes[pane] = self._panes.getValue((pane,))
                part = panes[pane]
                if part is not None:
                    merged = part if merged is None else output.merge(merged, part)
            if merged is not None:
                yield output.row(key, start, end, merged)

    def close(self) -> None:
        """Nothing to release."""


def _late(time: int, window: TimeWindow, lateness: int, watermark: int) -> str:
    show = from_micros(t.TimestampType())
    allowed = f", {lateness // US_PER_MS} ms of lateness included" if lateness else ""
    closed = show(window.last_end(window.pane_of(time)) + lateness)
    return (
        f"event time {show(time).isoformat()}: its last window closed at {closed.isoformat()}{allowed}, "
        f"and the watermark is {show(watermark).isoformat()}"
    )
