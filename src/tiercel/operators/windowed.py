"""A stream with windows that waits for its aggregates: what `stream.window(...)` gives. Rates over windows.

Responsible for: `agg`, which declares the operator; the plan for any kind of window; the unit of a rate.
Not responsible for: what windows do (time_windows.py, session_windows.py, count_windows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pyspark.sql import types as t
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.operators.aggregates import Aggregate, BoundAggregate, count
from tiercel.operators.aggregates import sum as sum_of
from tiercel.operators.count_windows import plan_count_windows
from tiercel.operators.durations import US_PER_MS, Duration, lateness_ms, positive_ms
from tiercel.operators.plan import Plan
from tiercel.operators.session_windows import plan_session_windows
from tiercel.operators.time_windows import plan_time_windows
from tiercel.operators.windows import CountWindow, SessionWindow, TimeWindow, Window, check_window, sliding

Stream = TypeVar("Stream")


def plan_windows(
    schema: StructType,
    key: Sequence[str],
    event_time: str,
    window: Window,
    aggregates: Sequence[Aggregate],
    *,
    lateness: Duration | None = None,
    window_time: str = "",
) -> Plan:
    """Aggregates of rows with this schema, by key and window."""
    late = lateness_ms(lateness)
    check_window(window)
    match window:
        case TimeWindow():
            return plan_time_windows(
                schema, key, event_time, window, aggregates, lateness_ms=late, window_time=window_time
            )
        case SessionWindow() if not late:
            return plan_session_windows(schema, key, event_time, window, aggregates, window_time=window_time)
        case CountWindow() if not late and not window_time:
            return plan_count_windows(schema, key, window, aggregates)
        case SessionWindow() | CountWindow():
            raise UserError(
                f"{'lateness' if late else 'window_time'} with {window!r}",
                expected="tumbling or sliding windows of time",
                hint="a longer delay of the stream makes sessions wait for late rows",
            )


class WindowedStream(Generic[Stream]):
    """A keyed stream, and the windows that its rows are in."""

    def __init__(
        self,
        apply: Callable[[Plan, dict[str, Any]], Stream],
        plan: Callable[[Sequence[Aggregate], str], Plan],
    ) -> None:
        self._apply, self._plan = apply, plan

    def agg(self, *aggregates: Aggregate, window_time: str = "", **options: Any) -> Stream:
        """One row per key and window: the key, `window` with `start` and `end`, and each aggregate.

        `window_time` names one more column, the last moment of the window, which becomes the event time of
        the output. Other options are those of `transform_with_state`.
        """
        return self._apply(self._plan(aggregates, window_time), options)


# -- rates -------------------------------------------------------------------------------------


def plan_rate(
    schema: t.StructType,
    key: Sequence[str],
    event_time: str,
    over: Duration,
    *,
    every: Duration | None = None,
    per: Duration = "1 second",
    column: str = "",
) -> Plan:
    """Rows, or the sum of a column, in windows of length `over` every `every`, per unit of time `per`."""
    window = sliding(over, over if every is None else every)
    units = window.size / (positive_ms(per, "per") * US_PER_MS)
    counted = sum_of(column) if column else count()
    rate = Aggregate("rate", lambda rows: _PerUnit(counted.bind(rows), units))
    plan = plan_time_windows(schema, key, event_time, window, [rate])
    return plan._replace(name="rate")


class _PerUnit(BoundAggregate):
    """A count or sum, divided by the number of units that its window is long."""

    def __init__(self, counted: BoundAggregate, units: float) -> None:
        self._counted, self._units = counted, units
        self.state_type, self.result_type, self.empty = counted.state_type, t.DoubleType(), counted.empty

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        return self._counted.step(buffer, values, order)

    def merge(self, earlier: Any, later: Any) -> Any:
        return self._counted.merge(earlier, later)

    def result(self, buffer: Any) -> Any:
        total = self._counted.result(buffer)
        return None if total is None else float(total) / self._units
