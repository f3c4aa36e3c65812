"""The messages between supervisor and application: one JSON object per line.

Responsible for: the form of the messages.
Not responsible for: reactions to them (application.py, supervisor.py).

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import msgspec

from tiercel.chaos.plan import Change


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The Spark application has a session."""

    application: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The deployment runs and rows flow. `continued`: moves that an earlier application had begun."""

    continued: int


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A change was accepted; `what` as in `Change`."""

    number: int
    what: str
    at_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A change has ended; `how`: done | undone | refused, with the reason."""

    number: int
    how: str
    at_s: float
    reason: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Rows sent and rows recorded, over all incarnations, and processes that were given up."""

    sent: int
    received: int
    failures: dict[str, str]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Everything that was sent is out."""

    sent: int
    received: int


class ChangeRequest(msgspec.Struct, frozen=True, tag=True):
    """Perform a change; reports about it carry its number."""

    number: int
    change: Change


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Send no more, let everything come out, end."""


Report = Opened | Ready | Begun | Ended | Heartbeat | Finished
Command = ChangeRequest | Finish

encode = msgspec.json.Encoder().encode
decode_report = msgspec.json.Decoder(Report).decode
decode_command = msgspec.json.Decoder(Command).decode
