"""Steady traffic through a deployment under test, and checks of every output.

Responsible for: rows of every key, round after round, through the public API; naming the first row that
    was lost, doubled or out of order.
Not responsible for: the faults (outages.py, tests), speed (bench/loadgen).

Row n of a key must come out as the n-th of that key, and its output depends on all rows before it: one wrong
row shows at once, and in every later row.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tiercel.bench.operators import INPUT, INPUT_SCHEMA, OUTPUT_SCHEMA, NumberedAverage
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.streams import LiveStream

OPERATOR = "average"
KEYS = 20
PAUSE_S = 0.01  # between two rounds: a gentle load, so that what is found is no matter of speed
WAIT_S_MAX = 120.0  # for the last rows, after restarts on a busy machine
FAULTS_MAX = 5  # the first ones say it all


class TrafficFault(Exception):
    """Rows were lost, doubled or out of order; or they do not come at all."""


def declare(live: Live, **options: Any) -> tuple[LiveStream, LiveStream]:
    """A stream of readings and the stream of their running averages."""
    readings = live.stream(INPUT, INPUT_SCHEMA, key="sensor")
    return readings, readings.transform_with_state(
        NumberedAverage(), OUTPUT_SCHEMA, name=OPERATOR, output_key=(), **options
    )


class Traffic:
    """Sends and checks in two threads. `begin` is the number of rounds that an earlier traffic has sent."""

    def __init__(self, readings: LiveStream, averages: LiveStream, *, name: str = "traffic", begin: int = 0):
        self.rounds = begin  # sent
        self._next = [0] * KEYS  # per key, the row that must come out now
        self._faults: list[str] = []
        self._failure: BaseException | None = None
        self._sending, self._reading = True, True
        self._producer = readings.producer(name)
        self._subscriber = averages.subscribe(after=0)
        self._threads = [threading.Thread(target=self._guarded, args=(w,)) for w in (self._send, self._read)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def through(self) -> int:
        """Rounds that have come out whole."""
        return min(self._next)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as failure:
            self._failure = failure

    def _send(self) -> None:
        while self._sending:
            self._producer.send_many([(key, self.rounds, 0, 1.0) for key in range(KEYS)])
            self.rounds += 1
            time.sleep(PAUSE_S)
        self._producer.flush(WAIT_S_MAX)

    def _read(self) -> None:
        while self._reading:
            for received in self._subscriber.poll(0.1):
                key, n, count = received.row[:3]
                due = self._next[key]
                if (n, count) != (due, due + 1) and len(self._faults) < FAULTS_MAX:
                    self._faults.append(f"key {key}: row {n} as number {count}, due was {due}")
                self._next[key] = n + 1

    def wait_through(self, rounds: int) -> None:
        """Wait until this many rounds have come out."""
        give_up = time.monotonic() + WAIT_S_MAX
        while self.through < rounds:
            self._check()
            if time.monotonic() > give_up:
                reason = f"{self.through} of {rounds} rounds came out within {WAIT_S_MAX:g} s"
                raise TrafficFault(reason)
            time.sleep(0.02)
        self._check()

    def go_on(self, rounds: int = 20) -> None:
        """Wait until rounds sent from now on have come out: the deployment works."""
        self.wait_through(self.rounds + rounds)

    def finish(self) -> int:
        """Send no more, wait for what is under way, judge; returns the rounds."""
        self._sending = False
        self._threads[0].join()
        self._check()
        self.wait_through(self.rounds)
        self._reading = False
        self._threads[1].join()
        self._check()
        self._producer.close()
        self._subscriber.close()
        return self.rounds

    def _check(self) -> None:
        if self._failure is not None:
            reason = f"traffic has ended: {self._failure}"
            raise TrafficFault(reason) from self._failure
        if self._faults:
            raise TrafficFault("; ".join(self._faults))
