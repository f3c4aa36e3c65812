"""What really happened in a run: every log as it is on disk, every move, who emitted when.

Responsible for: facts for the checkers. Logs are kept whole here, also where they were trimmed.
Not responsible for: judging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.core import messages as m
from tiercel.core.effects import Effect, Send, StorageKey, Write
from tiercel.core.events import Durable, Event, Received, TimerFired
from tiercel.core.records import Abort, Adopt, Begin, Compare, Done, Entry, Flip


class Recorder:
    """Collects facts while a run goes on."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, str], dict[int, Entry]] = {}  # (site, operator) -> offset -> entry
        self.requests: dict[str, m.MoveRequest] = {}
        self.phases: dict[str, str] = {}  # move -> last durable or spoken phase at its source's router
        self.move_messages = 0

    def wrote(self, site: str, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                for key, value in effect.puts.items():
                    if key[0] == "inbox" and isinstance(value, Entry):
                        self.logs.setdefault((site, key[1]), {})[key[2]] = value
                    elif key[0] == "departure":
                        self.requests[key[1]] = value.request

    def recovered(self, site: str, items: dict[StorageKey, Any]) -> None:
        """After a crash: what was not durable never happened."""
        for (at, operator), log in self.logs.items():
            if at == site:
                head = items.get(("head", operator), (0,))[0]
                for offset in [o for o in log if o > head]:
                    del log[offset]


def steps_of(event: Event, effects: Sequence[Effect]) -> list[tuple[str, str]]:
    """The protocol steps that an event is: (move, name of the step)."""
    match event:
        case Received(message=m.LaneFrame(notice=notice)) if notice is not None:
            return [(notice.move, type(notice).__name__)]
        case Received(message=m.Dispatch(entries=entries)):
            return [
                (e.control.move, f"Dispatch:{type(e.control).__name__}")
                for e in entries
                if isinstance(e.control, Begin | Compare | Abort | Flip | Adopt | Done)
            ]
        case Received(message=m.Said(message=message)) | Received(message=message):
            move = getattr(message, "move", None)
            return [(move, type(message).__name__)] if move else []
        case TimerFired(name=name) if name.startswith("capture|"):
            return [(name[8:], "timer:capture")]
        case Durable():
            sent = [e.message for e in effects if isinstance(e, Send)]
            plain: list[Any] = [s.message if isinstance(s, m.Said) else s for s in sent]
            return [(p.move, f"Durable>{type(p).__name__}") for p in plain if getattr(p, "move", None)]
        case _:
            return []
