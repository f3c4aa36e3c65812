"""Bundles for user code: the rows of many keys decoded in one call, their outputs encoded in one.

Responsible for: the core's `BundleCode` of a processor and of a fold.
Not responsible for: the calls (core/instance/bundle_calls.py), the form of a bundle (core/model/bundle.py).

An operator with transforms in front, or with a broadcast stream, has none: its bundles are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tiercel.core.model.bundle import HEAD_BYTES, MalformedBundle, head, range_width
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row as CoreRow
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.transforms import reader
from tiercel.spark.rows.row_codec import RowCodec, encode_payload, encode_rows

_encode = msgspec.msgpack.Encoder().encode

Read = Callable[[bytes], tuple[list[Key], list[Any]]]
Advance = Callable[[Any, Any], tuple[Any, Any]]


def reads_bundles(plan: OperatorPlan) -> bool:
    """Whether a row of a bundle is one row for user code, whatever the operator does with it."""
    return not any(each.transforms or each.broadcast for each in plan.inputs if not each.initial)


def decoder(row: Any) -> Read:
    """Reads the keys of a bundle, and its rows as this type."""
    decode = msgspec.msgpack.Decoder(
        tuple[list[bytes], msgspec.Raw, list[row], msgspec.Raw, msgspec.Raw]
    ).decode

    def read(payload: bytes) -> tuple[list[Key], list[Any]]:
        keys, _, rows, _, _ = decode(memoryview(payload)[HEAD_BYTES:])
        if len(keys) != len(rows):
            raise MalformedBundle(f"a bundle has {len(keys)} keys and {len(rows)} rows")
        return keys, rows

    return read


def processor_readers(plan: OperatorPlan) -> list[Read]:
    """For each input: reads rows as the processor sees them."""
    return [_of_input(reader(each, each.schema if each.initial else plan.schema)) for each in plan.inputs]


def _of_input(rows_of: Callable[[Iterator[Any]], Iterator[Any]]) -> Read:
    decode = decoder(tuple[Any, ...])

    def read(payload: bytes) -> tuple[list[Key], list[Any]]:
        keys, rows = decode(payload)
        return keys, list(rows_of(iter(rows)))

    return read


class OperatorBundles:
    """How one operator reads bundles and writes them."""

    def __init__(
        self,
        readers: list[Read],
        output: RowCodec,
        internal: Callable[[Any], Any],
        advance: Advance | None = None,
    ) -> None:
        self._readers = readers
        self._output = output
        self.internal = internal
        self.width = range_width
        self.advance: Advance = advance if advance is not None else _no_fold
        self.joins = not output.key and not output.event_time

    def unpack(self, payload: Any) -> tuple[list[Key], list[Any]]:
        if type(payload) is bytes:
            return self._readers[0](payload)
        read: Read = self._readers[payload[0]]  # with the number of its input
        return read(payload[1])

    def rows(self, key: Key, made: list[Any]) -> Iterable[CoreRow]:
        """Outputs of one call as rows of the core."""
        if self.joins:
            return [(key, 0, payload) for payload in encode_rows(made)] if made else []
        output = self._output
        return [
            (
                output.key_of_payload(each) if output.key else key,
                output.time_of_payload(each) if output.event_time else 0,
                encode_payload(each),
            )
            for each in made
        ]

    def payload(self, keys: list[Key], made: list[Any]) -> bytes:
        return head(len(keys)) + _encode((keys, (), made, (), ()))


def _no_fold(kept: Any, given: Any) -> tuple[Any, Any]:
    raise AssertionError(given)
