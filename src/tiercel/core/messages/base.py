"""The base of all messages; a module of its own so that the others need not import each other."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of everything that crosses a process boundary: an array that begins with its name."""
