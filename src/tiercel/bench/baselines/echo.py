"""The latency floor: an echo of the same bytes over the same hops, without any processing.

Responsible for: source -> process R -> process I -> R -> source, on the same kind of sockets and loop.
Not responsible for: the content of the frames; they only have the sizes of the real ones.

    python -m tiercel.bench.baselines.echo relay SOCKET [NEXT-SOCKET]    R with a next one, I without
    python -m tiercel.bench.baselines.echo source SOCKET FRAME-BYTES ROW-BYTES
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import msgspec
import numpy as np
import uvloop

from tiercel.bench.loadgen.child import Answer, ChildProcess, serve
from tiercel.bench.loadgen.load import BURST_TICKS_MAX, PRODUCER, TICK_NS, due_in_tick
from tiercel.bench.loadgen.process import spread, until
from tiercel.bench.loadgen.timer import TickTimer
from tiercel.bench.operators import INPUT
from tiercel.core import messages as m
from tiercel.runtime.net.wire import encode_frame
from tiercel.runtime.process.machine import tame_collector
from tiercel.spark.operators.processor_adapter import encode_key

HEAD = struct.Struct("<IQ")  # bytes that follow, due time


def frame_sizes() -> tuple[int, int]:
    """Bytes of a real frame without rows, and of each row in it."""

    def size(rows: int) -> int:
        payload = msgspec.msgpack.encode((500, 1_000, 1 << 50, 1_000.0))
        row = (encode_key(500), 0, payload)
        return len(encode_frame(m.Produce(PRODUCER, 100_000, INPUT, [row] * rows)))

    return size(0), (size(100) - size(0)) // 100


# -- in the driver ----------------------------------------------------------------------------


class Echo:
    """Three processes that only pass bytes on, started once."""

    def __init__(self, source: ChildProcess) -> None:
        self._source = source

    def open_loop(self, rate: int, seconds: float, warm_s: float) -> Answer:
        return self._source.ask("open", rate=rate, seconds=seconds, warm_s=warm_s)


@contextlib.contextmanager
def echoing() -> Iterator[Echo]:
    with tempfile.TemporaryDirectory(prefix="tiercel-echo-") as place:
        first, second = Path(place) / "r", Path(place) / "i"
        with (
            ChildProcess(__name__, "relay", second),
            ChildProcess(__name__, "relay", first, second),
            ChildProcess(__name__, "source", first, *frame_sizes()) as source,
        ):
            yield Echo(source)


# -- the processes ----------------------------------------------------------------------------


class Pipe(asyncio.Protocol):
    """Whatever comes in here goes out there; nothing there: back."""

    def __init__(self, to: Pipe | None = None) -> None:
        self.to = to or self
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.to.transport is not None:
            self.to.transport.write(data)


async def relay(here: str, onward: str) -> None:
    loop = asyncio.get_running_loop()
    if onward:
        forth, back = Pipe(), Pipe()
        forth.to, back.to = back, forth
        await loop.create_unix_connection(lambda: back, onward)
        server = await loop.create_unix_server(lambda: forth, here)
    else:
        server = await loop.create_unix_server(Pipe, here)
    tame_collector()
    await serve(_nothing)
    server.close()


async def _nothing(question: Answer) -> Answer:
    return question


class Source(asyncio.Protocol):
    """Sends a frame when it is due, and notes when it is back."""

    def __init__(self, frame_bytes: int, row_bytes: int) -> None:
        self._frame_bytes, self._row_bytes = frame_bytes, row_bytes
        self.due_ns, self.emitted_ns = array("q"), array("q")
        self.sent = 0
        self._buffer = bytearray()
        self._next_ns = 0
        self._tick = self._rate = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now, buffer = monotonic_ns(), self._buffer
        buffer += data
        while len(buffer) >= HEAD.size:
            size, due_ns = HEAD.unpack_from(buffer)
            if len(buffer) < HEAD.size + size:
                break
            del buffer[: HEAD.size + size]
            self.due_ns.append(due_ns)
            self.emitted_ns.append(now)

    def on_tick(self) -> None:
        now = monotonic_ns()
        for _ in range(BURST_TICKS_MAX):
            if not 0 < self._next_ns <= now:
                return
            rows = due_in_tick(self._tick, self._rate)
            if rows:
                filling = bytes(max(0, self._frame_bytes + rows * self._row_bytes - HEAD.size))
                self._transport.write(HEAD.pack(len(filling), self._next_ns) + filling)
                self.sent += 1
            self._tick += 1
            self._next_ns += TICK_NS

    async def handle(self, question: Answer) -> Answer:
        self._rate, self._tick = question["rate"], 0
        self.due_ns, self.emitted_ns, self.sent = array("q"), array("q"), 0
        self._next_ns = monotonic_ns() + TICK_NS
        ticks = TickTimer(self._next_ns, TICK_NS, self.on_tick)
        await asyncio.sleep(question["warm_s"])
        began_ns = monotonic_ns()
        await asyncio.sleep(question["seconds"])
        ended_ns, self._next_ns = monotonic_ns(), 0
        ticks.close()
        await until(lambda: len(self.due_ns) == self.sent, "frames do not come back")
        due, emitted = np.asarray(self.due_ns), np.asarray(self.emitted_ns)
        return spread((emitted - due)[(began_ns <= due) & (due < ended_ns)])


async def source(to: str, frame_bytes: int, row_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    sender = Source(frame_bytes, row_bytes)
    await loop.create_unix_connection(lambda: sender, to)
    tame_collector()
    await serve(sender.handle)


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        match sys.argv[1:]:
            case ["relay", here, *onward]:
                runner.run(relay(here, "".join(onward)))
            case ["source", to, frame_bytes, row_bytes]:
                runner.run(source(to, int(frame_bytes), int(row_bytes)))
            case wrong:
                raise ValueError(wrong)


if __name__ == "__main__":
    main()
