"""The tables of the four roles of a move: every phase against every event, written out.

Responsible for: the content of the tables; a row that is added, removed or changed shows here.
Not responsible for: that the machines follow them (test_source_router.py, test_destination_router.py,
    test_instance_moves.py).

Read a cell as: in the phase of this column, the event of this line leads to one of these phases. `late`: the
event is ignored. `.`: the event is unexpected.
"""

from __future__ import annotations

from typing import Any

import pytest

from tiercel.core.errors import CoreBug
from tiercel.core.machine.effects import Note, Unexpected
from tiercel.core.machine.step import Step
from tiercel.core.migration.phases import (
    DESTINATION_INSTANCE,
    DESTINATION_ROUTER,
    SOURCE_INSTANCE,
    SOURCE_ROUTER,
    MovePhase,
    Role,
    SourceRouterPhase,
)

ROLES: tuple[Role[Any], ...] = (SOURCE_ROUTER, DESTINATION_ROUTER, SOURCE_INSTANCE, DESTINATION_INSTANCE)
MATRICES = {
    "source router": """
        1 preparing
        2 prepared
        3 begun
        4 shadowing
        5 comparing
        6 flipped
        7 cut
        8 emitting
        9 done
        10 aborted

                                | 1     | 2    | 3    | 4    | 5      | 6    | 7    | 8    | 9    | 10
        Prepared                | 2 3 6 | late | late | late | late   | late | late | late | late | .
        outputs admitted        | .     | 6    | .    | .    | 6 10   | .    | .    | .    | .    | .
        CaptureFrom             | .     | .    | 4    | late | late   | late | late | late | late | .
        Captured                | .     | .    | late | 5    | late   | 6    | 7    | 8    | 9    | .
        Digests                 | .     | .    | .    | .    | 5 6 10 | 6    | 7    | 8    | 9    | .
        Ready                   | .     | .    | .    | .    | 5 6 10 | late | late | late | late | .
        shadow complete         | .     | .    | .    | .    | 6 10   | .    | .    | .    | .    | .
        shadow full             | .     | .    | .    | 10   | 10     | .    | .    | .    | .    | .
        Refused                 | 10    | 10   | 10   | 10   | 10     | late | late | late | late | .
        source restarted        | 10    | 10   | 10   | 10   | 10     | 7    | .    | .    | .    | .
        router restarted        | 10    | 10   | 10   | 10   | 10     | .    | .    | .    | .    | .
        deadline passed         | 10    | 10   | 10   | 10   | 10     | .    | .    | .    | .    | .
        SourceStopped           | .     | .    | .    | .    | .      | 7    | late | late | late | .
        source silent           | .     | .    | .    | .    | .      | 7    | .    | .    | .    | .
        outputs arrived         | .     | .    | .    | .    | .      | .    | 8    | .    | .    | .
        cut shadowed            | .     | .    | .    | .    | .      | .    | 8    | .    | .    | .
        DestinationCheckpointed | .     | .    | .    | .    | .      | late | late | 8 9  | 9    | .
        DestinationReplaced     | .     | .    | .    | .    | .      | 6    | 7    | 8    | late | .
        StateComplete           | late  | late | late | late | late   | 6    | 7    | 8    | 9    | .
        Forgotten               | .     | .    | .    | .    | .      | .    | .    | .    | 9    | .
    """,
    "destination router": """
        1 preparing
        2 shadowing
        3 adoptable
        4 adopted
        5 merged
        6 forgotten

                                | 1   | 2 | 3    | 4    | 5    | 6
        Prepare                 | 1   | 2 | 3    | late | late | .
        Prepared                | 2 3 | 2 | 3    | late | late | .
        Ready                   | .   | 3 | late | late | late | .
        ShadowNotice            | 6   | 2 | 3    | 4    | late | .
        EmittedNotice           | 6   | 2 | 3    | late | late | .
        FlipToDestination       | 4   | . | 4    | late | late | .
        AbortedNotice           | 6   | 6 | 6    | .    | .    | .
        AbortNotice             | 6   | 6 | 6    | late | late | .
        destination restarted   | 6   | 6 | .    | .    | .    | .
        StateComplete           | .   | 2 | 3    | 4    | late | .
        ResumeNotice            | .   | . | .    | 4    | late | .
        ServedByNotice          | .   | . | .    | 4    | late | .
        EmitFromNotice          | .   | . | .    | 4    | late | .
        DestinationCheckpointed | .   | . | .    | 4    | late | .
        DoneNotice              | .   | . | .    | 5    | late | .
        checkpoint covers it    | .   | . | .    | .    | 6    | .
        destination retired     | .   | . | .    | .    | 6    | .
    """,
    "source instance": """
        1 absent
        2 capturing
        3 captured
        4 flipped
        5 waiting
        6 drained

                        | 1     | 2    | 3     | 4    | 5    | 6
        Capture         | 1 2   | late | late  | late | .    | late
        FlipToSource    | 4 5 6 | .    | 6     | 6    | 5 6  | 6
        Flip            | 4 5 6 | .    | 6     | 6    | 6    | 6
        attached        | 4 5 6 | .    | 3 4 6 | 4 6  | 5 6  | 6 1
        Forget          | 1     | .    | .     | late | late | 6 1
        keys captured   | .     | 2 3  | .     | .    | .    | .
        UnitReceipt     | late  | 2    | 3     | 4    | late | 6
        Compare         | .     | late | 3     | late | .    | late
        AbortNotice     | late  | 1    | 1     | .    | .    | .
        UnitRequest     | late  | 2    | 3     | 4    | late | 6
        Backlog         | late  | .    | .     | .    | late | 6
        cut reached     | .     | .    | .     | .    | 6    | .
    """,
    "destination instance": """
        1 absent
        2 receiving
        3 in step
        4 comparing
        5 voted
        6 adopted, receiving
        7 adopted

                          | 1    | 2   | 3    | 4    | 5    | 6    | 7
        Prepare           | 1 2  | 2   | 3    | 4    | 5    | 6    | 7
        Adopt             | 6    | 6   | 3 7  | .    | 5 7  | late | late
        attached          | 2 6  | 2 1 | 3 1  | 4 1  | 5 1  | 6 1  | 7 1
        restored          | 3 6 7 | .   | .    | .    | .    | .    | .
        Shadow            | late | 2   | 3 4  | 4    | 5    | 6 7  | late
        Chunk             | late | 2 3 | 3    | 4    | 5    | 6 7  | 7
        checkpoint stored | .    | .   | .    | 4 5  | 5    | .    | 7
        EmitFrom          | late | 2   | 3 7  | .    | 5 7  | 6 7  | 7
        EmittedThrough    | late | 2   | 3    | 4    | 5    | 6    | 7
        ServedBy          | late | 2   | 3    | 4    | 5    | 6    | 7
        AbortNotice       | late | 1   | 1    | 1    | 1    | .    | .
        Done              | .    | .   | .    | .    | .    | .    | 1
    """,
}


def cells_of_text(role: Role[Any]) -> dict[tuple[str, str], str]:
    """The written matrix, by phase and event, without the cells of unexpected events."""
    legend, _, table = MATRICES[role.name].partition("\n\n")
    phases = dict(line.split(maxsplit=1) for line in legend.split("\n") if line.strip())
    header, *lines = [[cell.strip() for cell in line.split("|")] for line in table.strip("\n ").split("\n")]
    found = {}
    for event, *cells in lines:
        for column, cell in zip(header[1:], cells, strict=True):
            if cell != ".":
                found[phases[column], event] = " ".join(phases.get(word, word) for word in cell.split())
    return found


def cells_of_table(role: Role[Any]) -> dict[tuple[str, str], str]:
    handled = {(r.phase.value, r.event): " ".join(p.value for p in r.next) for r in role.rows}
    late = {(row.phase.value, row.event): "late" for row in role.late}
    assert len(handled) == len(role.rows), "an event is listed twice in a phase"
    assert len(late) == len(role.late), "a late event is listed twice in a phase"
    assert not handled.keys() & late.keys(), "an event is handled and ignored in the same phase"
    return handled | late


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_table_has_exactly_the_written_transitions(role: Role[Any]) -> None:
    assert cells_of_table(role) == cells_of_text(role)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_phase_is_reachable_from_the_first(role: Role[Any]) -> None:
    reached = set(role.start)
    for _ in role.phases:
        reached |= {p for p in role.phases if any(role.may_follow(before, p) for before in reached)}
    assert reached == set(role.phases)


class Prepared:
    """A message that the source router handles while it prepares, and ignores afterwards."""


class Forgotten:
    """A message that the source router expects only in its last phase."""


def source_router(phase: SourceRouterPhase) -> MovePhase[SourceRouterPhase]:
    return MovePhase(SOURCE_ROUTER, "m1", phase)


def test_only_an_unexpected_message_is_reported() -> None:
    for message, phase, accepted, reported in (
        (Prepared(), SourceRouterPhase.PREPARING, True, False),
        (Prepared(), SourceRouterPhase.BEGUN, False, False),
        (Forgotten(), SourceRouterPhase.BEGUN, False, True),
    ):
        step = Step(0.0)
        assert source_router(phase).accepts(step, message) is accepted
        assert any(isinstance(effect, Unexpected) for effect in step.effects) is reported


def test_a_change_of_phase_is_noted_and_persisted() -> None:
    stored: list[SourceRouterPhase] = []
    move = MovePhase(SOURCE_ROUTER, "m1", SourceRouterPhase.FLIPPED, lambda step, phase: stored.append(phase))
    step = Step(0.0)
    move.become(step, SourceRouterPhase.CUT)
    assert move.now is SourceRouterPhase.CUT
    assert stored == [SourceRouterPhase.CUT]
    assert Note("m1: source router flipped -> cut") in step.effects


def test_a_change_of_phase_that_the_table_does_not_list_raises() -> None:
    move = source_router(SourceRouterPhase.FLIPPED)
    with pytest.raises(CoreBug, match="no transition from flipped to aborted"):
        move.become(Step(0.0), SourceRouterPhase.ABORTED)
    assert move.now is SourceRouterPhase.FLIPPED
