"""What a driver tells a machine. Names are in the past tense: these things have happened.

Responsible for: the closed set of inputs of `Router`, `Instance`, `Controller`, `Producer`.
Not responsible for: messages between processes (messages.py), which arrive inside `Received`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.effects import StorageKey
from tiercel.core.records import Entry
from tiercel.core.spill import Shelf


class Connected(msgspec.Struct, frozen=True, gc=False):
    """A fresh FIFO connection with a peer exists. Everything sent before on an older one may be lost."""

    peer: str


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection with a peer broke. Messages in flight, both ways, are lost."""

    peer: str


class Received(msgspec.Struct, frozen=True, gc=False):
    """A peer's message arrived."""

    sender: str
    message: Any


class Durable(msgspec.Struct, frozen=True, gc=False):
    """`Write(seq)` and all before it are durable, as the log's durability setting defines it."""

    seq: int


class LogRead(msgspec.Struct, frozen=True, gc=False):
    """Answer to `ReadLog`."""

    inbox: str
    reader: str
    entries: list[Entry]


class CheckpointLoaded(msgspec.Struct, frozen=True, gc=False):
    """Answer to `LoadCheckpoint`: all that the last durable checkpoint holds."""

    items: dict[StorageKey, Any]
    shelf: Shelf | None = None  # reads stored versions from now on; without one all values stay in memory
    number: int = 0  # of the question
    adopted: bool = False  # our own storage holds this share, and tells nothing durable before all of it came


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    """The timer of that name is due."""

    name: str


Event = Connected | Disconnected | Received | Durable | LogRead | CheckpointLoaded | TimerFired
