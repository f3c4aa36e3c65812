"""The backup of one process: a base, the increments since, and a head that says how far they are whole.

Responsible for: which files make up a state, in which order they were written, which may go; lives that
    are never taken twice, wherever a process runs.
Not responsible for: the form of a file (pieces.py), when something is written (shipping.py).

    processes/count%40cloud%231/
      claim.00000002.1f0c...        life 2 has begun; written before it does anything
      base.000000000007.00000001.000000    number, life, chunk
      increment.000000000008.00000001
      increment.000000000009.00000002      life 2 went on where life 1 ended
      head.00000002                 whole from base 7 through 9

Names hold the life, so one that is believed dead and writes on can spoil nothing: the head of the
highest life counts, and each file names the checksum of the one that it follows.
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

from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import (
    DamagedBackup,
    Header,
    MissingPiece,
    Needed,
    Pair,
    Spot,
    glance,
    needed_runs,
    pack,
    unpack,
    unpack_index,
    unpack_sections,
    unpack_spot,
)

CHUNK_BYTES = 4 * 1024 * 1024  # of a base: what is in memory at a time
HEAD_BYTES = 8 * 1024  # enough to see what is in a file, for all but very long keys
CLAIM_TRIES = 20
CLAIMS_KEPT = 4


T = TypeVar("T")


class Listed(NamedTuple):
    """A file of a base or an increment, by its name."""

    kind: str
    number: int
    life: int
    chunk: int
    name: str


class Piece(NamedTuple):
    """A file that was read and is as it was written."""

    name: str
    header: Header
    pairs: list[Pair]
    checksum: str
    spots: list[Spot]  # of states that were left where they are
    body: int  # where in the file they begin to be counted


class Wanted(NamedTuple):
    """What of a file is read: sections that are needed; with `spots`, where the states of keys are."""

    needed: Needed
    spots: bool = False


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; the next one is fetched while the caller is at work on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="tiercel-ahead") as fetching:
        coming = fetching.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = fetching.submit(next, items, None)
            yield item


class ProcessBackup:
    """What a location holds of one process of one deployment."""

    def __init__(
        self, location: Location, deployment: str, process: str, moment_ms: int | None = None
    ) -> None:
        """`moment_ms`: what is written is as of this moment, not of when it is written."""
        self._moment_ms = moment_ms
        self.location = location
        self.deployment = deployment
        self.process = process
        self.folder = folder_of(process)

    # -- lives ---------------------------------------------------------------------------------

    def last_life(self) -> int:
        """The highest life that ever began; 0: none. A copy by hand has no claims."""
        names = self.location.names(self.folder)
        lives = [int(name.split(".")[1]) for name in names if name.startswith(("claim.", "head."))]
        return max([*lives, *(piece.life for piece in listed(names))], default=0)

    def claim(self, after: int) -> int:
        """A life above all others, for us alone.

        Two processes may start at once, where Spark gave the first one up. Whoever sees another's claim of
        the same life takes the next one; at least one of them sees it.
        """
        for attempt in range(CLAIM_TRIES):
            life = max(after, self.last_life()) + 1
            ours = f"claim.{life:08d}.{secrets.token_hex(8)}"
            self.location.put(f"{self.folder}/{ours}", b"")
            same = [n for n in self.location.names(self.folder) if n.startswith(f"claim.{life:08d}.")]
            if same == [ours]:
                return life
            time.sleep(0.05 * attempt)
        raise DamagedBackup(
            f"no life of {self.process} could be claimed in {self.location.url}",
            expected="one process of this name at a time",
        )

    # -- writing -------------------------------------------------------------------------------

    def put_base(self, life: int, number: int, through: int, pairs: Iterable[Pair]) -> tuple[str, int]:
        """Everything, in chunks; returns the checksum of the last one, and how many bytes there are."""
        written, checksum = 0, ""
        for chunk, (part, final) in enumerate(chunked(pairs)):
            header = self._header("base", life, number, through, checksum, chunk=chunk, final=final)
            data, checksum = pack(header, part)
            self.location.put(f"{self.folder}/base.{number:012d}.{life:08d}.{chunk:06d}", data)
            written += len(data)
        return checksum, written

    def put_increment(
        self, life: int, number: int, through: int, previous: str, pairs: list[Pair]
    ) -> tuple[str, int]:
        """What has changed since the piece before."""
        data, checksum = pack(
            self._header("increment", life, number, through, previous), sorted(pairs, key=itemgetter(0))
        )
        self.location.put(f"{self.folder}/increment.{number:012d}.{life:08d}", data)
        return checksum, len(data)

    def put_head(self, life: int, base: int, number: int, through: int, previous: str) -> None:
        """From here on the state through this number is what counts."""
        data, _ = pack(self._header("head", life, number, through, previous, base=base))
        self.location.put(f"{self.folder}/head.{life:08d}", data)

    def _header(
        self,
        kind: str,
        life: int,
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
        return Header(kind, *names, life, number, through, previous, now_ms, base, chunk, final)  # type: ignore[arg-type]

    def forget_old(self, keep: int, life: int) -> None:
        """Only the last `keep` bases with their increments stay, this life's head, and the newest claims."""
        names = self.location.names(self.folder)
        if any(int(n.split(".")[1]) > life for n in names if n.startswith("claim.")):
            return  # we are believed dead: what our successor needs is older than what we ship now
        pieces = listed(names)
        bases = sorted({piece.number for piece in pieces if piece.kind == "base"})
        first = bases[-keep:][0] if bases else 0
        old = [piece.name for piece in pieces if piece.number < first]
        old += [n for n in names if n.startswith("head.") and int(n.split(".")[1]) < life]
        old += sorted(n for n in names if n.startswith("claim."))[:-CLAIMS_KEPT]
        self.location.delete(f"{self.folder}/{name}" for name in old)

    # -- reading -------------------------------------------------------------------------------

    def head(self) -> Header | None:
        """How far this backup is whole; None: there is none."""
        heads = [name for name in self.location.names(self.folder) if name.startswith("head.")]
        return self._get(max(heads)).header if heads else None

    def _head_if_whole(self) -> Header | None:
        with contextlib.suppress(DamagedBackup):
            return self.head()
        return None

    def last_number(self) -> int:
        """The highest number of any file, whole or not."""
        return max((piece.number for piece in listed(self.location.names(self.folder))), default=0)

    def first_number(self) -> int:
        """The lowest number of any file that was not forgotten; 0: there is none."""
        return min((piece.number for piece in listed(self.location.names(self.folder))), default=0)

    def has_passed(self, name: str) -> bool:
        """Whether the newest state does not need this file any more: it may have been deleted for that."""
        head = self._head_if_whole()
        return head is not None and any(piece.number < head.base for piece in listed([name]))

    def base_bytes(self, number: int) -> int:
        """About how large a base is, by the number of its chunks."""
        pieces = listed(self.location.names(self.folder))
        return CHUNK_BYTES * sum(piece.kind == "base" and piece.number == number for piece in pieces)

    def pieces(self, up_to: int | None = None, wanted: Wanted | None = None) -> Iterator[Piece]:
        """The files that make up the newest whole state, or the one of a number; each is checked.

        With `wanted`, sections that are not needed are not read, and their pairs do not come.
        One that is missing or damaged ends it with an error that names it, and the last whole number before.
        """
        try:
            head = self.head() if up_to is None else self._head_if_whole()
        except DamagedBackup as damage:
            self.offer(damage)
            raise
        last = head.number if up_to is None and head is not None else up_to
        if last is None:
            missing = DamagedBackup(
                f"{self.location.url} holds no backup of {self.process}", expected="one with a head"
            )
            self.offer(missing)
            raise missing
        found = listed(self.location.names(self.folder))
        if up_to is None and head is not None:  # who came later and finished nothing is not in this state
            found = [piece for piece in found if piece.life <= head.life]
        bases = [p.number for p in found if p.kind == "base" and p.number <= last]
        named = head is not None and head.base <= last <= head.number  # else it may be a base without a head
        base = head.base if head is not None and named else max(bases, default=0)
        try:
            tail = ""
            for piece in ahead(self._chain(found, base, last, wanted)):
                tail = piece.checksum
                yield piece
            if head is not None and head.number == last and head.previous != tail:
                raise DamagedBackup(
                    f"the head of {self.process} in {self.location.url} does not fit its last file",
                    expected=f"one with the checksum {head.previous}",
                )
        except DamagedBackup as damage:
            self.offer(damage, last)
            raise

    def offer(self, damage: DamagedBackup, before: int | None = None) -> None:
        """Say which state is whole, beside whatever else there is to say."""
        whole = self.last_whole(self.last_number() if before is None else before)
        if whole is not None:
            other = f"the last whole state before it: --up-to '{self.process}={whole.number}'"
            damage.hint = other if damage.hint is None else f"{damage.hint}; or {other}"
        elif damage.hint is None:
            damage.hint = "no earlier state is whole there; a copy of the location may have it"

    def states(self) -> list[Header]:
        """Every whole state that can be restored, oldest first: the header of its last file."""
        found = listed(self.location.names(self.folder))
        last = max((piece.number for piece in found), default=0)
        states: dict[int, Header] = {}
        for base in sorted({piece.number for piece in found if piece.kind == "base"}):
            with contextlib.suppress(DamagedBackup):  # where the next base begins, or something is damaged
                for piece in self._chain(found, base, last):
                    if piece.header.final:
                        states[piece.header.number] = piece.header
        return [states[number] for number in sorted(states)]

    def number_at(self, moment_ms: int) -> int | None:
        """The number of the newest whole state that was written by a moment."""
        found = listed(self.location.names(self.folder))
        bases = {p.number for p in found if p.kind == "base"}
        for base in sorted(bases, reverse=True):
            last: int | None = None
            with contextlib.suppress(DamagedBackup):
                for piece in self._chain(found, base, max(p.number for p in found)):
                    if piece.header.written_ms > moment_ms:
                        break
                    if piece.header.final:
                        last = piece.header.number
            if last is not None:
                return last
        return None

    def last_whole(self, before: int) -> Header | None:
        """The newest state up to a number of which every file is there and undamaged."""
        found = listed(self.location.names(self.folder))
        for base in sorted(
            {p.number for p in found if p.kind == "base" and p.number <= before}, reverse=True
        ):
            last: Header | None = None
            try:
                for piece in self._chain(found, base, before):
                    if piece.header.kind == "increment" or piece.header.final:
                        last = piece.header
            except DamagedBackup:
                pass
            if last is not None:
                return last
        return None

    def _chain(
        self, found: list[Listed], base: int, last: int, wanted: Wanted | None = None
    ) -> Iterator[Piece]:
        """A base and the increments behind it."""
        places: dict[tuple[str, int, int], list[Listed]] = {}
        for one in found:
            places.setdefault((one.kind, one.number, one.chunk), []).append(one)
        previous, chunk, final = "", 0, False
        while not final:
            chunks = places.get(("base", base, chunk), [])
            piece = self._following(chunks, previous, f"base {base}, chunk {chunk},", wanted)
            yield piece
            previous, final, chunk = piece.checksum, piece.header.final, chunk + 1
        for number in range(base + 1, last + 1):
            increments = places.get(("increment", number, 0), [])
            piece = self._following(increments, previous, f"increment {number}", wanted)
            yield piece
            previous = piece.checksum

    def _following(
        self, candidates: list[Listed], previous: str, what: str, wanted: Wanted | None = None
    ) -> Piece:
        """The one of these files that follows the one before."""
        damage: DamagedBackup | None = None
        for candidate in sorted(candidates, key=lambda c: c.life, reverse=True):
            try:
                piece = (wanted and self._partly(candidate.name, wanted)) or self._get(candidate.name)
            except DamagedBackup as found:
                damage = found
                continue
            if piece.header.previous == previous:
                return piece
        if damage is not None:
            raise damage
        is_there = "does not follow the file before it" if candidates else "is missing"
        raise DamagedBackup(
            f"{what} of {self.process} {is_there} in {self.location.url}",
            expected="every file that its head names",
        )

    def _partly(self, name: str, wanted: Wanted) -> Piece | None:
        """The sections of a file that are needed; None: all of it must be read, and is judged then."""
        path, where = f"{self.folder}/{name}", self._where(name)
        spots: list[Spot] = []
        try:
            seen = glance(self.location.get(path, end=HEAD_BYTES))
            if seen is None or (seen.header.deployment, seen.header.process) != (
                self.deployment,
                self.process,
            ):
                return None
            pairs: list[Pair] = []
            if wanted.spots:
                index = self.location.get(path, seen.begin, seen.body)
                spots = unpack_index(index, seen.header, where)
            for at, sections in needed_runs(seen, wanted.needed):
                size = sum(section.size for section in sections)
                pairs += unpack_sections(self.location.get(path, at, at + size), sections, where)
        except FileNotFoundError:
            return None
        return Piece(name, seen.header, pairs, seen.checksum, spots, seen.body)

    def values(self, name: str, body: int, spots: Sequence[Spot]) -> list[Pair]:
        """The states that are at these spots of one file, which are in order and near each other."""
        begin, where = spots[0].at, self._where(name)
        try:
            data = self.location.get(f"{self.folder}/{name}", body + begin, body + spots[-1].end)
        except FileNotFoundError as error:
            raise MissingPiece(f"{where} is missing", expected="every file that its head names") from error
        return [unpack_spot(data[spot.at - begin : spot.end - begin], spot, where) for spot in spots]

    def _is_ours(self, header: Header) -> bool:
        return (header.deployment, header.process) == (self.deployment, self.process)

    def _where(self, name: str) -> str:
        return f"{self.location.url}/{self.folder}/{name}"

    def _get(self, name: str) -> Piece:
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
        return Piece(name, header, pairs, checksum, [], 0)


def folder_of(process: str) -> str:
    return f"processes/{quote(process, safe='')}"


def listed(names: Iterable[str]) -> list[Listed]:
    """The bases and increments among these names."""
    found = []
    for name in names:
        kind, *numbers = name.split(".")
        if kind == "base" and len(numbers) == 3:
            found.append(Listed(kind, int(numbers[0]), int(numbers[1]), int(numbers[2]), name))
        elif kind == "increment" and len(numbers) == 2:
            found.append(Listed(kind, int(numbers[0]), int(numbers[1]), 0, name))
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
