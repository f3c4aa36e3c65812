"""The one place that looks behind PySpark's public face, and why.

Responsible for: what a `GroupedData` was made of. PySpark gives no public way to ask it.
Not responsible for: anything else; add here, with a reason, or not at all.
"""

from __future__ import annotations

import re

from pyspark.sql import DataFrame, GroupedData

from tiercel.errors import UserError


def grouped_frame(grouped: GroupedData) -> tuple[DataFrame, list[str]]:
    """The DataFrame and the columns of `df.groupBy(columns)`.

    The columns are in its printed form; the DataFrame is an attribute without a public name.
    """
    frame = getattr(grouped, "_df", None)
    found = re.search(r"grouping expressions: \[(.*?)\], value:", repr(grouped))
    if not isinstance(frame, DataFrame) or found is None:
        raise UserError(
            f"cannot tell what {grouped!r} groups by",
            expected="df.groupBy('column', ...)",
            hint="declare the stream: live.stream(name, schema, key=...) and feed the DataFrame to it",
        )
    columns = [part.strip().strip("`'") for part in found[1].split(",")]
    unknown = [c for c in columns if c not in frame.columns]
    if unknown:
        raise UserError(
            f"groupBy of an expression: {', '.join(unknown)}",
            expected="plain columns of the DataFrame",
            hint="give the expression a name first: df.withColumn(name, expression).groupBy(name)",
        )
    return frame, columns
