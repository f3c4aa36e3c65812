"""Times as milliseconds since 1970, which is how operators of applications keep them in state.

Responsible for: from a timestamp to milliseconds and back, exactly.
Not responsible for: what the times mean.
"""

from __future__ import annotations

import datetime

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MS = datetime.timedelta(milliseconds=1)


def to_ms(time: datetime.datetime) -> int:
    """Milliseconds since 1970; a time without a zone is one of this process's zone, as in PySpark."""
    if time.tzinfo is None:
        time = time.astimezone(datetime.UTC)
    return (time - EPOCH) // MS


def from_ms(ms: int) -> datetime.datetime:
    return EPOCH + ms * MS
