"""Parallel recovery at a router: who gets which slots, what is refused, and that a refusal stays one."""

from __future__ import annotations

from typing import Any

import pytest

from playing import Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.effects import Effect, LoadCheckpoint, Send, StorageKey, Write
from tiercel.core.events import CheckpointLoaded, Connected, Disconnected, Durable, Event, Received
from tiercel.core.instance import Instance
from tiercel.core.records import Inheritance, Inherited, KeyFacts, KeySet
from tiercel.core.router import Router
from tiercel.core.settings import Settings
from tiercel.core.taken import Cursor
from tiercel.core.topology import Operator, Stream, Topology
from tiercel.workloads.processors import KINDS, PlainCode

DEAD, OTHER = "op@a#0", "op@a#1"
HEIRS = ("op@a#2", "op@a#3", "op@a#4")
OPERATOR = Operator("op", ("in",), "out", (DEAD, OTHER), slots=16)
TOPOLOGY = Topology({"a": None}, {"out": Stream("out", "a")}, {"op": OPERATOR})


class Driven:
    """A router whose writes are durable at once; what it told the controller."""

    def __init__(self, items: dict[StorageKey, Any] | None = None) -> None:
        self.disk: dict[StorageKey, Any] = dict(items or {})
        self.router = Router("a", TOPOLOGY, Settings(), 1, self.disk)
        self.told: list[m.MoveStatus] = []
        self.take(Connected("controller"))

    def take(self, event: Event) -> None:
        self._perform(self.router.on_event(event, 0.0))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self.disk |= effect.puts
                    for key in effect.deletes:
                        self.disk.pop(key, None)
                    self._perform(self.router.on_event(Durable(effect.seq), 0.0))
                case Send(to="controller", message=m.MoveStatus() as status):
                    self.told.append(status)
                case _:
                    pass

    def succeed(self, name: str, heirs: tuple[str, ...], dead: str = DEAD) -> m.MoveStatus:
        self.take(Received("controller", m.Succession(name, dead, heirs)))
        return self.told[-1]


def test_the_slots_of_the_dead_are_divided_and_its_readers_place_is_inherited() -> None:
    driven = Driven()
    owned = [s for s, r in enumerate(driven.router.inboxes["op"].table.slots) if r.instance == DEAD]
    assert driven.succeed("r1", HEIRS).phase == "done"
    inbox = driven.router.inboxes["op"]
    shares = {heir: inbox.heirs[heir].keys.slots for heir in HEIRS}
    assert sorted(slot for share in shares.values() for slot in share) == owned
    assert all(inbox.table.slots[slot].instance == heir for heir, share in shares.items() for slot in share)
    assert DEAD not in inbox.readers
    assert set(HEIRS) <= set(inbox.readers)
    assert isinstance(driven.disk["inbox", "op", 1].control, Inherited)
    assert driven.succeed("r1", HEIRS).phase == "done"  # asked again: nothing more happens
    assert inbox.offset == 1


def test_a_restarted_router_knows_its_heirs() -> None:
    before = Driven()
    before.succeed("r1", HEIRS)
    after = Driven(before.disk)
    assert after.router.inboxes["op"].heirs == before.router.inboxes["op"].heirs
    assert set(after.router.inboxes["op"].readers) == {OTHER, *HEIRS}


@pytest.mark.parametrize(
    ("dead", "heirs", "why"),
    [
        ("op@a#9", HEIRS, "no instance of this site"),
        (DEAD, (OTHER,), "expected a new instance"),
        (DEAD, ("op@b#1",), "expected a new instance"),
        (DEAD, (), "a slot for each"),
        (DEAD, tuple(f"op@a#{n}" for n in range(10, 40)), "a slot for each"),
    ],
)
def test_what_cannot_be_inherited_is_refused(dead: str, heirs: tuple[str, ...], why: str) -> None:
    status = Driven().succeed("r1", heirs, dead)
    assert status.phase == "refused"
    assert why in status.reason


def test_a_refusal_is_final_even_if_the_reason_is_gone_when_the_request_comes_again() -> None:
    """Found by seed 306: the controller had been told of the refusal, and then it was carried out."""
    driven = Driven()
    assert driven.succeed("r1", (OTHER,)).phase == "refused"
    driven = Driven(driven.disk)
    del driven.router.inboxes["op"].readers[OTHER]
    assert driven.succeed("r1", (OTHER,)).phase == "refused"


def test_who_died_is_kept_out_until_its_heirs_have_checkpoints_of_their_own() -> None:
    driven = Driven()
    driven.succeed("r1", HEIRS[:1])
    inbox = driven.router.inboxes["op"]
    driven.take(Connected(DEAD))
    driven.take(Received(DEAD, m.Attach(DEAD, 7, 1)))
    assert DEAD not in inbox.readers
    driven.take(Connected(HEIRS[0]))
    driven.take(Received(HEIRS[0], m.Attach(HEIRS[0], 1, 1)))
    driven.take(Received(HEIRS[0], m.Checkpointed(HEIRS[0], 1, inbox.offset - 1, {})))
    assert not inbox.heirs[HEIRS[0]].fresh
    assert DEAD not in inbox.readers
    driven.take(Received(HEIRS[0], m.Checkpointed(HEIRS[0], 1, inbox.offset, {})))
    assert not inbox.heirs
    assert inbox.readers[DEAD].life == 7


def test_an_heir_whose_name_was_used_before_does_not_take_its_old_store_for_what_it_inherits() -> None:
    code = PlainCode(KINDS["chained"]("op", False))
    heir = Instance(HEIRS[0], OPERATOR, code, Settings(), 1)
    heir.on_event(Connected("a"), 0.0)
    inherited = Inheritance(DEAD, KeySet(slots=frozenset({1})), 9)
    reply = m.AttachReply(1, 1, 1, 0, -1, False, 0, [], [], [], inherited, head=20)
    effects = heir.on_event(Received("a", reply), 0.0)
    assert LoadCheckpoint(values=False, timers=False, number=1) in effects
    older: dict[Any, Any] = {("cursor",): Cursor(3, 8, 1, 0, -1, [])}
    effects = heir.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert effects == [LoadCheckpoint(timers=False, inherited=inherited, number=2, adopt=True)]
    assert not heir.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert not heir.loaded


def resumed_at(effects: list[Effect]) -> list[int]:
    said = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.applied for message in said if isinstance(message, m.Resume)]


def test_an_heir_whose_checkpoint_the_router_has_not_heard_of_yet_does_not_inherit_again() -> None:
    """Found by seed 896: then the router heard, and the log behind the dead one's checkpoint was gone."""
    heir = Instance(HEIRS[0], OPERATOR, PlainCode(KINDS["chained"]("op", False)), Settings(), 1)
    heir.on_event(Connected("a"), 0.0)
    inherited = Inheritance(DEAD, KeySet(slots=frozenset({1})), 9)
    reply = m.AttachReply(1, 1, 1, 0, -1, False, 0, [], [], [], inherited, head=20)
    heir.on_event(Received("a", reply), 0.0)
    since: dict[Any, Any] = {("cursor",): Cursor(3, 12, 1, 0, -1, [], None, 9)}
    effects = heir.on_event(CheckpointLoaded(since, number=1), 0.0)
    assert heir.loaded
    assert resumed_at(effects) == [12]


def test_a_newcomer_that_died_before_its_first_checkpoint_has_nothing_of_before_it_was_retired() -> None:
    """Found by seed 1717: only its first life was told, and its second one had keys that others have."""
    comer = Instance(DEAD, OPERATOR, PlainCode(KINDS["chained"]("op", False)), Settings(), 5)
    comer.on_event(Connected("a"), 0.0)
    comer.on_event(Received("a", m.AttachReply(5, 1, 2, 80, -1, False, 0, [], [], [], head=80)), 0.0)
    older: dict[Any, Any] = {
        ("cursor",): Cursor(1, 18, 1, 0, -1, []),
        ("state", 3, b"k", 1): KeyFacts(),
    }
    effects = comer.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert not comer.space.count
    assert resumed_at(effects) == [80]


def test_an_heir_gives_keys_away_only_once_it_has_read_all_that_it_inherited() -> None:
    """Found by seed 3286: it captured in the midst of the dead one's rows, and these were in no shadow.

    What it makes of them is of the dead one's epoch, too; the destination would have gone on with that.
    """
    heir, key = HEIRS[0], key_in(0)
    stage = Stage(topology(("a",), instances=(DEAD, OTHER))).start()
    slots = frozenset(
        s for s, r in enumerate(stage.machines["a"].inboxes["op"].table.slots) if r.instance == DEAD
    )
    stage.produce("a", (key, 0, 1))
    stage.stop(DEAD)
    stage.produce("a", (key, 0, 2))
    stage.tell("a", m.Succession("r1", DEAD, (heir,)))
    stage.withholds = lambda sender, to, message: to == heir and isinstance(message, m.Dispatch)
    stage.start(heir)
    stage.produce("a", (key, 0, 3))
    stage.move(KeySet(slots=slots), heir, OTHER)
    stage.deliver()
    stage.produce("a", (key, 0, 4))
    stage.pass_ms(10_000)
    stage.produce("a", (key, 0, 5))
    assert stage.machines["a"].ended["m1"] == ("done", "")
    outputs = stage.outputs()
    assert [output.row[2][2] for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.epoch for output in outputs] == sorted(output.epoch for output in outputs)


def test_one_that_lives_after_all_is_told_to_end_whenever_it_can_be() -> None:
    """It must not store: its heirs still read what it has stored."""
    stage = Stage(topology(("a",), instances=(DEAD, OTHER))).start()
    stage.produce("a", (key_in(0), 0, 1))
    stage.tell("a", m.Succession("r1", DEAD, HEIRS[:1]))
    assert stage.exits == [DEAD]
    stage.exits.clear()
    for here, gone in (("a", DEAD), (DEAD, "a")):  # it was out of reach when it was told
        stage.give(here, Disconnected(gone))
    for here, gone in (("a", DEAD), (DEAD, "a")):
        stage.give(here, Connected(gone))
    assert stage.exits == [DEAD]
    stage.exits.clear()
    stage.restart(DEAD)
    assert stage.exits == [], "a new life waits until its heirs need nothing more of it"
    assert DEAD in stage.machines["a"].inboxes["op"].attaching
