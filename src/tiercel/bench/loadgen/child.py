"""Child processes that answer requests, one JSON object per line.

Responsible for: starting the child, requests and replies, ending it with us.
Not responsible for: the requests themselves (process.py, echo.py, subscriber.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tiercel

Answer = dict[str, Any]
Handle = Callable[[Answer], Awaitable[Answer]]


def child_environment() -> dict[str, str]:
    """Our environment, with this very package on the path of Python."""
    source = str(Path(tiercel.__file__).resolve().parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class ChildFailed(Exception):
    """A child process ended before its work was done."""


class ChildProcess:
    """A process that runs one of our modules and answers requests, one after the other."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        self.hello = self.answer()

    def send(self, do: str, **facts: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **facts}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            message = f"{self._module} ended with {self.process.wait()}"
            raise ChildFailed(message)
        return dict(json.loads(line))

    def ask(self, do: str, **facts: Any) -> Answer:
        self.send(do, **facts)
        return self.answer()

    def close(self) -> None:
        """Close its input, which ends it; kill it if it does not end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        finally:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- inside the process -----------------------------------------------------------------------


def reply(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


async def serve(handle: Handle) -> None:
    """Answer requests until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    reply({})
    while line := await reader.readline():
        reply(await handle(json.loads(line)))
