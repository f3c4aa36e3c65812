"""Waiting rows: slices of measured length, what overtakes them, and the order that stays."""

from __future__ import annotations

from machines_in_memory import SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.instance.row_queue import FIRST_ROWS, RowQueue
from tiercel.core.machine.effects import Continue, Send
from tiercel.core.machine.events import Continued, Disconnected, Received
from tiercel.core.messages.site_link import ShadowNotice
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Adopt, Entry
from tiercel.core.model.routing import RouteUpdate
from tiercel.core.settings import Settings

ME = "op@a#0"


def entry(offset: int, rows: int = 1) -> Entry:
    return Entry(offset, 0, {ME: [(b"k", 0, "x")] * rows})


def adopt(offset: int, move: str = "m1") -> Entry:
    record = Adopt(move, KeySet(), ME, "live", RouteUpdate({}, {}), 0, -1, -1, RouteUpdate({}, {}), 1)
    return Entry(offset, 0, {}, record)


def notice(offset: int, move: str = "m1") -> ShadowNotice:
    return ShadowNotice(move, offset, 0, [(b"k", 0, "x")], None)


def measured(row_ms: float, slice_ms: float = 2.0) -> RowQueue:
    queue = RowQueue(slice_ms)
    queue.service.add(1, row_ms)
    return queue


def offsets(queue: RowQueue) -> list[list[int]]:
    """The offsets of each slice; those of shadow rows are negative."""
    found = []
    while queue:
        taken = queue.take()
        found.append([e.offset for e in taken.entries] + [-n.offset for n in taken.shadow])
    return found


def test_a_slice_holds_as_many_rows_as_take_its_time() -> None:
    queue = measured(0.5)
    queue.add_entries([entry(n) for n in range(1, 8)])
    assert offsets(queue) == [[1, 2, 3, 4], [5, 6, 7]]


def test_an_entry_that_takes_longer_than_a_slice_is_a_slice_of_its_own() -> None:
    queue = measured(1.0)
    queue.add_entries([entry(1, rows=50), entry(2), entry(3)])
    assert offsets(queue) == [[1], [2, 3]]


def test_before_the_first_measurement_a_slice_is_small() -> None:
    queue = RowQueue(2.0)
    queue.add_entries([entry(n) for n in range(100)])
    assert len(queue.take().entries) == FIRST_ROWS


def test_shadow_rows_get_every_fourth_slice_and_what_entries_leave() -> None:
    queue = measured(2.0)
    queue.add_entries([entry(1), entry(2), entry(3), entry(4)])
    queue.add_shadow("m1", [notice(8), notice(9)])
    assert offsets(queue) == [[1], [2], [3], [-8], [4], [-9]]


def test_the_shadow_rows_of_a_move_whose_source_has_stopped_come_first() -> None:
    queue = measured(2.0)
    queue.add_entries([entry(1), entry(2)])
    queue.add_shadow("m1", [notice(7)])
    queue.add_shadow("m2", [notice(8, "m2"), notice(9, "m2")])
    queue.hurry("m2")
    assert offsets(queue) == [[-8], [-9], [1], [2], [-7]]


def test_an_adoption_waits_for_the_shadow_rows_of_its_move_and_for_no_others() -> None:
    queue = measured(0.0)
    queue.add_shadow("m1", [notice(8)])
    queue.add_shadow("m2", [notice(9, "m2")])
    queue.add_entries([entry(1), adopt(2, "m2"), entry(3)])
    assert offsets(queue) == [[1], [-9], [2, 3], [-8]]


def test_the_shadow_rows_of_two_moves_take_turns() -> None:
    queue = measured(2.0)
    queue.add_shadow("m1", [notice(1), notice(2)])
    queue.add_shadow("m2", [notice(3, "m2"), notice(4, "m2")])
    assert offsets(queue) == [[-1], [-3], [-2], [-4]]


def test_one_slow_slice_does_not_make_all_later_ones_small() -> None:
    queue = measured(0.01)
    queue.service.add(100, 21.0)
    assert 0.01 < (queue.service.row_ms or 0) < 0.1


# -- in an instance ------------------------------------------------------------------------------


def busy_source() -> tuple[SmallDeployment, list[int]]:
    """A deployment whose source has 60 entries that wait; the driver says that each takes 1 ms."""
    driver = SmallDeployment(settings=Settings(dispatch_ms_max=1e6)).start()
    driver.took_ms = 1.0
    driver.produce("a", (key_in(0), 0, 0))
    machine = driver.machines[ME]
    machine.queue.service.row_ms = 1.0
    waiting = list(range(machine.applied + 1, machine.applied + 61))
    dispatch = m.Dispatch([Entry(n, 0, {ME: [(key_in(0), 0, n)]}) for n in waiting])
    effects = machine.on_event(Received("a", dispatch), driver.now_ms)
    assert isinstance(effects[-1], Continue), "it must ask to continue"
    return driver, waiting


def test_an_instance_processes_a_slice_and_asks_to_continue() -> None:
    driver, waiting = busy_source()
    machine = driver.machines[ME]
    assert machine.applied == waiting[1]
    machine.on_event(Continued(2.0), driver.now_ms)
    assert machine.applied == waiting[3]


def test_a_capture_overtakes_rows_that_wait() -> None:
    driver, waiting = busy_source()
    capture = m.Capture("m1", KeySet(slots=frozenset((0,))), "op@b#0")
    effects = driver.machines[ME].on_event(Received("a", capture), driver.now_ms)
    sent = [
        e.message.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.FromInstance)
    ]
    assert sent == [m.CaptureFrom("m1", waiting[1], 0, -1)]


def test_rows_of_a_lost_connection_are_not_processed() -> None:
    driver, waiting = busy_source()
    machine = driver.machines[ME]
    machine.on_event(Disconnected("a"), driver.now_ms)
    machine.on_event(Continued(2.0), driver.now_ms)
    assert machine.applied == waiting[1]


def test_the_router_is_told_the_service_time_and_limits_its_credit_by_it() -> None:
    driver = SmallDeployment(settings=Settings(dispatch_ms_max=50.0)).start()
    driver.took_ms = 10.0
    driver.produce("a", *((key_in(0), 0, n) for n in range(10)))
    driver.produce("a", (key_in(0), 0, 11))
    cursor = driver.machines["a"].inboxes["op"].cursors[ME]
    assert cursor.credit_rows == 50, "a row takes 1 ms"
