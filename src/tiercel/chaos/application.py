"""The application under test: it may be killed at any moment, and resumes when it is restarted.

Responsible for: deploying on Spark, sending and recording rows, recording outputs, performing changes,
    reporting progress.
Not responsible for: faults and restarts (supervisor.py), whether outputs are right (verdict.py).

    python -m tiercel.chaos.application STORAGE RECORDS SEED MASTER SCRATCH DURABILITY

Commands come on stdin, reports go to stdout (protocol.py). Producers resume by name and frame number, the
subscriber by offset.
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

from tiercel.chaos import protocol as protocol
from tiercel.chaos.application_handle import QUICK_JVM
from tiercel.chaos.plan import Change, chosen
from tiercel.chaos.recording import Inputs, Output, Outputs
from tiercel.chaos.storage_options import arguments
from tiercel.chaos.workload import (
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
from tiercel.demo.traffic import BackgroundTask
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.api.moves import MoveHandle, ScaleHandle
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.cluster.session import open_session

log = logging.getLogger(__name__)

POLL_S = 0.2
BEAT_S = 0.2
LOOK_S = 0.002
AGAIN_S = 0.3  # before a failed client is replaced
CHANGE_S_MAX = 60.0  # after this time a change is no longer watched; it may still end
EXCESS_S = 1.0  # a doubled row may come last
FLUSH_S_MAX = 120.0


class Channel:
    """Sends reports to the supervisor, from any thread. Other output to stdout goes to the log instead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out: IO[bytes] = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def send(self, report: protocol.Report) -> None:
        with self._lock:
            self._out.write(protocol.encode(report) + b"\n")


class RowSender(BackgroundTask):
    """One producer: records each chunk first, then sends its frames under fixed numbers."""

    def __init__(self, stream: LiveStream, inputs: Path, seed: int, number: int) -> None:
        super().__init__(f"chaos-sender-{number}")
        self._stream, self._seed, self._number = stream, seed, number
        self._site = SITES[number]
        self._name = f"chaos-{self._site}"
        self._record = Inputs(inputs, self._name)
        self.sent = 0  # frames, including those of earlier incarnations

    def work(self) -> None:
        done = False
        while not done:
            try:
                done = self._send()
            except UserError as error:
                log.warning("%s: %s", self._name, error)
                time.sleep(AGAIN_S)

    def _send(self) -> bool:
        """Send until asked to end; stops only after a whole chunk, so that everything recorded is sent."""
        with self._stream.producer(self._name, site=self._site) as producer:
            while True:
                self.sent = producer.client.submitted
                chunk, begun = divmod(self.sent, CHUNK_FRAMES)
                if not begun and self.ending.is_set():
                    producer.flush(FLUSH_S_MAX)
                    return True
                for frame in self._recorded(chunk)[begun:]:
                    producer.client.send_frame(self.sent + 1, list(map(producer.codec.pack, frame)))
                    self.sent += 1
                    time.sleep(FRAME_S)

    def _recorded(self, chunk: int) -> list[list[tuple[int, int, int]]]:
        found = self._record.chunk(chunk)
        if found is None:
            found = frames(self._seed, self._number, chunk)
            self._record.add(chunk, found)
        return found


class OutputRecorder(BackgroundTask):
    """The subscriber: records each entry once, after what is already recorded."""

    def __init__(self, balances: LiveStream, outputs: Path) -> None:
        super().__init__("chaos-recorder")
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


class ChangeRunner(BackgroundTask):
    """Starts changes one after the other; the changes themselves run concurrently."""

    def __init__(self, live: Live, channel: Channel) -> None:
        super().__init__("chaos-changes")
        self._live, self._channel = live, channel
        self.requests: queue.Queue[protocol.ChangeRequest | None] = queue.Queue()
        self._watching: list[threading.Thread] = []

    def work(self) -> None:
        while (request := self.requests.get()) is not None:
            try:
                self._begin(request)
            except Exception as error:  # reported; the next request is tried
                self._channel.send(protocol.Ended(request.number, "refused", time.monotonic(), str(error)))
        for thread in self._watching:
            thread.join()

    def _begin(self, request: protocol.ChangeRequest) -> None:
        change = request.change
        if change.what == "scale":
            handle: MoveHandle | ScaleHandle = self._live.scale(
                OPERATOR, change.instances, strategy=change.strategy
            )
        else:
            handle = self._move(change)
        self._channel.send(protocol.Begun(request.number, change.what, time.monotonic()))
        watching = threading.Thread(target=self._watch, args=(request.number, handle), daemon=True)
        self._watching.append(watching)
        watching.start()

    def _move(self, change: Change) -> MoveHandle:
        """Move some keys or slots of one instance to another."""
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
        if change.strategy == "standby":
            self._live.set_standby(source, some["to"])
        handle: MoveHandle = self._live.move(OPERATOR, **some)
        return handle

    def _watch(self, number: int, handle: MoveHandle | ScaleHandle) -> None:
        give_up = time.monotonic() + CHANGE_S_MAX
        while not handle.done and time.monotonic() < give_up:
            time.sleep(LOOK_S)
        at_s = time.monotonic()
        if not handle.done:
            how, reason = "open", f"not ended after {CHANGE_S_MAX:g} s"
        elif isinstance(handle, ScaleHandle):
            how, reason = "done", ""
        else:
            undone = [report for report in handle.reports() if report.state == "undone"]
            how, reason = ("undone", undone[0].reason) if undone else ("done", "")
        self._channel.send(protocol.Ended(number, how, at_s, reason))


class HeartbeatSender(BackgroundTask):
    """Reports the progress of all tasks at short intervals."""

    def __init__(
        self, live: Live, channel: Channel, senders: list[RowSender], recorder: OutputRecorder
    ) -> None:
        super().__init__("chaos-heartbeat")
        self._live, self._channel = live, channel
        self._sending, self._recording = senders, recorder

    @property
    def counts(self) -> tuple[int, int]:
        return sum(each.sent for each in self._sending) * FRAME_ROWS, self._recording.record.rows

    def work(self) -> None:
        while not self.ending.wait(BEAT_S):
            self._channel.send(protocol.Heartbeat(*self.counts, self._live.failures))


def serve(live: Live, records: Path, seed: int, channel: Channel) -> None:
    transfers = live.stream(STREAM, TRANSFER, key="account")
    balances = transfers.transform_with_state(
        Ledger(), BALANCE, name=OPERATOR, output_key=(), instances=INSTANCES
    )
    live.deploy()
    moves = live.status().moves.values()
    senders = [RowSender(transfers, records / "inputs", seed, n) for n in range(len(SITES))]
    recorder = OutputRecorder(balances, records / "outputs")
    change_runner, heartbeat_sender = (
        ChangeRunner(live, channel),
        HeartbeatSender(live, channel, senders, recorder),
    )
    for task in (*senders, recorder, change_runner, heartbeat_sender):
        task.start()
    channel.send(protocol.Ready(sum(state in ("queued", "asked") for state in moves)))
    for line in sys.stdin.buffer:
        command = protocol.decode_command(line)
        if isinstance(command, protocol.Finish):
            break
        change_runner.requests.put(command)
    else:
        return  # the supervisor is gone
    change_runner.requests.put(None)
    change_runner.end()
    for each in senders:
        each.end()
    _wait_for_outputs(heartbeat_sender)
    recorder.end()
    heartbeat_sender.end()
    channel.send(protocol.Finished(*heartbeat_sender.counts))


def _wait_for_outputs(heartbeat_sender: HeartbeatSender) -> None:
    """Wait until all rows are out, and a moment longer: a doubled row may come last."""
    while heartbeat_sender.counts[1] < heartbeat_sender.counts[0]:
        time.sleep(POLL_S)
    time.sleep(EXCESS_S)


def main() -> None:
    storage, records, seed, master, scratch, durability = sys.argv[1:]
    channel = Channel()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = {"spark.executor.extraJavaOptions": f"-Djava.io.tmpdir={scratch} {QUICK_JVM}"}
    spark = open_session("tiercel-chaos", master=master, config=config)
    channel.send(protocol.Opened(spark.sparkContext.applicationId))
    try:
        with start(spark, SITES, storage, **arguments(durability, Path(storage))) as live:
            serve(live, Path(records), int(seed), channel)
    finally:
        with contextlib.suppress(Exception):  # Spark itself may have failed
            spark.stop()


if __name__ == "__main__":
    main()
