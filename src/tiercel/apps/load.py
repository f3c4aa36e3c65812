"""The load of an application: sends its events when they are due, and receives its outputs.

Responsible for: open-loop sending, the arrival of each output row, latencies.
Not responsible for: which events (the application's generator), figures of phases (figures.py).

Event n is due n / rate seconds after the start, or when its second has come so far, if each second has a rate
of its own. Latency counts from there, also if the sender is late.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, islice
from operator import itemgetter
from time import monotonic_ns
from typing import Any

from tiercel import LiveStream, Producer, Subscriber
from tiercel.apps.app import Event, Output, Values

TICK_S = 0.002
SECOND_NS = 1_000_000_000
POLL_S = 0.1
CHUNK = 2_000  # events that are sent at once, at most
FLUSH_S_MAX = 120.0
RECENT = 2_000  # latencies that are shown while the load runs
FINDINGS = 8


class Sender(threading.Thread):
    """Sends events: first ones as fast as acknowledgements allow, then others at a rate, then last ones.

    With a rate of 0 the others go as fast as acknowledgements allow, for some seconds. With a rate the load
    goes on behind its last event, with events of `more`, while `go_on` is set.
    """

    def __init__(
        self,
        streams: Mapping[str, LiveStream],
        first: Sequence[Event],
        events: Sequence[Event],
        more: Iterator[Event],
        rate: int,
        seconds: float,
        rates: Sequence[int] = (),
    ) -> None:
        super().__init__(name="app-sender", daemon=True)
        self.producers: dict[str, Producer] = {n: s.producer(f"app-{n}") for n, s in streams.items()}
        self._first = len(first)
        self.events = [*first, *events]
        self.moments = [moment for moment, _, _ in self.events]
        self.rate, self._seconds = rate, seconds
        self._rates = [*rates, rate]  # of each second, and of all behind them
        self._before = list(accumulate(rates, initial=0))  # events before each second
        self._more = more
        self.go_on = False
        self._until_ns = 0
        self.start_ns = self.end_ns = 0  # of the load with a rate
        self.sent = 0
        self.due_ns = array("q")  # of events that were sent without a rate
        self.failure: BaseException | None = None

    def due_of(self, n: int) -> int:
        """When event n was due; without a rate, when it was sent."""
        if n < len(self.due_ns):
            return self.due_ns[n]
        n -= self._first
        second = max(0, bisect_right(self._before, n) - 1)
        within = (n - self._before[second]) * SECOND_NS // max(1, self._rates[second])
        return self.start_ns + second * SECOND_NS + within

    def _passed(self) -> int:
        """Events with a rate that are due by now."""
        second, ns = divmod(monotonic_ns() - self.start_ns, SECOND_NS)
        if second >= len(self._before):
            second, ns = len(self._before) - 1, ns + (second - len(self._before) + 1) * SECOND_NS
        return self._before[second] + ns * self._rates[second] // SECOND_NS + 1

    def fill(self) -> None:
        """Send the first events; returns when they are acknowledged."""
        self._send_fast(self._first, float("inf"))
        self._flush()

    def _flush(self) -> None:
        for producer in self.producers.values():
            producer.flush(FLUSH_S_MAX)

    def run(self) -> None:
        try:
            self.start_ns = monotonic_ns()
            if self.rate:
                self._send_at_rate()
            else:
                self._send_fast(len(self.events), time.monotonic() + self._seconds)
                del self.events[self.sent :], self.moments[self.sent :]
                self._flush()  # what waits in the client has not been sent
            self.end_ns = monotonic_ns()
            self._flush()
        except BaseException as failure:
            self.failure = failure

    def _send_fast(self, until: int, give_up: float) -> None:
        while self.sent < until and time.monotonic() < give_up:
            part = self.events[self.sent : min(until, self.sent + CHUNK)]
            now = monotonic_ns()
            self.due_ns.extend([now] * len(part))
            self._send(part)

    def _send_at_rate(self) -> None:
        while self.sent < len(self.events) or self.go_on or monotonic_ns() < self._until_ns:
            due = self._first + self._passed()
            if due > len(self.events) and (self.go_on or monotonic_ns() < self._until_ns):
                added = list(islice(self._more, due - len(self.events)))
                self.moments += [moment for moment, _, _ in added]
                self.events += added
            due = min(due, len(self.events))
            if due <= self.sent:
                time.sleep(TICK_S)
            else:
                self._send(self.events[self.sent : min(due, self.sent + CHUNK)])
        self.due_ns = array("q", [self.due_of(n) for n in range(len(self.events))])

    def stop_after(self, seconds: float) -> None:
        """Go on for these seconds, not longer, behind the last event."""
        self._until_ns = monotonic_ns() + int(seconds * 1e9)
        self.go_on = False

    def _send(self, events: Sequence[Event]) -> None:
        for stream, part in groupby(events, key=itemgetter(1)):
            self.producers[stream].send_many([row for _, _, row in part])
        self.sent += len(events)

    def finish(self, last: Sequence[Event]) -> None:
        """Send the last events at once, when the thread has ended."""
        for event in last:
            self.events.append(event)
            self.moments.append(event[0])
            self.due_ns.append(monotonic_ns())
            self.producers[event[1]].send(event[2])
        self.sent += len(last)
        self._flush()

    def end(self) -> None:
        """Wait for the thread, and raise its failure."""
        self.join()
        if self.failure is not None:
            raise self.failure


class Receiver(threading.Thread):
    """Receives one output stream until it is told to end."""

    def __init__(self, subscriber: Subscriber, output: Output, sender: Sender) -> None:
        super().__init__(name="app-receiver", daemon=True)
        self._subscriber, self._output, self._sender = subscriber, output, sender
        self.rows: list[Values] = []
        self.arrived_ns = array("q")
        self.causes = array("q")  # number of the event that the row waited for; -1: unknown
        self.recent: deque[float] = deque(maxlen=RECENT)  # latencies in ms
        self.findings: deque[str] = deque(maxlen=FINDINGS)
        self.found = 0
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                rows = self._subscriber.poll_values(POLL_S)
                if rows:
                    self._take(rows, monotonic_ns())
        except BaseException as failure:
            self.failure = failure

    def _take(self, rows: Sequence[Values], now: int) -> None:
        moments, cause, finding = self._sender.moments, self._output.cause, self._output.finding
        total, due_of = len(moments), self._sender.due_of
        for values in rows:
            n = bisect_left(moments, cause(values)) if cause is not None else total
            if n < total:
                self.causes.append(n)
                self.recent.append((now - due_of(n)) / 1e6)
            else:
                self.causes.append(-1)
            if finding is not None and (text := finding(values)):
                self.found += 1
                self.findings.append(text)
        self.arrived_ns.extend([now] * len(rows))
        self.rows += rows

    def end(self) -> None:
        """End the thread, and raise its failure."""
        self.ending.set()
        self.join()
        if self.failure is not None:
            raise self.failure


def rows_of(events: Sequence[Event], stream: str) -> list[tuple[Any, ...]]:
    """The rows that were sent to one stream, each with its number at the end."""
    rows = [row for _, name, row in events if name == stream]
    return [(*row, n) for n, row in enumerate(rows)]
