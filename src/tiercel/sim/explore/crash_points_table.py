"""The steps of each strategy's protocol at which a role of a move can die.

Responsible for: being complete. A test compares it with the result of `crash_points.discover`, so that a new
    step cannot be forgotten; `python -m tiercel.sim.explore.crash_points` prints the table.
Not responsible for: finding the steps, or dying at them (crash_points.py).

A step is an event that belongs to a move: a message by its name, `Dispatch:X` the control record X
of the log, `Durable>X` the moment at which message X may leave because its write is durable,
`timer:x` a timer. Seeds draw crash points by position: the table is sorted, so that its order has one form.
"""

from __future__ import annotations


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(name for line in lines for name in line.split())


STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "bins": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
    "fetch": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
    "live": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Capture Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget UnitReceipt timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed Durable>Ready EmitFrom",
            "EmittedThrough Prepare Shadow",
        ),
        "origin": _names(
            "CaptureFrom Captured DestinationCheckpointed Digests Durable>AbortNotice Durable>Capture",
            "Durable>FlipToSource Durable>Forget Durable>MoveStatus Durable>Prepare Forgotten MoveRequest",
            "OutcomeStored Prepared Ready Refused SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>Ready",
            "Durable>StateComplete EmitFromNotice EmittedNotice FlipToDestination MoveOutputs Prepare",
            "Prepared Ready ShadowNotice StateComplete",
        ),
    },
    "meces": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
    "pause": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
    "push": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
    "replicate": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Capture Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget UnitReceipt timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed Durable>Ready EmitFrom",
            "EmittedThrough Prepare Shadow",
        ),
        "origin": _names(
            "CaptureFrom Captured DestinationCheckpointed Digests Durable>AbortNotice Durable>Capture",
            "Durable>FlipToSource Durable>Forget Durable>MoveStatus Durable>Prepare Forgotten MoveRequest",
            "OutcomeStored Prepared Ready Refused SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>Ready",
            "Durable>StateComplete EmitFromNotice EmittedNotice FlipToDestination MoveOutputs Prepare",
            "Prepared Ready ShadowNotice StateComplete",
        ),
    },
    "restart": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "RestartRequest UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare RestartRequest Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Durable>RestartRequest Forgotten MoveRequest",
            "OutcomeStored Prepared Refused SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>RestartRequest",
            "Durable>StateComplete EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared",
            "ResumeNotice ShadowNotice StateComplete",
        ),
    },
    "standby": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Capture Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget UnitReceipt timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Abort Dispatch:Adopt Dispatch:Begin Dispatch:Compare",
            "Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed Durable>Ready EmitFrom",
            "EmittedThrough Prepare Shadow",
        ),
        "origin": _names(
            "CaptureFrom Captured DestinationCheckpointed Digests Durable>AbortNotice Durable>Capture",
            "Durable>FlipToSource Durable>Forget Durable>MoveStatus Durable>Prepare Forgotten MoveRequest",
            "OutcomeStored Prepared Ready Refused SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>Ready",
            "Durable>StateComplete EmitFromNotice EmittedNotice FlipToDestination MoveOutputs Prepare",
            "Prepared Ready ShadowNotice StateComplete",
        ),
    },
    "subscale": {
        "controller": _names(
            "Durable>MoveRequest Durable>OutcomeStored MoveStatus",
        ),
        "source": _names(
            "AbortNotice Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>Forgotten FlipToSource Forget",
            "UnitReceipt UnitRequest timer:capture",
        ),
        "destination": _names(
            "AbortNotice Chunk Dispatch:Adopt Dispatch:Done Dispatch:Flip Durable>DestinationCheckpointed",
            "Durable>UnitReceipt EmitFrom Prepare Shadow",
        ),
        "origin": _names(
            "Captured DestinationCheckpointed Durable>AbortNotice Durable>FlipToSource Durable>Forget",
            "Durable>MoveStatus Durable>Prepare Forgotten MoveRequest OutcomeStored Prepared Refused",
            "SourceStopped StateComplete",
        ),
        "target": _names(
            "AbortNotice AbortedNotice DestinationCheckpointed DoneNotice Durable>AbortNotice",
            "Durable>DestinationCheckpointed Durable>EmitFrom Durable>Prepared Durable>StateComplete",
            "EmitFromNotice FlipToDestination MoveOutputs Prepare Prepared ShadowNotice StateComplete",
        ),
    },
}
