"""The base class of all messages, in its own module so that the others need not import each other."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of the messages between processes: an array that begins with the message's name."""
