"""Bundles of a stream's rows: frames of rows with many keys, packed by the slots of their keys.

Responsible for: whether the rows of a frame travel as bundles or as row batches; both, from internal forms.
Not responsible for: the form of a bundle (core/model/bundle.py), user code that reads one (operators/).
"""

from __future__ import annotations

from typing import Any, Final

import xxhash

from tiercel.core.model.bundle import bundle, range_key, range_width
from tiercel.core.model.topology import Topology
from tiercel.spark.rows.row_codec import CoreRow, RowCodec

SAMPLED_MAX: Final = 2_000  # rows of a frame that are looked at
DISTINCT_MIN: Final = 0.7  # part of them with a key of their own: row batches would be short

_hash = xxhash.xxh3_64_intdigest


def slots_of(topology: Topology, stream: str) -> int:
    """The number of slots by which the rows of a stream can be bundled; 0: they travel without bundles."""
    if any(operator.broadcast == stream for operator in topology.operators.values()):
        return 0
    slots = {operator.slots for operator in topology.operators.values() if stream in operator.inputs}
    return slots.pop() if len(slots) == 1 else 0


class Bundler:
    """Packs the frames of one stream."""

    def __init__(self, codec: RowCodec, slots: int) -> None:
        self._codec = codec
        self._slots = slots if codec.key and not codec.sequence else 0  # numbered rows travel alone

    def pack(self, rows: list[tuple[Any, ...]]) -> list[CoreRow]:
        """Rows of the core, from internal forms: bundles if most keys have one row, else row batches."""
        width = range_width(len(rows), self._slots)
        if not width or not self._has_many_keys(rows):
            return self._codec.gather(rows)
        codec, slots, hashed = self._codec, self._slots, _hash
        keys, times = codec.keys(rows), codec.times(rows)
        if len(set(keys)) < len(keys):
            keys, times, rows = _by_key(keys, times, rows)
        ranges: list[tuple[list[bytes], list[Any], list[int]]] = [
            ([], [], []) for _ in range(-(-slots // width))
        ]
        if times:
            for key, row, at in zip(keys, rows, times, strict=True):
                of_range = ranges[hashed(key) % slots // width]
                of_range[0].append(key)
                of_range[1].append(row)
                of_range[2].append(at)
        else:
            for key, row in zip(keys, rows, strict=True):
                of_range = ranges[hashed(key) % slots // width]
                of_range[0].append(key)
                of_range[1].append(row)
        return [
            bundle(range_key(slots, n * width, min(slots, (n + 1) * width) - 1), of_keys, of_times, of_rows)
            for n, (of_keys, of_rows, of_times) in enumerate(ranges)
            if of_keys
        ]

    def _has_many_keys(self, rows: list[tuple[Any, ...]]) -> bool:
        if self._codec.event_time:
            return True  # each row travels alone otherwise
        sample = rows[:: max(1, len(rows) // SAMPLED_MAX)]
        return len(set(self._codec.key_parts(sample))) > DISTINCT_MIN * len(sample)


def _by_key(
    keys: list[bytes], times: list[int], rows: list[tuple[Any, ...]]
) -> tuple[list[bytes], list[int], list[tuple[Any, ...]]]:
    """The same with the rows of each key behind each other, in their order."""
    by_key: dict[bytes, list[int]] = {}
    for n, key in enumerate(keys):
        by_key.setdefault(key, []).append(n)
    order = [n for of_key in by_key.values() for n in of_key]
    return [keys[n] for n in order], [times[n] for n in order] if times else [], [rows[n] for n in order]
