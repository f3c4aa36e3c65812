"""Plain Spark as the other side of a comparison: its own queries, which may fail for a reason of Spark's own.

Spark gives a new Python process ten seconds to connect back, a constant of `PythonWorkerFactory`. Every start
of a `transformWithState` query starts such a process. On a machine that runs three Spark applications on two
cores it may take longer, and Spark then ends the query. That says nothing about Tiercel or the processor.

Responsible for: running such a query again, in an empty directory. Any other failure is passed on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

P = ParamSpec("P")
R = TypeVar("R")

TRIES = 4
NOT_CONNECTED = "Python worker failed to connect back"


def run_until_worker_connects(
    run: Callable[Concatenate[Path, P], R],
) -> Callable[Concatenate[Path, P], R]:
    """Give each try a directory of its own; only the last failure of this kind is passed on."""

    @functools.wraps(run)
    def tried(directory: Path, *args: P.args, **kwargs: P.kwargs) -> R:
        for n in range(1, TRIES):
            try:
                return run(directory / f"try-{n}", *args, **kwargs)
            except PySparkException as failure:
                if NOT_CONNECTED not in str(failure):
                    raise
        return run(directory / f"try-{TRIES}", *args, **kwargs)

    return tried


def settled(query: StreamingQuery, writer: DataStreamWriter) -> StreamingQuery:
    """The query, or the one that continues its checkpoint, once it has processed what its source has."""
    for _ in range(1, TRIES):
        try:
            query.processAllAvailable()
            return query
        except PySparkException as failure:
            if NOT_CONNECTED not in str(failure):
                raise
            query = writer.start()
    query.processAllAvailable()
    return query
