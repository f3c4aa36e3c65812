"""Rows of a key without their duplicates.

Responsible for: which row is the first of its kind, and how long that is remembered.
Not responsible for: duplicates with different keys; a stream is keyed by what makes its rows the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.operators.durations import US_PER_MS, Duration, positive_ms
from tiercel.operators.plan import Plan
from tiercel.operators.time_windows import NEVER
from tiercel.operators.values import (
    Convert,
    LateRow,
    event_time_of,
    from_micros,
    key_fields,
    place_of,
    row_of,
    stored_type,
    timer_ms,
    to_micros,
    to_stored,
)


def plan_deduplicate(
    schema: t.StructType,
    key: Sequence[str],
    event_time: str,
    columns: Sequence[str] = (),
    within: Duration | None = None,
) -> Plan:
    """The first row of each key and value of these columns; another one counts again after `within`.

    With `within` it is Spark's dropDuplicatesWithinWatermark, without it dropDuplicates, which never forgets.
    """
    what = "deduplicate"
    key_fields(schema, key, what)
    places = [place_of(schema, name, what) for name in columns]
    kinds = [schema.fields[place].dataType for place in places]
    identity = t.StructType().add("here", t.BooleanType())
    for n, kind in enumerate(kinds):
        identity.add(f"column_{n}", stored_type(kind))
    read = list(zip(places, [to_stored(kind) for kind in kinds], strict=True))
    if within is None:
        return Plan(what, Deduplicated(schema.names, identity, read, None), schema)
    length = positive_ms(within, "within") * US_PER_MS
    place = event_time_of(schema, event_time, what)
    time = (place, to_micros(schema.fields[place].dataType), length)
    return Plan(what, Deduplicated(schema.names, identity, read, time), schema, "eventTime", event_time)


class Deduplicated(StatefulProcessor):
    """Emits the first of equal rows. State: what was seen, and until when that counts."""

    def __init__(
        self,
        names: Sequence[str],
        identity: t.StructType,
        read: Sequence[tuple[int, Convert]],
        time: tuple[int, Any, int] | None,
    ) -> None:
        self._identity, self._read, self._time = identity, list(read), time
        self._row = row_of(names)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._seen = handle.getMapState("seen", self._identity, t.StructType().add("until", t.LongType()))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            identity = (True, *[store(row[place]) for place, store in self._read])
            until = self._until(row, timerValues)
            if not self._seen.containsKey(identity):
                self._seen.updateValue(identity, (until,))
                yield self._row(tuple(row))

    def _until(self, row: Any, timerValues: Any) -> int:
        """When a row like this one counts again; a timer is set for it."""
        if self._time is None:
            return 0
        place, micros, length = self._time
        time = micros(row[place])
        watermark = timerValues.getCurrentWatermarkInMs() * US_PER_MS or NEVER
        if time <= watermark:
            show = from_micros(t.TimestampType())
            raise LateRow(
                f"event time {show(time).isoformat()}: the watermark is {show(watermark).isoformat()}"
            )
        self._handle.registerTimer(timer_ms(time + length))
        return int(time + length)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        watermark = max(timerValues.getCurrentWatermarkInMs(), expiredTimerInfo.getExpiryTimeInMs())
        for identity, (until,) in self._seen.iterator():
            if until <= watermark * US_PER_MS:
                self._seen.removeKey(identity)
        return iter(())

    def close(self) -> None:
        """Nothing to release."""
