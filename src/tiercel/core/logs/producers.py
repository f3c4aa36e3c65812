"""The producer table: the last accepted frame of each fixed producer of a site.

Responsible for: accepting each frame of a producer once, and acknowledging it.
Not responsible for: the contents of a frame (intake.py), output logs (output_log.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core import messages as m
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step


class ProducerTable:
    """The fixed producers of this site, each with one gap-free sequence over all of its incarnations."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.incarnations: dict[str, str] = {}  # producer -> the incarnation that owns the name

    def is_next(self, producer: str, seq: int) -> bool:
        """Rule R1: accept each frame of a producer once, without gaps."""
        return seq == self.marks.get(producer, 0) + 1

    def accept(self, step: Step, producer: str, seq: int) -> bool:
        """Whether this frame is the next one. A repeat is acknowledged again, a frame after a gap ignored."""
        if not self.is_next(producer, seq):
            return False
        self.marks[producer] = seq
        step.put(("producer", producer), seq)
        return True

    def load(self, key: StorageKey, value: Any) -> None:
        """Load a stored mark, or the incarnation of a producer."""
        if key[0] == "producer":
            self.recover_mark(key[1], value)
        else:
            self.incarnations[key[1]] = value

    def recover_mark(self, producer: str, seq: int) -> None:
        """Rule R1: a restarted router remembers the last frame of each producer."""
        self.marks[producer] = seq

    def acknowledge(self, step: Step, to: str, producer: str, *, greets: str | None = None) -> None:
        """Rule R9: acknowledge frames once they are durable."""
        step.send_durable(to, m.ProducerAck(producer, self.marks.get(producer, 0), greets))

    def hello(self, step: Step, to: str, hello: m.Hello) -> None:
        """Give the name to its latest incarnation. Numbers alone would not distinguish two programs."""
        incarnation = self.incarnations.get(hello.producer, "")
        if hello.again and incarnation not in ("", hello.incarnation):
            step.send_durable(to, m.ProducerFenced(hello.producer))
            return
        if hello.incarnation != incarnation:
            self.incarnations[hello.producer] = hello.incarnation
            step.put(("producer_incarnation", hello.producer), hello.incarnation)
        self.acknowledge(step, to, hello.producer, greets=hello.incarnation)
