"""Files of a backup: a line with version and checksum, a line that says what it is, then pairs.

Responsible for: the form of one file; noticing that it is damaged, of another kind or another version.
Not responsible for: which files make up a backup (backups.py), where they lie (locations.py).

    tiercel-backup 1 9f86d081884c7d65          the checksum covers everything behind this line
    {"kind":"increment","process":"count@cloud#1","number":17,...}
    MessagePack of [key, value or nil] ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import xxhash

from tiercel.errors import UserError

MAGIC = b"tiercel-backup"
FORMAT = 1

Pair = tuple[bytes, bytes | None]  # a stored key, and its value or that it was deleted


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
    first: str = ""  # in a base: its first and last stored key, in hex; keys are in order there
    last: str = ""


class DamagedBackup(UserError):
    """A file of a backup that must not be used."""


_pairs = msgspec.msgpack.Decoder(list[Pair])


def pack(header: Header, pairs: Sequence[Pair] = ()) -> tuple[bytes, str]:
    """The content of a file, and its checksum."""
    body = msgspec.json.encode(header) + b"\n" + msgspec.msgpack.encode(pairs)
    checksum = xxhash.xxh3_64_hexdigest(body)
    return b"%s %d %s\n%s" % (MAGIC, FORMAT, checksum.encode(), body), checksum


def glance(beginning: bytes) -> tuple[Header, str] | None:
    """What a file says that it is, out of its beginning; None if that was too short, or is no such file."""
    first, _, rest = beginning.partition(b"\n")
    line, end, _ = rest.partition(b"\n")
    words = first.split(b" ")
    if words[:2] != [MAGIC, b"%d" % FORMAT] or len(words) != 3 or not end:
        return None
    try:
        return msgspec.json.decode(line, type=Header), words[2].decode("ascii")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


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
    checksum = xxhash.xxh3_64_hexdigest(body)
    if len(words) != 3 or words[2].decode("ascii", "replace") != checksum:
        raise DamagedBackup(
            f"{where} is damaged or incomplete: its checksum is {checksum}",
            expected=words[2].decode("ascii", "replace")
            if len(words) == 3
            else "a checksum in its first line",
        )
    line, _, rest = body.partition(b"\n")
    return msgspec.json.decode(line, type=Header), _pairs.decode(rest), checksum
