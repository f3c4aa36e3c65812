"""An arriving key set as a checkpoint holds it, beside its keys.

Responsible for: what of an arrival is stored, and the arrival that it becomes again in a new life.
Not responsible for: its keys, and when all of it is stored (checkpoints.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tiercel.core.destination import DestinationMove, Marks
from tiercel.core.destination import Phase as DestinationPhase
from tiercel.core.records import Adopt, KeySet, Output, Position, TableUpdate

if TYPE_CHECKING:
    from tiercel.core.processing import Processing


class ArrivalImage(msgspec.Struct, frozen=True):
    """An arriving key set as of a checkpoint."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    epochs: TableUpdate
    position: Position
    adopt: Adopt | None
    adopted_at: int
    shadow_watermark_ms: int
    own_watermark_ms: int
    floors: dict[bytes, int]
    at: dict[bytes, Position]
    kept: list[tuple[int, Output]]  # outputs that are not yet allowed out: nobody would make them again
    kept_dead: list[tuple[int, Output]]


def arrival_image(arriving: DestinationMove, position: Position) -> ArrivalImage:
    return ArrivalImage(
        arriving.move,
        arriving.keys,
        arriving.source,
        arriving.strategy,
        arriving.epochs,
        position,
        arriving.adopt,
        arriving.adopted_at,
        arriving.marks.shadow_ms,
        arriving.marks.own_ms,
        dict(arriving.floor_wm),
        dict(arriving.at),
        list(arriving.kept),
        list(arriving.kept_dead),
    )


def load_arrival(instance: Processing, image: ArrivalImage) -> DestinationMove:
    arriving = DestinationMove(instance, image.move, image.keys, image.source, image.strategy, image.epochs)
    arriving.complete = True
    arriving.position = tuple(image.position)  # type: ignore[assignment]
    arriving.marks = Marks(image.shadow_watermark_ms, image.own_watermark_ms)
    arriving.floor_wm = dict(image.floors)
    arriving.kept, arriving.kept_dead = list(image.kept), list(image.kept_dead)
    arriving.at = {k: (p[0], p[1]) for k, p in image.at.items()}
    arriving.adopt, arriving.adopted_at = image.adopt, image.adopted_at
    arriving.owned = image.adopt is not None
    arriving.phase = DestinationPhase.ADOPTED if arriving.owned else DestinationPhase.VOTED
    return arriving
