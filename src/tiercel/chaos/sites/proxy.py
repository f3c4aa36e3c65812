"""A link between sites that can be slow, stalled in one direction, or cut: a TCP proxy on real sockets.

Responsible for: forwarding bytes between a site's advertised port and its router, as the link of now allows.
Not responsible for: choosing when a link fails (run.py), bandwidth (runtime/net/emulated_link.py).

A cut link accepts no connection and delivers nothing, and the ends are not told: connections stay open, as
behind a switch that lost its power. When the link is healed, they end with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import NamedTuple

CHUNK_BYTES = 64 * 1024


class LinkState(NamedTuple):
    """What the link does with bytes now."""

    latency_s: float = 0.0  # one way
    toward: bool = True  # bytes toward the site arrive
    back: bool = True  # bytes from the site arrive


OPEN = LinkState()
CUT = LinkState(toward=False, back=False)


class Proxy:
    """The link of one site, in a thread of its own. Close it, or use it in a `with`."""

    def __init__(self, port: int, target_port: int, host: str = "127.0.0.1") -> None:
        self._host, self._port, self._target = host, port, target_port
        self._state = OPEN
        self._pipes: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._thread.start()
        self._started.wait()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def set(self, state: LinkState) -> None:
        """Change the link. Connections that were cut end when it is healed."""
        asyncio.run_coroutine_threadsafe(self._set(state), self._loop).result()

    async def _set(self, state: LinkState) -> None:
        was, self._state = self._state, state
        if not (was.toward and was.back) and state.toward and state.back:
            for pipe in self._pipes:
                pipe.cancel()
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._on_connection, self._host, self._port)
        self._started.set()
        await self._ended.wait()
        server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (self._state.toward and self._state.back):
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.transport.abort()
            return
        pipes = [
            asyncio.create_task(self._pump(reader, there_writer, toward=True)),
            asyncio.create_task(self._pump(there_reader, writer, toward=False)),
        ]
        self._pipes.update(pipes)
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
                self._pipes.discard(pipe)
            for end in (writer, there_writer):
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, toward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                while not (self._state.toward if toward else self._state.back):
                    await self._changed.wait()
                if self._state.latency_s:
                    await asyncio.sleep(self._state.latency_s)
                writer.write(data)
                await writer.drain()
