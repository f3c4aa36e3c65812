"""Helper processes of a benchmark: one that asks, one that does, JSON lines in between.

Responsible for: starting such a process, questions and answers, its end with ours.
Not responsible for: what is asked (loader.py, echo.py, reader.py).
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


class WorkerFailed(Exception):
    """A helper process of the benchmark ended before its work was done."""


class Worker:
    """A process that runs one of our modules and answers questions, one after the other."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._module = module
        source = str(Path(tiercel.__file__).resolve().parent.parent)
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.hello = self.answer()

    def tell(self, do: str, **facts: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **facts}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            message = f"{self._module} ended with {self.process.wait()}"
            raise WorkerFailed(message)
        return dict(json.loads(line))

    def ask(self, do: str, **facts: Any) -> Answer:
        self.tell(do, **facts)
        return self.answer()

    def close(self) -> None:
        """It ends when its input does."""
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


def say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


async def serve(handle: Handle) -> None:
    """Answer questions until there are no more."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({})
    while line := await reader.readline():
        say(await handle(json.loads(line)))
