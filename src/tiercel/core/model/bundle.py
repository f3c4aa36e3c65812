"""Bundles: rows of many keys that are sent as one row, because costs are per row.

Responsible for: the form of a bundle; the range of slots that its keys are in; taking it apart.
Not responsible for: the contents of a row, which rows are bundled (spark/rows), where a bundle may stay whole
    (core/logs/inbox.py, core/instance/processing.py).

A bundle is an encoding of single rows. Where each of its keys is treated alike it stays whole; everywhere
else `opened` gives the rows that it stands for, and nothing is different from then on. Its key is no key: it
names a range of slots, and all keys of the bundle are in that range.

    key       MARK | number of slots | first slot | last slot
    payload   MARK | number of rows | lowest event time | highest event time | five arrays in MessagePack:
              keys       of each row; rows of one key follow each other
              times      event time of each row; empty: there are none, and rows of one key are a row batch
              rows       the payloads
              operators' keys   of outputs: the key whose call has emitted the row; empty: the same as `keys`
              numbers    of outputs: `Output.n` of each row; empty: 0, the rows of a key are a row batch

No MessagePack value, and so no key of a user, begins with the mark; a row batch continues otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from tiercel.core.errors import ProtocolViolation
from tiercel.core.model.keys import Key, KeySet, slot_of
from tiercel.core.model.log import Output, Row
from tiercel.core.model.row_batch import BUNDLE_MARK, in_runs

MARK: Final = BUNDLE_MARK
BUNDLE_ROWS_MIN: Final = 16  # rows of a bundle, on average; with fewer a bundle saves little
RANGES_MIN: Final = 8  # a wider range often has several owners, and is taken apart
RANGES_MAX: Final = 64
_KEY = struct.Struct(">2sIII")
_HEAD = struct.Struct(">2sIqq")
HEAD_BYTES: Final = _HEAD.size
_KEY_BYTES: Final = _KEY.size
_key_of = itemgetter(0)
_encode = msgspec.msgpack.Encoder().encode
_Body = tuple[list[bytes], list[int], list[msgspec.Raw], list[bytes], list[int]]
_decode = msgspec.msgpack.Decoder(_Body).decode
_skip = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw]).decode
_decode_keys = msgspec.msgpack.Decoder(tuple[list[bytes], Any, msgspec.Raw, msgspec.Raw, msgspec.Raw]).decode


class MalformedBundle(ProtocolViolation):
    """Bytes that came as a bundle and are none."""


class Contents(NamedTuple):
    """The rows of a bundle, column by column."""

    keys: list[Key]
    times: list[int]
    payloads: list[bytes]
    of: list[Key]
    numbers: list[int]


# -- the range of slots ------------------------------------------------------------------------------


def is_bundle(key: Key) -> bool:
    return key[:2] == MARK and len(key) == _KEY_BYTES


def range_key(slots: int, first: int, last: int) -> Key:
    """The key of a bundle whose keys are in these slots."""
    return _KEY.pack(MARK, slots, first, last)


def range_of(key: Key) -> tuple[int, range]:
    """The number of slots, and the slots in which the keys of a bundle are."""
    _, slots, first, last = _KEY.unpack(key)
    return slots, range(first, last + 1)


def range_width(rows: int, slots: int) -> int:
    """How many slots the bundles of a frame should span; 0: its rows should travel alone."""
    ranges = RANGES_MAX
    while ranges * BUNDLE_ROWS_MIN > rows and ranges > RANGES_MIN:
        ranges //= 2
    if ranges * BUNDLE_ROWS_MIN > rows or not slots:
        return 0
    return -(-slots // ranges)


def may_hold(key: Key, keys: KeySet) -> bool:
    """Whether a bundle may have a row of one of these keys."""
    slots, of_bundle = range_of(key)
    if any(slot in of_bundle for slot in keys.slots):
        return True
    return any(slot_of(each, slots) in of_bundle for each in keys.keys)


def are_apart(bundles: Sequence[Row], others: Iterable[Row], slots: int) -> bool:
    """Whether no key is in two of these bundles, or in one and among the other rows."""
    found = [range_of(each[0]) for each in bundles]
    if any(of != slots for of, _ in found):
        return False
    ranges = sorted([of_bundle for _, of_bundle in found], key=lambda of_bundle: of_bundle.start)
    if any(before.stop > after.start for before, after in pairwise(ranges)):
        return False
    taken = {slot for of_bundle in ranges for slot in of_bundle}
    return not any(slot_of(row[0], slots) in taken for row in others)


def entries_of(rows: list[Row]) -> list[list[Row]]:
    """These rows, in their order, as entries in which each bundle has a range of its own.

    Otherwise its reader would have to take it apart: a key has one call for each entry.
    """
    entries: list[list[Row]] = [[]]
    taken: set[int] = set()
    for row in rows:
        if is_bundle(row[0]):
            _, slots = range_of(row[0])
            if not taken.isdisjoint(slots):
                entries.append([])
                taken.clear()
            taken.update(slots)
        entries[-1].append(row)
    return entries


# -- making bundles ----------------------------------------------------------------------------------


def head(count: int, lowest: int = 0, highest: int = 0) -> bytes:
    """The first part of a payload."""
    return _HEAD.pack(MARK, count, lowest, highest)


def bundle(
    key: Key,
    keys: list[Key],
    times: list[int],
    rows: Sequence[Any],
    of: Sequence[Key] = (),
    numbers: Sequence[int] = (),
) -> Row:
    """A bundle of rows that are not encoded yet, or are `msgspec.Raw`; `key` names the range of its slots."""
    lowest, highest = (min(times), max(times)) if times else (0, 0)
    return (key, lowest, head(len(keys), lowest, highest) + _encode((keys, times, rows, of, numbers)))


def bundled(rows: Iterable[Row], slots: int, width: int, *, timed: bool) -> list[Row]:
    """Encoded single rows as bundles that span `width` slots each. Without `timed` they lose their times."""
    by_range: dict[int, dict[Key, list[Row]]] = {}
    for row in rows:
        by_range.setdefault(slot_of(row[0], slots) // width, {}).setdefault(row[0], []).append(row)
    made: list[Row] = []
    for n, by_key in by_range.items():
        every = [row for of_key in by_key.values() for row in of_key]
        key = range_key(slots, n * width, min(slots, (n + 1) * width) - 1)
        times = [row[1] for row in every] if timed else []
        made.append(bundle(key, [row[0] for row in every], times, [msgspec.Raw(row[2]) for row in every]))
    return made


# -- taking bundles apart ----------------------------------------------------------------------------


def count_of(payload: bytes) -> int:
    return int.from_bytes(payload[2:6])


def newest_ms(rows: Iterable[Row]) -> int:
    """The highest event time of rows, of which some may be bundles."""
    return max([_highest_ms(_inner(row[2])) if is_bundle(row[0]) else row[1] for row in rows])


def _highest_ms(payload: bytes) -> int:
    highest: int = _HEAD.unpack_from(payload)[3]
    return highest


def contents(payload: Any) -> Contents:
    """The rows of a bundle; MalformedBundle if they cannot be read, or are not as many as they should be."""
    try:
        keys, times, raws, of, numbers = _decode(memoryview(payload)[HEAD_BYTES:])
    except (msgspec.DecodeError, TypeError) as error:
        reason = f"a bundle of {len(payload)} bytes cannot be read: {error}"
        raise MalformedBundle(reason) from error
    count = count_of(payload)
    if (
        len(keys) != count
        or len(raws) != count
        or any(len(c) not in (0, count) for c in (times, of, numbers))
    ):
        raise MalformedBundle(f"a bundle of {count} rows has {len(keys)} keys and {len(raws)} payloads")
    return Contents(keys, times, [bytes(raw) for raw in raws], of, numbers)


def check_bundles(rows: Iterable[Row]) -> None:
    """Raise MalformedBundle for a bundle that its readers could not take apart; its rows are skipped over."""
    for row in rows:
        if is_bundle(row[0]):
            payload = row[2]
            if type(payload) is not bytes or len(payload) <= HEAD_BYTES or payload[:2] != MARK:
                raise MalformedBundle(f"a bundle without rows: {payload!r:.40}")
            slots, of_bundle = range_of(row[0])
            try:
                columns = [
                    bytes(memoryview(column)[:5]) for column in _skip(memoryview(payload)[HEAD_BYTES:])
                ]
            except (msgspec.DecodeError, TypeError) as error:
                raise MalformedBundle(f"a bundle of {len(payload)} bytes cannot be read: {error}") from error
            keys, times, payloads, of, numbers = map(_length, columns)
            count = count_of(payload)
            fits = {keys, payloads} == {count} and {times, of, numbers} <= {0, count}
            if not fits or not count or not of_bundle or of_bundle.stop > slots:
                raise MalformedBundle(f"a bundle of {count} rows has {keys} keys and {payloads} payloads")


def _length(column: bytes) -> int:
    """The length of a MessagePack array, by its head; -1: it is none."""
    first = column[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    return (
        int.from_bytes(column[1:3]) if first == 0xDC else int.from_bytes(column[1:5]) if first == 0xDD else -1
    )


def keys_of(row: Row) -> list[Key]:
    """The keys of a bundle, of each row one."""
    try:
        return _decode_keys(memoryview(_inner(row[2]))[HEAD_BYTES:])[0]
    except (msgspec.DecodeError, TypeError) as error:
        raise MalformedBundle(f"the keys of a bundle cannot be read: {error}") from error


def open_bundle(row: Row) -> list[Row]:
    """The rows that a bundle stands for, each with the number of its input, if the bundle has one."""
    payload = row[2]
    if type(payload) is bytes:
        return _rows(contents(payload))
    return [(key, at, (payload[0], one, *payload[2:])) for key, at, one in _rows(contents(payload[1]))]


def opened(rows: Sequence[Row]) -> list[Row]:
    """These rows, with the rows of bundles in place of the bundles."""
    found: list[Row] = []
    for row in rows:
        if is_bundle(row[0]):
            found += open_bundle(row)
        else:
            found.append(row)
    return found


def opened_for(rows: list[Row], key_sets: Sequence[KeySet]) -> list[Row]:
    """These rows, of which bundles come first, without bundles that may hold one of these keys."""
    bundles = [row for row in rows if is_bundle(row[0])]
    concerned = [row for row in bundles if any(may_hold(row[0], keys) for keys in key_sets)]
    if not concerned:
        return rows
    others = rows[len(bundles) :]
    if not are_apart(bundles, others, range_of(bundles[0][0])[0]):
        return opened(rows)
    return [row for row in bundles if row not in concerned] + opened(concerned) + others


def open_output(output: Output) -> list[Output]:
    """The outputs that an output stands for: the output itself, unless it is a bundle."""
    if not is_bundle(output.key):
        return [output]
    made, offset, epoch = contents(output.row[2]), output.offset, output.epoch
    if not made.numbers and not made.of:
        return _numbered(_rows(made), offset, epoch)
    of = made.of or made.keys
    times = made.times or [0] * len(of)
    numbers = made.numbers or [0] * len(of)
    columns = zip(of, numbers, made.keys, times, made.payloads, strict=True)
    return [Output(offset, by, epoch, n, (key, at, payload)) for by, n, key, at, payload in columns]


def open_outputs(outputs: Iterable[Output]) -> list[Output]:
    return [each for output in outputs for each in open_output(output)]


def _numbered(rows: list[Row], offset: int, epoch: int) -> list[Output]:
    return [
        Output(offset, key, epoch, n, row)
        for key, of_key in groupby(rows, _key_of)
        for n, row in enumerate(of_key)
    ]


def _rows(made: Contents) -> list[Row]:
    if made.times:
        return list(zip(made.keys, made.times, made.payloads, strict=True))
    return [
        (key, 0, payload)
        for key, of_key in groupby(zip(made.keys, made.payloads, strict=True), _key_of)
        for payload in in_runs([each for _, each in of_key])
    ]


def _inner(payload: Any) -> bytes:
    """The payload of a bundle, which may carry the number of its input."""
    return payload if type(payload) is bytes else payload[1]
