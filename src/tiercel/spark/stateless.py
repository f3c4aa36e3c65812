"""A processor without state: for streams that are only mapped, filtered, or given another key.

Responsible for: passing rows on. What is done to them stands in the steps in front of it (steps.py).
Not responsible for: keys; the output stream's columns say which they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


class PassOn(StatefulProcessor):
    """Every row that comes in goes out."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """No state."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        return rows

    def close(self) -> None:
        """Nothing to let go."""
