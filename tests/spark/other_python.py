"""A program whose Spark workers run another Python than its own: for test_preflight.py.

python other_python.py DIRECTORY PYTHON ...        starts a deployment with each, and prints what it is told
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tiercel
from tiercel.chaos.steady_traffic import declare


def main(directory: Path, *pythons: str) -> None:
    told = []
    for n, python in enumerate(pythons):
        os.environ["PYSPARK_PYTHON"] = python
        spark = tiercel.session("other python", slots=6)
        storage = directory / f"storage-{n}"
        with tiercel.start(spark, ["cloud"], storage) as live:
            declare(live)
            try:
                live.deploy()
                told.append("nothing")
            except tiercel.UserError as error:
                told.append(str(error))
        spark.stop()
        assert [path.name for path in storage.iterdir()] == ["lock"], (
            "nothing was started: nothing is written"
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
