"""Files of a backup: a line with version and checksum, a line that says what it is, then pairs in sections.

Responsible for: the form of one file; noticing that it is damaged, of another kind or another version;
    which of its sections are needed.
Not responsible for: which files make up a backup (backups.py), where they lie (locations.py).

    tiercel-backup 2 9f86d081884c7d65          the checksum covers everything behind this line
    {"kind":"increment","process":"count@cloud#1","number":17,...,"sections":[[first,last,size,checksum],...]}
    MessagePack of [[key, value or nil], ...], once for each section

Pairs are in the order of their keys: whoever needs a few slots reads the sections that may have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import xxhash

from tiercel.errors import UserError

MAGIC = b"tiercel-backup"
FORMAT = 2
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


class DamagedBackup(UserError):
    """A file of a backup that must not be used."""


_pairs = msgspec.msgpack.Decoder(list[Pair])


def pack(header: Header, pairs: Sequence[Pair] = ()) -> tuple[bytes, str]:
    """The content of a file, and its checksum. The pairs are in the order of their keys."""
    sections, bodies = [], []
    for part in _sections(pairs):
        bodies.append(msgspec.msgpack.encode(part))
        first, last = part[0][0].hex(), part[-1][0].hex()
        sections.append(Section(first, last, len(bodies[-1]), _checksum(bodies[-1])))
    told = msgspec.json.encode(msgspec.structs.replace(header, sections=tuple(sections)))
    body = b"\n".join([told, b"".join(bodies)])
    checksum = _checksum(body)
    return b"%s %d %s\n%s" % (MAGIC, FORMAT, checksum.encode(), body), checksum


def _sections(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    sizes = [len(key) + len(value or b"") for key, value in pairs]
    enough = max(SECTION_BYTES, sum(sizes) // SECTIONS_MAX + 1)
    part: list[Pair] = []
    filled = 0
    for pair, size in zip(pairs, sizes, strict=True):
        part.append(pair)
        filled += size
        if filled >= enough:
            yield part
            part, filled = [], 0
    if part:
        yield part


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


class Glance(NamedTuple):
    """What the beginning of a file says."""

    header: Header
    checksum: str
    body: int  # where the first section begins


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
    return header, unpack_sections(rest, header.sections, where), checksum
