"""The patches of the planted bugs that break the rules of bundles.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core.instance.bundle_calls import Made
from tiercel.core.instance.processing import Processing
from tiercel.core.logs.dispatch import DispatchCursor
from tiercel.core.logs.inbox import Inbox
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.model.bundle import is_bundle, range_of
from tiercel.core.model.log import Row
from tiercel.core.router.outputs import OutputAdmission
from tiercel.core.router.watermarks import Watermarks
from tiercel.sim.explore.planting import Patch, instead


def _as_given(original: Any) -> Any:
    return lambda self, rows, *others: rows


def _to_the_first_owner(original: Any) -> Any:
    """All of a bundle goes to the owner of its first slot, if that is at this site."""

    def broken(inbox: Inbox, key: bytes) -> str | None:
        count, slots = range_of(key)
        first = inbox.table.slots[slots.start] if count == inbox.table.count else None
        return first.instance if first is not None and first.site == inbox.site else None

    return broken


def _while_keys_move(original: Any) -> Any:
    """A bundle stays whole although one of its keys moves, or has an owner of its own."""

    def broken(inbox: Inbox, key: bytes) -> str | None:
        count, slots = range_of(key)
        owners = {inbox.table.slots[slot].instance for slot in slots} if count == inbox.table.count else set()
        first = inbox.table.slots[slots.start] if len(owners) == 1 else None
        return first.instance if first is not None and first.site == inbox.site else None

    return broken


def _sorted(original: Any) -> Any:
    return lambda inbox, rows: sorted(rows, key=lambda row: not is_bundle(row[0]))


def _single_rows(of: int) -> Any:
    """A method that does not see bundles: they are left out of the argument at this place."""

    def broken(original: Any) -> Any:
        def method(*args: Any) -> Any:
            given = list(args)
            given[of] = _without_bundles(given[of])
            return original(*given)

        return method

    return broken


def _without_bundles(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not is_bundle(row[0])]


def _no_bundles_in_shadow(original: Any) -> Any:
    def broken(outgoing: OutgoingMove, entry: Any) -> list[Row]:
        rows = _without_bundles(entry.rows_of(outgoing.source))
        return [row for row in rows if outgoing.is_at_source(row[0])]

    return broken


def _late_as_a_whole(original: Any) -> Any:
    """A bundle with one late row counts as late."""

    def broken(watermarks: Watermarks, operator: str, rows: list[Row]) -> list[Row]:
        promised = watermarks.intake_promise(operator)
        mark = max(watermarks.state.inboxes[operator].watermark_ms, promised if promised < 1 << 60 else -1)
        in_time = [row for row in rows if not is_bundle(row[0]) or row[1] > mark]
        return original(watermarks, operator, in_time) if in_time else []

    return broken


def _first_epoch(original: Any) -> Any:
    """The outputs of a bundle all get the epoch of its first key."""

    def broken(made: Any, epoch: int) -> bool:
        original(made, epoch)
        return True

    return broken


PATCHES: dict[str, tuple[Patch, ...]] = {
    "bundles-not-split": (Patch(Inbox, "owner_of_bundle", _to_the_first_owner),),
    "moving-bundles-whole": (Patch(Inbox, "owner_of_bundle", _while_keys_move),),
    "bundles-overtake-rows": (Patch(Inbox, "bundles_first", _sorted),),
    "leaving-bundles-whole": (Patch(InstanceMoves, "without_bundles_of_moves", _as_given),),
    "refused-bundles-admitted": (Patch(OutputAdmission, "each_alone", _as_given),),
    "bundles-not-shadowed": (Patch(OutgoingMove, "rows_in_source_parts", _no_bundles_in_shadow),),
    "bundles-not-taken-over": (Patch(DispatchCursor, "_taken_over", _single_rows(1)),),
    "keys-called-twice": (Patch(Processing, "may_stay_whole", instead(True)),),
    "bundles-late-whole": (Patch(Watermarks, "in_time", _late_as_a_whole),),
    "bundle-of-one-epoch": (Patch(Made, "takes", _first_epoch),),
}
