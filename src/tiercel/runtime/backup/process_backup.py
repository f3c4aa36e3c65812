"""The backup of one process: a base, increments, and a head that tells how far they are complete.

Responsible for: which files make up a state, their order, deleting old ones; incarnation numbers that are
    used once, wherever a process runs.
Not responsible for: the format of a file (segment_file.py), when something is written (uploader.py).

    processes/count%40cloud%231/
      claim.00000002.1f0c...        incarnation 2 has begun; written before it does anything
      base.000000000007.00000001.000000    number, incarnation, chunk
      increment.000000000008.00000001
      increment.000000000009.00000002      incarnation 2 continued where 1 ended
      head.00000002                 complete from base 7 through 9

File names contain the incarnation, so a process that was given up and still writes cannot damage anything:
the head of the highest incarnation counts, and each file names the checksum of its predecessor.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.segment_file import (
    DamagedBackup,
    Header,
    MissingSegment,
    Needed,
    ValueRef,
    needed_section_ranges,
    pack,
    read_header,
    unpack,
    unpack_index,
    unpack_sections,
    unpack_value,
)
from tiercel.runtime.storage.codec import Pair

CHUNK_BYTES = 4 * 1024 * 1024  # of a base: in memory at a time
HEAD_BYTES = 8 * 1024  # enough for the header of a file, except with very long keys
CLAIM_TRIES = 20
CLAIMS_KEPT = 4


T = TypeVar("T")


class SegmentName(NamedTuple):
    """A file of a base or an increment, by its name."""

    kind: str
    number: int
    incarnation: int
    chunk: int
    name: str


class Segment(NamedTuple):
    """A file that was read and verified."""

    name: str
    header: Header
    pairs: list[Pair]
    checksum: str
    refs: list[ValueRef]  # of states that were not read
    body: int  # the offset that they are relative to


class ReadRequest(NamedTuple):
    """Which parts of a file are read: needed sections, and with `refs` the positions of states."""

    needed: Needed
    refs: bool = False


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """The same items; a thread fetches the next one while the caller uses this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="tiercel-ahead") as fetching:
        coming = fetching.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = fetching.submit(next, items, None)
            yield item


class ProcessBackup:
    """The files of one process of one deployment in a location."""

    def __init__(
        self, location: Location, deployment: str, process: str, moment_ms: int | None = None
    ) -> None:
        """With `moment_ms`, written files get this time stamp instead of the current time."""
        self._moment_ms = moment_ms
        self.location = location
        self.deployment = deployment
        self.process = process
        self.folder = folder_of(process)

    # -- incarnations ---------------------------------------------------------------------------------

    def last_incarnation(self) -> int:
        """The highest incarnation that ever began; 0: none. A copy by hand has no claims."""
        names = self.location.names(self.folder)
        incarnations = [int(name.split(".")[1]) for name in names if name.startswith(("claim.", "head."))]
        return max([*incarnations, *(segment.incarnation for segment in segment_names(names))], default=0)

    def claim(self, after: int) -> int:
        """Claim an incarnation above all others.

        Two processes may start at once, when Spark has given up the first one. A process that sees another
        claim of the same incarnation takes the next one; at least one of the two sees it.
        """
        for attempt in range(CLAIM_TRIES):
            incarnation = max(after, self.last_incarnation()) + 1
            ours = f"claim.{incarnation:08d}.{secrets.token_hex(8)}"
            self.location.put(f"{self.folder}/{ours}", b"")
            same = [n for n in self.location.names(self.folder) if n.startswith(f"claim.{incarnation:08d}.")]
            if same == [ours]:
                return incarnation
            time.sleep(0.05 * attempt)
        raise DamagedBackup(
            f"no incarnation of {self.process} could be claimed in {self.location.url}",
            expected="one process of this name at a time",
        )

    # -- writing -------------------------------------------------------------------------------

    def put_base(self, incarnation: int, number: int, through: int, pairs: Iterable[Pair]) -> tuple[str, int]:
        """Write everything in chunks; returns the checksum of the last one, and the number of bytes."""
        written, checksum = 0, ""
        for chunk, (part, final) in enumerate(chunked(pairs)):
            header = self._header("base", incarnation, number, through, checksum, chunk=chunk, final=final)
            data, checksum = pack(header, part)
            self.location.put(f"{self.folder}/base.{number:012d}.{incarnation:08d}.{chunk:06d}", data)
            written += len(data)
        return checksum, written

    def put_increment(
        self, incarnation: int, number: int, through: int, previous: str, pairs: list[Pair]
    ) -> tuple[str, int]:
        """Write what has changed since the last segment."""
        data, checksum = pack(
            self._header("increment", incarnation, number, through, previous),
            sorted(pairs, key=itemgetter(0)),
        )
        self.location.put(f"{self.folder}/increment.{number:012d}.{incarnation:08d}", data)
        return checksum, len(data)

    def put_head(self, incarnation: int, base: int, number: int, through: int, previous: str) -> None:
        """Declare the state through this number complete."""
        data, _ = pack(self._header("head", incarnation, number, through, previous, base=base))
        self.location.put(f"{self.folder}/head.{incarnation:08d}", data)

    def _header(
        self,
        kind: str,
        incarnation: int,
        number: int,
        through: int,
        previous: str,
        *,
        base: int = 0,
        chunk: int = 0,
        final: bool = True,
    ) -> Header:
        assert kind in ("base", "increment", "head")
        names = (self.deployment, self.process)
        now_ms = time.time_ns() // 1_000_000 if self._moment_ms is None else self._moment_ms
        return Header(kind, *names, incarnation, number, through, previous, now_ms, base, chunk, final)  # type: ignore[arg-type]

    def delete_old(self, keep: int, incarnation: int) -> None:
        """Delete all but the last `keep` bases with their increments, our head, and the newest claims."""
        names = self.location.names(self.folder)
        if any(int(n.split(".")[1]) > incarnation for n in names if n.startswith("claim.")):
            return  # we were given up: our successor needs files older than our new base
        segments = segment_names(names)
        bases = sorted({segment.number for segment in segments if segment.kind == "base"})
        first = bases[-keep:][0] if bases else 0
        old = [segment.name for segment in segments if segment.number < first]
        old += [n for n in names if n.startswith("head.") and int(n.split(".")[1]) < incarnation]
        old += sorted(n for n in names if n.startswith("claim."))[:-CLAIMS_KEPT]
        self.location.delete(f"{self.folder}/{name}" for name in old)

    # -- reading -------------------------------------------------------------------------------

    def head(self) -> Header | None:
        """The head of the newest complete state; None: there is none."""
        heads = [name for name in self.location.names(self.folder) if name.startswith("head.")]
        return self._get(max(heads)).header if heads else None

    def _head_or_none(self) -> Header | None:
        with contextlib.suppress(DamagedBackup):
            return self.head()
        return None

    def last_number(self) -> int:
        """The highest number of any file, complete or not."""
        return max((segment.number for segment in segment_names(self.location.names(self.folder))), default=0)

    def first_number(self) -> int:
        """The lowest number of any file; 0: there is none."""
        return min((segment.number for segment in segment_names(self.location.names(self.folder))), default=0)

    def is_superseded(self, name: str) -> bool:
        """Whether the newest state does not need this file, so that it may have been deleted."""
        head = self._head_or_none()
        return head is not None and any(segment.number < head.base for segment in segment_names([name]))

    def base_bytes(self, number: int) -> int:
        """The approximate size of a base, by the number of its chunks."""
        segments = segment_names(self.location.names(self.folder))
        return CHUNK_BYTES * sum(segment.kind == "base" and segment.number == number for segment in segments)

    def segments(self, up_to: int | None = None, request: ReadRequest | None = None) -> Iterator[Segment]:
        """The files of the newest complete state, or of a number; each is verified.

        With `request`, sections that are not needed are not read, and their pairs do not come.
        One that is missing or damaged ends it with an error that names it, and the last whole number before.
        """
        try:
            head = self.head() if up_to is None else self._head_or_none()
        except DamagedBackup as damage:
            self.suggest_complete_state(damage)
            raise
        last = head.number if up_to is None and head is not None else up_to
        if last is None:
            missing = DamagedBackup(
                f"{self.location.url} holds no backup of {self.process}", expected="one with a head"
            )
            self.suggest_complete_state(missing)
            raise missing
        found = segment_names(self.location.names(self.folder))
        if up_to is None and head is not None:  # later incarnations without a head are not part of this state
            found = [segment for segment in found if segment.incarnation <= head.incarnation]
        bases = [p.number for p in found if p.kind == "base" and p.number <= last]
        named = head is not None and head.base <= last <= head.number  # else it may be a base without a head
        base = head.base if head is not None and named else max(bases, default=0)
        try:
            tail = ""
            for segment in prefetched(self._chain(found, base, last, request)):
                tail = segment.checksum
                yield segment
            if head is not None and head.number == last and head.previous != tail:
                raise DamagedBackup(
                    f"the head of {self.process} in {self.location.url} does not fit its last file",
                    expected=f"one with the checksum {head.previous}",
                )
        except DamagedBackup as damage:
            self.suggest_complete_state(damage, last)
            raise

    def suggest_complete_state(self, damage: DamagedBackup, before: int | None = None) -> None:
        """Add the last complete state to the hint of an error."""
        complete = self.last_complete(self.last_number() if before is None else before)
        if complete is not None:
            other = f"the last complete state before it: --up-to '{self.process}={complete.number}'"
            damage.hint = other if damage.hint is None else f"{damage.hint}; or {other}"
        elif damage.hint is None:
            damage.hint = "no earlier state is complete there; a copy of the location may have one"

    def states(self) -> list[Header]:
        """Every complete state, oldest first: the header of its last file."""
        found = segment_names(self.location.names(self.folder))
        last = max((segment.number for segment in found), default=0)
        states: dict[int, Header] = {}
        for base in sorted({segment.number for segment in found if segment.kind == "base"}):
            with contextlib.suppress(DamagedBackup):  # where the next base begins, or something is damaged
                for segment in self._chain(found, base, last):
                    if segment.header.final:
                        states[segment.header.number] = segment.header
        return [states[number] for number in sorted(states)]

    def number_at(self, moment_ms: int) -> int | None:
        """The number of the newest complete state that was written by a moment."""
        found = segment_names(self.location.names(self.folder))
        bases = {p.number for p in found if p.kind == "base"}
        for base in sorted(bases, reverse=True):
            last: int | None = None
            with contextlib.suppress(DamagedBackup):
                for segment in self._chain(found, base, max(p.number for p in found)):
                    if segment.header.written_ms > moment_ms:
                        break
                    if segment.header.final:
                        last = segment.header.number
            if last is not None:
                return last
        return None

    def last_complete(self, before: int) -> Header | None:
        """The newest complete state up to a number: every file exists and is undamaged."""
        found = segment_names(self.location.names(self.folder))
        for base in sorted(
            {p.number for p in found if p.kind == "base" and p.number <= before}, reverse=True
        ):
            last: Header | None = None
            try:
                for segment in self._chain(found, base, before):
                    if segment.header.kind == "increment" or segment.header.final:
                        last = segment.header
            except DamagedBackup:
                pass
            if last is not None:
                return last
        return None

    def _chain(
        self, found: list[SegmentName], base: int, last: int, request: ReadRequest | None = None
    ) -> Iterator[Segment]:
        """A base and the increments behind it."""
        locations: dict[tuple[str, int, int], list[SegmentName]] = {}
        for one in found:
            locations.setdefault((one.kind, one.number, one.chunk), []).append(one)
        previous, chunk, final = "", 0, False
        while not final:
            chunks = locations.get(("base", base, chunk), [])
            segment = self._next_in_chain(chunks, previous, f"base {base}, chunk {chunk},", request)
            yield segment
            previous, final, chunk = segment.checksum, segment.header.final, chunk + 1
        for number in range(base + 1, last + 1):
            increments = locations.get(("increment", number, 0), [])
            segment = self._next_in_chain(increments, previous, f"increment {number}", request)
            yield segment
            previous = segment.checksum

    def _next_in_chain(
        self, candidates: list[SegmentName], previous: str, what: str, request: ReadRequest | None = None
    ) -> Segment:
        """The file among these that follows the previous one in the chain."""
        damage: DamagedBackup | None = None
        for candidate in sorted(candidates, key=lambda c: c.incarnation, reverse=True):
            try:
                segment = (request and self._read_sections(candidate.name, request)) or self._get(
                    candidate.name
                )
            except DamagedBackup as found:
                damage = found
                continue
            if segment.header.previous == previous:
                return segment
        if damage is not None:
            raise damage
        is_there = "does not follow the file before it" if candidates else "is missing"
        raise DamagedBackup(
            f"{what} of {self.process} {is_there} in {self.location.url}",
            expected="every file that its head names",
        )

    def _read_sections(self, name: str, request: ReadRequest) -> Segment | None:
        """Read the needed sections of a file; None: the whole file must be read and verified."""
        path, where = f"{self.folder}/{name}", self._where(name)
        refs: list[ValueRef] = []
        try:
            views_by_process = read_header(self.location.get(path, end=HEAD_BYTES))
            if views_by_process is None or (
                views_by_process.header.deployment,
                views_by_process.header.process,
            ) != (
                self.deployment,
                self.process,
            ):
                return None
            pairs: list[Pair] = []
            if request.refs:
                index = self.location.get(path, views_by_process.begin, views_by_process.body)
                refs = unpack_index(index, views_by_process.header, where)
            for at, sections in needed_section_ranges(views_by_process, request.needed):
                size = sum(section.size for section in sections)
                pairs += unpack_sections(self.location.get(path, at, at + size), sections, where)
        except FileNotFoundError:
            return None
        return Segment(
            name, views_by_process.header, pairs, views_by_process.checksum, refs, views_by_process.body
        )

    def values(self, name: str, body: int, refs: Sequence[ValueRef]) -> list[Pair]:
        """Read the states at these positions of one file, which are sorted and close to each other."""
        begin, where = refs[0].at, self._where(name)
        try:
            data = self.location.get(f"{self.folder}/{name}", body + begin, body + refs[-1].end)
        except FileNotFoundError as error:
            raise MissingSegment(f"{where} is missing", expected="every file that its head names") from error
        return [unpack_value(data[ref.at - begin : ref.end - begin], ref, where) for ref in refs]

    def _where(self, name: str) -> str:
        return f"{self.location.url}/{self.folder}/{name}"

    def _get(self, name: str) -> Segment:
        where = self._where(name)
        try:
            header, pairs, checksum = unpack(self.location.get(f"{self.folder}/{name}"), where)
        except FileNotFoundError as error:
            raise DamagedBackup(f"{where} is missing", expected="every file that its head names") from error
        if header.deployment != self.deployment:
            raise DamagedBackup(
                f"{where} is a backup of the deployment {header.deployment}",
                expected=f"one of {self.deployment}",
                hint="each deployment needs a location of its own",
            )
        if header.process != self.process:
            raise DamagedBackup(f"{where} is a backup of {header.process}", expected=f"one of {self.process}")
        return Segment(name, header, pairs, checksum, [], 0)


def folder_of(process: str) -> str:
    return f"processes/{quote(process, safe='')}"


def segment_names(names: Iterable[str]) -> list[SegmentName]:
    """The bases and increments among these file names."""
    found = []
    for name in names:
        kind, *numbers = name.split(".")
        if kind == "base" and len(numbers) == 3:
            found.append(SegmentName(kind, int(numbers[0]), int(numbers[1]), int(numbers[2]), name))
        elif kind == "increment" and len(numbers) == 2:
            found.append(SegmentName(kind, int(numbers[0]), int(numbers[1]), 0, name))
    return found


def chunked(pairs: Iterable[Pair]) -> Iterator[tuple[list[Pair], bool]]:
    """Lists of about `CHUNK_BYTES`, and whether it is the last one; at least one."""
    part: list[Pair] = []
    size = 0
    for key, value in pairs:
        if size > CHUNK_BYTES:
            yield part, False
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value or b"")
    yield part, True
