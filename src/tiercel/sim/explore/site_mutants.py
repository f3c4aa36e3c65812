"""The patches of the planted bugs that break rules between sites: logs of outputs, numbers of devices.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core.logs.device_numbers import DeviceNumbers
from tiercel.core.logs.output_log import OutputLog
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.router.device_rows import DeviceRows
from tiercel.core.router.outputs import FanOut
from tiercel.sim.explore.planting import Patch, instead


def _one_log_only(original: Any) -> Any:
    def log_outputs(fan_out: Any, step: Any, stream: str, outputs: Any, *more: Any) -> None:
        log = fan_out.state.topology.streams[stream].own_log_at(fan_out.state.site)
        if log:
            fan_out.state.streams[log].append(step, outputs)
        else:
            original(fan_out, step, stream, outputs, *more)

    return log_outputs


def _held_in_memory(original: Any) -> Any:
    """Early rows are held where they came in; only memory has them."""

    def take_or_defer(sequencer: Any, step: Any, rows: Any) -> Any:
        ready: list[Any] = []
        for row in rows:
            sequencer._sequence_here(step, row, (), ready)
        return ready, []

    return take_or_defer


def _numbered_by_sites(original: Any) -> Any:
    """The rows of devices are rows like others: each site numbers those that enter there."""
    return lambda devices, step, facts, rows, numbers: devices._fan_out.route_rows(step, facts.name, rows)


PATCHES: dict[str, tuple[Patch, ...]] = {
    "outputs-in-one-log-only": (Patch(FanOut, "log_outputs", _one_log_only),),
    "fence-ignored": (Patch(OutputLog, "must_hold", instead(False)),),
    "held-outputs-forgotten": (Patch(OutputLog, "recover_held", instead(None)),),
    "done-before-the-fence": (Patch(OutgoingMove, "all_arrived", instead(True)),),
    "fenced-outputs-not-released": (Patch(OutputLog, "release", instead([])),),
    # numbers of devices, and predicted moves
    "device-numbers-ignored": (Patch(DeviceRows, "route_rows", _numbered_by_sites),),
    "early-device-rows-in-memory": (Patch(Sequencer, "take_or_defer", _held_in_memory),),
    "device-repeats-refused": (Patch(DeviceNumbers, "is_repeat", instead(False)),),
    "reused-numbers-dropped": (Patch(DeviceNumbers, "is_repeat", instead(True)),),
    "gaps-never-close": (Patch(DeviceNumbers, "overdue", instead(())),),
    "gaps-close-in-silence": (Patch(DeviceRows, "_refuse", instead(None)),),
    "recent-rows-not-moved": (Patch(DeviceNumbers, "install", instead(None)),),
    "recent-rows-forgotten": (Patch(DeviceNumbers, "recover", instead(None)),),
    "predicted-without-rows": (Patch(OutgoingMove, "rows_are_there", instead(True)),),
}
