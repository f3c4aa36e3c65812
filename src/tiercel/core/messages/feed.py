"""Messages between the writer of a DataFrame feed and the router of its site.

The tasks of a feed stage their rows with the messages of batch tasks (batch.py), under an attempt.
"""

from __future__ import annotations

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.messages.batch import BatchTask


class StagedPart(msgspec.Struct, frozen=True, array_like=True):
    """What the attempt that counts has staged of one partition."""

    attempt: str
    frames: int


class FeedCommit(Message, frozen=True):
    """Publish these attempts, in this order, unless the batch has been published; see `FeedPublished`."""

    task: BatchTask  # of the whole batch: no partition, no attempt
    stream: str
    parts: list[StagedPart]
    newest_ms: int = -1  # the newest event time among the rows
    consecutive: bool = True  # its number follows that of the last batch; False: it is only larger


class FeedPublished(Message, frozen=True):
    """So many frames of a batch are in the logs; `done`: all of them are durable there."""

    task: BatchTask
    frames: int
    done: bool


class FeedForget(Message, frozen=True):
    """This feed has no further batches, and none will be repeated; or this batch of it was given up."""

    feed: str
    batch: int | None = None
