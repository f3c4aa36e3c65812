"""A driver that may die at any moment: files -> feed -> operator -> parquet, continued where it was.

Rows without a car do not fit the stream: they must be dead letters.

python driver.py DIRECTORY ROWS        ends when the sink holds that many rows, and writes down what it holds
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel

INPUT = "car string not null, seq long"
OUTPUT = "car string, seq long, count long, chain string"
FOUND = "found.json"
LETTERS = "letters.json"


def chained(chain: str, seq: int) -> str:
    """Differs for every order, for a row too many and a row too few."""
    return hashlib.sha256(f"{chain} {seq}".encode()).hexdigest()[:16]


class Chain(StatefulProcessor):
    """Counts rows, and remembers in which order they came."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("state", "count long, chain string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, chain = self.state.get() or (0, "")
        for row in rows:
            count, chain = count + 1, chained(chain, row.seq)
            yield Row(car=key[0], seq=row.seq, count=count, chain=chain)
        self.state.update((count, chain))

    def close(self) -> None:
        pass


def main(directory: Path, rows: int) -> None:
    spark = tiercel.session("driver", slots=8)
    sink = str(directory / "sink")
    with tiercel.start(spark, ["local"], directory / "storage") as live:
        cars = live.stream("cars", INPUT, key="car")
        files = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(directory / "files"))
        cars.feed(files, checkpoint=str(directory / "feed"))
        chains = cars.transform_with_state(Chain(), OUTPUT, name="chain", instances={"local": 2})
        query = (
            chains.dataframe(maxEntriesPerBatch=2)
            .writeStream.option("checkpointLocation", str(directory / "out"))
            .start(sink, format="parquet")
        )
        while query.isActive and spark.read.schema(OUTPUT).parquet(sink).count() < rows:
            time.sleep(1.0)
        query.processAllAvailable()
        query.stop()
        where = {"storage": str(directory / "storage"), "stream": cars.dead_letters.name}
        letters = spark.read.format("tiercel").options(**where).load().drop("feed").collect()
        (directory / LETTERS).write_text(json.dumps(letters), encoding="utf-8")
    found = spark.read.schema(OUTPUT).parquet(sink).collect()  # Spark knows which files of a sink count
    (directory / FOUND).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
