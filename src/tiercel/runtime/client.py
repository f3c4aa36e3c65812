"""Producers and subscribers for any Python program: blocking calls, and the same for asyncio.

Responsible for: handing rows over and entries out, slowing the caller down, waiting, clear errors.
Not responsible for: what is in a row (spark/schema.py), what is repeated after a reconnect
    (core/clients.py), the thread and its event loop (background.py).

    send --> gathered frames --(few are under way)--> router --> acknowledged: safe
                 ^ full: send waits

A row is the core's: (key: bytes, event time in ms, payload).
"""

from __future__ import annotations

import functools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from tiercel.core import clients as core
from tiercel.core import messages as m
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Connected, Event, Received
from tiercel.core.records import Row, StreamEntry
from tiercel.core.runs import join
from tiercel.errors import UserError
from tiercel.runtime.arguments import check_name, checked_rows, home_of, pieces, site_for
from tiercel.runtime.background import POKED, Client
from tiercel.runtime.place import Place

FRAME_ROWS_MAX = 16_000  # rows that gather become one entry: the more of a key, the less each of them costs
FRAME_BYTES = 1_000_000  # about; rows that gather stay far below the limit of a frame (wire.py)
UNDER_WAY_MAX = 8  # frames on their way; rows that come meanwhile gather in the next ones
KEPT_FRAMES_MAX = 16  # frames not acknowledged, gathered ones included; `send` waits beyond it
KEPT_ENTRIES_MAX = 256  # entries not taken by the caller; the router is not asked for more beyond it
FLUSH_S_MAX = 30.0
RANGE_S_MAX = 10.0


Pack = Callable[[list[Any]], list[Row]]


class Frame:
    """Rows that get one number; `whole`: none may be added, and nothing is left to pack."""

    __slots__ = ("initial", "rows", "size", "stream", "watermark_ms", "whole")

    def __init__(
        self,
        rows: list[Any],
        size: int = 0,
        watermark_ms: int | None = None,
        *,
        initial: bool = False,
        whole: bool = False,
        stream: str = "",
    ) -> None:
        self.rows = rows
        self.size = size  # bytes, about
        self.watermark_ms = watermark_ms
        self.initial = initial
        self.whole = whole
        self.stream = stream  # not the producer's own


class Producer(Client):
    """Sends rows into a stream; each of them changes its key's state once, whatever is sent again.

    `name` is this producer's identity for good: after a restart of the program, `acknowledged` says
    which frames of it the deployment has.
    """

    def __init__(
        self,
        place: Place,
        stream: str,
        *,
        name: str,
        site: str = "",
        joins: bool = False,
        pack: Pack | None = None,
    ) -> None:
        """`joins`: payloads are MessagePack arrays, and those of a key may travel as one (core/runs.py).

        `pack` makes rows of what `send` is given, when a frame of it leaves: the more there is by then, the
        less each costs. It must not fail.
        """
        manifest = place.manifest()
        site = site_for(manifest, stream, site)
        facts = manifest.streams[stream]
        self._joins = joins and not facts.event_time  # the log looks at the time of each row
        self._pack = pack
        check_name(manifest, name)
        self._stream = stream
        self._machine = core.Producer(name, site, uuid.uuid4().hex)
        self._gathered: deque[Frame] = deque()  # numbered, not handed to the machine yet
        self._submitted = self._acknowledged = 0
        self._poked = False
        self._failure: UserError | None = None
        super().__init__(place, name, site)

    # -- what callers use ----------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """Frames up to this one are safe, those of earlier lives of this name included."""
        return self._acknowledged

    @property
    def submitted(self) -> int:
        """The number of the last frame that was taken, here or in an earlier life of this name."""
        return self._submitted

    def send(self, rows: Sequence[Any]) -> int:
        """Hand rows over, and wait only while too much is under way; returns the last one's frame number."""
        self.connect()
        for piece, size in self._pieces(rows):
            self._bell.until(functools.partial(self._offer, piece, size), None)
        return self._submitted

    async def send_async(self, rows: Sequence[Any]) -> int:
        await self.connect_async()
        for piece, size in self._pieces(rows):
            await self._bell.until_async(functools.partial(self._offer, piece, size), None)
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
        """Exactly this frame under this number, for whoever can repeat it: one that was sent is dropped.

        `watermark_ms` promises later event times; `initial` rows are a key's first state, not tuples. With
        `stream` the rows are those of another one: a feed's frames and its dead letters are numbered as one.
        With `timeout_s` it is an error if there is no room for so long.
        """
        self.connect()
        frame = Frame(checked_rows(rows), 0, watermark_ms, initial=initial, whole=True, stream=stream)
        if not self._bell.until(lambda: self._offer_frame(seq, frame), timeout_s):
            raise self._unsafe(self._submitted, timeout_s or 0.0)

    async def send_frame_async(
        self, seq: int, rows: Sequence[Row], *, watermark_ms: int | None = None, initial: bool = False
    ) -> None:
        await self.connect_async()
        frame = Frame(checked_rows(rows), 0, watermark_ms, initial=initial, whole=True)
        await self._bell.until_async(lambda: self._offer_frame(seq, frame), None)

    def flush(self, timeout_s: float = FLUSH_S_MAX) -> None:
        """Return when everything sent so far is safe, as the deployment's durability says."""
        seq = self._submitted
        if not self._bell.until(lambda: self._is_safe(seq), timeout_s):
            raise self._unsafe(seq, timeout_s)

    async def flush_async(self, timeout_s: float = FLUSH_S_MAX) -> None:
        seq = self._submitted
        if not await self._bell.until_async(lambda: self._is_safe(seq), timeout_s):
            raise self._unsafe(seq, timeout_s)

    def close(self, timeout_s: float = FLUSH_S_MAX) -> None:
        """Wait until everything is safe, then end."""
        if not self._closed:
            try:
                self.flush(timeout_s)
            finally:
                self._end()

    def _pieces(self, rows: Sequence[Any]) -> list[tuple[list[Any], int]]:
        copied = list(rows) if self._pack is not None else checked_rows(rows)
        return pieces(copied, FRAME_ROWS_MAX, FRAME_BYTES)

    # -- attempts, in the caller's thread with the lock held -----------------------------------

    def _offer(self, rows: list[Any], size: int) -> bool:
        """Rows join the frame that gathers, or begin the next one; False: there is no room."""
        self._check()
        last = self._gathered[-1] if self._gathered else None
        if (
            last is not None
            and not last.whole
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
        if self._submitted - self._acknowledged >= KEPT_FRAMES_MAX:
            return False
        self._submitted += 1
        self._gathered.append(frame)
        if not self._poked:
            self._poked = True
            self._background.poke()
        return True

    def _is_safe(self, seq: int) -> bool:
        if self._acknowledged >= seq:
            return True
        self._check()
        return False

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        super()._check()

    def _unsafe(self, seq: int, timeout_s: float) -> UserError:
        return UserError(
            f"frames {self._acknowledged + 1} to {seq} of producer {self._name!r} are not safe after "
            f"{timeout_s:g} s",
            expected=f"an acknowledgement by the router of site {self._site!r}",
            hint="it is away, or slows producers down until its operators have caught up; flush again",
        )

    # -- the machine, in the background --------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        effects = [] if event is POKED else self._machine.on_event(event, now_ms)
        with self._bell:
            self._note_progress()
            return effects + self._hand_over()

    def _note_progress(self) -> None:
        machine = self._machine
        if machine.rival and self._failure is None:
            self._failure = UserError(
                f"another program sends as producer {self._name!r}: what was sent here after frame "
                f"{self._acknowledged} may be missing",
                expected="one program at a time under each name",
                hint="give each producer a name of its own",
            )
            self._bell.ring()
        elif machine.forgotten and self._failure is None:
            self._failure = UserError(
                f"the router has lost the last {machine.forgotten} frames that it had acknowledged to "
                f"producer {self._name!r}: its disk is gone, and its backup was not as far",
                hint="send them again under another name; backup={..., 'strict': True} acknowledges later",
            )
            self._bell.ring()
        elif machine.acknowledged > self._acknowledged or (machine.greeted and not self._ready):
            self._acknowledged = machine.acknowledged
            self._submitted = max(self._submitted, machine.submitted)  # an earlier life's, when we first meet
            self._ready = True
            self._bell.ring()

    def _hand_over(self) -> list[Effect]:
        """What has gathered leaves as long as little is under way: so frames grow under load."""
        self._poked = False
        machine = self._machine
        effects: list[Effect] = []
        while self._gathered and machine.submitted - machine.acknowledged < UNDER_WAY_MAX:
            frame = self._gathered.popleft()
            rows = frame.rows
            if self._pack is not None and not frame.whole:
                rows = self._pack(rows)
            elif self._joins and not frame.initial:
                rows = join(rows)
            stream = frame.stream or self._stream
            effects += machine.submit(stream, rows, frame.watermark_ms, initial=frame.initial)
        return effects


class Subscriber(Client):
    """Reads a stream's entries, each once and in order, across restarts of the router.

    `after=None` begins with what comes after connecting, 0 with the first entry, n behind entry n.
    """

    def __init__(self, place: Place, stream: str, *, after: int | None = None) -> None:
        home = home_of(place.manifest(), stream)
        self._stream = stream
        self._machine = core.Subscriber(stream, home, after, range_first=True, entries_max=KEPT_ENTRIES_MAX)
        self._begun: deque[StreamEntry] = deque()  # taken by an iterator, not handed out yet
        self._offset = 0 if after is None else after
        self._unsaid: list[Effect] = []
        self._range: tuple[int, int] | None = None
        self._asking = False
        super().__init__(place, f"subscriber|{uuid.uuid4().hex}", home)

    # -- what callers use ----------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The last entry that was handed out: `after=offset` goes on behind it."""
        return self._offset

    def poll(self, timeout_s: float) -> list[StreamEntry]:
        """Everything that has come; waits for the first of it, at most this long."""
        self.connect()
        return self._bell.until(self._take, timeout_s) or []

    async def poll_async(self, timeout_s: float) -> list[StreamEntry]:
        await self.connect_async()
        return await self._bell.until_async(self._take, timeout_s) or []

    def __iter__(self) -> Iterator[StreamEntry]:
        """Entry by entry, until the subscriber is closed."""
        self.connect()
        while (found := self._bell.until(self._take_one, None)) and found[0] is not None:
            yield found[0]

    async def __aiter__(self) -> AsyncIterator[StreamEntry]:
        await self.connect_async()
        while (found := await self._bell.until_async(self._take_one, None)) and found[0] is not None:
            yield found[0]

    def range(self, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
        """First and last entry of the stream that can be read now; there is none if last is smaller."""
        self.connect()
        self._ask_range()
        found = self._bell.until(self._answered, timeout_s)
        if found is None:
            raise self._silent(timeout_s)
        return found

    async def range_async(self, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
        await self.connect_async()
        self._ask_range()
        found = await self._bell.until_async(self._answered, timeout_s)
        if found is None:
            raise self._silent(timeout_s)
        return found

    # -- attempts, in the caller's thread with the lock held -----------------------------------

    def _take(self) -> list[StreamEntry]:
        self._fetch()
        entries = list(self._begun)
        self._begun.clear()
        if entries:
            self._offset = entries[-1].offset
        return entries

    def _take_one(self) -> tuple[StreamEntry | None, ...]:
        """One entry, nothing yet, or None for the end."""
        if self._closed:
            return (None,)
        if not self._begun:
            self._fetch()
        if not self._begun:
            return ()
        entry = self._begun.popleft()
        self._offset = entry.offset
        return (entry,)

    def _fetch(self) -> None:
        if not self._machine.entries:
            if not self._begun:
                self._check()
            return
        entries, effects = self._machine.take()
        self._begun += entries
        if effects:
            self._unsaid += effects
            self._background.poke()

    def _ask_range(self) -> None:
        with self._bell:
            self._range, self._asking = None, True
            self._unsaid.append(Send(self._site, m.RangeQuery(self._stream)))
            self._background.poke()

    def _answered(self) -> tuple[int, int] | None:
        self._check()
        return self._range

    def _check(self) -> None:
        if self._machine.refused:
            raise UserError(
                self._machine.refused,
                expected="after=None for what comes from now on, or an offset within what the stream holds",
                hint="stream_range says what it holds",
            )
        super()._check()

    # -- the machine, in the background --------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._bell:
            machine = self._machine
            was_subscribed, had = machine.subscribed, len(machine.entries)
            effects = machine.on_event(event, now_ms)
            match event:
                case Connected() if self._asking:
                    effects.append(Send(self._site, m.RangeQuery(self._stream)))
                case Received(message=m.RangeReply() as reply) if was_subscribed and self._asking:
                    self._range, self._asking = (reply.first, reply.last), False
                    self._bell.ring()
                case _:
                    pass
            if machine.subscribed and not self._ready:
                self._ready, self._offset = True, machine.offset
            if len(machine.entries) > had or machine.subscribed != was_subscribed or machine.refused:
                self._bell.ring()
            effects += self._unsaid
            self._unsaid = []
            return effects


class _RangeReader(Client):
    """Asks for a stream's range, once."""

    def __init__(self, place: Place, stream: str, timeout_s: float) -> None:
        self._stream = stream
        self.range = (-1, -1)
        super().__init__(place, f"reader|{uuid.uuid4().hex}", home_of(place.manifest(), stream), timeout_s)

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected():
                return [Send(self._site, m.RangeQuery(self._stream))]
            case Received(message=m.RangeReply() as reply):
                with self._bell:
                    self.range, self._ready = (reply.first, reply.last), True
                    self._bell.ring()
            case _:
                pass
        return []


def stream_range(place: Place, stream: str, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
    """First and last entry of a stream that can be read now; there is none if last is smaller."""
    reader = _RangeReader(place, stream, timeout_s)
    try:
        reader.connect(timeout_s)
        return reader.range
    finally:
        reader.close()
