"""Parallel recovery: successors take over the slots of a dead instance, from its checkpoint and its log."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from machines_in_memory import REQUESTER, SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.errors import LostCheckpoint
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import Effect, LoadCheckpoint, Send, StorageKey, Write
from tiercel.core.machine.events import CheckpointLoaded, Connected, Disconnected, Durable, Event, Received
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import KeySet, StoredKeyInfo
from tiercel.core.model.log import TakenOver, Takeover
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.sim.workload import KINDS, PlainCode

DEAD, OTHER = "op@a#0", "op@a#1"
SUCCESSORS = ("op@a#2", "op@a#3", "op@a#4")
SUCCESSOR = SUCCESSORS[0]
OPERATOR = Operator("op", ("in",), "out", (DEAD, OTHER), slots=16)
TOPOLOGY = Topology({"a": None}, {"out": Stream("out", "a")}, {"op": OPERATOR})
ALL_OF_A = KeySet(slots=frozenset((0, 1)))


class Driven:
    """A router whose writes are durable at once, and its reports to the controller."""

    def __init__(self, items: dict[StorageKey, Any] | None = None) -> None:
        self.disk: dict[StorageKey, Any] = dict(items or {})
        self.router = Router("a", TOPOLOGY, Settings(), 1, self.disk)
        self.reports: list[m.MoveStatus] = []
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
                    self.reports.append(status)
                case _:
                    pass

    def take_over(self, name: str, successors: tuple[str, ...], dead: str = DEAD) -> m.MoveStatus:
        self.take(Received("controller", m.TakeoverRequest(name, dead, successors)))
        return self.reports[-1]


def test_a_takeover_divides_the_slots_of_the_dead_instance_among_its_successors() -> None:
    driven = Driven()
    owned = [s for s, r in enumerate(driven.router.inboxes["op"].table.slots) if r.instance == DEAD]
    assert driven.take_over("r1", SUCCESSORS).phase == "done"
    inbox = driven.router.inboxes["op"]
    shares = {successor: inbox.successors[successor].keys.slots for successor in SUCCESSORS}
    assert sorted(slot for share in shares.values() for slot in share) == owned
    assert all(
        inbox.table.slots[slot].instance == successor for successor, share in shares.items() for slot in share
    )
    assert DEAD not in inbox.readers
    assert set(SUCCESSORS) <= set(inbox.readers)
    assert isinstance(driven.disk["inbox", "op", 1].control, TakenOver)
    assert driven.take_over("r1", SUCCESSORS).phase == "done"  # repeated: nothing more happens
    assert inbox.offset == 1


def test_successors_survive_a_restart_of_the_router() -> None:
    before = Driven()
    before.take_over("r1", SUCCESSORS)
    after = Driven(before.disk)
    assert after.router.inboxes["op"].successors == before.router.inboxes["op"].successors
    assert set(after.router.inboxes["op"].readers) == {OTHER, *SUCCESSORS}


@pytest.mark.parametrize(
    ("dead", "successors", "why"),
    [
        ("op@a#9", SUCCESSORS, "no instance of this site"),
        (DEAD, (OTHER,), "expected a new instance"),
        (DEAD, ("op@b#1",), "expected a new instance"),
        (DEAD, (), "a slot for each"),
        (DEAD, tuple(f"op@a#{n}" for n in range(10, 40)), "a slot for each"),
    ],
)
def test_an_invalid_takeover_request_is_refused(dead: str, successors: tuple[str, ...], why: str) -> None:
    status = Driven().take_over("r1", successors, dead)
    assert status.phase == "refused"
    assert why in status.reason


def test_a_refused_takeover_stays_refused_when_the_request_is_repeated() -> None:
    """Found by seed 306: the controller got the refusal, and then the takeover was carried out."""
    driven = Driven()
    assert driven.take_over("r1", (OTHER,)).phase == "refused"
    driven = Driven(driven.disk)
    del driven.router.inboxes["op"].readers[OTHER]
    assert driven.take_over("r1", (OTHER,)).phase == "refused"


def test_a_dead_instance_may_attach_again_only_after_its_successors_have_checkpoints() -> None:
    driven = Driven()
    driven.take_over("r1", SUCCESSORS[:1])
    inbox = driven.router.inboxes["op"]
    driven.take(Connected(DEAD))
    driven.take(Received(DEAD, m.Attach(DEAD, 7, 1)))
    assert DEAD not in inbox.readers
    driven.take(Connected(SUCCESSORS[0]))
    driven.take(Received(SUCCESSORS[0], m.Attach(SUCCESSORS[0], 1, 1)))
    driven.take(Received(SUCCESSORS[0], m.Checkpointed(SUCCESSORS[0], 1, inbox.offset - 1, {})))
    assert not inbox.successors[SUCCESSORS[0]].fresh
    assert DEAD not in inbox.readers
    driven.take(Received(SUCCESSORS[0], m.Checkpointed(SUCCESSORS[0], 1, inbox.offset, {})))
    assert not inbox.successors
    assert inbox.readers[DEAD].incarnation == 7


def test_a_successor_ignores_its_own_checkpoint_from_before_the_takeover() -> None:
    code = PlainCode(KINDS["chained"]("op", False))
    successor = Instance(SUCCESSORS[0], OPERATOR, code, Settings(), 1)
    successor.on_event(Connected("a"), 0.0)
    takeover = Takeover(DEAD, KeySet(slots=frozenset({1})), 9)
    reply = m.AttachReply(1, 1, 1, 0, -1, False, 0, [], [], [], takeover, head=20)
    effects = successor.on_event(Received("a", reply), 0.0)
    assert LoadCheckpoint(values=False, timers=False, number=1) in effects
    older: dict[Any, Any] = {("checkpoint",): CheckpointHeader(3, 8, 1, 0, -1, [])}
    effects = successor.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert effects == [LoadCheckpoint(timers=False, takeover=takeover, number=2, adopt=True)]
    assert not successor.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert not successor.loaded


def resumed_at(effects: list[Effect]) -> list[int]:
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.applied for message in messages if isinstance(message, m.Resume)]


def test_a_restarted_successor_resumes_from_its_own_checkpoint_since_the_takeover() -> None:
    """Found by seed 896: the router learned of the checkpoint late, and had trimmed the log before it."""
    successor = Instance(SUCCESSORS[0], OPERATOR, PlainCode(KINDS["chained"]("op", False)), Settings(), 1)
    successor.on_event(Connected("a"), 0.0)
    takeover = Takeover(DEAD, KeySet(slots=frozenset({1})), 9)
    reply = m.AttachReply(1, 1, 1, 0, -1, False, 0, [], [], [], takeover, head=20)
    successor.on_event(Received("a", reply), 0.0)
    since: dict[Any, Any] = {("checkpoint",): CheckpointHeader(3, 12, 1, 0, -1, [], None, 9)}
    effects = successor.on_event(CheckpointLoaded(since, number=1), 0.0)
    assert successor.loaded
    assert resumed_at(effects) == [12]


def test_a_rehired_instance_ignores_a_checkpoint_older_than_its_start_offset() -> None:
    """Found by seed 1717: only the first incarnation discarded its old keys; the second had them again."""
    rehired = Instance(DEAD, OPERATOR, PlainCode(KINDS["chained"]("op", False)), Settings(), 5)
    rehired.on_event(Connected("a"), 0.0)
    rehired.on_event(Received("a", m.AttachReply(5, 1, 2, 80, -1, False, 0, [], [], [], head=80)), 0.0)
    older: dict[Any, Any] = {
        ("checkpoint",): CheckpointHeader(1, 18, 1, 0, -1, []),
        ("state", 3, b"k", 1): StoredKeyInfo(),
    }
    effects = rehired.on_event(CheckpointLoaded(older, number=1), 0.0)
    assert not rehired.space.count
    assert resumed_at(effects) == [80]


def test_a_move_from_a_successor_waits_until_it_has_replayed_the_takeover() -> None:
    """Found by seed 3286: the successor captured keys while it replayed rows that no shadow had.

    Outputs of these rows have the epoch of the dead instance, which the destination must not continue.
    """
    successor, key = SUCCESSORS[0], key_in(0)
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    slots = frozenset(slot for slot in range(SLOTS) if driver.owner_of(key_in(slot), at="a") == DEAD)
    driver.produce("a", (key, 0, 1))
    driver.stop(DEAD)
    driver.produce("a", (key, 0, 2))
    driver.send("a", m.TakeoverRequest("r1", DEAD, (successor,)))
    driver.withholds = lambda sender, to, message: to == successor and isinstance(message, m.Dispatch)
    driver.start(successor)
    driver.produce("a", (key, 0, 3))
    driver.move(KeySet(slots=slots), successor, OTHER)
    driver.release_withheld()
    driver.produce("a", (key, 0, 4))
    driver.advance_ms(10_000)
    driver.produce("a", (key, 0, 5))
    assert driver.disks["a"]["ended", "m1"] == ("done", "")
    outputs = driver.outputs()
    assert [output.row[2][2] for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.epoch for output in outputs] == sorted(output.epoch for output in outputs)


def test_an_instance_still_running_after_its_takeover_is_fenced_at_each_connection() -> None:
    """It must write no checkpoint: its successors still read the stored one."""
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    driver.produce("a", (key_in(0), 0, 1))
    driver.send("a", m.TakeoverRequest("r1", DEAD, SUCCESSORS[:1]))
    assert driver.exits == [DEAD]
    driver.exits.clear()
    for here, gone in (("a", DEAD), (DEAD, "a")):  # the connection broke
        driver.handle(here, Disconnected(gone))
    for here, gone in (("a", DEAD), (DEAD, "a")):
        driver.handle(here, Connected(gone))
    assert driver.exits == [DEAD]
    driver.exits.clear()
    driver.restart(DEAD)
    assert driver.exits == [], "a new incarnation waits until the successors have checkpoints"
    assert DEAD in driver.machines["a"].inboxes["op"].attaching


def test_retiring_a_successor_lets_the_dead_instance_attach_again() -> None:
    """It moved all its keys on at once. The dead instance would wait for its checkpoint without end."""
    driver = SmallDeployment(topology(("a",), "forgetful", instances=(DEAD, OTHER)), kind="forgetful").start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.advance_ms(3_000)
    driver.stop(DEAD)
    driver.send("a", m.TakeoverRequest("r1", DEAD, (SUCCESSOR,)))
    driver.unsynced.add(SUCCESSOR)  # its disk is slow
    driver.start(SUCCESSOR)
    driver.move(ALL_OF_A, SUCCESSOR, OTHER, "pause")
    driver.advance_ms(3_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.send("a", m.Retirement(SUCCESSOR))
    assert driver.messages("a", REQUESTER, m.RetirementReply) == [m.RetirementReply(SUCCESSOR, True)]
    driver.stop(SUCCESSOR)
    driver.start(DEAD)
    assert DEAD in driver.machines["a"].inboxes["op"].readers, "no successor needs its checkpoint"
    driver.unsynced.discard(SUCCESSOR)
    driver.start(SUCCESSOR)
    assert not driver.has_state(SUCCESSOR, key_in(0)), "a copy of a key that is not its own"


def test_a_reused_successor_name_emits_the_outputs_that_the_dead_instance_did_not() -> None:
    """The dead instance has emitted nothing; the successor has an older output mark of its own."""
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start("a", OTHER)
    for n in range(3):
        driver.produce("a", (key_in(2), 0, n))
    driver.start(DEAD)
    driver.kill_unnoticed(DEAD)
    driver.handle("a", Disconnected(DEAD))
    for n in range(3):
        driver.produce("a", (key_in(0), 0, n))
    driver.start(SUCCESSOR)  # for a while, without keys
    driver.advance_ms(100)
    driver.stop(SUCCESSOR)
    driver.send("a", m.TakeoverRequest("r1", DEAD, (SUCCESSOR,)))
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.start(SUCCESSOR)
    driver.advance_ms(3_000)
    assert [o.row[2][2] for o in driver.outputs() if o.key == key_in(0)] == [1, 2, 3]


def test_a_takeover_does_not_raise_the_watermark_to_the_old_progress_of_the_successor() -> None:
    """The successor has read on without keys; outputs of the dead instance are still to come."""
    driver = SmallDeployment(topology(("a",), "windows", instances=(DEAD, OTHER)), kind="windows").start()
    driver.start(SUCCESSOR)
    driver.withholds = lambda sender, to, message: to == DEAD and isinstance(message, m.Dispatch)
    driver.produce("a", (key_in(0), 10, 0), watermark_ms=5)
    driver.produce("a", (key_in(2), 200, 0), watermark_ms=100)
    router = driver.machines["a"]
    assert router.output_promise("op") == -1
    driver.stop(SUCCESSOR)
    driver.stop(DEAD)
    driver.send("a", m.TakeoverRequest("r1", DEAD, (SUCCESSOR,)))
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    assert router.output_promise("op") == -1, "the row at 10 has not been processed"
    driver.start(SUCCESSOR)
    driver.advance_ms(3_000)
    assert router.output_promise("op") == 100


def test_a_successor_stops_if_the_checkpoint_of_the_dead_instance_is_lost() -> None:
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.advance_ms(3_000)
    assert driver.machines["a"].inboxes["op"].readers[DEAD].stored
    driver.stop(DEAD)
    driver.disks[DEAD].clear()
    driver.send("a", m.TakeoverRequest("r1", DEAD, (SUCCESSOR,)))
    with pytest.raises(LostCheckpoint):
        driver.start(SUCCESSOR)


@pytest.mark.parametrize("strategy", ["live", "pause"])
@pytest.mark.parametrize("dead", [DEAD, OTHER], ids=["source", "destination"])
def test_who_dies_shortly_after_a_move_can_be_taken_over(dead: str, strategy: str) -> None:
    """The move is done, and no checkpoint of the dead instance covers its end, nor ever will."""
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    moved = KeySet(keys=frozenset({key_in(0)}))
    for n in range(3):
        driver.produce("a", (key_in(0), n, n), (key_in(1), n, n), (key_in(3), n, n))
    driver.checkpoint()
    driver.move(moved, DEAD, OTHER, strategy)
    for _ in range(40):
        if driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done":
            break
        driver.produce("a", (key_in(0), 0, 7))
        driver.advance_ms(25)
    assert driver.phase_of("m1", "source router") == "done"
    assert driver.phase_of("m1", "destination router") == "merged"
    driver.produce("a", (key_in(0), 0, 8), (key_in(1), 0, 8), (key_in(3), 0, 8))
    made = len(driver.outputs())
    before = {key: driver.state_of(key).digest() for key in (key_in(0), key_in(1), key_in(3))}  # type: ignore[union-attr]
    driver.stop(dead)
    driver.send("a", m.TakeoverRequest("r1", dead, SUCCESSORS[:2]))
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.start(*SUCCESSORS[:2])
    driver.advance_ms(3_000)
    assert driver.phase_of("m1", "source router") == driver.phase_of("m1", "destination router") == ""
    assert {key: driver.state_of(key).digest() for key in before} == before  # type: ignore[union-attr]
    holders = [name for name, x in driver.machines.items() if name != "a" and x.space.has(key_in(0))]
    assert holders == [driver.owner_of(key_in(0))], "no copy is left where the key was"
    assert len(driver.outputs()) == made, "no output was doubled"
    driver.produce("a", (key_in(0), 0, 9), (key_in(1), 0, 9), (key_in(3), 0, 9))
    assert len(driver.outputs()) == made + 3


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        *itertools.product(
            ("pause", "fetch"),
            ("FlipToSource", "SourceStopped", "Chunk", "EmitFrom", "DestinationCheckpointed"),
        ),
        *itertools.product(("live",), ("SourceStopped", "EmitFrom", "DestinationCheckpointed")),
    ],
)
@pytest.mark.parametrize("dead", [DEAD, OTHER], ids=["source", "destination"])
def test_who_dies_in_a_decided_move_is_taken_over_and_the_move_ends(
    dead: str, strategy: str, lost: str
) -> None:
    """A successor serves the units of a dead source, or receives those of a dead destination."""
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    for n in range(3):
        driver.produce("a", (key_in(0), n, n), (key_in(1), n, n), (key_in(3), n, n))
    driver.checkpoint()
    driver.withholds = lambda sender, to, message: type(getattr(message, "message", message)).__name__ == lost
    driver.move(KeySet(keys=frozenset({key_in(0)})), DEAD, OTHER, strategy)
    for _ in range(20):
        if driver.phase_of("m1", "source router") in ("flipped", "cut", "emitting"):
            break
        driver.advance_ms(5)
    assert driver.phase_of("m1", "source router") in ("flipped", "cut", "emitting")
    driver.withholds = lambda sender, to, message: False
    driver.stop(dead)
    driver.produce("a", (key_in(0), 0, 8), (key_in(1), 0, 8), (key_in(3), 0, 8))
    driver.send("a", m.TakeoverRequest("r1", dead, SUCCESSORS[:2]))
    assert driver.statuses["r1"].phase == "done"
    driver.start(*SUCCESSORS[:2])
    driver.advance_ms(3_000)
    driver.produce("a", (key_in(0), 0, 9), (key_in(1), 0, 9), (key_in(3), 0, 9))
    driver.advance_ms(3_000)
    assert driver.phase_of("m1", "source router") == driver.phase_of("m1", "destination router") == ""
    for key in (key_in(0), key_in(1), key_in(3)):
        counts = [output.row[2][2] for output in driver.outputs() if output.key == key]
        assert counts == [1, 2, 3, 4, 5], "every row once, in order"
    holders = [name for name, x in driver.machines.items() if name != "a" and x.space.has(key_in(0))]
    assert holders == [driver.owner_of(key_in(0))]
    assert driver.owner_of(key_in(0)) == (OTHER if dead == DEAD else SUCCESSORS[0])


def test_an_undecided_move_of_a_dead_instance_is_undone_before_it_is_taken_over() -> None:
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    driver.produce("a", (key_in(0), 0, "x"))
    driver.checkpoint()
    driver.stop(OTHER)
    driver.move(KeySet(keys=frozenset({key_in(0)})), DEAD, OTHER, "live")
    driver.send("a", m.TakeoverRequest("r1", OTHER, SUCCESSORS[:1]))
    assert [(s.move, s.phase) for s in driver.messages("a", REQUESTER, m.MoveStatus)][-1] == ("r1", "done")
    assert driver.owner_of(key_in(0)) == DEAD


def test_an_instance_that_owns_single_keys_and_no_slot_can_be_taken_over() -> None:
    guest = "op@a#7"
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start().start(guest)
    driver.produce("a", (key_in(0), 0, "x"))
    driver.move(KeySet(keys=frozenset({key_in(0)})), DEAD, guest)
    driver.finish_moves()
    driver.produce("a", (key_in(0), 0, "y"))
    driver.stop(guest)
    driver.send("a", m.TakeoverRequest("r1", guest, (SUCCESSOR,)))
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.start(SUCCESSOR)
    driver.produce("a", (key_in(0), 0, "z"))
    assert driver.owner_of(key_in(0)) == SUCCESSOR
    assert [output.row[2][2] for output in driver.outputs()] == [1, 2, 3]
