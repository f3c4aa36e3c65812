"""Rows that devices number: any producer at any site may bring them, the key's sequencer puts them in order.

Responsible for: routing such rows; the timer of gaps; the dead letters of numbers that are missing or went
    backwards.
Not responsible for: the numbers themselves (core/logs/device_numbers.py), accepting a frame (intake.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.logs.device_numbers import RefusedNumber, digest_of
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.model.log import Output, Row, device_origin
from tiercel.core.model.topology import Stream
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.outputs import FanOut
from tiercel.core.router.state import RouterState

MS_PER_S = 1_000


class DeviceRows:
    """The numbered streams of one router."""

    def __init__(self, state: RouterState, forwarding: Forwarding, fan_out: FanOut) -> None:
        self.state = state
        self._forwarding = forwarding
        self._fan_out = fan_out
        self._timers: set[str] = set()  # inboxes whose timer is set
        self._numbered: list[str] = []  # operators that read such a stream
        for operator in state.topology.operators.values():
            read = [state.topology.streams.get(name) for name in operator.inputs]
            gaps = {device_origin(s.name): float(s.gap_ms) for s in read if s is not None and s.gap_ms}
            if gaps:
                devices = state.inboxes[operator.name].sequencer.devices
                devices.gap_ms = gaps
                devices.refused = functools.partial(self._refuse, operator.name)
                self._numbered.append(operator.name)

    # -- rows that enter ---------------------------------------------------------------------

    @staticmethod
    def check(facts: Stream | None, message: m.Produce) -> None:
        """Refuse a frame whose rows and numbers do not fit, before anything of it counts."""
        expected = len(message.rows) if facts is not None and facts.is_numbered else 0
        if len(message.numbers) != expected:
            reason = f"{len(message.rows)} rows of {message.stream!r} with {len(message.numbers)} numbers"
            raise ProtocolViolation(reason)

    def route_rows(self, step: Step, facts: Stream, rows: list[Row], numbers: Sequence[int]) -> None:
        """Pass numbered rows to every operator that reads the stream; late ones are left out behind it."""
        self.state.rows += len(rows)
        origin = device_origin(facts.name)
        for name in self.state.consumers(facts.name):
            inbox, operator = self.state.inboxes[name], self.state.topology.operators[name]
            tag = operator.inputs.index(facts.name)
            more = (inbox.broadcast,) if operator.broadcast else ()
            by_site: dict[str, list[Row]] = {}
            for (key, event_time, payload), number in zip(rows, numbers, strict=True):
                route = inbox.table.route(key)
                taken: Any = (tag, payload, *more) if operator.numbers_inputs else payload
                n = number - facts.first_number + 1
                by_site.setdefault(route.site, []).append((key, event_time, taken, origin, n, route.epoch))
            self.state.entering[name].count(rows, len(rows))
            here = by_site.pop(self.state.site, [])
            deferred = inbox.take_or_defer(step, here)
            if deferred:
                self._forwarding.forward(step, self.state.site, inbox, deferred)
            for site, stamped in by_site.items():
                self.state.entering[name].count_sent_on(stamped)
                self._forwarding.forward(step, site, inbox, stamped)
        self._forwarding.settle_inbound(step)

    # -- gaps ----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether some operator reads rows that devices number."""
        return bool(self._numbered)

    def keep_time(self, step: Step) -> None:
        """Set a timer for each inbox with a gap."""
        for name in self._numbered:
            due_ms = self.state.inboxes[name].sequencer.devices.next_deadline_ms
            if due_ms is not None and name not in self._timers:
                self._timers.add(name)
                step.timer(Timer(TimerKind.GAP, name), max(due_ms, step.now_ms))

    def on_timer(self, step: Step, name: str) -> None:
        self._timers.discard(name)
        self.state.inboxes[name].close_gaps(step)
        self._forwarding.settle_inbound(step)

    # -- dead letters ----------------------------------------------------------------------------

    def _refuse(self, operator: str, step: Step, refused: RefusedNumber) -> None:
        """Log what will not be processed. Its identity is its number, so that a repeated one is the same."""
        facts = self.state.topology.streams[refused.origin[1:]]
        offset = facts.first_number - 1
        number, expected = refused.n + offset, refused.expected + offset
        digest = 0 if refused.payload is None else int.from_bytes(digest_of(refused.payload))
        reason, shown = self._reason(facts, operator, number, expected, refused.payload)
        columns = (reason, refused.key, number, shown, None, None, None)
        if facts.dead_letters:
            row = (refused.key, 0, columns)
            self._fan_out.log_outputs(step, facts.dead_letters, [Output(number, refused.key, 0, digest, row)])

    @staticmethod
    def _reason(
        facts: Stream, operator: str, number: int, expected: int, payload: Any
    ) -> tuple[str, str | None]:
        """Why, with both numbers, and the row as JSON if there is one."""
        if payload is None:
            waited = f"{(facts.gap_ms or 0) / MS_PER_S:g} s"
            what = f"numbers {expected} to {number - 1} did not come within {waited}"
            return f"{operator}: {what}: went on with {number}", None
        if type(payload) in (tuple, list) and 2 <= len(payload) <= 3 and type(payload[0]) is int:
            payload = payload[1]
        text = _shown(payload)
        what = f"number {number} came where {expected} was next, and is not the row that was taken under it"
        hint = "the device's numbers went backwards, or it came too late"
        return f"{operator}: {what}: {hint}", text


def _shown(payload: Any) -> str:
    """The columns of a row as JSON; a payload that is none is shown as it is: it must not stop the router."""
    try:
        decoded = msgspec.msgpack.decode(payload) if type(payload) is bytes else payload
        return msgspec.json.encode(decoded).decode()
    except (msgspec.MsgspecError, TypeError, ValueError):
        return repr(payload)
