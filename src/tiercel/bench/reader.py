"""A subscriber in a process of its own: it shares no interpreter lock with the producer.

Responsible for: reading an operator's output through the public API, and checking every row of it.
Not responsible for: rates (throughput.py makes them out of what is told here).

    python -m tiercel.bench.reader STORAGE STREAM KEYS

Each row must be the next of its key: one more than the last count, and the average that follows from it.
Values of a key are 1.0, 2.0, 3.0, ... so anything lost, doubled or out of order shows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from time import monotonic, monotonic_ns
from typing import Any

from tiercel.bench.worker import Worker, WorkerFailed, say
from tiercel.runtime.place import Place
from tiercel.spark.ends import RowSubscriber

TELL_S = 0.05


class Reader:
    """The driver's hold on the process: how much had come, and when."""

    def __init__(self, place: Place, stream: str, keys: int) -> None:
        self._worker = Worker(__name__, place.directory, stream, keys)
        self.told: list[tuple[int, int]] = [(0, 0)]  # (ns, rows that had come)
        self.faults = 0
        self._failure: WorkerFailed | None = None
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                said = self._worker.answer()
            except WorkerFailed as failure:
                self._failure = failure
                return
            if "counts" in said:
                self.counts = said["counts"]
                return
            self.told.append((said["at_ns"], said["received"]))
            self.faults = said["faults"]

    @property
    def pid(self) -> int:
        return self._worker.process.pid

    @property
    def received(self) -> int:
        if self._failure is not None:
            raise self._failure
        return self.told[-1][1]

    def received_at(self, at_ns: int) -> float:
        """How much had come by then, between two tellings in proportion."""
        before = (0, 0)
        for now in self.told:
            if now[0] >= at_ns:
                share = (at_ns - before[0]) / max(1, now[0] - before[0])
                return before[1] + share * (now[1] - before[1])
            before = now
        return before[1]

    def end(self) -> list[int]:
        """The last count of each key."""
        self._worker.tell("end")
        self._thread.join(30)
        self._worker.close()
        return self.counts


def main() -> None:
    directory, stream, keys = sys.argv[1:]
    ending = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ending,), daemon=True).start()
    with RowSubscriber(directory, stream, after=0) as subscriber:
        say({})
        _read(subscriber, [0] * int(keys), ending)


def _wait_for_the_end(ending: threading.Event) -> None:
    sys.stdin.readline()  # we are told, or whoever started us is gone
    ending.set()


def _read(subscriber: RowSubscriber, counts: list[int], ending: threading.Event) -> None:
    received = faults = 0
    told_s = 0.0
    check = _averaged if "average" in subscriber.columns.names else _counted
    while not ending.is_set():
        rows = subscriber.poll_values(TELL_S)
        received += len(rows)
        faults += check(rows, counts)
        if not rows or monotonic() - told_s > TELL_S:
            told_s = monotonic()
            say({"at_ns": monotonic_ns(), "received": received, "faults": faults})
    say({"counts": counts})


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
