"""What the supervisor and the application say to each other: one JSON object a line.

Responsible for: the messages.
Not responsible for: what they lead to (application.py, supervisor.py).

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
    """A change was taken on; `what` as in `Change`."""

    number: int
    what: str
    at_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A change has ended; `how`: done | undone | refused, with the reason."""

    number: int
    how: str
    at_s: float
    reason: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """All is well so far: rows sent and rows recorded, over all lives, and who was given up."""

    sent: int
    received: int
    failures: dict[str, str]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Everything that was sent is out."""

    sent: int
    received: int


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Carry a change out; answers carry its number."""

    number: int
    change: Change


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Send no more, let everything come out, end."""


Told = Opened | Ready | Begun | Ended | Beat | Finished
Asked = Wanted | Finish

encode = msgspec.json.Encoder().encode
decode_told = msgspec.json.Decoder(Told).decode
decode_asked = msgspec.json.Decoder(Asked).decode
