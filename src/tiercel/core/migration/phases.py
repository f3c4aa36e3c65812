"""The state machine of a move: the phases of its four roles and every legal transition, in one table each.

Responsible for: the phases, the transitions between them with their events, the late messages to ignore.
Not responsible for: the actions of a role (source_router.py, destination_router.py, source_instance.py,
    destination_instance.py).

A role asks `accepts` before it handles a message, and calls `become` to change its phase. A message that the
table does not list is unexpected: the role changes nothing and emits the effect `Unexpected`. The simulator
and the tests stop at this effect; a deployment counts it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from tiercel.core.errors import CoreBug
from tiercel.core.machine.step import Step

P = TypeVar("P", bound=enum.Enum)


class Row(NamedTuple, Generic[P]):
    """One line of a table: the phases that an event may lead to from `phase`."""

    phase: P
    event: str  # the name of a message, of a log record, or of something that happens to the role
    next: tuple[P, ...]  # phases it may lead to; the phase itself: the role handles the event and stays


class Late(NamedTuple, Generic[P]):
    """A message that may arrive in a phase that does not need it. The role ignores it there."""

    phase: P
    event: str
    because: str


class Role(Generic[P]):
    """One role's table."""

    def __init__(self, name: str, start: tuple[P, ...], rows: list[Row[P]], late: list[Late[P]]) -> None:
        self.name = name
        self.start = start
        self.rows = tuple(rows)
        self.late = tuple(late)
        self.phases: type[P] = type(start[0])
        self._handles = {(row.phase, row.event): row.next for row in rows}
        self._ignores = {(row.phase, row.event) for row in late}
        self._follows: Mapping[P, frozenset[P]] = {
            phase: frozenset(following for row in rows if row.phase is phase for following in row.next)
            for phase in self.phases
        }

    def handles(self, phase: P, event: str) -> bool:
        """Whether a role in this phase handles an event of this name."""
        return (phase, event) in self._handles

    def ignores(self, phase: P, event: str) -> bool:
        """Whether a role in this phase ignores an event of this name as late."""
        return (phase, event) in self._ignores

    def may_follow(self, phase: P, following: P) -> bool:
        """Whether the table leads from one phase to another."""
        return following in self._follows[phase]


class MovePhase(Generic[P]):
    """The phase of one move in one role. Only `become` changes it."""

    def __init__(
        self, role: Role[P], move: str, phase: P, changed: Callable[[Step, P], None] | None = None
    ) -> None:
        self.role = role
        self.move = move
        self.now = phase
        self._changed = changed  # persists the new phase, where the role is durable

    def accepts(self, step: Step, message: Any) -> bool:
        """Whether to handle a message. Reports an unexpected message; ignores a late one."""
        event = type(message).__name__
        if self.role.handles(self.now, event):
            return True
        if not self.role.ignores(self.now, event):
            step.unexpected(self.role.name, self.move, str(self.now.value), event)
        return False

    def become(self, step: Step, phase: P) -> None:
        """Change the phase: check that the table allows it, trace it, persist it."""
        if not self.role.may_follow(self.now, phase):
            message = f"{self.role.name} of {self.move}: no transition from {self.now.value} to {phase.value}"
            raise CoreBug(message)
        step.note(f"{self.move}: {self.role.name} {self.now.value} -> {phase.value}")
        self.now = phase
        if self._changed is not None:
            self._changed(step, phase)


# -- the source router -------------------------------------------------------------------------------


class SourceRouterPhase(enum.Enum):
    """The router of the site that the keys leave. It decides the move."""

    PREPARING = "preparing"  # the destination gets ready; nothing is logged
    PREPARED = "prepared"  # flip first: the source has yet to reach the destination's watermark
    BEGUN = "begun"  # Begin is logged; the source has not yet reported where its capture starts
    SHADOWING = "shadowing"  # both instances get the keys' rows; the source sends state
    COMPARING = "comparing"  # every key is captured; both sides digest; the destination votes
    FLIPPED = "flipped"  # the decision is logged; the source has not yet reported where it stopped
    CUT = "cut"  # the source's last offset is known; its outputs are on their way to the receivers
    EMITTING = "emitting"  # the destination emits; the source retains its copy
    DONE = "done"  # the source may forget
    ABORTED = "aborted"  # undone; the destination forgets


UNDECIDED = (
    SourceRouterPhase.PREPARING,
    SourceRouterPhase.PREPARED,
    SourceRouterPhase.BEGUN,
    SourceRouterPhase.SHADOWING,
    SourceRouterPhase.COMPARING,
)
SHADOWED = (SourceRouterPhase.SHADOWING, SourceRouterPhase.COMPARING)
DECIDED = (
    SourceRouterPhase.FLIPPED,
    SourceRouterPhase.CUT,
    SourceRouterPhase.EMITTING,
    SourceRouterPhase.DONE,
)
STOPPED = (SourceRouterPhase.CUT, SourceRouterPhase.EMITTING, SourceRouterPhase.DONE)


def _source_router() -> Role[SourceRouterPhase]:
    preparing, prepared, begun, shadowing, comparing = UNDECIDED
    flipped, cut, emitting, done = DECIDED
    aborted = SourceRouterPhase.ABORTED
    undo = ("Refused", "source restarted", "router restarted", "deadline passed")
    answered = "the destination router repeats it until the next phase reaches it"
    repeated = "the source repeats it when it reconnects or is asked again"
    return Role(
        "source router",
        (preparing,),
        rows=[
            Row(preparing, "Prepared", (prepared, begun, flipped)),
            Row(prepared, "outputs admitted", (flipped,)),
            Row(begun, "CaptureFrom", (shadowing,)),
            Row(shadowing, "Captured", (comparing,)),
            Row(comparing, "Digests", (comparing, flipped, aborted)),
            Row(comparing, "Ready", (comparing, flipped, aborted)),
            Row(comparing, "outputs admitted", (flipped, aborted)),
            Row(comparing, "shadow complete", (flipped, aborted)),
            *(Row(phase, "shadow full", (aborted,)) for phase in SHADOWED),
            *(Row(phase, event, (aborted,)) for phase in UNDECIDED for event in undo),
            Row(flipped, "SourceStopped", (cut,)),
            Row(flipped, "source restarted", (cut,)),
            Row(flipped, "source silent", (cut,)),
            Row(cut, "outputs arrived", (emitting,)),
            Row(cut, "cut shadowed", (emitting,)),
            Row(emitting, "DestinationCheckpointed", (emitting, done)),
            *(Row(phase, "StateComplete", (phase,)) for phase in DECIDED),
            *(Row(phase, "Captured", (phase,)) for phase in DECIDED),  # flip first: every unit is sent
            *(Row(phase, "Digests", (phase,)) for phase in DECIDED),  # the flip did not wait for them
            *(Row(phase, "DestinationReplaced", (phase,)) for phase in DECIDED if phase is not done),
            Row(done, "DestinationCheckpointed", (done,)),
            Row(done, "Forgotten", (done,)),
        ],
        late=[
            *(Late(phase, "Prepared", answered) for phase in (prepared, begun, *SHADOWED, *DECIDED)),
            *(Late(phase, "Ready", answered) for phase in DECIDED),
            Late(begun, "Captured", "the report where the capture starts was lost and is sent again first"),
            *(Late(phase, "CaptureFrom", repeated) for phase in (*SHADOWED, *DECIDED)),
            Late(comparing, "Captured", repeated),
            *(Late(phase, "SourceStopped", repeated) for phase in STOPPED),
            *(Late(phase, "StateComplete", "only a move that flips first needs it") for phase in UNDECIDED),
            *(Late(phase, "Refused", "too late: the move is decided") for phase in DECIDED),
            Late(done, "DestinationReplaced", repeated),
            *(
                Late(phase, "DestinationCheckpointed", "the destination reports it again")
                for phase in (flipped, cut)
            ),
        ],
    )


SOURCE_ROUTER = _source_router()


# -- the destination router --------------------------------------------------------------------------


class DestinationRouterPhase(enum.Enum):
    """The router of the site that the keys come to. From the flip on its log sequences them."""

    PREPARING = "preparing"  # the router has asked the destination to get ready
    SHADOWING = "shadowing"  # the destination instance gets the shadow rows and the state
    ADOPTABLE = "adoptable"  # the vote is durable; only the source router ends this
    ADOPTED = "adopted"  # this log sequences the keys; they are a part of their own
    MERGED = "merged"  # the keys are ordinary again; remembered until a checkpoint covers it
    FORGOTTEN = "forgotten"  # undone, or covered by a checkpoint: nothing is stored about it


DURABLE = (DestinationRouterPhase.ADOPTABLE, DestinationRouterPhase.ADOPTED, DestinationRouterPhase.MERGED)
REVOCABLE = (
    DestinationRouterPhase.PREPARING,
    DestinationRouterPhase.SHADOWING,
    DestinationRouterPhase.ADOPTABLE,
)


def _destination_router() -> Role[DestinationRouterPhase]:
    preparing, shadowing, adoptable = REVOCABLE
    _, adopted, merged = DURABLE
    forgotten = DestinationRouterPhase.FORGOTTEN
    again = "a frame whose receipt was lost is sent again"
    repeated = "the destination repeats it when it reconnects or is asked again"
    return Role(
        "destination router",
        (preparing,),
        rows=[
            *(Row(phase, "Prepare", (phase,)) for phase in REVOCABLE),
            Row(preparing, "Prepared", (shadowing, adoptable)),
            *(Row(phase, "Prepared", (phase,)) for phase in (shadowing, adoptable)),
            *(Row(preparing, notice, (forgotten,)) for notice in ("ShadowNotice", "EmittedNotice")),
            Row(shadowing, "Ready", (adoptable,)),
            *(Row(phase, "ShadowNotice", (phase,)) for phase in (shadowing, adoptable, adopted)),
            *(Row(phase, "EmittedNotice", (phase,)) for phase in (shadowing, adoptable)),
            *(Row(phase, "FlipToDestination", (adopted,)) for phase in (preparing, adoptable)),
            *(Row(phase, "AbortedNotice", (forgotten,)) for phase in REVOCABLE),
            *(Row(phase, "AbortNotice", (forgotten,)) for phase in REVOCABLE),
            *(Row(phase, "destination restarted", (forgotten,)) for phase in (preparing, shadowing)),
            *(Row(phase, "StateComplete", (phase,)) for phase in (shadowing, adoptable, adopted)),
            Row(adopted, "ResumeNotice", (adopted,)),
            Row(adopted, "ServedByNotice", (adopted,)),
            Row(adopted, "EmitFromNotice", (adopted,)),
            Row(adopted, "DestinationCheckpointed", (adopted,)),
            Row(adopted, "DoneNotice", (merged,)),
            Row(merged, "checkpoint covers it", (forgotten,)),
            Row(merged, "destination retired", (forgotten,)),
        ],
        late=[
            *(
                Late(phase, "Prepare", "the source router repeated it before it was answered")
                for phase in (adopted, merged)
            ),
            *(Late(phase, "Prepared", repeated) for phase in (adopted, merged)),
            *(Late(phase, "Ready", repeated) for phase in DURABLE),
            Late(merged, "StateComplete", repeated),
            Late(merged, "DestinationCheckpointed", repeated),
            *(
                Late(phase, notice, again)
                for phase in (adopted, merged)
                for notice in ("EmittedNotice", "FlipToDestination")
            ),
            Late(merged, "ShadowNotice", again),
            *(
                Late(merged, notice, again)
                for notice in ("EmitFromNotice", "ResumeNotice", "ServedByNotice", "DoneNotice")
            ),
            *(
                Late(phase, "AbortNotice", "the answer to a message repeated after the move was done")
                for phase in (adopted, merged)
            ),
        ],
    )


DESTINATION_ROUTER = _destination_router()


# -- moves that a router does not know -------------------------------------------------------------------


class Answer(enum.Enum):
    """The answer of a router to a message about a move that it does not know."""

    IGNORE = "ignore"
    ABORT = "abort"  # answer with AbortNotice: this router never decided it, so the sender must forget it
    REFUSE = "refuse"  # answer with Refused: this router forgot it, so the source router must undo it
    ADOPT = "adopt"  # the keys are this site's, with everything that the message carries


class Unknown(NamedTuple):
    """One line: the answer to a message about an unknown move, and why."""

    event: str
    answer: Answer
    because: str


UNKNOWN_MOVE: dict[str, Unknown] = {
    row.event: row
    for row in (
        Unknown("Prepared", Answer.ABORT, "the source router was restarted, or the move has ended"),
        Unknown("Ready", Answer.ABORT, "the source router was restarted, or the move has ended"),
        Unknown("CaptureFrom", Answer.ABORT, "the source router was restarted, or the move has ended"),
        Unknown("ShadowNotice", Answer.REFUSE, "the destination router was restarted before the vote"),
        Unknown("FlipToDestination", Answer.ADOPT, "a decided move is never lost"),
        Unknown("AbortNotice", Answer.IGNORE, "it is forgotten already"),
        Unknown("AbortedNotice", Answer.IGNORE, "it is forgotten already"),
        Unknown("Refused", Answer.IGNORE, "it was undone already"),
        Unknown("Captured", Answer.IGNORE, "it was undone; the source gets AbortNotice"),
        Unknown("Digests", Answer.IGNORE, "it was undone; the source gets AbortNotice"),
        Unknown("SourceStopped", Answer.IGNORE, "repeated after the move has ended"),
        Unknown("StateComplete", Answer.IGNORE, "repeated after the move has ended"),
        Unknown("DestinationCheckpointed", Answer.IGNORE, "repeated after the move has ended"),
        Unknown("Forgotten", Answer.IGNORE, "repeated after the move has ended"),
        Unknown("EmittedNotice", Answer.IGNORE, "the frame before it is answered by Refused"),
        Unknown("EmitFromNotice", Answer.IGNORE, "a frame whose receipt was lost is sent again"),
        Unknown("ResumeNotice", Answer.IGNORE, "a frame whose receipt was lost is sent again"),
        Unknown("ServedByNotice", Answer.IGNORE, "a frame whose receipt was lost is sent again"),
        Unknown("DestinationReplaced", Answer.IGNORE, "repeated after the move has ended"),
        Unknown("DoneNotice", Answer.IGNORE, "a frame whose receipt was lost is sent again"),
    )
}


# -- the source instance -----------------------------------------------------------------------------


class SourceInstancePhase(enum.Enum):
    """The instance that the keys leave. It sends their state."""

    ABSENT = "absent"  # it knows nothing of such a move: not asked yet, undone, or forgotten
    CAPTURING = "capturing"  # it captures a few keys at a time, and continues processing
    CAPTURED = "captured"  # every key is captured; it continues processing and emitting
    FLIPPED = "flipped"  # it attached again after the flip was decided; it processes until FlipToSource
    WAITING = "waiting"  # flip first: a replay has not reached the cut
    DRAINED = "drained"  # it emits nothing above its last offset, and retains the keys until Forget


def _source_instance() -> Role[SourceInstancePhase]:
    phases = SourceInstancePhase
    absent, capturing, captured = phases.ABSENT, phases.CAPTURING, phases.CAPTURED
    flipped, waiting, drained = phases.FLIPPED, phases.WAITING, phases.DRAINED
    repeated = "its router repeats it until the answer arrives"
    over = "the move is over here"
    earlier = "for an earlier incarnation of this instance"
    sending = (capturing, captured, flipped, drained)
    return Role(
        "source instance",
        (absent,),
        rows=[
            Row(absent, "Capture", (absent, capturing)),  # absent: the keys are still arriving; asked again
            Row(absent, "FlipToSource", (flipped, waiting, drained)),
            Row(absent, "Flip", (flipped, waiting, drained)),
            Row(absent, "attached", (flipped, waiting, drained)),
            Row(absent, "Forget", (absent,)),  # the answer was lost
            Row(capturing, "keys captured", (capturing, captured)),
            Row(captured, "Compare", (captured,)),
            *(Row(phase, "AbortNotice", (absent,)) for phase in (capturing, captured)),
            *(Row(phase, "UnitReceipt", (phase,)) for phase in sending),
            *(Row(phase, "UnitRequest", (phase,)) for phase in sending),
            Row(drained, "Backlog", (drained,)),
            *(Row(phase, "FlipToSource", (drained,)) for phase in (captured, flipped, drained)),
            *(Row(phase, "Flip", (drained,)) for phase in (captured, flipped, drained)),
            Row(captured, "attached", (captured, flipped, drained)),
            Row(flipped, "attached", (flipped, drained)),
            Row(waiting, "FlipToSource", (waiting, drained)),
            Row(waiting, "Flip", (drained,)),
            Row(waiting, "cut reached", (drained,)),
            Row(waiting, "attached", (waiting, drained)),
            Row(drained, "Forget", (drained, absent)),  # drained: a replay still meets rows of the keys
            Row(drained, "attached", (drained, absent)),
        ],
        late=[
            *(
                Late(absent, event, over)
                for event in ("UnitReceipt", "UnitRequest", "Backlog", "AbortNotice")
            ),
            *(Late(phase, "Capture", repeated) for phase in sending),
            *(Late(waiting, event, earlier) for event in ("UnitReceipt", "UnitRequest", "Backlog")),
            Late(capturing, "Compare", "it has captured the keys again, and the move is being undone"),
            *(Late(phase, "Compare", "a replay of entries before the flip") for phase in (flipped, drained)),
            *(Late(phase, "Forget", "a replay has not reached the flip") for phase in (flipped, waiting)),
        ],
    )


SOURCE_INSTANCE = _source_instance()


# -- the destination instance ------------------------------------------------------------------------


class DestinationInstancePhase(enum.Enum):
    """The instance that the keys come to. It receives their state and catches up."""

    ABSENT = "absent"  # it knows nothing of such a move: not asked yet, undone, or merged
    RECEIVING = "receiving"  # rows of a key wait until its state has arrived
    IN_STEP = "in step"  # every key has arrived; it processes rows without emitting
    COMPARING = "comparing"  # it has processed Compare, and computes digests and writes a checkpoint
    VOTED = "voted"  # a checkpoint has every key as of Compare; only the source router may end this now
    ADOPTED_RECEIVING = "adopted, receiving"  # flip first: owned, and rows of a key wait for its state
    ADOPTED = "adopted"  # the keys are owned here; emits once EmitFrom has come


INCOMPLETE = (
    DestinationInstancePhase.ABSENT,
    DestinationInstancePhase.RECEIVING,
    DestinationInstancePhase.ADOPTED_RECEIVING,
)
OWNING = (DestinationInstancePhase.ADOPTED_RECEIVING, DestinationInstancePhase.ADOPTED)


def _destination_instance() -> Role[DestinationInstancePhase]:
    phases = DestinationInstancePhase
    absent, receiving, in_step, comparing = (
        phases.ABSENT,
        phases.RECEIVING,
        phases.IN_STEP,
        phases.COMPARING,
    )
    voted, early, adopted = phases.VOTED, phases.ADOPTED_RECEIVING, phases.ADOPTED
    complete = (in_step, comparing, voted, adopted)
    shadowed = (receiving, in_step, comparing, voted)
    present = (*shadowed, early, adopted)
    over = "the move is over here"
    return Role(
        "destination instance",
        (absent,),
        rows=[
            Row(absent, "Prepare", (absent, receiving)),  # absent: it is about to restart; asked again
            Row(absent, "Adopt", (early,)),
            Row(absent, "attached", (receiving, early)),  # receiving: flip first, and Adopt is still to come
            Row(absent, "restored", (in_step, early, adopted)),
            *(Row(phase, "Prepare", (phase,)) for phase in present),  # the answer was lost
            Row(receiving, "Shadow", (receiving,)),
            Row(in_step, "Shadow", (in_step, comparing)),  # Compare comes in the shadow
            *(Row(phase, "Shadow", (phase,)) for phase in (comparing, voted)),
            Row(receiving, "Chunk", (receiving, in_step)),
            *(Row(early, event, (early, adopted)) for event in ("Chunk", "Shadow")),
            *(Row(phase, "Chunk", (phase,)) for phase in complete),  # only acknowledged
            Row(comparing, "checkpoint stored", (comparing, voted)),
            Row(voted, "checkpoint stored", (voted,)),
            Row(adopted, "checkpoint stored", (adopted,)),
            Row(receiving, "Adopt", (early,)),
            Row(early, "EmitFrom", (early, adopted)),  # rows may have waited for room
            *(Row(phase, "Adopt", (phase, adopted)) for phase in (in_step, voted)),  # it may wait its turn
            *(Row(phase, "EmitFrom", (phase, adopted)) for phase in (in_step, voted)),
            *(Row(phase, "EmitFrom", (phase,)) for phase in (receiving, adopted)),
            *(Row(phase, "EmittedThrough", (phase,)) for phase in present),
            *(Row(phase, "ServedBy", (phase,)) for phase in present),
            *(Row(phase, "AbortNotice", (absent,)) for phase in shadowed),
            Row(adopted, "Done", (absent,)),
            *(Row(phase, "attached", (phase, absent)) for phase in present),
        ],
        late=[
            *(
                Late(absent, event, over)
                for event in ("Shadow", "Chunk", "EmitFrom", "EmittedThrough", "ServedBy", "AbortNotice")
            ),
            Late(adopted, "Shadow", "the keys' rows come from the log of this site"),
            *(Late(phase, "Adopt", "a replay of entries that the checkpoint is past") for phase in OWNING),
        ],
    )


DESTINATION_INSTANCE = _destination_instance()


def accepts_unknown(step: Step, message: Any) -> bool:
    """Whether an instance handles a message about a move that has not begun there, or is over.

    A message that the destination's table does not list is for the source.
    """
    event = type(message).__name__
    if DESTINATION_INSTANCE.handles(DestinationInstancePhase.ABSENT, event) or DESTINATION_INSTANCE.ignores(
        DestinationInstancePhase.ABSENT, event
    ):
        return DESTINATION_INSTANCE.handles(DestinationInstancePhase.ABSENT, event)
    return MovePhase(SOURCE_INSTANCE, message.move, SourceInstancePhase.ABSENT).accepts(step, message)
