"""A checking subscriber in a process of its own, which shares no interpreter lock with the producer.

Responsible for: reading an operator's output through the public API, and checking every row of it.
Not responsible for: rates (throughput.py computes them from the counts reported here).

    python -m tiercel.bench.loadgen.subscriber STORAGE STREAM KEYS

Each row must be the next of its key: one more than the last count, and the average that follows from it.
Values of a key are 1.0, 2.0, 3.0, ... so anything lost, doubled or out of order shows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from time import monotonic, monotonic_ns
from typing import Any

from tiercel.bench.loadgen.child import ChildFailed, ChildProcess, reply
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.api.clients import RowSubscriber

TELL_S = 0.05


class SubscriberProcess:
    """The driver's hold on the process: how much had come, and when."""

    def __init__(self, place: DeploymentDir, stream: str, keys: int) -> None:
        self._worker = ChildProcess(__name__, place.directory, stream, keys)
        self.reports: list[tuple[int, int]] = [(0, 0)]  # (ns, rows that had come)
        self.faults = 0
        self._failure: ChildFailed | None = None
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                report = self._worker.answer()
            except ChildFailed as failure:
                self._failure = failure
                return
            if "counts" in report:
                self.counts = report["counts"]
                return
            self.reports.append((report["at_ns"], report["received"]))
            self.faults = report["faults"]

    @property
    def pid(self) -> int:
        return self._worker.process.pid

    @property
    def received(self) -> int:
        if self._failure is not None:
            raise self._failure
        return self.reports[-1][1]

    def received_at(self, at_ns: int) -> float:
        """The number of rows received by then, interpolated between two reports."""
        before = (0, 0)
        for now in self.reports:
            if now[0] >= at_ns:
                share = (at_ns - before[0]) / max(1, now[0] - before[0])
                return before[1] + share * (now[1] - before[1])
            before = now
        return before[1]

    def end(self) -> list[int]:
        """The last count of each key."""
        self._worker.send("end")
        self._thread.join(30)
        self._worker.close()
        return self.counts


def main() -> None:
    directory, stream, keys = sys.argv[1:]
    ending = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ending,), daemon=True).start()
    with RowSubscriber(directory, stream, after=0) as subscriber:
        reply({})
        _read(subscriber, [0] * int(keys), ending)


def _wait_for_the_end(ending: threading.Event) -> None:
    sys.stdin.readline()  # the request to end, or the end of our parent
    ending.set()


def _read(subscriber: RowSubscriber, counts: list[int], ending: threading.Event) -> None:
    received = faults = 0
    reported_s = 0.0
    check = _averaged if "average" in subscriber.codec.names else _counted
    while not ending.is_set():
        rows = subscriber.poll_values(TELL_S)
        received += len(rows)
        faults += check(rows, counts)
        if not rows or monotonic() - reported_s > TELL_S:
            reported_s = monotonic()
            reply({"at_ns": monotonic_ns(), "received": received, "faults": faults})
    reply({"counts": counts})


def _counted(rows: Iterable[Sequence[Any]], counts: list[int]) -> int:
    faults = 0
    for sensor, count in rows:
        if count != counts[sensor] + 1:
            faults += 1
        counts[sensor] = count
    return faults


def _averaged(rows: Iterable[Sequence[Any]], counts: list[int]) -> int:
    faults = 0
    for sensor, count, average in rows:
        if count != counts[sensor] + 1 or average != (count + 1) / 2:
            faults += 1
        counts[sensor] = count
    return faults


if __name__ == "__main__":
    main()
