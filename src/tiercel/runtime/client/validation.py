"""Checks of the arguments of clients: streams, sites, names and rows.

Responsible for: errors that tell what is wrong and what is expected, before anything is sent.
Not responsible for: columns and types of a row (spark/rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiercel.core.model.log import Row
from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import Manifest

_size_of = msgspec.msgpack.Encoder().encode


def split_rows(copied: list[Any], rows_max: int, bytes_max: int) -> list[tuple[list[Any], int]]:
    """Parts that each fit into one frame, with their approximate sizes in bytes.

    The size of the first row is used for all rows: measuring each would cost more than sending it.
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


def checked_rows(rows: Sequence[Row], *, numbered: bool = False) -> list[Row]:
    """A copy of the rows; an error if the first is not a row. Where devices number rows, with its number."""
    copied = list(rows)
    if copied:
        first: Any = copied[0]
        length = 4 if numbered else 3
        if not (isinstance(first, tuple | list) and len(first) == length and isinstance(first[0], bytes)):
            what = f"{first!r} is no row"
            number = ", number: int" if numbered else ""
            raise UserError(what, expected=f"(key: bytes, event time in ms: int, payload{number})")
    return copied


def site_for(manifest: Manifest, stream: str, site: str) -> str:
    """The site where a producer of a stream connects: the given one, else the first that accepts rows."""
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
    return site or (manifest.hosts or open_sites)[0]


def writable_hint(manifest: Manifest) -> str:
    """A hint that names the streams that producers and feeds may write."""
    found = sorted(name for name, facts in manifest.streams.items() if not facts.writer)
    return f"producers and feeds write {', '.join(found) or '(there is none)'}"


def home_of(manifest: Manifest, stream: str) -> str:
    facts = manifest.topology.streams.get(stream)
    if facts is None and stream not in manifest.streams:
        raise _unknown_stream(manifest, stream)
    if facts is None or not facts.logged:
        what = f"the stream {stream!r} has no log"
        logged = sorted(s.name for s in manifest.topology.streams.values() if s.logged)
        raise UserError(what, expected=f"a stream that can be read: {', '.join(logged)}")
    return facts.home


def log_of(manifest: Manifest, stream: str, site: str = "") -> tuple[str, str]:
    """The site and the name of the log that a subscriber reads: all rows, or those that a site has made."""
    home, facts = home_of(manifest, stream), manifest.topology.streams[stream]
    if not site and facts.outputs_at == "site":
        what = f"the outputs of {stream!r} are logged where they are made, and nowhere together"
        raise UserError(what, expected="subscribe(site=...)", hint='or declare them with outputs_at="both"')
    if not site:
        return home, stream
    if site not in manifest.topology.sites:
        raise UserError(
            f"there is no site {site!r}", expected=f"one of: {', '.join(manifest.topology.sites)}"
        )
    if facts.outputs_at == "home":
        what = f"the outputs of {stream!r} are logged at {home!r} only"
        raise UserError(what, expected="subscribe() without site=", hint='or declare outputs_at="both"')
    return site, facts.own_log_at(site)


def _unknown_stream(manifest: Manifest, stream: str) -> UserError:
    known = sorted(manifest.streams) or sorted(manifest.topology.streams)
    return UserError(f"there is no stream {stream!r}", expected=f"one of: {', '.join(known)}")


def check_name(manifest: Manifest, name: str) -> None:
    """Refuse the name of a process of the deployment: a producer would take over its connection."""
    topology = manifest.topology
    if not name or name in topology.sites or operator_of(name) in topology.operators or name == "controller":
        what = f"{name!r} cannot be the name of a producer"
        raise UserError(what, expected="a name that no site, instance or controller of the deployment has")
