"""Three successors take over from a killed instance; each row is output once in order."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare

DEAD = f"{OPERATOR}@cloud#1"


@pytest.mark.parametrize("lost", [True, False], ids=["without its disk", "with its disk"])
def test_three_successors_take_over_from_a_killed_instance(
    spark: SparkSession, tmp_path: Path, lost: bool
) -> None:
    backup = {"location": (tmp_path / "backup").as_uri(), "every_s": 0.05} if lost else None
    with tiercel.start(spark, ["cloud"], tmp_path / "storage", backup=backup) as live:
        traffic = Traffic(*declare(live, instances={"cloud": 2}))
        traffic.go_on()
        victim = next(found for found in live.status().processes if found.name == DEAD)
        os.kill(check_ours(victim.pid, [os.getpid()]), signal.SIGKILL)
        if lost:
            shutil.rmtree(live.deployment.process(DEAD))
        successors = live.recover(DEAD, over=3)
        assert successors == [f"{OPERATOR}@cloud#{n}" for n in (3, 4, 5)]
        traffic.go_on()
        slots = live.status().operators[OPERATOR]
        assert set(slots) == {f"{OPERATOR}@cloud#2", *successors}
        assert sum(slots.values()) == 4_096
        assert (
            max(slots[successor] for successor in successors)
            - min(slots[successor] for successor in successors)
            <= 1
        )
        live.move(OPERATOR, source=successors[0], to=f"{OPERATOR}@cloud#2").wait()
        live.scale(OPERATOR, {"cloud": 1}).wait()
        traffic.finish()
