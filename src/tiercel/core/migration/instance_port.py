"""The interface of an instance for its moves.

Responsible for: the Protocol between a move (source_instance.py, destination_instance.py) and its instance.
Not responsible for: the instance itself (core/instance).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple, Protocol

from tiercel.core import messages as m
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output, Row
from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import Operator
from tiercel.core.settings import Settings
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable


class CallResult(NamedTuple):
    """The results of one call of user code."""

    outputs: list[Output]
    dead_letters: list[Output]
    new_timers: list[int]


class UserCode(Protocol):
    """Calls of the operator's code for one key."""

    event_time: bool

    @property
    def about_keys(self) -> tuple[Callable[[Key], object], Set[str]]:
        """For a StateTable: the user's form of a key, and the state variables that the user has deleted."""
        ...

    def call_apart(
        self, state: KeyState, key: Key, rows: list[Row], time_ms: int, watermark_ms: int, offset: int
    ) -> CallResult:
        """Call user code with rows of one key."""
        ...

    def fire_apart(
        self, state: KeyState, key: Key, due_ms: int, time_ms: int, watermark_ms: int, offset: int
    ) -> CallResult:
        """Fire the timers of one key up to a time."""
        ...


class InstancePort(Protocol):
    """An instance as its moves see it."""

    name: str
    router: str
    incarnation: int
    operator: Operator
    settings: Settings
    space: StateTable  # the keys that it owns
    routes: RoutingTable
    applied: int  # offset of the last processed entry
    durable: int  # its log is durable up to here
    time_ms: int
    watermark_ms: int
    halting: str  # the move that makes it restart; empty if there is none

    @property
    def user_code(self) -> UserCode: ...

    def is_taking_over(self) -> bool:
        """Whether it still processes rows of a dead instance that it takes over."""
        ...

    def tell(self, step: Step, message: m.Message) -> None:
        """Send its router a message about a move."""
        ...

    def flush(self, step: Step) -> None:
        """Send its router the outputs of all processed entries."""
        ...

    def checkpoint_soon(self, step: Step) -> None:
        """Take a checkpoint of the keys that are arriving."""
        ...

    def tidy_soon(self, step: Step) -> None:
        """Schedule a full checkpoint soon, because a move has ended."""
        ...

    def after_next_checkpoint(self, step: Step, message: m.Message) -> None:
        """Send its router a message once the next full checkpoint is stored."""
        ...

    def stored_generation(self, key: Key) -> int | None:
        """The generation of the stored version of a key, if a finished checkpoint has its last change."""
        ...

    def drop_stored_move(self, move: str) -> None:
        """Delete the stored keys of a move with the next checkpoint."""
        ...
