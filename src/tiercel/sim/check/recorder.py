"""The record of a run: every log as it is on disk, every move, and which instance emitted when.

Responsible for: facts for the checkers. It keeps whole logs, also the trimmed part.
Not responsible for: judging (checkers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send, StorageKey, Write
from tiercel.core.machine.events import Durable, Event, Received, TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.model.bundle import open_outputs, opened
from tiercel.core.model.log import (
    Abort,
    Adopt,
    Begin,
    Compare,
    Done,
    Entry,
    Flip,
    Output,
    Row,
    TakenOver,
    Watermark,
)
from tiercel.core.model.topology import Topology, operator_of, site_of
from tiercel.core.router.router import Router
from tiercel.sim.workload import plain


class Recorder:
    """Collects facts while a run goes on."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, str], dict[int, Entry]] = {}  # (site, operator) -> offset -> entry
        self.requests: dict[str, m.MoveRequest] = {}
        self.phases: dict[str, str] = {}  # move -> last durable or reported phase at its source's router
        self.move_messages = 0
        self.watermarks: dict[str, int] = {}  # operator -> the highest that any log of it has had
        self.promised: dict[tuple[str, str], int] = {}  # (site, stream that makes its own watermark) -> it
        self.late: dict[str, set[tuple[Any, Any]]] = {}  # operator -> (key, payload) of rows left out
        self.late_breaches: list[str] = []
        self.servers: dict[str, set[str]] = {}  # dead source of a move -> successors that finish it
        self.emitters: dict[tuple[Any, ...], str] = {}  # (operator, identity of an output) -> who emitted it

    def wrote(self, site: str, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                for key, value in effect.puts.items():
                    if key[0] == "inbox" and isinstance(value, Entry):
                        self.logs.setdefault((site, key[1]), {})[key[2]] = value
                        if isinstance(value.control, Watermark):
                            known = self.watermarks.get(key[1], -1)
                            self.watermarks[key[1]] = max(known, value.control.value_ms)
                    elif key[0] == "outgoing":
                        self.requests[key[1]] = value.request
                        for dead in value.served_for:
                            self.servers.setdefault(dead, set()).add(value.request.source)

    def takeovers_of(self, instance: str) -> int:
        """How often successors have taken over an instance of this name."""
        log = self.logs.get((site_of(instance), operator_of(instance)), {})
        return sum(isinstance(e.control, TakenOver) and e.control.of == instance for e in log.values())

    def recovered(self, site: str, items: dict[StorageKey, Any]) -> None:
        """After a crash the recorder forgets what was not durable."""
        for (at, operator), log in self.logs.items():
            if at == site:
                head = items.get(("head", operator), (0,))[0]
                for offset in [o for o in log if o > head]:
                    del log[offset]
        for at, stream in list(self.promised):
            if at == site:
                marks = [v for k, v in items.items() if k[0] == "source" and k[2] == stream]
                self.promised[at, stream] = max(marks, default=-1)

    def took_in(self, site: str, topology: Topology, frame: m.Produce) -> None:
        """The router accepted a frame, which may raise the watermark of its stream at this site."""
        delay_ms = topology.streams[frame.stream].delay_ms
        if delay_ms is not None and frame.rows:
            mark = frame.watermark_ms
            if mark is None:
                mark = max(row[1] for row in opened(frame.rows)) - delay_ms
            self.promised[site, frame.stream] = max(self.promised.get((site, frame.stream), -1), mark)

    def left_out(self, site: str, topology: Topology, operator: str, rows: list[Row]) -> None:
        """The router dropped late rows; check that they are behind its own watermark or that of a log."""
        marks = [self.watermarks.get(operator, -1)]
        for stream in topology.operators[operator].inputs:
            marks.append(self.promised.get((site, stream), -1))
            marks.append(self.watermarks.get(topology.producer_of(stream) or "", -1))
        for key, event_time, payload in [one for row in rows for one in plain((row[0], row[1], row[2]))]:
            self.late.setdefault(operator, set()).add((key, payload))
            if event_time > max(marks):
                row = (key, event_time, payload)
                self.late_breaches.append(f"{operator} at {site}: {row} is ahead of all of {marks}")


def identity(output: Output) -> tuple[bytes, int, int, int]:
    """What names an output within its operator."""
    return (output.key, output.epoch, output.offset, output.n)


class WatchedRouter(Router):
    """The real router, which also reports accepted frames and late rows to the recorder."""

    def __init__(self, *facts: Any, recorder: Recorder) -> None:
        super().__init__(*facts)
        self._recorder = recorder
        self._count_late = self.watermarks.came_late
        setattr(self.watermarks, "came_late", self._came_late)  # noqa: B010
        self._emit = self.outputs.emit
        setattr(self.outputs, "emit", self._emitted)  # noqa: B010
        self._emitter = ""

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        if isinstance(message, m.Outputs | m.MoveOutputs):
            self._emitter = message.instance
        if not isinstance(message, m.Produce):
            super().on_message(step, sender, message)
            return
        marks = self.state.producers.marks
        before = marks.get(message.producer, 0)
        super().on_message(step, sender, message)
        if marks.get(message.producer, 0) > before:
            self._recorder.took_in(self.site, self.topology, message)

    def _emitted(
        self, step: Step, operator: str, outputs: Sequence[Output], *args: Any, **facts: Any
    ) -> None:
        for output in open_outputs(outputs):
            self._recorder.emitters[(operator, *identity(output))] = self._emitter
        self._emit(step, operator, outputs, *args, **facts)

    def _came_late(self, operator: str, rows: list[Row]) -> None:
        self._count_late(operator, rows)
        self._recorder.left_out(self.site, self.topology, operator, rows)


def steps_of(event: Event, effects: Sequence[Effect]) -> list[tuple[str, str]]:
    """The protocol steps that an event is: (move, name of the step)."""
    match event:
        case Received(message=m.SiteFrame(notice=notice)) if notice is not None:
            return [(notice.move, type(notice).__name__)]
        case Received(message=m.Dispatch(entries=entries)):
            return [
                (e.control.move, f"Dispatch:{type(e.control).__name__}")
                for e in entries
                if isinstance(e.control, Begin | Compare | Abort | Flip | Adopt | Done)
            ]
        case Received(message=m.FromInstance(message=message)) | Received(message=message):
            move = getattr(message, "move", None)
            return [(move, type(message).__name__)] if move else []
        case TimerFired(name=Timer(kind=TimerKind.CAPTURE, of=move)):
            return [(move, "timer:capture")]
        case Durable():
            sent = [e.message for e in effects if isinstance(e, Send)]
            plain: list[Any] = [s.message if isinstance(s, m.FromInstance) else s for s in sent]
            return [(p.move, f"Durable>{type(p).__name__}") for p in plain if getattr(p, "move", None)]
        case _:
            return []
