"""The program of one site in `tiercel demo --edges`: the same at every site, each a Spark application.

Responsible for: the graph, and in the cloud the mobility policy; a line of JSON a second about what happens.
Not responsible for: starting it, the cars, the audit (edges.py).

    python -m tiercel.demo.edge_program FILE SITE STORAGE
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import tiercel

POSITION = "car string, seq long, speed double"
SPEED = "car string, seq long, n long, mean double"
CLOUD = "cloud"


def mean_speed(state: tuple[int, float], row: Any) -> tuple[tuple[int, float], tuple[Any, ...]]:
    """Counts a car's rows, and keeps its mean speed."""
    n, total = state[0] + 1, state[1] + row.speed
    return (n, total), (row.car, row.seq, n, total / n)


def declare(live: tiercel.Live) -> None:
    positions = live.stream("positions", POSITION, key="car", sequence="seq", gap="30 seconds")
    positions.fold(
        mean_speed,
        (0, 0.0),
        SPEED,
        state_schema="n long, total double",
        name="speed",
        instances={CLOUD: 1, "edge": 1},
    )


def main(file: str, site: str, storage: str) -> None:
    spark = tiercel.session(f"demo-{site}", slots=6)
    with tiercel.start(spark, deployment=file, site=site, storage=storage) as live:
        declare(live)
        live.deploy()
        if site == CLOUD:
            stayed = tiercel.Threshold(seconds=2)
            live.mobility("speed", mobility=tiercel.Threshold(tuples=3), wait=stayed)
        print(json.dumps({"state": "deployed", "site": site}), flush=True)
        for line in sys.stdin:  # a list of cars: where are their keys?
            cars = json.loads(line)
            found: dict[str, Any] = {"at_s": time.time()}
            if site == CLOUD:
                found["owners"] = live.owners("speed", cars)
                found["hand_overs"] = [str(one) for one in live.hand_overs()]
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except tiercel.UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
