"""The patches of the planted bugs that break rules between sites: where outputs are logged, in which order.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core.logs.output_log import OutputLog
from tiercel.core.migration.source_router import OutgoingMove
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


PATCHES: dict[str, tuple[Patch, ...]] = {
    "outputs-in-one-log-only": (Patch(FanOut, "log_outputs", _one_log_only),),
    "fence-ignored": (Patch(OutputLog, "must_hold", instead(False)),),
    "held-outputs-forgotten": (Patch(OutputLog, "recover_held", instead(None)),),
    "done-before-the-fence": (Patch(OutgoingMove, "all_arrived", instead(True)),),
    "fenced-outputs-not-released": (Patch(OutputLog, "release", instead([])),),
}
