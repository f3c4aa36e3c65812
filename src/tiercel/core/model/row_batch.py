"""Row batches: several rows of one key that are sent as one row, because costs are per row.

Responsible for: the form of a row batch; joining rows, counting them, splitting a batch.
Not responsible for: the contents of a row, and which rows may be joined (spark/rows, runtime/client).

A payload is the MessagePack array of a row's columns. So payloads in sequence behind the head of an array
are an array of rows, and joining them decodes none:

    RUN | head of an array | payload | payload | ...        at most RUN_ROWS_MAX payloads

A router treats a row batch like any other row: it has one key, and the key determines its route. No
MessagePack value begins with `RUN`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row

RUN: Final = 0xC1
RUN_ROWS_MAX: Final = 64  # a longer batch would save little more
RUN_MARK: Final = bytes((RUN,))
BUNDLE_MARK: Final = bytes((RUN, RUN))  # of a payload with rows of several keys (bundle.py)
_BUNDLE_BYTES = 22  # its mark, the number of its rows, and two times
# Heads of arrays: with the length inside, or in the two bytes that follow.
_SHORT, _SHORT_MAX, _LONG = 0x90, 15, 0xDC
# The mark, a head, two payloads: a shorter payload is no batch, and becomes a dead letter.
_BYTES_MIN = 4
_HEADS = [
    bytes((RUN, _SHORT | n)) if n <= _SHORT_MAX else bytes((RUN, _LONG, 0, n))
    for n in range(RUN_ROWS_MAX + 1)
]
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_bundle = msgspec.msgpack.Decoder(
    tuple[msgspec.Raw, msgspec.Raw, list[msgspec.Raw], msgspec.Raw, msgspec.Raw]
).decode


def is_run(payload: Any) -> bool:
    if type(payload) is not bytes or payload[:1] != RUN_MARK:
        return False
    return len(payload) >= _BYTES_MIN and payload[1] != RUN


def join(rows: list[Row]) -> list[Row]:
    """Join rows into batches, by key in the order of first rows. For encoded rows without event time."""
    by_key: defaultdict[Key, list[bytes]] = defaultdict(list)
    for key, _, payload in rows:
        by_key[key].append(payload)
    if len(by_key) == len(rows):
        return rows
    joined: list[Row] = []
    for key, payloads in by_key.items():
        joined += [(key, 0, payload) for payload in in_runs(payloads)]
    return joined


def in_runs(payloads: Sequence[bytes]) -> list[bytes]:
    """The rows of one key in as few payloads as possible."""
    count = len(payloads)
    if count == 1:
        return [payloads[0]]
    if 1 < count <= RUN_ROWS_MAX:
        return [_HEADS[count] + b"".join(payloads)]
    parts = [payloads[n : n + RUN_ROWS_MAX] for n in range(0, count, RUN_ROWS_MAX)]
    return [part[0] if len(part) == 1 else _HEADS[len(part)] + b"".join(part) for part in parts]


def split(payload: Any) -> list[Any]:
    """The payloads of single rows, of a bundle too. A malformed one stays whole: its decoder reports why."""
    with contextlib.suppress(msgspec.DecodeError):
        if is_run(payload):
            return [bytes(raw) for raw in _raws(payload[1:])]
        if type(payload) is bytes and payload[:2] == BUNDLE_MARK:
            return [bytes(raw) for raw in _bundle(payload[_BUNDLE_BYTES:])[2]]
    return [payload]


def singles(row: Row) -> list[Row]:
    """The rows of a batch as single rows, each with the number of its input, if it has one."""
    payload = row[2]
    if is_run(payload):
        return [(row[0], row[1], one) for one in split(payload)]
    if _has_input(payload) and is_run(payload[1]):
        return [(row[0], row[1], (payload[0], one, *payload[2:])) for one in split(payload[1])]
    return [row]


def count_rows(rows: Sequence[Row]) -> int:
    """The number of rows, including those within batches and bundles."""
    payloads = [row[2] for row in rows]
    if payloads and type(payloads[0]) is not bytes and _has_input(payloads[0]):  # then all payloads have one
        payloads = [payload[1] for payload in payloads]
    runs = [p for p in payloads if type(p) is bytes and p[:1] == RUN_MARK and len(p) >= _BYTES_MIN]
    if not runs:
        return len(payloads)
    counts = [
        p[3] if p[1] == _LONG else int.from_bytes(p[2:6]) if p[1] == RUN else p[1] & _SHORT_MAX for p in runs
    ]
    return len(payloads) - len(runs) + sum(counts)


def _has_input(payload: Any) -> bool:
    """Whether a payload carries the number of its input, and perhaps the last row of a broadcast stream."""
    return type(payload) in (tuple, list) and 2 <= len(payload) <= 3
