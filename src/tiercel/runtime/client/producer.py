"""The producer: sends rows into a stream, for any Python program, with blocking and asyncio calls.

Responsible for: gathering rows into frames, slowing the caller down, waiting for acknowledgements, clear
    errors.
Not responsible for: the content of rows (spark/rows), repetition after a reconnect (core/clients.py), the
    thread and its event loop (event_loop_thread.py).

    send --> gathered frames --(few are in flight)--> router --> acknowledged
                 ^ full: send waits

A row is the core's: (key: bytes, event time in ms, payload), and its number if devices number the rows.
"""

from __future__ import annotations

import functools
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tiercel.core import clients as core
from tiercel.core.machine.effects import Effect
from tiercel.core.machine.events import Event
from tiercel.core.model.log import Row
from tiercel.core.model.row_batch import join
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import WOKEN, Client
from tiercel.runtime.client.validation import check_name, checked_rows, site_for, split_rows
from tiercel.runtime.deployment import DeploymentDir

FRAME_ROWS_MAX = (
    16_000  # gathered rows become one log entry: the more rows of a key it has, the less each costs
)
FRAME_BYTES = 1_000_000  # approximate; far below the limit of a frame (net/wire.py)
IN_FLIGHT_FRAMES_MAX = 8  # frames sent and not acknowledged; further rows gather in the next ones
UNACKED_FRAMES_MAX = 16  # frames not acknowledged, gathered ones included; beyond it `send` waits
FLUSH_S_MAX = 30.0


Pack = Callable[[list[Any]], list[Row]]


class Frame:
    """Rows under one sequence number. No rows are added to a sealed frame, and its rows are packed."""

    __slots__ = ("initial", "is_sealed", "rows", "size", "stream", "watermark_ms")

    def __init__(
        self,
        rows: list[Any],
        size: int = 0,
        watermark_ms: int | None = None,
        *,
        initial: bool = False,
        is_sealed: bool = False,
        stream: str = "",
    ) -> None:
        self.rows = rows
        self.size = size  # bytes, about
        self.watermark_ms = watermark_ms
        self.initial = initial
        self.is_sealed = is_sealed
        self.stream = stream  # empty: that of the producer


class Producer(Client):
    """Sends rows into a stream. Each row is applied once, whatever is sent again.

    `name` is the permanent identity of this producer. After a restart of the program, `acknowledged` tells
    which frames the deployment has.
    """

    def __init__(
        self,
        deployment: DeploymentDir,
        stream: str,
        *,
        name: str,
        site: str = "",
        joins: bool = False,
        pack: Pack | None = None,
    ) -> None:
        """With `joins`, payloads are MessagePack arrays, and those of a key may travel as one row batch.

        `pack` converts what `send` is given into rows, when its frame leaves: a large frame costs less per
        row. It must not fail.
        """
        manifest = deployment.manifest()
        site = site_for(manifest, stream, site)
        facts = manifest.streams[stream]
        # the log needs the time, or the number, of each row
        self._joins = joins and not facts.event_time and not facts.sequence
        self._numbered = facts.sequence != ""
        self._pack = pack
        check_name(manifest, name)
        self._stream = stream
        self._machine = core.Producer(name, site, uuid.uuid4().hex)
        self._gathered: deque[Frame] = deque()  # numbered, not handed to the machine yet
        self._submitted = self._acknowledged = 0
        self._is_woken = False
        self._failure: UserError | None = None
        super().__init__(deployment, name, site)

    # -- for callers ----------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """The last acknowledged frame, counted over all incarnations of this name."""
        return self._acknowledged

    @property
    def submitted(self) -> int:
        """The last submitted frame, counted over all incarnations of this name."""
        return self._submitted

    def send(self, rows: Sequence[Any]) -> int:
        """Submit rows, and wait while too many are not acknowledged; returns the number of the last frame."""
        self.connect()
        for part, size in self._split(rows):
            self._waiters.until(functools.partial(self._offer, part, size), None)
        return self._submitted

    async def send_async(self, rows: Sequence[Any]) -> int:
        await self.connect_async()
        for part, size in self._split(rows):
            await self._waiters.until_async(functools.partial(self._offer, part, size), None)
        return self._submitted

    def send_frame(
        self,
        seq: int,
        rows: Sequence[Row],
        *,
        watermark_ms: int | None = None,
        initial: bool = False,
        stream: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Submit exactly this frame under this number. A frame that was submitted before is dropped.

        `watermark_ms` promises later event times. `initial` rows are the first state of their keys. With
        `stream` the rows belong to another stream: the frames of a feed and its dead letters share one
        sequence. With `timeout_s`, waiting longer for room is an error.
        """
        self.connect()
        checked = checked_rows(rows, numbered=self._numbered and stream in ("", self._stream))
        frame = Frame(checked, 0, watermark_ms, initial=initial, is_sealed=True, stream=stream)
        if not self._waiters.until(lambda: self._offer_frame(seq, frame), timeout_s):
            raise self._not_acknowledged(self._submitted, timeout_s or 0.0)

    async def send_frame_async(
        self, seq: int, rows: Sequence[Row], *, watermark_ms: int | None = None, initial: bool = False
    ) -> None:
        await self.connect_async()
        checked = checked_rows(rows, numbered=self._numbered)
        frame = Frame(checked, 0, watermark_ms, initial=initial, is_sealed=True)
        await self._waiters.until_async(lambda: self._offer_frame(seq, frame), None)

    def flush(self, timeout_s: float = FLUSH_S_MAX) -> None:
        """Wait until everything submitted so far is acknowledged, and so is durable."""
        seq = self._submitted
        if not self._waiters.until(lambda: self._is_acknowledged(seq), timeout_s):
            raise self._not_acknowledged(seq, timeout_s)

    async def flush_async(self, timeout_s: float = FLUSH_S_MAX) -> None:
        seq = self._submitted
        if not await self._waiters.until_async(lambda: self._is_acknowledged(seq), timeout_s):
            raise self._not_acknowledged(seq, timeout_s)

    def close(self, timeout_s: float = FLUSH_S_MAX) -> None:
        """Wait until everything is acknowledged, then end."""
        if not self._closed:
            try:
                self.flush(timeout_s)
            finally:
                self._end()

    def _split(self, rows: Sequence[Any]) -> list[tuple[list[Any], int]]:
        copied = list(rows) if self._pack is not None else checked_rows(rows, numbered=self._numbered)
        return split_rows(copied, FRAME_ROWS_MAX, FRAME_BYTES)

    # -- attempts, in the caller's thread with the lock held -----------------------------------

    def _offer(self, rows: list[Any], size: int) -> bool:
        """Add rows to the gathering frame, or begin the next one; False: there is no room."""
        self._check()
        last = self._gathered[-1] if self._gathered else None
        if (
            last is not None
            and not last.is_sealed
            and len(last.rows) + len(rows) <= FRAME_ROWS_MAX
            and last.size + size <= FRAME_BYTES
        ):
            last.rows += rows
            last.size += size
            return True
        return self._append(Frame(rows, size))

    def _offer_frame(self, seq: int, frame: Frame) -> bool:
        self._check()
        if seq <= self._submitted:
            return True
        if seq > self._submitted + 1:
            what = f"frame {seq} of producer {self._name!r} comes too early"
            raise UserError(what, expected=f"frame {self._submitted + 1}: numbers have no gaps")
        return self._append(frame)

    def _append(self, frame: Frame) -> bool:
        if self._submitted - self._acknowledged >= UNACKED_FRAMES_MAX:
            return False
        self._submitted += 1
        self._gathered.append(frame)
        if not self._is_woken:
            self._is_woken = True
            self._loop_thread.wake()
        return True

    def _is_acknowledged(self, seq: int) -> bool:
        if self._acknowledged >= seq:
            return True
        self._check()
        return False

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        super()._check()

    def _not_acknowledged(self, seq: int, timeout_s: float) -> UserError:
        return UserError(
            f"frames {self._acknowledged + 1} to {seq} of producer {self._name!r} are not acknowledged after "
            f"{timeout_s:g} s",
            expected=f"an acknowledgement by the router of site {self._site!r}",
            hint="it is unreachable, or slows producers down until its operators have caught up; flush again",
        )

    # -- the machine, in the loop thread --------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = [] if event is WOKEN else self._machine.on_event(event, now_ms)
        with self._waiters:
            self._note_progress()
            return effects + self._submit_gathered()

    def _note_progress(self) -> None:
        machine = self._machine
        if machine.rival and self._failure is None:
            self._failure = UserError(
                f"another program sends as producer {self._name!r}: what was sent here after frame "
                f"{self._acknowledged} may be missing",
                expected="one program at a time under each name",
                hint="give each producer a name of its own",
            )
            self._waiters.notify()
        elif machine.forgotten and self._failure is None:
            self._failure = UserError(
                f"the router has lost the last {machine.forgotten} frames that it had acknowledged to "
                f"producer {self._name!r}: its disk is gone, and its backup was not as far",
                hint="send them again under another name; backup={..., 'strict': True} acknowledges later",
            )
            self._waiters.notify()
        elif machine.acknowledged > self._acknowledged or (machine.greeted and not self._ready):
            self._acknowledged = machine.acknowledged
            self._submitted = max(
                self._submitted, machine.submitted
            )  # an earlier incarnation's, at the first connection
            self._ready = True
            self._waiters.notify()

    def _submit_gathered(self) -> list[Effect]:
        """Submit gathered frames while few are in flight, so that frames grow under load."""
        self._is_woken = False
        machine = self._machine
        effects: list[Effect] = []
        while self._gathered and machine.submitted - machine.acknowledged < IN_FLIGHT_FRAMES_MAX:
            frame = self._gathered.popleft()
            rows = frame.rows
            if self._pack is not None and not frame.is_sealed:
                rows = self._pack(rows)
            elif self._joins and not frame.initial:
                rows = join(rows)
            stream = frame.stream or self._stream
            numbers: list[int] = []
            if self._numbered and stream == self._stream:
                numbers = [row[3] for row in rows]
                rows = [row[:3] for row in rows]
            effects += machine.submit(
                stream, rows, frame.watermark_ms, initial=frame.initial, numbers=numbers
            )
        return effects
