"""The program of one site, as a Spark application of its own: it obeys JSON lines on its standard input.

Responsible for: declaring the same graph at every site; moves, scalings and questions on command.
Not responsible for: the process (site_process.py), the load and the verdict (run.py).

    python -m tiercel.chaos.sites.site_program FILE SITE STORAGE [SECONDS]

With seconds the clock of every router and instance of this site is so far ahead.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

import tiercel
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.host import Host
from tiercel.spark.cluster.task import build_host
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import Row, StatefulProcessor, StatefulProcessorHandle

INPUT = "car string, n long"
OUTPUT = "car string, n long, total long"


class Sums(StatefulProcessor):
    """Adds up the numbers of a car."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (total,) = self.total.get() or (0,)
        for row in rows:
            total += row.n
            yield Row(car=key[0], n=row.n, total=total)
        self.total.update((total,))

    def close(self) -> None:
        """Nothing to let go."""


def declare(live: tiercel.Live) -> None:
    cars = live.stream("cars", INPUT, key="car")
    instances = dict.fromkeys(live.graph.sites, 1)
    cars.transform_with_state(Sums(), OUTPUT, name="sums", instances=instances, outputs_at="both")


def answer(live: tiercel.Live, command: dict[str, Any]) -> Any:
    match command:
        case {"do": "move", "keys": keys, "to": to, "strategy": strategy}:
            return [str(r) for r in live.move("sums", keys=keys, to=to, strategy=strategy).wait(60.0)]
        case {"do": "scale", "instances": instances}:
            return live.scale("sums", instances).wait()
        case {"do": "leave", "site": site}:
            return live.leave(site)
        case {"do": "owners", "keys": keys}:
            return live.owners("sums", keys)
        case {"do": "autoscale", **options}:
            return live.autoscale("sums", **options)
        case {"do": "policies"}:
            return [str(decision) for decision in live.policies().history]
        case {"do": "load"}:
            return msgspec.to_builtins(live.load())
        case {"do": "status"}:
            return live.status().as_dict()
        case _:
            return {"error": f"unknown command {command!r}"}


def build_ahead(ahead_ms: float, deployment: DeploymentDir, name: str, plan: OperatorPlan | None) -> Host:
    """A process of a site whose clocks are wrong."""
    host = build_host(deployment, name, plan)
    host.shift_clock(ahead_ms)
    return host


def main(file: str, site: str, storage: str, ahead_s: str = "0") -> None:
    spark = tiercel.session(f"site-{site}", slots=6)
    with tiercel.start(spark, deployment=file, site=site, storage=storage) as live:
        if float(ahead_s):
            live.build = functools.partial(build_ahead, float(ahead_s) * 1e3)
        declare(live)
        live.deploy()
        print(json.dumps("deployed"), flush=True)
        for line in sys.stdin:
            try:
                result = answer(live, json.loads(line))
            except tiercel.UserError as error:
                result = {"error": str(error)}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except tiercel.UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
