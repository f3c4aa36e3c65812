"""Files of a backup: a line with version and checksum, a line that says what it is, then pairs in sections.

Responsible for: the form of one file; noticing that it is damaged, of another kind or another version;
    which of its sections are needed.
Not responsible for: which files make up a backup (backups.py), where they lie (locations.py).

    tiercel-backup 3 9f86d081884c7d65          the checksum covers everything behind this line
    {"kind":"increment","process":"count@cloud#1","number":17,...,"sections":[[first,last,size,checksum],...]}
    the index: MessagePack of [[key, at, size, checksum, timers], ...], of the keys' states
    MessagePack of [[key, value or nil], ...], once for each section

Pairs are in the order of their keys: whoever needs a few slots reads the sections that may have them. A
section holds states of keys, or none: whoever needs those later reads the index and the other sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import xxhash

from tiercel.errors import UserError
from tiercel.runtime.tables import is_state, timers_in

MAGIC = b"tiercel-backup"
FORMAT = 3
SECTION_BYTES = 256 * 1024  # at least, of all but the last one
SECTIONS_MAX = 16  # so that the beginning of a file tells of all of them

Pair = tuple[bytes, bytes | None]  # a stored key, and its value or that it was deleted


Needed = Callable[[bytes, bytes], bool]  # whether a section with keys from here to there is


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Where some of the pairs of a file are: behind those of the sections before."""

    first: str  # stored key, in hex
    last: str
    size: int  # bytes
    checksum: str


class Spot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the state of a key is in a file, and the timers in it."""

    key: bytes  # as it is stored
    at: int  # behind the index
    size: int  # 0: the key was deleted
    checksum: int
    timers: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.at + self.size


class Header(msgspec.Struct, frozen=True):
    """What a file of a backup is.

    Files of one process are numbered; `previous` is the checksum of the one before, so that they are a
    chain. Of a base, each chunk follows the one before it, and the first one follows nothing.
    """

    kind: Literal["base", "increment", "head"]
    deployment: str
    process: str
    life: int  # of the process that wrote it
    number: int
    through: int  # batches of the store up to here are in it, or in those before it
    previous: str
    written_ms: int
    base: int = 0  # in a head: the base that everything begins with
    chunk: int = 0  # in a base
    final: bool = True  # in a base: no chunk follows
    sections: tuple[Section, ...] = ()
    index_bytes: int = 0
    index_checksum: str = ""


class DamagedBackup(UserError):
    """A file of a backup that must not be used."""


class MissingPiece(DamagedBackup):
    """A file that a backup should have."""


_pair = msgspec.msgpack.Decoder(Pair)
_pairs = msgspec.msgpack.Decoder(list[Pair])
_spots = msgspec.msgpack.Decoder(list[Spot])


def pack(header: Header, pairs: Sequence[Pair] = ()) -> tuple[bytes, str]:
    """The content of a file, and its checksum. The pairs are in the order of their keys."""
    sections: list[Section] = []
    bodies: list[bytes] = []
    spots: list[Spot] = []
    at = 0
    for part in _sections(pairs):
        encoded = [msgspec.msgpack.encode(pair) for pair in part]
        head = _array_head(len(part))
        bodies.append(head + b"".join(encoded))
        first, last = part[0][0].hex(), part[-1][0].hex()
        sections.append(Section(first, last, len(bodies[-1]), _checksum(bodies[-1])))
        if is_state(part[0][0]):
            begin = at + len(head)
            for (key, value), data in zip(part, encoded, strict=True):
                size = 0 if value is None else len(data)
                timers = () if value is None else timers_in(value)
                spots.append(Spot(key, begin, size, xxhash.xxh3_64_intdigest(data), timers))
                begin += len(data)
        at += len(bodies[-1])
    index = msgspec.msgpack.encode(spots)
    told = msgspec.structs.replace(
        header, sections=tuple(sections), index_bytes=len(index), index_checksum=_checksum(index)
    )
    body = b"\n".join([msgspec.json.encode(told), index + b"".join(bodies)])
    checksum = _checksum(body)
    return b"%s %d %s\n%s" % (MAGIC, FORMAT, checksum.encode(), body), checksum


def _sections(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    sizes = [len(key) + len(value or b"") for key, value in pairs]
    enough = max(SECTION_BYTES, sum(sizes) // SECTIONS_MAX + 1)
    part: list[Pair] = []
    filled = 0
    for pair, size in zip(pairs, sizes, strict=True):
        if part and is_state(part[-1][0]) != is_state(pair[0]):
            yield part
            part, filled = [], 0
        part.append(pair)
        filled += size
        if filled >= enough:
            yield part
            part, filled = [], 0
    if part:
        yield part


def _array_head(count: int) -> bytes:
    """How MessagePack begins an array of so many."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


class Glance(NamedTuple):
    """What the beginning of a file says."""

    header: Header
    checksum: str
    begin: int  # where the index begins

    @property
    def body(self) -> int:
        """Where the first section begins."""
        return self.begin + self.header.index_bytes


def glance(beginning: bytes) -> Glance | None:
    """What a file says that it is, out of its beginning; None if that was too short, or is no such file."""
    first, _, rest = beginning.partition(b"\n")
    line, end, _ = rest.partition(b"\n")
    words = first.split(b" ")
    if words[:2] != [MAGIC, b"%d" % FORMAT] or len(words) != 3 or not end:
        return None
    try:
        header = msgspec.json.decode(line, type=Header)
        return Glance(header, words[2].decode("ascii"), len(first) + len(line) + 2)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def needed_runs(seen: Glance, needed: Needed) -> list[tuple[int, list[Section]]]:
    """Neighbouring sections that are needed, and where the first of them begins."""
    placed, at = [], seen.body
    for section in seen.header.sections:
        placed.append((at, section))
        at += section.size
    runs = groupby(placed, lambda p: needed(bytes.fromhex(p[1].first), bytes.fromhex(p[1].last)))
    found = [list(run) for wanted, run in runs if wanted]
    return [(run[0][0], [section for _, section in run]) for run in found]


def unpack_index(data: bytes, header: Header, where: str) -> list[Spot]:
    """Where the states of keys are."""
    if _checksum(data) != header.index_checksum:
        raise DamagedBackup(
            f"{where} is damaged or incomplete: its index has the checksum {_checksum(data)}",
            expected=header.index_checksum,
        )
    return _spots.decode(data)


def unpack_spot(data: bytes, spot: Spot, where: str) -> Pair:
    """The one pair of these bytes."""
    found = xxhash.xxh3_64_intdigest(data)
    if found != spot.checksum:
        what = f"{where} is damaged or incomplete: a value has the checksum {found:016x}"
        raise DamagedBackup(what, expected=f"{spot.checksum:016x}")
    pair: Pair = _pair.decode(data)
    return pair


def unpack_sections(data: bytes, sections: Sequence[Section], where: str) -> list[Pair]:
    """The pairs of these sections, which are all there is."""
    pairs: list[Pair] = []
    at = 0
    for section in sections:
        part = data[at : at + section.size]
        at += section.size
        if _checksum(part) != section.checksum:
            what = f"{where} is damaged or incomplete: a section has the checksum {_checksum(part)}"
            raise DamagedBackup(what, expected=section.checksum)
        pairs += _pairs.decode(part)
    return pairs


def unpack(data: bytes, where: str) -> tuple[Header, list[Pair], str]:
    """What `pack` was given, and the checksum."""
    first, _, body = data.partition(b"\n")
    words = first.split(b" ")
    if words[0] != MAGIC or len(words) < 2 or not words[1].isdigit():
        raise DamagedBackup(f"{where} is no file of a backup", expected=f"one that begins with {MAGIC!r}")
    if int(words[1]) != FORMAT:
        raise DamagedBackup(
            f"{where} has format {int(words[1])}",
            expected=f"format {FORMAT}",
            hint="use the version that wrote it",
        )
    checksum = _checksum(body)
    if len(words) != 3 or words[2].decode("ascii", "replace") != checksum:
        raise DamagedBackup(
            f"{where} is damaged or incomplete: its checksum is {checksum}",
            expected=words[2].decode("ascii", "replace")
            if len(words) == 3
            else "a checksum in its first line",
        )
    line, _, rest = body.partition(b"\n")
    header = msgspec.json.decode(line, type=Header)
    return header, unpack_sections(rest[header.index_bytes :], header.sections, where), checksum
