"""The two instance roles of a move: every phase, reached by real events, against every event of a move.

An event that the table lists leads to a listed phase; a late one changes nothing; any other is reported.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from machines_in_memory import SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.machine.events import Connected, Disconnected
from tiercel.core.migration.phases import (
    DESTINATION_INSTANCE,
    SOURCE_INSTANCE,
    DestinationInstancePhase,
    Role,
    SourceInstancePhase,
)
from tiercel.core.migration.units import unit_of, units_of
from tiercel.core.model.keys import KeySet, StateImage
from tiercel.core.model.log import Adopt, Compare, Control, Done, Entry, Flip
from tiercel.core.model.routing import Route, RouteUpdate

A, B = "op@a#0", "op@b#0"
KEY = key_in(2)
KEYS = KeySet(slots=frozenset({2}))
BEFORE = RouteUpdate({2: Route(A, 1)}, {})
AFTER = RouteUpdate({2: Route(B, 2)}, {})

MESSAGES = (
    m.Prepare,
    m.Capture,
    m.Shadow,
    m.Chunk,
    m.UnitReceipt,
    m.UnitRequest,
    m.Backlog,
    m.FlipToSource,
    m.EmitFrom,
    m.EmittedThrough,
    m.ServedBy,
    m.AbortNotice,
    m.Forget,
)
REPEATED = {  # handled, and the first one has done everything
    (SourceInstancePhase.WAITING, m.FlipToSource),
    (SourceInstancePhase.DRAINED, Flip),
    (SourceInstancePhase.CAPTURING, m.UnitReceipt),  # a timer sends the next chunk
    (SourceInstancePhase.CAPTURING, m.UnitRequest),
    (SourceInstancePhase.DRAINED, m.Backlog),  # it orders the queue
}
RECORDS = {SOURCE_INSTANCE: (Compare, Flip), DESTINATION_INSTANCE: (Adopt, Done)}


class Play:
    """One instance and its router. The test sends every message of the router."""

    def __init__(self, name: str, site: str) -> None:
        self.driver = SmallDeployment(topology(("a", "b")))
        self.driver.start(site, name)
        self.site, self.name = site, name
        self.driver.produce(site, (KEY if site == "a" else key_in(3), 0, "x"))
        self.driver.withholds = lambda sender, to, message: name in (sender, to)
        self.next = self.instance.applied + 1
        self.driver.sent.clear()

    @property
    def instance(self) -> Any:
        return self.driver.machines[self.name]

    @property
    def moving(self) -> Any:
        return self.instance.senders.get("m1") or self.instance.receivers.get("m1")

    @property
    def phase(self) -> Any:
        absent = SourceInstancePhase.ABSENT if self.site == "a" else DestinationInstancePhase.ABSENT
        return self.moving.phase if self.moving is not None else absent

    def role(self, strategy: str) -> m.OutgoingRole:
        emitted = self.next + 1  # a flip-first source waits for this entry
        return m.OutgoingRole("m1", KEYS, B, strategy, 1, self.next + 1, None, BEFORE, emitted)

    def receive(self, message: m.Message) -> None:
        self.driver.send(self.name, message, self.site)

    def log(self, control: Control) -> None:
        offset = self.next + 1 if isinstance(control, Flip) else self.next
        self.receive(m.Dispatch([Entry(offset, 1000, {}, control)]))

    def on(self, kind: type) -> None:
        """An event of this kind, as it would come in the move that was begun."""
        strategy = "live"
        if self.phase in (SourceInstancePhase.WAITING, DestinationInstancePhase.ADOPTED_RECEIVING):
            strategy = "pause"
        match kind:
            case m.Prepare:
                self.receive(m.Prepare("m1", "op", KEYS, A, B, strategy, BEFORE))
            case m.Capture:
                self.receive(m.Capture("m1", KEYS, B))
            case m.Shadow:
                self.receive(
                    m.Shadow("m1", [m.ShadowNotice("m1", 50, 1000, [(KEY, 0, "x", "a", 50, 1)], None)])
                )
            case m.Chunk:
                self.receive(m.Chunk("m1", 0, [StateImage(KEY, 1, 0, None)], sorted(units_of(KEYS, SLOTS))))
            case m.UnitReceipt:
                self.receive(m.UnitReceipt("m1", 1, []))
            case m.UnitRequest:
                self.receive(m.UnitRequest("m1", [unit_of(KEY, SLOTS)], again=True))
            case m.Backlog:
                self.receive(m.Backlog("m1", {unit_of(KEY, SLOTS): (1, 1)}))
            case m.FlipToSource:
                self.receive(m.FlipToSource("m1", self.role(strategy)))
            case m.EmitFrom | m.EmittedThrough:
                self.receive(kind("m1", 1))
            case m.ServedBy:
                self.receive(m.ServedBy("m1", "op@a#7"))
            case m.AbortNotice | m.Forget:
                self.receive(kind("m1"))
            case _ if kind is Compare or kind is Done:
                self.log(kind("m1"))
            case _ if kind is Flip:
                self.log(Flip("m1", KEYS, A, B, strategy, 1, BEFORE))
            case _:
                assert kind is Adopt
                if self.phase is DestinationInstancePhase.RECEIVING:  # only before the state of such a move
                    self.moving.strategy = "pause"
                self.log(Adopt("m1", KEYS, A, strategy, AFTER, 1000, -1, -1, BEFORE, 60))

    def attach(self, *outgoing: m.OutgoingRole) -> None:
        """The connection breaks, and the router names these moves when the instance is back."""
        self.driver.handle(self.name, Disconnected(self.site))
        self.driver.handle(self.name, Connected(self.site))
        flushes = self.instance.flushes
        self.receive(
            m.AttachReply(
                1, self.instance.session, 1, 0, -1, False, flushes, [], [], list(outgoing), stored=True
            )
        )

    def confirm(self) -> None:
        """The router confirms that every output is admitted and durable."""
        self.receive(m.Confirmed(1, self.instance.flushes, 1_000))

    def seen(self) -> Any:
        """Everything that a message about the move could have changed."""
        moving, ours = self.moving, [x for x in self.driver.sent if x[0] == self.name]
        about = {} if moving is None else vars(moving)
        values = {k: repr(v) for k, v in about.items() if isinstance(v, int | list | dict | set | tuple)}
        about_move = [message for _, _, message in ours if not isinstance(message, m.Outputs)]
        return self.phase, values, about_move


def source_in(phase: SourceInstancePhase) -> Play:
    play = Play(A, "a")
    if phase is SourceInstancePhase.WAITING:
        play.receive(m.FlipToSource("m1", play.role("pause")))
    elif phase is not SourceInstancePhase.ABSENT:
        play.on(m.Capture)
        if phase is not SourceInstancePhase.CAPTURING:
            play.driver.advance_ms(10)
        if phase is SourceInstancePhase.FLIPPED:
            play.attach(play.role("live"))
        elif phase is SourceInstancePhase.DRAINED:
            play.on(m.FlipToSource)
    assert play.phase is phase
    return play


def destination_in(phase: DestinationInstancePhase) -> Play:
    play = Play(B, "b")
    if phase is DestinationInstancePhase.ABSENT:
        return play
    play.on(m.Prepare)
    if phase is DestinationInstancePhase.ADOPTED_RECEIVING:
        play.on(m.AbortNotice)
        play.receive(m.Prepare("m1", "op", KEYS, A, B, "pause", BEFORE))
        play.log(Adopt("m1", KEYS, A, "pause", AFTER, 1000, -1, -1, BEFORE, 60))
        play.next += 1
    elif phase is not DestinationInstancePhase.RECEIVING:
        play.on(m.Chunk)
        if phase is not DestinationInstancePhase.IN_STEP:
            play.receive(m.Shadow("m1", [m.ShadowNotice("m1", 10, 1000, [], Compare("m1"))]))
        if phase in (DestinationInstancePhase.VOTED, DestinationInstancePhase.ADOPTED):
            play.confirm()
            play.driver.advance_ms(100)
            assert play.driver.messages(B, "b", m.FromInstance)[-1].message == m.Ready("m1", 1, {})
        if phase is DestinationInstancePhase.ADOPTED:
            play.on(Adopt)
            play.next += 1
    assert play.phase is phase
    return play


def reach(phase: Any) -> Play:
    return source_in(phase) if isinstance(phase, SourceInstancePhase) else destination_in(phase)


def cells(kind: str) -> list[Any]:
    """The cells of both matrices in which the event is handled, late or unexpected."""
    found = []
    roles: tuple[Role[Any], ...] = (SOURCE_INSTANCE, DESTINATION_INSTANCE)
    for role in roles:
        events = (*MESSAGES, *RECORDS[role])
        for phase, event in itertools.product(role.phases, events):
            name = event.__name__
            handled, late = role.handles(phase, name), role.ignores(phase, name)
            if phase.value == "absent":  # the instance has no role: the message may be for either
                other = roles[1 - roles.index(role)]
                absent = other.phases("absent")
                handled = handled or other.handles(absent, name)
                late = late or other.ignores(absent, name)
                if event not in MESSAGES:
                    continue  # a record of another instance's move
            if kind == ("handled" if handled else "late" if late else "unexpected"):
                found.append(pytest.param(role, phase, event, id=f"{role.name}-{phase.value}-{name}"))
    return found


@pytest.mark.parametrize("role", RECORDS, ids=lambda role: role.name)
def test_matrix_has_every_message_and_record_of_the_table(role: Role[Any]) -> None:
    listed = {row.event for row in (*role.rows, *role.late)}
    known = {event.__name__ for event in (*MESSAGES, *RECORDS[role])}
    assert {event for event in listed if event[0].isupper()} <= known


@pytest.mark.parametrize(("role", "phase", "event"), cells("handled"))
def test_event_that_the_table_lists_leads_to_a_listed_phase(role: Role[Any], phase: Any, event: type) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    if event not in (m.Forget, m.EmittedThrough, m.ServedBy) and (phase, event) not in REPEATED:
        assert play.seen() != before
    rows = [row for row in role.rows if (row.phase, row.event) == (phase, event.__name__)]
    if rows:
        assert play.phase in rows[0].next


@pytest.mark.parametrize(("role", "phase", "event"), cells("late"))
def test_late_event_changes_nothing(role: Role[Any], phase: Any, event: type) -> None:
    play = reach(phase)
    before = play.seen()
    play.on(event)
    assert play.seen() == before


@pytest.mark.parametrize(("role", "phase", "event"), cells("unexpected"))
def test_event_that_the_table_does_not_list_is_reported_and_changes_nothing(
    role: Role[Any], phase: Any, event: type
) -> None:
    play = reach(phase)
    before = play.seen()
    with pytest.raises(CoreBug, match="unexpected message"):
        play.on(event)
    assert play.seen() == before


def test_every_phase_can_be_left() -> None:
    for role in (SOURCE_INSTANCE, DESTINATION_INSTANCE):
        for phase in role.phases:
            assert any(role.may_follow(phase, other) for other in role.phases if other is not phase), phase
