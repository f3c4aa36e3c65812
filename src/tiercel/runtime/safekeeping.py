"""What a process says, or is told, only once its backup holds what that rests on.

Responsible for: holding back, and knowing how far the backup is.
Not responsible for: shipping (shipping.py), sending (host.py).

An instance hears that a checkpoint is durable when the backup has it, so nothing is trimmed that it would
need again. A router's instances hear that their log is durable when its backup has that part of the log
(`Confirmed`): then no checkpoint rests on entries that a lost disk could take back, and whatever is
restored, a log is never behind the checkpoints of its readers.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.core.messages import Confirmed, Message
from tiercel.runtime.shipping import Shipper

HELD_MAX = 1_024  # per peer; each of them says all that those before it said


class Safekeeping:
    """A process's backup, as its host sees it. With `safe_first` nothing is durable before it is shipped."""

    def __init__(self, shipper: Shipper, *, safe_first: bool) -> None:
        self.shipper = shipper
        self.safe_first = safe_first
        self.shipped = 0
        self._held: dict[str, list[tuple[int, Message]]] = {}

    def start(self, on_shipped: Callable[[int], object]) -> None:
        self.shipper.start(on_shipped)

    def holds(self, to: str, message: Message, written: int) -> bool:
        """Whether this is to be said later, when what is written now is safe."""
        if self.safe_first or type(message) is not Confirmed or written <= self.shipped:
            return False
        held = self._held.setdefault(to, [])
        held.append((written, message))
        if len(held) > HELD_MAX:
            self._held[to] = held[::-2][::-1]  # every second one, and the last in any case
        return True

    def forget(self, peer: str) -> None:
        """It has gone: whatever was said to it is said again, or superseded."""
        self._held.pop(peer, None)

    def on_shipped(self, seq: int) -> list[tuple[str, Message]]:
        """What can be said now; of several to one peer the last."""
        self.shipped = max(self.shipped, seq)
        ready: list[tuple[str, Message]] = []
        for peer, held in list(self._held.items()):
            safe = [message for written, message in held if written <= self.shipped]
            ready += [(peer, message) for message in safe[-1:]]
            self._held[peer] = held[len(safe) :]
        return ready
