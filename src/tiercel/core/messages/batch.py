"""Messages between a task of a user's micro-batch and the router of its site."""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.model.keys import Key


class BatchTask(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a batch task: every attempt of the task has the same one, except in a feed.

    Rows of a feed are staged under their `attempt`, and one attempt of each partition is published.
    """

    query: str  # Spark's id of the query, which its checkpoint keeps
    batch: int
    partition: int
    attempt: str = ""  # of a feed: a name that no other attempt has


class BatchBegin(Message, frozen=True):
    """A batch task asks what the router knows of it; the router answers `BatchBegun` or `BatchRefused`."""

    task: BatchTask
    stream: str  # the one that its rows go to
    timers: tuple[int, int] | None = None  # it has no rows, but the outputs of timers at these places, (a, b]


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
    numbers: tuple[int, ...] = ()  # of a stream whose devices number their rows: the number of each row


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


class TimerQuery(Message, frozen=True):
    """A query asks for outputs of timers. All of its batches that have begun are committed.

    The answer comes when there is a place with such outputs after `after`; with `settled` also when
    everything that has entered is processed.
    """

    stream: str  # the operator's input
    after: int
    settled: bool = False


class TimerPlaces(Message, frozen=True):
    """Outputs of timers are in the output log, at places up to `last`."""

    stream: str
    last: int


class Unsubscribe(Message, frozen=True):
    """A subscriber needs no more entries of this stream; its connection stays."""

    stream: str
