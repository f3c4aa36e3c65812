"""Windows of a number of rows of a key, in the order of their arrival, made of panes.

Responsible for: which pane a row is in, when a window is complete.
Not responsible for: the aggregates (aggregates.py), sizes (windows.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.operators.aggregates import Aggregate, bound
from tiercel.operators.plan import Plan
from tiercel.operators.time_windows import WindowOutput
from tiercel.operators.windows import CountWindow


def plan_count_windows(
    schema: t.StructType, key: Sequence[str], window: CountWindow, aggregates: Sequence[Aggregate]
) -> Plan:
    """Aggregates of rows with this schema, by key and window; `window` has the numbers of its rows."""
    what = "count window"
    output = WindowOutput(schema, key, t.LongType(), bound(aggregates, schema, what), what)
    if window.pane < window.size:
        output.refuse_without_merge("a sliding window")
    return Plan("window", CountWindows(window, output), output.schema)


class CountWindows(StatefulProcessor):
    """Aggregates of the last rows of a key. State: how many rows there were, and the panes."""

    def __init__(self, window: CountWindow, output: WindowOutput) -> None:
        self._window, self._output = window, output

    def init(self, handle: StatefulProcessorHandle) -> None:
        start = t.StructType().add("start", t.LongType())
        self._panes = handle.getMapState("panes", start, self._output.state())
        self._count = handle.getValueState("count", t.StructType().add("rows", t.LongType()))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        window, output = self._window, self._output
        (count,) = self._count.get() or (0,)
        for row in rows:
            pane = count - count % window.pane
            kept = self._panes.getValue((pane,))
            buffers = output.empty if kept is None else list(kept)
            output.step(buffers, tuple(row), count)
            self._panes.updateValue((pane,), tuple(buffers))
            count += 1
            if count >= window.size and (count - window.size) % window.slide == 0:
                yield self._result(key, count)
        self._count.update((count,))

    def _result(self, key: Any, end: int) -> Row:
        window = self._window
        start = end - window.size
        merged: Any = None
        for pane in range(start, end, window.pane):
            part: Any = self._panes.getValue((pane,))
            merged = part if merged is None else self._output.merge(merged, part)
            if pane < start + window.slide:
                self._panes.removeKey((pane,))
        return self._output.row(key, start, end, merged)

    def close(self) -> None:
        """Nothing to release."""
