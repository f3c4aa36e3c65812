"""An instance that starts from its checkpoint: stale, lost or incomplete storage is recognised."""

from __future__ import annotations

import pytest

from machines_in_memory import REQUESTER, SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.errors import LostCheckpoint, LostLog
from tiercel.core.model.keys import KeySet

A, B = "op@a#0", "op@b#0"


ALL_OF_A = KeySet(slots=frozenset((0, 1)))


def counts(driver: SmallDeployment) -> list[int]:
    return [output.row[2][2] for output in driver.outputs()]


def retired_before_it_forgot(name: str = A) -> SmallDeployment:
    """All keys of A have moved to B; A has a checkpoint behind the flip, and is retired before it forgets."""
    driver = SmallDeployment(kind="forgetful").start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    driver.move(ALL_OF_A, A, B, "pause")
    driver.advance_ms(12_000)
    assert driver.phase_of("m1", "source router") == "done"
    driver.send("a", m.Retirement(A))
    assert driver.messages("a", REQUESTER, m.RetirementReply) == [m.RetirementReply(A, True)]
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: False
    return driver


@pytest.mark.parametrize("strategy", ["live", "pause"])
def test_retired_instance_discards_stale_checkpoint_when_rehired(
    strategy: str,
) -> None:
    """The stale checkpoint is at the offset where the new instance starts: no row was logged in between."""
    driver = retired_before_it_forgot()
    driver.stop(A)
    driver.start(A)  # rehired: it starts as a new instance
    driver.produce("a", (key_in(0), 0, 1))  # the key starts again at B
    driver.withholds = lambda sender, to, message: isinstance(message, m.Chunk)
    driver.send("b", m.MoveRequest("m2", "op", ALL_OF_A, B, A, strategy, 30_000.0))
    driver.restart(A)  # it dies before it has stored anything
    assert not driver.has_state(A, key_in(0)), "a copy of a key that is not its own"
    driver.release_withheld()
    driver.advance_ms(8_000)
    if strategy == "live":
        driver.send("b", m.MoveRequest("m3", "op", ALL_OF_A, B, A, strategy, 30_000.0))
        driver.advance_ms(8_000)
    assert driver.owner_of(key_in(0), at="a") == A
    driver.produce("a", (key_in(0), 0, 2))
    driver.advance_ms(8_000)
    assert counts(driver) == [1, 2, 1]


@pytest.mark.parametrize("left", ["nothing", "an older checkpoint"])
def test_an_instance_stops_if_its_stored_checkpoint_is_older_than_the_reported_one(left: str) -> None:
    """The log is trimmed up to the reported checkpoint: to go on would lose rows silently."""
    driver = SmallDeployment().start()
    driver.produce("a", *((key_in(slot), 1, 0) for slot in range(4)))
    driver.advance_ms(2_000)
    name = "op@a#0"
    older = {} if left == "nothing" else dict(driver.disks[name])
    driver.produce("a", *((key_in(slot), 2, 1) for slot in range(4)))
    driver.advance_ms(2_000)
    driver.stop(name)
    driver.disks[name] = older
    with pytest.raises(LostCheckpoint, match="no checkpoint" if left == "nothing" else "at offset"):
        driver.start(name)


@pytest.mark.parametrize("left", ["nothing", "an older log"])
def test_an_instance_stops_if_the_log_ends_before_its_checkpoint(left: str) -> None:
    """New rows would get the offsets of processed ones, and the instance would skip them.

    The instance keeps its stored checkpoint, even if its router has lost everything.
    """
    driver = SmallDeployment().start()
    driver.produce("a", *((key_in(slot), 1, 0) for slot in range(4)))
    driver.advance_ms(2_000)
    older = {} if left == "nothing" else dict(driver.disks["a"])
    driver.produce("a", *((key_in(slot), 2, 1) for slot in range(4)))
    driver.advance_ms(2_000)
    stored = dict(driver.disks["op@a#0"])
    driver.stop("op@a#0")
    driver.stop("a")
    driver.disks["a"] = older
    driver.start("a")
    with pytest.raises(LostLog, match="ends at"):
        driver.start("op@a#0")
    assert driver.disks["op@a#0"] == stored
