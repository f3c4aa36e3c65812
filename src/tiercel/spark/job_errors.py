"""Reasons of failed Spark jobs, short enough to show to a user.

Responsible for: the one line that matters out of Spark's long message; the error of a process that cannot
    start.
Not responsible for: deciding what to do about a failed job (cluster/supervisor.py).
"""

from __future__ import annotations

import itertools
import re

from tiercel.errors import UserError

REASON_CHARACTERS_MAX = 1_000
_TRACEBACK = "Traceback (most recent call last):"
_SPARK_PREFIX = re.compile(r"^(.* most recent failure: .*?\): )?(: )?(org\.apache\.spark\.SparkException: )?")


def reason_of(error: Exception) -> str:
    """The reason of a failure: the end of the worker's traceback, or else Spark's own first line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    begins = [n for n, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if begins:
        after = itertools.dropwhile(lambda line: line[0].isspace(), lines[begins[-1] + 1 :])
        reason = "\n".join(itertools.takewhile(lambda line: not line[0].isspace(), after))
        reason = reason.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
    else:
        own = [line for line in lines if not line.startswith("An error occurred while calling")]
        reason = _SPARK_PREFIX.sub("", own[0]) if own else type(error).__name__
    return reason[:REASON_CHARACTERS_MAX]


def could_not_start(name: str, reason: str) -> UserError:
    what = f"{name} could not be started: {reason}"
    if "\nhint: " in reason:  # the process itself has given the expectation and the hint
        return UserError(what)
    return UserError(what, expected="a process that starts", hint="the executor's log has the whole story")
