"""Figures of the rows that pass a place of a query, batch by batch, in the query's own progress.

Responsible for: declaring the figures as SQL; reading them from a progress report.
Not responsible for: what they mean (the caller).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def observe(frame: DataFrame, name: str, **figures: str) -> DataFrame:
    """The same rows; `figures` are aggregates in SQL, such as `rows="count(*)"`."""
    columns = [f.expr(sql).alias(figure) for figure, sql in figures.items()]
    return frame.observe(name, *columns)


def observed(progress: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The figures of one batch; empty if it had none."""
    found = progress["observedMetrics"].get(name)
    if found is None:
        return {}
    return dict(found.asDict()) if hasattr(found, "asDict") else dict(found)
