"""The application that chaos is done to: it may be killed at any moment, and goes on when started again.

Responsible for: deploying on Spark, the load and its record, the reader and its record, carrying changes out,
    telling how it goes.
Not responsible for: faults, starting again (supervisor.py), whether what came out is right (judge.py).

    python -m tiercel.chaos.application STORAGE RECORDS SEED MASTER SCRATCH DURABILITY

Asked on stdin, tells on stdout (talk.py). Producers resume by name and frame number, the reader by offset.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from tiercel.bench.traffic import Chore
from tiercel.chaos import talk
from tiercel.chaos.child import QUICK_JVM
from tiercel.chaos.keeping import arguments
from tiercel.chaos.ledger import (
    ACCOUNTS,
    BALANCE,
    CHUNK_FRAMES,
    FRAME_ROWS,
    FRAME_S,
    INSTANCES,
    OPERATOR,
    SITES,
    STREAM,
    TRANSFER,
    Ledger,
    frames,
)
from tiercel.chaos.plan import Change, chosen
from tiercel.chaos.record import Inputs, Output, Outputs
from tiercel.errors import UserError
from tiercel.spark.live import Live, start
from tiercel.spark.moves import Moving, Scaling
from tiercel.spark.session import open_session
from tiercel.spark.streams import LiveStream

log = logging.getLogger(__name__)

POLL_S = 0.2
BEAT_S = 0.2
LOOK_S = 0.002
AGAIN_S = 0.3  # before a client that failed is made again
CHANGE_S_MAX = 60.0  # then a change is no longer watched; it may still end
EXCESS_S = 1.0  # a doubled row may come last
FLUSH_S_MAX = 120.0


class Channel:
    """Tells the supervisor, from any thread. What others print to stdout goes to the log instead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out: IO[bytes] = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def tell(self, told: talk.Told) -> None:
        with self._lock:
            self._out.write(talk.encode(told) + b"\n")


class Sending(Chore):
    """One producer: chunk after chunk, recorded first, then frame by frame under numbers that stay."""

    def __init__(self, stream: LiveStream, inputs: Path, seed: int, number: int) -> None:
        super().__init__(f"chaos-sending-{number}")
        self._stream, self._seed, self._number = stream, seed, number
        self._site = SITES[number]
        self._name = f"chaos-{self._site}"
        self._record = Inputs(inputs, self._name)
        self.sent = 0  # frames, those of earlier lives included

    def work(self) -> None:
        done = False
        while not done:
            try:
                done = self._send()
            except UserError as error:
                log.warning("%s: %s", self._name, error)
                time.sleep(AGAIN_S)

    def _send(self) -> bool:
        """Until asked to end; only behind a whole chunk, so that all that is recorded is sent."""
        with self._stream.producer(self._name, site=self._site) as producer:
            while True:
                self.sent = producer.client.submitted
                chunk, begun = divmod(self.sent, CHUNK_FRAMES)
                if not begun and self.ending.is_set():
                    producer.flush(FLUSH_S_MAX)
                    return True
                for frame in self._recorded(chunk)[begun:]:
                    producer.client.send_frame(self.sent + 1, list(map(producer.columns.pack, frame)))
                    self.sent += 1
                    time.sleep(FRAME_S)

    def _recorded(self, chunk: int) -> list[list[tuple[int, int, int]]]:
        found = self._record.chunk(chunk)
        if found is None:
            found = frames(self._seed, self._number, chunk)
            self._record.add(chunk, found)
        return found


class Recording(Chore):
    """The reader: each entry once, behind what is recorded."""

    def __init__(self, balances: LiveStream, outputs: Path) -> None:
        super().__init__("chaos-recording")
        self._balances = balances
        self.record = Outputs(outputs)

    def work(self) -> None:
        while not self.ending.is_set():
            try:
                with self._balances.subscribe(after=self.record.last) as subscriber:
                    while not self.ending.is_set():
                        entries = itertools.groupby(subscriber.poll(POLL_S), lambda received: received.offset)
                        rows: list[Output] = []
                        for offset, entry in entries:
                            rows += [(offset, n, *received.row) for n, received in enumerate(entry)]
                        self.record.add(rows)
                        time.sleep(POLL_S)  # fewer and larger files
            except UserError as error:
                log.warning("reader: %s", error)
                time.sleep(AGAIN_S)


class Changing(Chore):
    """Carries changes out, one request after the other; what they become runs side by side."""

    def __init__(self, live: Live, channel: Channel) -> None:
        super().__init__("chaos-changing")
        self._live, self._channel = live, channel
        self.wanted: queue.Queue[talk.Wanted | None] = queue.Queue()
        self._watching: list[threading.Thread] = []

    def work(self) -> None:
        while (wanted := self.wanted.get()) is not None:
            try:
                self._begin(wanted)
            except Exception as error:  # whatever it is: it is told, and the next one is tried
                self._channel.tell(talk.Ended(wanted.number, "refused", time.monotonic(), str(error)))
        for thread in self._watching:
            thread.join()

    def _begin(self, wanted: talk.Wanted) -> None:
        change = wanted.change
        if change.what == "scale":
            handle: Moving | Scaling = self._live.scale(OPERATOR, change.instances, strategy=change.strategy)
        else:
            handle = self._move(change)
        self._channel.tell(talk.Begun(wanted.number, change.what, time.monotonic()))
        watching = threading.Thread(target=self._watch, args=(wanted.number, handle), daemon=True)
        self._watching.append(watching)
        watching.start()

    def _move(self, change: Change) -> Moving:
        """Some of what one instance owns to another one."""
        owners = self._live.owners(OPERATOR, range(ACCOUNTS))
        slots = self._live.status().operators[OPERATOR]
        source = chosen(sorted(set(owners.values())), change.source)
        others = sorted({*owners.values(), *slots} - {source})
        if not others:
            raise UserError("only one instance runs")
        some: dict[str, Any] = {"to": chosen(others, change.target), "strategy": change.strategy}
        if change.what == "keys" or not slots.get(source):
            mine = [account for account, owner in owners.items() if owner == source]
            some["keys"] = mine[: max(1, int(change.share * len(mine)))]
        else:
            some |= {"source": source, "slots": range(int(change.share * sum(slots.values())))}
        return self._live.move(OPERATOR, **some)

    def _watch(self, number: int, handle: Moving | Scaling) -> None:
        give_up = time.monotonic() + CHANGE_S_MAX
        while not handle.done and time.monotonic() < give_up:
            time.sleep(LOOK_S)
        at_s = time.monotonic()
        if not handle.done:
            how, reason = "open", f"not ended after {CHANGE_S_MAX:g} s"
        elif isinstance(handle, Scaling):
            how, reason = "done", ""
        else:
            undone = [report for report in handle.reports() if report.state == "undone"]
            how, reason = ("undone", undone[0].reason) if undone else ("done", "")
        self._channel.tell(talk.Ended(number, how, at_s, reason))


class Beating(Chore):
    """Tells again and again how far everything is."""

    def __init__(self, live: Live, channel: Channel, sending: list[Sending], recording: Recording) -> None:
        super().__init__("chaos-beating")
        self._live, self._channel = live, channel
        self._sending, self._recording = sending, recording

    @property
    def counts(self) -> tuple[int, int]:
        return sum(each.sent for each in self._sending) * FRAME_ROWS, self._recording.record.rows

    def work(self) -> None:
        while not self.ending.wait(BEAT_S):
            self._channel.tell(talk.Beat(*self.counts, self._live.failures))


def serve(live: Live, records: Path, seed: int, channel: Channel) -> None:
    transfers = live.stream(STREAM, TRANSFER, key="account")
    balances = transfers.transform_with_state(
        Ledger(), BALANCE, name=OPERATOR, output_key=(), instances=INSTANCES
    )
    live.deploy()
    moves = live.status().moves.values()
    sending = [Sending(transfers, records / "inputs", seed, n) for n in range(len(SITES))]
    recording = Recording(balances, records / "outputs")
    changing, beating = Changing(live, channel), Beating(live, channel, sending, recording)
    for chore in (*sending, recording, changing, beating):
        chore.start()
    channel.tell(talk.Ready(sum(state in ("queued", "asked") for state in moves)))
    for line in sys.stdin.buffer:
        asked = talk.decode_asked(line)
        if isinstance(asked, talk.Finish):
            break
        changing.wanted.put(asked)
    else:
        return  # the supervisor is gone
    changing.wanted.put(None)
    changing.end()
    for each in sending:
        each.end()
    _let_come_out(beating)
    recording.end()
    beating.end()
    channel.tell(talk.Finished(*beating.counts))


def _let_come_out(beating: Beating) -> None:
    """How long that may take, the supervisor decides. What comes in excess may come last."""
    while beating.counts[1] < beating.counts[0]:
        time.sleep(POLL_S)
    time.sleep(EXCESS_S)


def main() -> None:
    storage, records, seed, master, scratch, durability = sys.argv[1:]
    channel = Channel()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = {"spark.executor.extraJavaOptions": f"-Djava.io.tmpdir={scratch} {QUICK_JVM}"}
    spark = open_session("tiercel-chaos", master=master, config=config)
    channel.tell(talk.Opened(spark.sparkContext.applicationId))
    try:
        with start(spark, SITES, storage, **arguments(durability, Path(storage))) as live:
            serve(live, Path(records), int(seed), channel)
    finally:
        with contextlib.suppress(Exception):  # it may be what has failed
            spark.stop()


if __name__ == "__main__":
    main()
