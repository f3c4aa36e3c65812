"""The source of a move: which state it captures, retains and drops."""

from __future__ import annotations

import pytest

from machines_in_memory import SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"


ALL_OF_A = KeySet(slots=frozenset((0, 1)))


def test_a_move_of_a_slot_leaves_out_a_key_that_moved_earlier() -> None:
    """The key moves before its slot; router and source restart while both moves are stored."""
    driver = SmallDeployment().start()
    key, beside = key_in(0), key_in(0, 1)
    driver.produce("a", (key, 0, 0), (beside, 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    driver.move(KeySet(keys=frozenset((key,))), A, B, "live", "m7.2")
    driver.advance_ms(3_000)
    assert driver.phase_of("m7.2", "source router") == "done"
    driver.produce("a", (key, 0, 1))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Forget | m.Chunk)
    driver.move(KeySet(slots=frozenset((0,))), A, B, "pause", "m10")
    driver.advance_ms(3_000)
    assert driver.phase_of("m10", "source router") == "emitting"
    driver.disks["a"] = dict(sorted(driver.disks["a"].items(), key=lambda item: [*map(str, item[0])]))
    driver.stop(A)
    driver.restart("a")
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: False
    driver.start(A)
    driver.advance_ms(5_000)
    assert driver.disks["a"]["ended", "m10"] == ("done", "")
    driver.produce("a", (key, 0, 2))
    driver.advance_ms(1_000)
    assert [o.row[2][2] for o in driver.outputs() if o.key == key] == [1, 2, 3]


def test_a_source_drops_captured_state_of_a_move_that_the_restarted_router_undid() -> None:
    driver = SmallDeployment().start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(
        getattr(message, "message", message), m.UnitReceipt | m.Ready
    )
    driver.move(ALL_OF_A, A, B)
    driver.advance_ms(100)
    assert driver.machines[A].senders["m1"].in_flight
    driver.restart("a")
    assert driver.disks["a"]["ended", "m1"][0] == "aborted"
    driver.advance_ms(60_000)
    assert driver.phase_of("m1", "source instance") == ""


def test_a_replay_does_not_give_a_key_away_again_that_left_before() -> None:
    """The source replays, and is asked for a slot before the replay reaches the flip of one of its keys."""
    driver = SmallDeployment().start()
    key, beside = key_in(0), key_in(0, 1)
    driver.produce("a", (key, 0, 0), (beside, 0, 0))
    driver.checkpoint()
    disk = dict(driver.disks[A])
    driver.withholds = lambda sender, to, message: (
        isinstance(message, m.Forget | m.Checkpointed) and sender != B
    )
    driver.move(KeySet(keys=frozenset((key,))), A, B, "pause", "m1")
    driver.advance_ms(3_000)
    assert driver.phase_of("m1", "source router") == "done"
    driver.stop(A)
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: to == A and isinstance(message, m.Forget | m.Dispatch)
    driver.disks[A] = disk  # it had no time for another checkpoint
    driver.start(A)
    driver.move(KeySet(slots=frozenset((0,))), A, B, "live", "m2")
    driver.advance_ms(20)
    sender = driver.machines[A].senders.get("m2")
    assert sender is None or key not in sender.captured_at
    driver.release_withheld()
    driver.advance_ms(5_000)
    assert driver.statuses["m2"].phase == "done"
    driver.produce("a", (key, 0, 2))
    driver.advance_ms(1_000)
    assert [o.row[2][2] for o in driver.outputs() if o.key == key] == [1, 2]


@pytest.mark.parametrize("strategy", [name for name, x in STRATEGIES.items() if x.freezes and not x.restarts])
def test_an_overloaded_source_does_not_work_off_its_backlog_before_it_sends_state(strategy: str) -> None:
    """It stops where it is; the destination processes the rows that waited, each once and in order."""
    driver = SmallDeployment().start()
    driver.produce("a", (key_in(0), 0, 0), (key_in(1), 0, 0))
    driver.withholds = lambda sender, to, message: to == A and isinstance(message, m.Dispatch)
    for n in range(9):
        driver.produce("a", (key_in(0), 0, n + 1), (key_in(1), 0, n + 1))
    driver.move(KeySet(slots=frozenset((0,))), A, B, strategy)
    driver.advance_ms(2_000)
    (stopped,) = {
        f.message for f in driver.messages(A, "a", m.FromInstance) if isinstance(f.message, m.SourceStopped)
    }
    assert stopped.offset == 1, "ten rows wait in the log"
    assert [o.row[2][2] for o in driver.outputs() if o.key == key_in(0)] == [*range(1, 11)]
    assert [o.row[2][2] for o in driver.outputs() if o.key == key_in(1)] == [1]
    driver.release_withheld()
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].phase == "done"
    assert [o.row[2][2] for o in driver.outputs() if o.key == key_in(1)] == [*range(1, 11)]


def test_a_source_holds_only_the_chunks_that_are_under_way() -> None:
    settings = Settings(chunk_keys_max=1, chunks_unacked_max=2)
    driver = SmallDeployment(settings=settings).start()
    keys = [key_in(0, n) for n in range(30)]
    driver.produce("a", *((key, 0, 0) for key in keys))
    seen: list[int] = []
    driver.withholds = lambda sender, to, message: (
        seen.append(len(driver.machines[A].senders["m1"].in_flight)) or False  # type: ignore[func-returns-value]
        if isinstance(message, m.UnitReceipt)
        else False
    )
    driver.move(KeySet(slots=frozenset((0,))), A, B, "pause")
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].phase == "done"
    assert len(seen) >= 30
    assert max(seen) <= 2


def test_a_destination_that_lost_its_units_asks_for_them_again() -> None:
    driver = SmallDeployment().start()
    keys = [key_in(0, n) for n in range(5)]
    driver.produce("a", *((key, 0, 0) for key in keys))
    driver.withholds = lambda sender, to, message: isinstance(
        getattr(message, "message", message), m.StateComplete
    )
    driver.move(KeySet(slots=frozenset((0,))), A, B, "fetch")
    driver.produce("a", (keys[0], 0, 1))
    driver.advance_ms(20)
    driver.restart(B)
    driver.release_withheld()
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].phase == "done"
    assert [o.row[2][2] for o in driver.outputs() if o.key == keys[0]] == [1, 2]
