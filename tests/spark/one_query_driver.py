"""A driver that may die at any moment: files -> the drop-in operator inside the query -> parquet.

python one_query_driver.py DIRECTORY ROWS        ends when the sink holds that many rows, and writes them down
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from driver import OUTPUT, Chain

import tiercel

INPUT = "car string, seq long"
FOUND = "found.json"


def main(directory: Path, rows: int) -> None:
    spark = tiercel.session("driver", slots=8)
    sink = str(directory / "sink")
    files = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(directory / "files"))
    chains = tiercel.transform_with_state(
        files.groupBy("car"), Chain(), OUTPUT, "append", "none", storage=directory / "storage", instances=2
    )
    query = chains.writeStream.option("checkpointLocation", str(directory / "out")).start(
        sink, format="parquet"
    )
    while query.isActive and spark.read.schema(OUTPUT).parquet(sink).count() < rows:
        time.sleep(0.5)
    query.processAllAvailable()
    query.stop()
    tiercel.stop_all()
    found = spark.read.schema(OUTPUT).parquet(sink).collect()
    (directory / FOUND).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
