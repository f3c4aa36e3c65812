"""Session windows: rows of a key with less than a gap between them.

Responsible for: sessions that begin, grow, merge and end, and their results.
Not responsible for: the aggregates (aggregates.py), the gap (windows.py).

A session lasts from its first row to its last one plus the gap. A row between two sessions can make them one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.operators.aggregates import Aggregate, bound
from tiercel.operators.durations import US_PER_MS
from tiercel.operators.plan import Plan
from tiercel.operators.time_windows import NEVER, WindowOutput
from tiercel.operators.values import LateRow, event_time_of, from_micros, timer_ms, to_micros
from tiercel.operators.windows import SessionWindow


def plan_session_windows(
    schema: t.StructType,
    key: Sequence[str],
    event_time: str,
    window: SessionWindow,
    aggregates: Sequence[Aggregate],
    *,
    window_time: str = "",
) -> Plan:
    """Aggregates of rows with this schema, by key and session."""
    what = "session window"
    place = event_time_of(schema, event_time, what)
    kind = schema.fields[place].dataType
    output = WindowOutput(schema, key, kind, bound(aggregates, schema, what), what, window_time)
    output.refuse_without_merge("a session window")
    processor = SessionWindows(window.gap, output, place, to_micros(kind))
    return Plan("session", processor, output.schema, "eventTime", window_time)


class SessionWindows(StatefulProcessor):
    """Aggregates by session. State: the open sessions of a key, by their start."""

    def __init__(self, gap: int, output: WindowOutput, place: int, micros: Any) -> None:
        self._gap, self._output, self._place, self._micros = gap, output, place, micros

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        start = t.StructType().add("start", t.LongType())
        self._sessions = handle.getMapState("sessions", start, self._output.state(("end", t.LongType())))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        watermark = timerValues.getCurrentWatermarkInMs() * US_PER_MS or NEVER
        stored = {start: end_and_buffers for (start,), end_and_buffers in self._sessions.iterator()}
        open_: dict[int, tuple[int, list[Any]]] = {s: (v[0], list(v[1:])) for s, v in stored.items()}
        changed: set[int] = set()
        for row in rows:
            values = tuple(row)
            time = self._micros(values[self._place])
            if time + self._gap <= watermark:
                show = from_micros(t.TimestampType())
                raise LateRow(f"event time {show(time).isoformat()}: its session ended before the watermark")
            changed.add(self._take(open_, values, time))
        for start in stored:
            if start not in open_:
                self._sessions.removeKey((start,))
                self._handle.deleteTimer(timer_ms(stored[start][0]))
        for start in sorted(changed & open_.keys()):
            end, buffers = open_[start]
            if start in stored and stored[start][0] != end:
                self._handle.deleteTimer(timer_ms(stored[start][0]))
            self._sessions.updateValue((start,), (end, *buffers))
            self._handle.registerTimer(timer_ms(end))
        return iter(())

    def _take(self, open_: dict[int, tuple[int, list[Any]]], values: Sequence[Any], time: int) -> int:
        """Add a row to the session that it belongs to, which may be several until now; its start."""
        first, end, buffers = time, time + self._gap, self._output.empty
        self._output.step(buffers, values, time)
        touching = [s for s, (ended, _) in open_.items() if s <= time + self._gap and time <= ended]
        for start in sorted(touching, reverse=True):
            ended, others = open_.pop(start)
            buffers = self._output.merge(others, buffers)
            first, end = min(first, start), max(end, ended)
        open_[first] = (end, buffers)
        return first

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        watermark = max(timerValues.getCurrentWatermarkInMs(), expiredTimerInfo.getExpiryTimeInMs())
        for (start,), (end, *buffers) in sorted(self._sessions.iterator(), key=lambda kept: kept[0]):
            if end <= watermark * US_PER_MS:
                self._sessions.removeKey((start,))
                yield self._output.row(key, start, end, buffers)

    def close(self) -> None:
        """Nothing to release."""
