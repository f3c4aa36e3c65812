"""The reason of a failed task: the error itself, out of the many lines of Spark's message."""

from __future__ import annotations

import pytest

from tiercel.spark.job_errors import could_not_start, reason_of

PYTHON = (
    "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File x, line 1\n"
)
SPARK = "An error occurred while calling o123.collectToPython.\n: org.apache.spark.SparkException: "
LOST = "Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times, most recent failure: Lost task "
LOST += "0.0 in stage 2.0 (TID 2) (localhost executor driver): org.apache.spark.SparkException: "
CRASHED = "Python worker exited unexpectedly (crashed)."
TAKEN = "taken\nexpected: free\nhint: end: it"
FRAME = (
    "\n\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:4568)\nCaused by: java.io.X"
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (PYTHON + "tiercel.errors.UserError: " + TAKEN, TAKEN),
        (PYTHON + "KeyError\n SQLSTATE: 38000" + FRAME, "KeyError"),
        (PYTHON + "a.B: first\n\nDuring it:\n\n" + PYTHON + "c.D: last", "c.D: last"),
        (SPARK + LOST + CRASHED + FRAME, CRASHED),
        (SPARK + "[SPARK_JOB_CANCELLED] Job 4 cancelled" + FRAME, "[SPARK_JOB_CANCELLED] Job 4 cancelled"),
        ("", "ValueError"),
    ],
)
def test_reason_of_a_failed_job_is_the_error_of_the_worker(message: str, reason: str) -> None:
    assert reason_of(ValueError(message)) == reason


def test_error_of_a_process_that_could_not_start_has_one_hint() -> None:
    assert str(could_not_start("cloud", "taken\nhint: end it")).count("hint: ") == 1
    assert str(could_not_start("cloud", "KeyError")).count("hint: ") == 1
