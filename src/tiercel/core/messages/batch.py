"""Messages between a task of a user's micro-batch and the router of its site."""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.model.keys import Key


class BatchTask(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a batch task: every attempt of the task has the same one."""

    query: str  # Spark's id of the query, which its checkpoint keeps
    batch: int
    partition: int


class BatchBegin(Message, frozen=True):
    """A batch task asks what the router knows of it; the router answers `BatchBegun` or `BatchRefused`."""

    task: BatchTask
    stream: str  # the one that its rows go to


class BatchBegun(Message, frozen=True):
    """The outputs of this task are in the output log behind `after`; an earlier attempt sent `frames`."""

    task: BatchTask
    after: int
    frames: int


class BatchFrame(Message, frozen=True):
    """Rows of a batch task, numbered from 0 on. Of a frame that the router has, the digest is enough."""

    task: BatchTask
    frame: int
    stream: str  # the task's, or the stream of its dead letters
    digest: bytes
    rows: list[tuple[Key, int, Any]]  # the full type, so that decoding refuses malformed rows
    newest_ms: int = -1  # the newest event time among the rows


class BatchFrameTaken(Message, frozen=True):
    """A frame of a batch task is durable."""

    task: BatchTask
    frame: int


class BatchEnd(Message, frozen=True):
    """The batch task has no more rows than these frames; it waits for their outputs."""

    task: BatchTask
    frames: int


class BatchOutputs(Message, frozen=True):
    """All outputs of a batch task are in the output log, at most at `until`.

    They are the outputs of the inbox entries `offsets`.
    """

    task: BatchTask
    offsets: list[int]
    until: int


class BatchRefused(Message, frozen=True):
    """The router cannot take the rows of this batch task exactly once."""

    task: BatchTask
    reason: str


class Unsubscribe(Message, frozen=True):
    """A subscriber needs no more entries of this stream; its connection stays."""

    stream: str
