"""The destination of a move: a move that ends while the destination does not run."""

from __future__ import annotations

from typing import Any

from machines_in_memory import REQUESTER, SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.machine.effects import LoadCheckpoint
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"


ALL_OF_A = KeySet(slots=frozenset((0, 1)))


def test_a_destination_that_loads_during_an_abort_forgets_the_move_when_it_attaches() -> None:
    """The destination has voted and restarts; the move is undone before its checkpoint is loaded."""
    driver = SmallDeployment().start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Ready) and sender == "b"
    driver.move(ALL_OF_A, A, B)
    driver.advance_ms(1_500)
    assert driver.phase_of("m1", "destination router") == "adoptable"
    held: list[Any] = []
    driver.stop(B)
    perform = driver.perform

    def slowly(name: str, effects: Any) -> None:
        later = [e for e in effects if name == B and isinstance(e, LoadCheckpoint)]
        held.extend(later)
        perform(name, [e for e in effects if e not in later])

    driver.perform = slowly  # type: ignore[method-assign]
    driver.start(B)
    assert held
    driver.restart(A)  # the source falls: the move is undone
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "aborted"
    driver.perform = perform  # type: ignore[method-assign]
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: False
    perform(B, held)
    driver.run()
    driver.advance_ms(3_000)
    assert driver.phase_of("m1", "destination instance") == "", "it learned that the move was undone"
    driver.move(ALL_OF_A, A, B, name="m2")
    driver.advance_ms(5_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.send("b", m.MoveRequest("m3", "op", ALL_OF_A, B, A, "live", 10_000.0))
    driver.advance_ms(20_000)
    assert driver.messages("b", REQUESTER, m.MoveStatus)[-1].phase == "done"


def test_a_live_move_goes_on_after_its_destination_withheld_as_many_outputs_as_it_may() -> None:
    driver = SmallDeployment(settings=Settings(withheld_max=5)).start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.withholds = lambda sender, to, message: (
        isinstance(message, m.EmittedThrough) or isinstance(getattr(message, "message", None), m.Captured)
    )
    driver.move(ALL_OF_A, A, B)
    driver.advance_ms(50)
    for n in range(20):
        driver.produce("a", (key_in(0), n, n))
    receiver = driver.machines[B].receivers["m1"]
    assert len(receiver.withheld) == 5
    assert receiver.stalled
    driver.release_withheld()
    driver.advance_ms(3_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    assert len(driver.outputs()) == 21
