"""The interface of migration for the data path of a router, and its implementation without migration.

Responsible for: the calls of a router about moves.
Not responsible for: moves (core/migration/coordinator.py implements `Moves`).

A router built with `NoMoves` only processes rows. It is the baseline for measuring the cost of migration
while nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.logs.site_outbox import FrameId
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.model.log import OWN, Entry, Output, OutputFence, Position, Row


class Moves(Protocol):
    """The moves of a site, as the components of its router use them."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The durable tables whose items `load` accepts."""

    @property
    def count(self) -> int:
        """The number of moves that this router takes part in."""

    # -- messages and time ---------------------------------------------------------------------

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        """Handle a message about moves, from a client, another router or an instance of this site."""

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        """Handle a notice of the source router of a move, from a frame of its site."""

    def on_shadow_read(self, step: Step, move: str, entries: list[Entry]) -> None:
        """Handle entries of the log that were read for the shadow of a move."""

    def on_retry(self, step: Step) -> None:
        """Repeat messages without an answer."""

    def rows_came(self, step: Step, site: str, inbox: str, rows: list[Row]) -> None:
        """Rows that entered at another site are for keys of this one."""

    # -- outputs -------------------------------------------------------------------------------

    def leaves(self, instance: str) -> bool:
        """Whether a move out of this instance is running."""

    def refuses_output(self, instance: str, output: Output) -> bool:
        """Whether the destination of a move emits this output, not the instance."""

    def outputs_admitted(self, step: Step, instance: str) -> None:
        """The outputs of an instance have advanced."""

    def admit(self, step: Step, message: m.MoveOutputs) -> list[Output]:
        """The outputs of moving keys that were not admitted before, including dead letters."""

    def fences_of(self, move: str) -> Mapping[str, OutputFence]:
        """Stream -> where the outputs of a move's destination come at the stream's home."""

    def frame_settled(self, step: Step, frame: FrameId) -> None:
        """All contents of a frame of this site have arrived."""

    def all_emit(self, operator: str, offset: int) -> bool:
        """Whether no destination withholds outputs of the operator's entries up to this offset."""

    # -- instances -----------------------------------------------------------------------------

    def roles_of(self, instance: str, *, known: bool) -> tuple[list[m.IncomingRole], list[m.OutgoingRole]]:
        """The roles of an instance that attaches. `known`: it is the same process as before."""

    def incarnation_began(self, step: Step, instance: str) -> None:
        """A new incarnation of an instance has attached."""

    def resumed(self, step: Step, message: m.Resume) -> dict[str, Position]:
        """The position from which an instance reads each incoming move."""

    def checkpointed(self, step: Step, message: m.Checkpointed) -> dict[str, int]:
        """The incoming moves that need the log of this site, with the offset from which they need it."""

    def concern(self, instance: str) -> bool:
        """Whether any move names this instance."""

    def need(self, instance: str) -> bool:
        """Whether a move cannot end without this instance."""

    def retired(self, step: Step, instance: str) -> None:
        """An instance is gone for good."""

    # -- recovery ------------------------------------------------------------------------------

    def load(self, key: StorageKey, value: Any) -> None:
        """Load one stored item of `tables`."""

    def recover(self, step: Step) -> None:
        """Continue or undo moves, in the first step after a restart."""

    def validate(self) -> None:
        """Check that every queue is within its limit."""


class NoMoves:
    """No migration: a message about a move is a bug."""

    tables: tuple[str, ...] = ()
    count = 0

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        raise CoreBug(f"{type(message).__name__} at a router that was built without migration")

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        raise CoreBug(f"{type(notice).__name__} at a router that was built without migration")

    def on_shadow_read(self, step: Step, move: str, entries: list[Entry]) -> None:
        raise CoreBug("a shadow at a router that was built without migration")

    def on_retry(self, step: Step) -> None:
        pass

    def rows_came(self, step: Step, site: str, inbox: str, rows: list[Row]) -> None:
        pass

    def leaves(self, instance: str) -> bool:
        return False

    def refuses_output(self, instance: str, output: Output) -> bool:
        return False

    def outputs_admitted(self, step: Step, instance: str) -> None:
        pass

    def admit(self, step: Step, message: m.MoveOutputs) -> list[Output]:
        return []

    def fences_of(self, move: str) -> Mapping[str, OutputFence]:
        return {}

    def frame_settled(self, step: Step, frame: FrameId) -> None:
        pass

    def all_emit(self, operator: str, offset: int) -> bool:
        return True

    def roles_of(self, instance: str, *, known: bool) -> tuple[list[m.IncomingRole], list[m.OutgoingRole]]:
        return [], []

    def incarnation_began(self, step: Step, instance: str) -> None:
        pass

    def resumed(self, step: Step, message: m.Resume) -> dict[str, Position]:
        return dict(message.moves)

    def checkpointed(self, step: Step, message: m.Checkpointed) -> dict[str, int]:
        return {move: offset for move, (stage, offset) in message.moves.items() if stage == OWN}

    def concern(self, instance: str) -> bool:
        return False

    def need(self, instance: str) -> bool:
        return False

    def retired(self, step: Step, instance: str) -> None:
        pass

    def load(self, key: StorageKey, value: Any) -> None:
        raise KeyError(key)

    def recover(self, step: Step) -> None:
        pass

    def validate(self) -> None:
        pass
