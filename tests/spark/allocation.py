"""A program on a cluster with dynamic allocation: a policy scales out and in, and says what Spark did.

python allocation.py STORAGE
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import tiercel
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.control.proposals import Resize
from tiercel.control.view import View

CONF = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "3",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}
WAIT_S_MAX = 120.0


def until(happened: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        if time.monotonic() > give_up:
            sys.exit(f"error: {what}")
        time.sleep(0.2)


def main(storage: str) -> None:
    spark = tiercel.session("allocation", master="local-cluster[3,3,1024]", config=CONF)
    slots = lambda: spark.sparkContext.defaultParallelism  # noqa: E731
    wanted = {"count": 5}

    def decide(view: View, memory: Any) -> Any:
        site = next(iter(view.sites))
        return [Resize(OPERATOR, site, wanted["count"], f"{wanted['count']} are asked for")], memory

    with tiercel.start(spark, storage=storage) as live:
        traffic = Traffic(*declare(live))
        traffic.go_on()
        before = slots()
        live.policy(decide, cool_down_s=1, scale_in_after_s=2, judge_after_s=1)

        def instances() -> int:
            return len([n for n, owned in live.status().operators[OPERATOR].items() if owned])

        until(lambda: instances() == 5, f"{instances()} instances, {slots()} slots: {live.policies()}")
        grown = slots()
        traffic.go_on()
        wanted["count"] = 1
        until(lambda: instances() == 1, f"{instances()} instances: {live.policies()}")
        until(lambda: slots() < grown, f"Spark released no executor: {slots()} slots")
        left = [p.executor for p in live.status().processes]
        report = {"before": before, "grown": grown, "after": slots(), "executors": sorted(set(left))}
        traffic.go_on()
        report["rounds"] = traffic.finish()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
