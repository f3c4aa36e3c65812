"""Rows of one key that travel together as one: what passes by the million is paid for by the row.

Responsible for: the form of such a run; joining rows, counting them, taking a run apart.
Not responsible for: what is in a row, and who may join some (spark/schema.py, runtime/client.py).

A payload is the MessagePack of a row's columns, an array. So several of them, one behind the other, are an
array of rows as soon as its head stands before them, and nobody has to look into one:

    RUN | head of an array | payload | payload | ...        at most RUN_ROWS_MAX of them

To routers a run is a row like any other: it has one key, and goes where that goes. No MessagePack begins with
`RUN`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tiercel.core.records import Key, Row

RUN: Final = 0xC1
RUN_ROWS_MAX: Final = 64  # what a run saves is saved by then
RUN_MARK: Final = bytes((RUN,))
_SHORT, _SHORT_MAX, _LONG = (
    0x90,
    15,
    0xDC,
)  # heads of arrays: with the length in it, or in two bytes behind it
_BYTES_MIN = (
    4  # the mark, a head, two payloads: who sends less sends no run, and finds it among the dead letters
)
_HEADS = [
    bytes((RUN, _SHORT | n)) if n <= _SHORT_MAX else bytes((RUN, _LONG, 0, n))
    for n in range(RUN_ROWS_MAX + 1)
]
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def is_run(payload: Any) -> bool:
    return type(payload) is bytes and payload[:1] == RUN_MARK and len(payload) >= _BYTES_MIN


def join(rows: list[Row]) -> list[Row]:
    """The same rows in runs, by key in the order of their first ones. For encoded rows without event time."""
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
    """Payloads of rows of one key, as few as possible."""
    count = len(payloads)
    if count == 1:
        return [payloads[0]]
    if 1 < count <= RUN_ROWS_MAX:
        return [_HEADS[count] + b"".join(payloads)]
    parts = [payloads[n : n + RUN_ROWS_MAX] for n in range(0, count, RUN_ROWS_MAX)]
    return [part[0] if len(part) == 1 else _HEADS[len(part)] + b"".join(part) for part in parts]


def split(payload: Any) -> list[Any]:
    """The payloads of single rows. What only begins like a run stays whole: whoever decodes it says why."""
    if is_run(payload):
        with contextlib.suppress(msgspec.DecodeError):
            return [bytes(raw) for raw in _raws(payload[1:])]
    return [payload]


def singles(row: Row) -> list[Row]:
    """The rows of a run, one by one; with the number of their input, if they have one."""
    payload = row[2]
    if is_run(payload):
        return [(row[0], row[1], one) for one in split(payload)]
    if _has_input(payload) and is_run(payload[1]):
        return [(row[0], row[1], (payload[0], one)) for one in split(payload[1])]
    return [row]


def count_rows(rows: Sequence[Row]) -> int:
    """How many there are, those within runs included."""
    payloads = [row[2] for row in rows]
    if payloads and _has_input(payloads[0]):  # then all of them have
        payloads = [payload[1] for payload in payloads]
    runs = [p for p in payloads if type(p) is bytes and p[:1] == RUN_MARK and len(p) >= _BYTES_MIN]
    return len(payloads) - len(runs) + sum([p[3] if p[1] == _LONG else p[1] & _SHORT_MAX for p in runs])


def _has_input(payload: Any) -> bool:
    """Rows for an operator of several inputs come with the number of theirs."""
    return type(payload) in (tuple, list) and len(payload) == 2
