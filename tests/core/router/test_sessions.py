"""Sessions of instances at a router: attach, fencing, retirement."""

from __future__ import annotations

from machines_in_memory import REQUESTER, SmallDeployment, topology
from tiercel.core import messages as m
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import Exit, Send
from tiercel.core.machine.events import Connected, Received
from tiercel.core.model.keys import KeySet
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.sim.workload import PlainCode

NAME = "op@a#1"


OPERATOR = Operator("op", ("in",), "out", (NAME,), slots=4)


TOPOLOGY = Topology({"a": None}, {"out": Stream("out", "a")}, {"op": OPERATOR})
ALL_OF_A = KeySet(slots=frozenset((0, 1)))
DEAD, OTHER, SUCCESSOR = "op@a#0", "op@a#1", "op@a#2"


class Silent:
    """Emits nothing."""

    def init(self, handle: object) -> None: ...
    def handleInputRows(self, key: object, rows: object, timerValues: object) -> list[object]:
        return []

    def close(self) -> None: ...


def test_an_older_incarnation_that_attaches_is_fenced_and_ends() -> None:
    """Found by chaos: a task that Spark believed dead had the later incarnation, and then ended.

    The task that Spark knew was fenced but kept running, so Spark did not restart it.
    """
    router = Router("a", TOPOLOGY, Settings(), 1, {})
    router.on_event(Connected(NAME), 0.0)
    router.on_event(Received(NAME, m.Attach(NAME, 3, 1)), 0.0)
    effects = router.on_event(Received(NAME, m.Attach(NAME, 2, 1)), 1.0)
    assert Send(NAME, m.InstanceFenced(2)) in effects
    instance = Instance(NAME, OPERATOR, PlainCode(Silent()), Settings(), 2)
    instance.on_event(Connected("a"), 0.0)
    assert instance.on_event(Received("a", m.InstanceFenced(1)), 1.0) == []
    (end,) = instance.on_event(Received("a", m.InstanceFenced(2)), 1.0)
    assert isinstance(end, Exit)


def test_a_repeated_retirement_does_not_keep_a_rehired_instance_out() -> None:
    """The instance is retired and started again; then the same retirement arrives a second time."""
    driver = SmallDeployment(topology(("a",), instances=(DEAD, OTHER))).start()
    driver.start(SUCCESSOR)
    driver.send("a", m.Retirement(SUCCESSOR))
    driver.restart(SUCCESSOR)
    driver.send("a", m.Retirement(SUCCESSOR))  # late
    driver.advance_ms(60_000)
    driver.move(ALL_OF_A, DEAD, SUCCESSOR)
    driver.advance_ms(60_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
