"""Several lives of one instance at once: only the latest is heard, and nobody waits who is not."""

from __future__ import annotations

import pytest

from playing import Stage, key_in
from tiercel.core import messages as m
from tiercel.core.effects import Exit, Send
from tiercel.core.events import Connected, Received
from tiercel.core.faults import LostCheckpoint, LostLog
from tiercel.core.instance import Instance
from tiercel.core.router import Router
from tiercel.core.settings import Settings
from tiercel.core.topology import Operator, Stream, Topology
from tiercel.workloads.processors import PlainCode

NAME = "op@a#1"
OPERATOR = Operator("op", ("in",), "out", (NAME,), slots=4)
TOPOLOGY = Topology({"a": None}, {"out": Stream("out", "a")}, {"op": OPERATOR})


class Silent:
    """Emits nothing."""

    def init(self, handle: object) -> None: ...
    def handleInputRows(self, key: object, rows: object, timerValues: object) -> list[object]:
        return []

    def close(self) -> None: ...


def test_a_life_that_attaches_behind_a_later_one_is_told_and_ends() -> None:
    """Found by chaos: what Spark believed dead had the later life, and then ended.

    The task that Spark knew was fenced from then on, and nobody started it again.
    """
    router = Router("a", TOPOLOGY, Settings(), 1, {})
    router.on_event(Connected(NAME), 0.0)
    router.on_event(Received(NAME, m.Attach(NAME, 3, 1)), 0.0)
    effects = router.on_event(Received(NAME, m.Attach(NAME, 2, 1)), 1.0)
    assert Send(NAME, m.Outlived(2)) in effects
    instance = Instance(NAME, OPERATOR, PlainCode(Silent()), Settings(), 2)
    instance.on_event(Connected("a"), 0.0)
    assert instance.on_event(Received("a", m.Outlived(1)), 1.0) == []
    (end,) = instance.on_event(Received("a", m.Outlived(2)), 1.0)
    assert isinstance(end, Exit)


@pytest.mark.parametrize("left", ["nothing", "an older checkpoint"])
def test_an_instance_whose_storage_holds_less_than_it_has_told_does_not_go_on(left: str) -> None:
    """Its log has forgotten the rest: going on would lose it silently."""
    stage = Stage().start()
    stage.produce("a", *((key_in(slot), 1, 0) for slot in range(4)))
    stage.pass_ms(2_000)
    name = "op@a#0"
    older = {} if left == "nothing" else dict(stage.disks[name])
    stage.produce("a", *((key_in(slot), 2, 1) for slot in range(4)))
    stage.pass_ms(2_000)
    stage.stop(name)
    stage.disks[name] = older
    with pytest.raises(LostCheckpoint, match="no checkpoint" if left == "nothing" else "at offset"):
        stage.start(name)


@pytest.mark.parametrize("left", ["nothing", "an older log"])
def test_an_instance_whose_log_ends_before_its_checkpoint_does_not_go_on(left: str) -> None:
    """New rows would get the numbers of those that it has processed, and be taken for them.

    Of a router that has nothing left, an instance was new: it threw away what it had stored itself.
    """
    stage = Stage().start()
    stage.produce("a", *((key_in(slot), 1, 0) for slot in range(4)))
    stage.pass_ms(2_000)
    older = {} if left == "nothing" else dict(stage.disks["a"])
    stage.produce("a", *((key_in(slot), 2, 1) for slot in range(4)))
    stage.pass_ms(2_000)
    stored = dict(stage.disks["op@a#0"])
    stage.stop("op@a#0")
    stage.stop("a")
    stage.disks["a"] = older
    stage.start("a")
    with pytest.raises(LostLog, match="ends at"):
        stage.start("op@a#0")
    assert stage.disks["op@a#0"] == stored
