"""Scripted clients of a simulated deployment: producers, mobile sources and listeners that follow a script.

Responsible for: following the script, also after a crash (a fixed producer continues behind the
    router's last sequence number, a mobile source sends everything again).
Not responsible for: what is in the script (scenario.py), the clients' own rules (core/clients.py).
"""

from __future__ import annotations

from tiercel.core.clients import MobileSource, Producer, Subscriber
from tiercel.core.machine.effects import Effect, SetTimer
from tiercel.core.machine.events import Connected, Event, TimerFired
from tiercel.core.model.keys import ABSENT_WATERMARK
from tiercel.core.model.log import Row, StreamEntry
from tiercel.sim.scenario.scenario import Journey, Traffic
from tiercel.sim.workload import encoded, in_bundles


class ScriptedProducer:
    """A fixed producer with a script."""

    def __init__(
        self,
        script: Traffic,
        encodes: bool = False,
        incarnation: int = 0,
        bundles: tuple[str, int] | None = None,
    ) -> None:
        """`bundles`: their form, and the number of slots of those who read them."""
        self.script = script
        self._encodes = encodes
        self._bundles = bundles
        self.producer = Producer(script.name, script.site, str(incarnation))

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = self.producer.on_event(event, now_ms)
        match event:
            case Connected():
                effects.append(SetTimer("next", self._due(now_ms)))
            case TimerFired():
                if self.producer.greeted and not self.finished:
                    effects += self._submit()
                if not self.finished:
                    effects.append(SetTimer("next", self._due(now_ms)))
            case _:
                pass
        return effects

    def _due(self, now_ms: float) -> float:
        script, n = self.script, self.producer.submitted
        before_frame, pause_ms = script.pause
        pause_ms = pause_ms if n >= before_frame else 0.0
        return max(now_ms + 0.5, script.start_ms + script.gap_ms * n + pause_ms)

    def _submit(self) -> list[Effect]:
        script, n = self.script, self.producer.submitted
        frame = script.frames[n]
        watermark = frame[-1][1] - 1 if script.watermarks else None
        if script.batch:  # as a feed does: the last frame of a batch carries the watermark
            batch = script.frames[n + 1 - script.batch : n + 1] if (n + 1) % script.batch == 0 else []
            newest = max((row[1] for rows in batch for row in rows), default=None)
            watermark = ABSENT_WATERMARK if newest is None else newest - script.delay_ms
        rows: list[Row] = list(frame)
        if self._bundles is not None and not script.numbers:
            form, slots = self._bundles
            rows = in_bundles(encoded(frame, joins=False), slots, n, timed=form == "timed")
        elif self._encodes:
            rows = encoded(frame, joins=not script.numbers)
        numbers = script.numbers[n] if script.numbers else ()
        return self.producer.submit(script.stream, rows, watermark, numbers=numbers)

    @property
    def finished(self) -> bool:
        return self.producer.submitted >= len(self.script.frames)

    @property
    def safe(self) -> bool:
        return self.producer.acknowledged >= len(self.script.frames)


class ScriptedMobile:
    """A mobile source with a script of frames and stops."""

    def __init__(self, script: Journey, encodes: bool = False) -> None:
        self.script = script
        self._encodes = encodes
        self.source = MobileSource(script.name, script.stops[0][1], "1")
        self.submitted = 0
        self.stop = 0
        self._armed = False

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = self.source.on_event(event, now_ms)
        if isinstance(event, TimerFired):
            effects += self._travel(now_ms)
            if not self.finished:
                frame: list[Row] = list(self.script.frames[self.submitted])
                effects += self.source.submit(
                    "input", encoded(frame, joins=False) if self._encodes else frame
                )
                self.submitted += 1
        if isinstance(event, TimerFired) or not self._armed:
            self._armed = True
            if not (self.finished and self.stop == len(self.script.stops) - 1):
                due = self.script.start_ms + self.script.gap_ms * self.submitted
                effects.append(SetTimer("next", max(now_ms + 0.5, due)))
        return effects

    def _travel(self, now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        stops = self.script.stops
        while self.stop + 1 < len(stops) and now_ms >= self.script.start_ms + stops[self.stop + 1][0]:
            self.stop += 1
            effects += self.source.travel(stops[self.stop][1])
        return effects

    @property
    def finished(self) -> bool:
        return self.submitted >= len(self.script.frames)

    @property
    def safe(self) -> bool:
        return self.finished and not self.source.pending


class Listener:
    """A subscriber that notes when each entry came."""

    def __init__(self, stream: str, home: str) -> None:
        self.subscriber = Subscriber(stream, home, subscription="listener")
        self.entries: list[StreamEntry] = []
        self.seen_ms: list[float] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = self.subscriber.on_event(event, now_ms)
        if self.subscriber.entries:
            taken, more = self.subscriber.take()
            self.entries += taken
            self.seen_ms += [now_ms] * len(taken)
            effects = [*effects, *more, *self.subscriber.finish()]
        return effects
