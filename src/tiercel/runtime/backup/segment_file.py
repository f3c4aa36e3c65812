"""The format of a backup file: a line with version and checksum, a header line, then pairs in sections.

Responsible for: the format; detecting damaged files, other kinds and other versions; which sections are
    needed.
Not responsible for: which files make up a backup (process_backup.py), where they are (location.py).

    tiercel-backup 3 9f86d081884c7d65          the checksum covers everything behind this line
    {"kind":"increment","process":"count@cloud#1","number":17,...,"sections":[[first,last,size,checksum],...]}
    the index: MessagePack of [[key, at, size, checksum, timers], ...], of the keys' states
    MessagePack of [[key, value or nil], ...], once for each section

Pairs are sorted by key, so a reader that needs a few slots reads only the sections that may have them. A
section holds either states of keys or none, so a lazy restore reads the index and the other sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import xxhash

from tiercel.errors import UserError
from tiercel.runtime.storage.codec import Pair, is_state, timers_in

MAGIC = b"tiercel-backup"
FORMAT = 3
SECTION_BYTES = 256 * 1024  # at least, of all but the last one
SECTIONS_MAX = 16  # so that the beginning of a file describes all of them


Needed = Callable[[bytes, bytes], bool]  # whether a section with keys from first to last is needed


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Some of the pairs of a file, behind those of the previous sections."""

    first: str  # stored key, in hex
    last: str
    size: int  # bytes
    checksum: str


class ValueRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position of the state of a key in a file, and its timers."""

    key: bytes  # as it is stored
    at: int  # behind the index
    size: int  # 0: the key was deleted
    checksum: int
    timers: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.at + self.size


class Header(msgspec.Struct, frozen=True):
    """The header of a file.

    Files of one process are numbered. `previous` is the checksum of the file before, so they form a chain.
    Each chunk of a base follows the chunk before, and the first one follows nothing.
    """

    kind: Literal["base", "increment", "head"]
    deployment: str
    process: str
    incarnation: int  # that wrote it
    number: int
    through: int  # batches of the store up to here are in it, or in earlier files
    previous: str
    written_ms: int
    base: int = 0  # in a head: the base of the chain
    chunk: int = 0  # in a base
    final: bool = True  # in a base: no chunk follows
    sections: tuple[Section, ...] = ()
    index_bytes: int = 0
    index_checksum: str = ""


class DamagedBackup(UserError):
    """A backup file that must not be used."""


class MissingSegment(DamagedBackup):
    """A backup file that should exist."""


_pair = msgspec.msgpack.Decoder(Pair)
_pairs = msgspec.msgpack.Decoder(list[Pair])
_refs = msgspec.msgpack.Decoder(list[ValueRef])


def pack(header: Header, pairs: Sequence[Pair] = ()) -> tuple[bytes, str]:
    """The content of a file, and its checksum. The pairs are in the order of their keys."""
    sections: list[Section] = []
    bodies: list[bytes] = []
    refs: list[ValueRef] = []
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
                refs.append(ValueRef(key, begin, size, xxhash.xxh3_64_intdigest(data), timers))
                begin += len(data)
        at += len(bodies[-1])
    index = msgspec.msgpack.encode(refs)
    complete_header = msgspec.structs.replace(
        header, sections=tuple(sections), index_bytes=len(index), index_checksum=_checksum(index)
    )
    body = b"\n".join([msgspec.json.encode(complete_header), index + b"".join(bodies)])
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
    """The MessagePack header of an array of this length."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


class SegmentSummary(NamedTuple):
    """The beginning of a file, decoded."""

    header: Header
    checksum: str
    begin: int  # where the index begins

    @property
    def body(self) -> int:
        """Where the first section begins."""
        return self.begin + self.header.index_bytes


def read_header(beginning: bytes) -> SegmentSummary | None:
    """Decode the beginning of a file; None if it is too short, or not a backup file."""
    first, _, rest = beginning.partition(b"\n")
    line, end, _ = rest.partition(b"\n")
    words = first.split(b" ")
    if words[:2] != [MAGIC, b"%d" % FORMAT] or len(words) != 3 or not end:
        return None
    try:
        header = msgspec.json.decode(line, type=Header)
        return SegmentSummary(header, words[2].decode("ascii"), len(first) + len(line) + 2)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def needed_section_ranges(
    views_by_process: SegmentSummary, needed: Needed
) -> list[tuple[int, list[Section]]]:
    """Neighbouring sections that are needed, and where the first of them begins."""
    placed, at = [], views_by_process.body
    for section in views_by_process.header.sections:
        placed.append((at, section))
        at += section.size
    runs = groupby(placed, lambda p: needed(bytes.fromhex(p[1].first), bytes.fromhex(p[1].last)))
    found = [list(run) for request, run in runs if request]
    return [(run[0][0], [section for _, section in run]) for run in found]


def unpack_index(data: bytes, header: Header, where: str) -> list[ValueRef]:
    """The positions of the states of keys."""
    if _checksum(data) != header.index_checksum:
        raise DamagedBackup(
            f"{where} is damaged or incomplete: its index has the checksum {_checksum(data)}",
            expected=header.index_checksum,
        )
    return _refs.decode(data)


def unpack_value(data: bytes, ref: ValueRef, where: str) -> Pair:
    """Decode one pair."""
    found = xxhash.xxh3_64_intdigest(data)
    if found != ref.checksum:
        what = f"{where} is damaged or incomplete: a value has the checksum {found:016x}"
        raise DamagedBackup(what, expected=f"{ref.checksum:016x}")
    pair: Pair = _pair.decode(data)
    return pair


def unpack_sections(data: bytes, sections: Sequence[Section], where: str) -> list[Pair]:
    """Decode the pairs of these sections."""
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
    """Header, pairs and checksum of a file: the inverse of `pack`."""
    first, _, body = data.partition(b"\n")
    words = first.split(b" ")
    if words[0] != MAGIC or len(words) < 2 or not words[1].isdigit():
        raise DamagedBackup(f"{where} is not a backup file", expected=f"one that begins with {MAGIC!r}")
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
