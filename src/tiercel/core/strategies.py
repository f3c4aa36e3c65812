"""How each strategy orders flip, transfer and processing. One small class each.

Responsible for: the differences between strategies at the source's router.
Not responsible for: the steps themselves (departures.py), or moving state (source.py, destination.py).

    live      dual run: state is streamed while the source works on; flip when the destination is in step
    pause     flip at once; the keys wait until all of their state has arrived
    restart   stop the operator's dispatch, end and relaunch every instance, move the state, go on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercel.core import messages as m
from tiercel.core.step import Step

if TYPE_CHECKING:
    from tiercel.core.departures import Departure


class Strategy:
    """What a strategy decides. The defaults are those of flip-first strategies."""

    name = ""
    flips_first = True
    can_take_over = False  # whether the destination can produce what the source still owes
    needs_determinism = False
    halts = False

    def on_prepared(self, departure: Departure, step: Step) -> None:
        self.advance_preparing(departure, step)

    def advance_preparing(self, departure: Departure, step: Step) -> None:
        if departure.prepared and departure.source_watermark_reached():
            departure.flip(step)

    def say_flip(self, departure: Departure, step: Step) -> None:
        role = departure.role()
        assert role is not None
        step.send_durable(departure.source, m.FlipNotice(departure.move, role))


class Live(Strategy):
    """Falcon's idea: both process, one emits, nobody waits."""

    name = "live"
    flips_first = False
    can_take_over = True
    needs_determinism = True

    def on_prepared(self, departure: Departure, step: Step) -> None:
        departure.begin(step)

    def advance_preparing(self, departure: Departure, step: Step) -> None:
        """Begin happens on Prepared, at once."""


class Pause(Strategy):
    """SEEP, Trisk, Flux: everything in one piece, its keys stop until it is there."""

    name = "pause"


class Restart(Strategy):
    """Flink, Spark: the whole operator stops and every instance is really ended and relaunched."""

    name = "restart"
    halts = True

    def say_flip(self, departure: Departure, step: Step) -> None:
        if departure.inbox.all_relaunched(departure.move):
            super().say_flip(departure, step)
        else:
            departure.inbox.say_halt(step, departure.move)


STRATEGIES: dict[str, Strategy] = {s.name: s for s in (Live(), Pause(), Restart())}
