"""Calls of user code for the rows of a bundle: the same calls as for single rows, in one loop.

Responsible for: one call per key of a bundle, or one step of a fold per row, and outputs as bundles.
Not responsible for: whether a bundle may stay whole (processing.py), a call that raises (user_code.py).

The outputs stand for the same outputs that the single rows would have had (core/model/bundle.py). What is not
plain leaves the loop for this key only, and goes the way of single rows: a call that raises, a timer that is
due, a key with another epoch than those before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from tiercel.core.instance.user_code import BundleCode, ProcessorRunner
from tiercel.core.model.bundle import bundle, open_bundle, range_key
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output, Row
from tiercel.core.model.routing import slot_of
from tiercel.core.model.row_batch import RUN_MARK
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable


class BundleCalls:
    """Makes the calls for the bundles of one entry."""

    def __init__(self, runner: ProcessorRunner, code: BundleCode, space: StateTable, slots: int) -> None:
        self._runner = runner
        self._code = code
        self._space = space
        self._slots = slots
        # outputs that are not row batches: key of the call, number, row; by epoch
        self._single: dict[int, list[tuple[Key, int, Row]]] = {}

    def call(self, row: Row, time_ms: int, watermark_ms: int, offset: int, out: list[Output]) -> None:
        """Process one bundle. Raises, before anything changes, if its rows are not as expected."""
        keys, rows = self._code.unpack(row[2])
        space = self._space
        dirty = dict.fromkeys(keys)
        if space.snapshots:
            space.before_change(dirty)
        groups: Iterable[tuple[Key, Sequence[Any]]]
        groups = (
            zip(keys, zip(rows, strict=True), strict=True)
            if len(dirty) == len(keys)
            else _grouped(keys, rows)
        )
        made = Made(self._code, offset)
        if self._runner.folds:
            self._fold(groups, row, offset, out, made)
        else:
            self._call_each(groups, row, time_ms, watermark_ms, offset, out, made)
        space.dirty.update(dirty)
        if made.rows and self._code.joins:
            whole = (row[0], 0, self._code.payload(made.keys, made.rows))
            out.append(Output(offset, row[0], made.epoch, 0, whole))
        elif made.rows:
            self._single.setdefault(made.epoch, []).extend(made.single_rows())

    def finish(self, offset: int, out: list[Output]) -> None:
        """All bundles of the entry are processed: their outputs for other keys are bundled together."""
        for epoch, outputs in self._single.items():
            width = self._code.width(len(outputs), self._slots)
            out += bundled_outputs(outputs, offset, epoch, self._slots, width)
        self._single.clear()

    # -- processors ------------------------------------------------------------------------------

    def _call_each(
        self,
        groups: Iterable[tuple[Key, Sequence[Any]]],
        row: Row,
        time_ms: int,
        watermark_ms: int,
        offset: int,
        out: list[Output],
        made: Made,
    ) -> None:
        runner, space, internal = self._runner, self._space, self._code.internal
        states, new_state, handle = space.keys, space.state, runner.handle
        undo, new_timers = handle.undo, handle.new_timers
        handle_rows, reset = runner.handle_rows, runner.reset_attributes
        rows, made_keys = made.rows, made.keys
        add = rows.append
        due_ms = watermark_ms if runner.event_time else time_ms
        times = runner.bind(handle.state, time_ms, watermark_ms)
        for key, given in groups:
            state = states.get(key) or new_state(key)
            handle.state = state
            reset()
            before = len(rows)
            try:
                for output in handle_rows(state.user_key, iter(given), times):
                    add(internal(output))
                undo.clear()
                failure = None
            except Exception as error:
                failure = error
            if failure is None and state.epoch == made.epoch and not state.timers:
                count = len(rows) - before
                if count == 1:
                    made_keys.append(key)
                elif count:
                    made_keys += [key] * count
            else:
                self._not_plain(
                    key, state, failure, before, row, times, offset, out, made, due_ms, watermark_ms
                )
            if new_timers or not state.values:
                space.touched(key, state, new_timers)

    def _not_plain(
        self,
        key: Key,
        state: KeyState,
        failure: Exception | None,
        before: int,
        row: Row,
        times: Any,
        offset: int,
        out: list[Output],
        made: Made,
        due_ms: int,
        watermark_ms: int,
    ) -> None:
        """A call that raised, a key that has timers, or another epoch than the keys before."""
        runner, first = self._runner, len(out)
        is_due = bool(state.timers) and min(state.timers) <= due_ms
        if failure is not None:
            del made.rows[before:]
            runner.undo_call(out, first)
            mine = [single for single in open_bundle(row) if single[0] == key]
            runner.call_each(state, key, mine, times, offset, out, first, failure)
            is_due = bool(state.timers)
        elif is_due or not made.takes(state.epoch):
            alone = made.take_back(before)
            out += [
                Output(offset, key, state.epoch, n, each)
                for n, each in enumerate(self._code.rows(key, alone))
            ]
        else:
            made.keys += [key] * (len(made.rows) - before)
        if is_due:
            time_ms = runner.handle.time_ms
            runner.fire(state, key, due_ms, time_ms, watermark_ms, offset, out, first)

    # -- folds -----------------------------------------------------------------------------------

    def _fold(
        self,
        groups: Iterable[tuple[Key, Sequence[Any]]],
        row: Row,
        offset: int,
        out: list[Output],
        made: Made,
    ) -> None:
        runner, space, advance = self._runner, self._space, self._code.advance
        states, new_state, variable = space.keys, space.state, runner.variable
        rows, made_keys = made.rows, made.keys
        add, add_key = rows.append, made_keys.append
        for key, given in groups:
            state = states.get(key) or new_state(key)
            values = state.values
            kept, before = values.get(variable), len(rows)
            try:
                for one in given:
                    kept, result = advance(kept, one)
                    if type(result) is tuple:
                        add(result)
                        add_key(key)
                    elif result is not None:
                        rows += result
                        made_keys += [key] * len(result)
            except Exception:
                del rows[before:], made_keys[before:]
                mine = [single for single in open_bundle(row) if single[0] == key]
                _, emptied = runner.fold({key: state}, new_state, mine, offset, out)
                if emptied:
                    space.touched(key, state, runner.handle.new_timers)
                continue
            if state.epoch != made.epoch and not made.takes(state.epoch):
                alone = made.take_back(before)
                del made_keys[before:]
                made_rows = self._code.rows(key, alone)
                out += [Output(offset, key, state.epoch, n, each) for n, each in enumerate(made_rows)]
            if kept is not None:
                values[variable] = kept
            else:
                values.pop(variable, None)
                space.touched(key, state, runner.handle.new_timers)


class Made:
    """The outputs of one bundle in internal form, all of one epoch, each with the key of its call."""

    __slots__ = ("_code", "_offset", "epoch", "keys", "rows")

    def __init__(self, code: BundleCode, offset: int) -> None:
        self._code = code
        self._offset = offset
        self.keys: list[Key] = []
        self.rows: list[Any] = []
        self.epoch = -1  # of the first key

    def takes(self, epoch: int) -> bool:
        """Whether outputs of this epoch fit: the first key decides."""
        if self.epoch < 0:
            self.epoch = epoch
        return self.epoch == epoch

    def take_back(self, before: int) -> list[Any]:
        """Remove the last outputs, which go another way."""
        alone = self.rows[before:]
        del self.rows[before:]
        return alone

    def single_rows(self) -> Iterator[tuple[Key, int, Row]]:
        """The outputs as rows of the core, each with the key and the number that it has in its call."""
        for key, rows in _grouped(self.keys, self.rows):
            for n, row in enumerate(self._code.rows(key, rows)):
                yield key, n, row


def _grouped(keys: list[Key], rows: list[Any]) -> Iterator[tuple[Key, list[Any]]]:
    """The rows of each key; those of one key follow each other."""
    begin = 0
    for key, of_key in groupby(keys):
        end = begin + sum(1 for _ in of_key)
        yield key, rows[begin:end]
        begin = end


def bundled_outputs(
    outputs: list[tuple[Key, int, Row]], offset: int, epoch: int, slots: int, width: int
) -> Iterator[Output]:
    """Outputs with keys of their own as bundles, by the slots of those keys; row batches stay alone."""
    by_range: dict[int, dict[Key, list[tuple[Key, int, Row]]]] = {}
    for by, n, row in outputs:
        if not width or type(row[2]) is not bytes or row[2][:1] == RUN_MARK:
            yield Output(offset, by, epoch, n, row)
        else:
            by_range.setdefault(slot_of(row[0], slots) // width, {}).setdefault(row[0], []).append(
                (by, n, row)
            )
    for place, by_key in by_range.items():
        every = [each for of_key in by_key.values() for each in of_key]
        key = range_key(slots, place * width, min(slots, (place + 1) * width) - 1)
        rows = [row for _, _, row in every]
        whole = bundle(
            key,
            [row[0] for row in rows],
            [row[1] for row in rows],
            [msgspec.Raw(row[2]) for row in rows],
            [by for by, _, _ in every],
            [n for _, n, _ in every],
        )
        yield Output(offset, key, epoch, 0, whole)
