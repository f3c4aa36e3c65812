"""What a caller of a client gives: streams, sites, names and rows, checked before anything is sent.

Responsible for: saying what is wrong and what would be right.
Not responsible for: columns and types of a row (spark/schema.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiercel.core.records import Row
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.place import Manifest

_size_of = msgspec.msgpack.Encoder().encode


def pieces(copied: list[Any], rows_max: int, bytes_max: int) -> list[tuple[list[Any], int]]:
    """Parts that each fit into one frame, and about how many bytes each has.

    The first row stands for all: looking at each would cost more than sending it.
    """
    if not copied:
        return []
    try:
        row_bytes = len(_size_of(copied[0]))
    except (TypeError, ValueError, OverflowError) as error:
        what = f"the payload of {copied[0]!r} cannot be sent: {error}"
        expected = "None, bool, int, float, str, bytes, and lists and dicts of them"
        raise UserError(what, expected=expected) from error
    step = max(1, min(rows_max, bytes_max // row_bytes))
    if len(copied) <= step:
        return [(copied, len(copied) * row_bytes)]
    return [(copied[n : n + step], step * row_bytes) for n in range(0, len(copied), step)]


def checked_rows(rows: Sequence[Row]) -> list[Row]:
    """A copy, if the first looks like a row."""
    copied = list(rows)
    if copied:
        first: Any = copied[0]
        if not (isinstance(first, tuple | list) and len(first) == 3 and isinstance(first[0], bytes)):
            what = f"{first!r} is no row"
            raise UserError(what, expected="(key: bytes, event time in ms: int, payload)")
    return copied


def site_for(manifest: Manifest, stream: str, site: str) -> str:
    """Where a producer of a stream connects: as asked, else the first site that takes its rows."""
    facts = manifest.streams.get(stream)
    if facts is None:
        raise _unknown_stream(manifest, stream)
    if facts.writer:
        what = f"the stream {stream!r} is written by {facts.writer}"
        raise UserError(what, expected="a stream that producers write", hint=writable_hint(manifest))
    open_sites = facts.sites or tuple(manifest.topology.sites)
    if site and site not in open_sites:
        what = f"the stream {stream!r} takes no rows at site {site!r}"
        hint = "sites are named once, where a deployment starts"
        raise UserError(what, expected=f"one of: {', '.join(open_sites)}", hint=hint)
    return site or open_sites[0]


def writable_hint(manifest: Manifest) -> str:
    """Which streams producers and feeds may write."""
    found = sorted(name for name, facts in manifest.streams.items() if not facts.writer)
    return f"producers and feeds write {', '.join(found) or '(there is none)'}"


def home_of(manifest: Manifest, stream: str) -> str:
    facts = manifest.topology.streams.get(stream)
    if facts is None and stream not in manifest.streams:
        raise _unknown_stream(manifest, stream)
    if facts is None or not facts.logged:
        what = f"nobody keeps a log of the stream {stream!r}"
        kept = sorted(s.name for s in manifest.topology.streams.values() if s.logged)
        raise UserError(what, expected=f"a stream that can be read: {', '.join(kept)}")
    return facts.home


def _unknown_stream(manifest: Manifest, stream: str) -> UserError:
    known = sorted(manifest.streams) or sorted(manifest.topology.streams)
    return UserError(f"there is no stream {stream!r}", expected=f"one of: {', '.join(known)}")


def check_name(manifest: Manifest, name: str) -> None:
    """A producer must not take the name, and with it the connection, of a part of the deployment."""
    topology = manifest.topology
    if not name or name in topology.sites or operator_of(name) in topology.operators or name == "controller":
        what = f"{name!r} cannot be the name of a producer"
        raise UserError(what, expected="a name that no site, instance or controller of the deployment has")
