"""The Spark application, through its SparkContext or through Spark Connect.

Responsible for: the differences between the two: slots, threads, tags, cancelling, executors that leave.
Not responsible for: what runs in it (task.py, supervisor.py), whether there is room for it (task_slots.py).

The jobs themselves are the same: `mapInArrow` and `collect` are public in both.
"""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession

from tiercel.errors import UserError
from tiercel.spark.pyspark_internals import CannotTell, ExecutorState, executor_state


class HostingJob:
    """A job whose rows are there to be counted: in Spark's UI, its SQL metrics and its listeners."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows

    def run(self) -> None:
        """Returns when the process has ended."""
        self._rows.write.format("noop").mode("overwrite").save()


class Backend(abc.ABC):
    """One application, as one session reaches it."""

    lacks: tuple[str, ...] = ()  # what works less well than through a context

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.check()
        self.application = self.setting("spark.app.id")  # sessions of one application share its slots

    def check(self) -> None:
        """Refuse a session that is stopped."""
        if self.is_stopped():
            what = "the Spark session is stopped"
            raise UserError(what, expected="a running session", hint="make one with tiercel.session()")

    def setting(self, name: str, default: str = "") -> str:
        found: str | None = self.spark.conf.get(name, default)
        return found or default

    def job(self, work: Callable[[Iterator[Any]], Iterator[Any]], tasks: int = 1) -> DataFrame:
        """A job of one task, or several at once, that runs whenever it is collected.

        Make it once, while the session runs: PySpark starts a new session when it wraps a function and finds
        none.
        """
        return self.spark.range(0, tasks, 1, tasks).mapInArrow(work, "id long")

    def hosting_job(
        self, work: Callable[[Iterator[Any]], Iterator[Any]], schema: str, profile: Any = None
    ) -> HostingJob:
        """A job of one task that hosts a process, and shows its figures as long as it runs.

        `profile` is the ResourceProfile of its task; a local master has none, and ignores it.
        """
        profile = None if self.local else profile
        return HostingJob(self.spark.range(0, 1, 1, 1).mapInArrow(work, schema, profile=profile))

    @property
    def allocates(self) -> bool:
        """Whether dynamic allocation adds executors when tasks wait."""
        return not self.local and self.setting("spark.dynamicAllocation.enabled") == "true"

    @property
    def local(self) -> bool:
        """Whether one process runs everything, so that no executor comes or goes."""
        return re.match(r"local($|\[)", self.setting("spark.master")) is not None

    @abc.abstractmethod
    def is_stopped(self) -> bool: ...

    @abc.abstractmethod
    def slots(self) -> int | None:
        """How many tasks can run at once now; None: unknown."""

    @abc.abstractmethod
    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """A thread that submits jobs; not started yet."""

    @abc.abstractmethod
    def enter(self, name: str, description: str = "") -> None:
        """Tag all later jobs of the calling thread as those of this process, and describe them."""

    @abc.abstractmethod
    def cancel(self, name: str) -> None:
        """Cancel the jobs of this process, from any thread; its worker is killed."""

    @abc.abstractmethod
    def executor(self, executor: str) -> ExecutorState:
        """Whether an executor stays, leaves or is gone."""

    def waits(self, stage: int) -> bool:
        """Whether a stage has no running task and waits for a slot. False where that is unknown."""
        return False

    @property
    @abc.abstractmethod
    def decommissions(self) -> bool:
        """Whether a decommissioned executor can be noticed before it is gone."""


class ThroughContext(Backend):
    """The session of the application itself."""

    def is_stopped(self) -> bool:
        try:
            return self.spark.sparkContext.defaultParallelism < 0
        except Exception:  # the kind of error depends on how far the stop has come
            return True

    def slots(self) -> int:
        return self.spark.sparkContext.defaultParallelism

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return InheritableThread(target=work, name=name, daemon=True)

    def enter(self, name: str, description: str = "") -> None:
        self.spark.sparkContext.addJobTag(f"tiercel:{name}")
        self.spark.sparkContext.setJobDescription(description or f"Tiercel: {name}")

    def cancel(self, name: str) -> None:
        self.spark.sparkContext.cancelJobsWithTag(f"tiercel:{name}")

    def executor(self, executor: str) -> ExecutorState:
        return executor_state(self.spark.sparkContext, executor)

    def waits(self, stage: int) -> bool:
        found = self.spark.sparkContext.statusTracker().getStageInfo(stage)
        return found is not None and found.numActiveTasks == 0

    @property
    def decommissions(self) -> bool:
        return not self.local and self.setting("spark.decommission.enabled") == "true"


class ThroughConnect(Backend):
    """A Spark Connect session: a server runs the application."""

    lacks = (
        "task slots are counted on local masters only: with too few, a start waits, then says so",
        "decommissioned executors are not noticed: call live.drain first",
        "if this program is killed, its processes run on until the server or the next start ends them",
    )

    def is_stopped(self) -> bool:
        stopped: bool = self.spark.is_stopped  # type: ignore[attr-defined]  # Connect's session has it
        return stopped

    def slots(self) -> int | None:
        found = re.fullmatch(r"local(?:-cluster)?\[(\d+)(?:,(\d+))?(?:,\d+)?\]", self.setting("spark.master"))
        if found is None:
            return None
        cluster = self.setting("spark.master").startswith("local-cluster")
        return int(found[1]) * (int(found[2]) if cluster and found[2] else 1)

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def enter(self, name: str, description: str = "") -> None:
        self.spark.addTag(f"tiercel:{name}")

    def cancel(self, name: str) -> None:
        self.spark.interruptTag(f"tiercel:{name}")

    def executor(self, executor: str) -> ExecutorState:
        raise CannotTell(executor)

    @property
    def decommissions(self) -> bool:
        return False


def backend_of(spark: SparkSession) -> Backend:
    """The backend for a `SparkSession`."""
    return ThroughConnect(spark) if ".connect." in type(spark).__module__ else ThroughContext(spark)
