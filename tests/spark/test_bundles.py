"""Rows that travel as bundles lead to the same outputs, state, timers and dead letters as single rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.core.instance.bundle_calls import BundleCalls
from tiercel.core.model.bundle import MalformedBundle, bundled, is_bundle, opened
from tiercel.core.model.log import Output
from tiercel.core.model.row_batch import count_rows
from tiercel.core.model.topology import Operator, Topology
from tiercel.spark.operators.folds import Fold
from tiercel.spark.rows.bundles import Bundler, slots_of
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.stream_reader import in_batches
from tiercel.testing.trial import DEAD_LETTERS, OPERATOR, SITE, SLOTS, Trial

SCHEMA = "sensor bigint, value double"
AVERAGED = "sensor bigint, count bigint, average double"


class Average(StatefulProcessor):
    """Emits the average so far, for each row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self._average = handle.getValueState("average", "count long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total = self._average.get() or (0, 0.0)
        for row in rows:
            count, total = count + 1, total + row.value
            self.saw(row, timerValues)
            yield Row(sensor=key[0], count=count, average=total / count)
        self.store(count, total)

    def saw(self, row: Any, times: Any) -> None:
        """More that a kind does with a row."""

    def store(self, count: int, total: float) -> None:
        self._average.update((count, total))

    def close(self) -> None:
        """Holds no resources."""


class Choosy(Average):
    """Raises on some rows."""

    def saw(self, row: Any, times: Any) -> None:
        if row.value == 3.0:
            raise ValueError("three")


class Forgetful(Average):
    """Deletes the state of a key after some rows."""

    def store(self, count: int, total: float) -> None:
        super().store(count, total)
        if count % 3 == 0:
            self._average.clear()


class Timed(Average):
    """Registers timers, some of which are due at once."""

    def saw(self, row: Any, times: Any) -> None:
        ahead_ms = 5_000 if row.value > 2.0 else 0
        self.handle.registerTimer(times.getCurrentProcessingTimeInMs() + ahead_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(sensor=-key[0], count=0, average=0.0)


def fold(on_three: Callable[[], Any] | None = None) -> Fold:
    def step(state: tuple[int, float], row: Any) -> Any:
        count, total = state[0] + 1, state[1] + row.value
        if row.value == 3.0 and on_three is not None:
            return on_three()
        made = (row.sensor, count, total / count)
        return (None if count % 4 == 0 else (count, total)), ([made, made] if row.value == 5.0 else made)

    return Fold(step, (0, 0.0), "count long, total double", AVERAGED)


def divide() -> Any:
    return 1 // 0


OPERATORS: dict[str, tuple[Callable[[], Any], str]] = {
    "processor": (Average, "none"),
    "raises": (Choosy, "none"),
    "deletes keys": (Forgetful, "none"),
    "timers": (Timed, "processingTime"),
    "fold": (fold, "none"),
    "fold that raises": (lambda: fold(divide), "none"),
}


def trial_of(name: str, **options: Any) -> Trial:
    make, time_mode = OPERATORS[name]
    return Trial(make(), schema=SCHEMA, key="sensor", output=AVERAGED, time_mode=time_mode, **options)


def send_bundled(trial: Trial, rows: list[tuple[int, float]], width: int) -> None:
    packed = [trial.columns.pack(row) for row in rows]
    trial._produce(bundled(packed, SLOTS, width, timed=False))


def seen(trial: Trial, keys: int) -> dict[int, Any]:
    """All that can be seen of each key."""
    return {
        key: (trial.outputs(key), trial.dead_letters(key), trial.state(key), trial.timers(key))
        for key in range(keys)
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_bundles_lead_to_the_same_as_single_rows(name: str) -> None:
    rng = random.Random(name)
    alone, together = trial_of(name), trial_of(name)
    for n in range(8):
        rows = [(rng.randrange(30), float(rng.randrange(6))) for _ in range(40)]
        alone.send(*rows)
        send_bundled(together, rows, (1, SLOTS // 2, SLOTS)[n % 3])
        if n % 3 == 1:
            key = rng.randrange(30)
            for trial in (alone, together):
                trial.move(key, ("live", "pause")[n % 2])
        if n == 4:
            for trial in (alone, together):
                trial.crash(after_checkpoint=True)
        if n % 2:
            for trial in (alone, together):
                trial.advance_time(3_000)
    assert seen(together, 30) == seen(alone, 30)
    identities = [
        sorted((o.key, o.offset, o.n) for o in trial.driver.outputs("output")) for trial in (alone, together)
    ]
    assert len(identities[0]) > 50
    assert [key for key, _, _ in identities[0]] == [key for key, _, _ in identities[1]]


def test_bundles_are_processed_whole_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    original = BundleCalls.call

    def call(self: BundleCalls, row: Any, *others: Any) -> None:
        called.append(count_rows([row]))
        original(self, row, *others)

    monkeypatch.setattr(BundleCalls, "call", call)
    trial = trial_of("processor")
    send_bundled(trial, [(n, 1.0) for n in range(64)], SLOTS // 4)
    assert sum(called) == 64
    assert len(called) == 4
    logged = [
        row for entry in trial.driver.log("here", "operator") for rows in entry.parts.values() for row in rows
    ]
    assert all(is_bundle(row[0]) for row in logged)


def test_a_row_that_does_not_fit_becomes_a_dead_letter_and_its_bundle_does_not() -> None:
    trial = trial_of("processor")
    packed = [trial.columns.pack((n, 1.0)) for n in range(5)]
    packed[2] = (packed[2][0], 0, b"\x91\x02")  # one column instead of two
    trial._produce(bundled(packed, SLOTS, SLOTS // 2, timed=False))
    assert sorted(row.sensor for row in trial.outputs()) == [0, 1, 3, 4]
    assert len(trial.driver.outputs(DEAD_LETTERS)) == 1


def test_a_frame_with_a_bundle_that_cannot_be_read_is_refused_and_changes_nothing() -> None:
    trial = trial_of("processor")
    bundles = bundled([trial.columns.pack((n, 1.0)) for n in range(20)], SLOTS, SLOTS // 4, timed=False)
    key, at, payload = bundles[0]
    with pytest.raises(MalformedBundle, match="cannot be read"):
        trial._produce([(key, at, payload[:-3]), *bundles[1:]])
    assert trial.outputs() == []
    assert trial.driver.log(SITE, OPERATOR) == []


# -- packing ------------------------------------------------------------------------------------------


def test_frames_of_distinct_keys_become_bundles_and_others_row_batches() -> None:
    codec = RowCodec(SCHEMA, "sensor")
    bundler = Bundler(codec, 4096)
    many = [(n, float(n)) for n in range(1_000)]
    few = [(n % 10, float(n)) for n in range(1_000)]
    assert all(is_bundle(row[0]) for row in bundler.pack(many))
    assert bundler.pack(few) == codec.gather(few)
    assert bundler.pack(many[:20]) == codec.gather(many[:20])
    assert Bundler(codec, 0).pack(many) == codec.gather(many)


@pytest.mark.parametrize("event_time", ["", "at"])
def test_packed_bundles_stand_for_the_rows_that_a_codec_gathers(event_time: str) -> None:
    rng = random.Random(3)
    codec = RowCodec("sensor bigint, at timestamp, value double", "sensor", event_time)
    rows = [(rng.randrange(4_000), n * 1_000, float(n)) for n in range(1_000)]
    found = opened(Bundler(codec, 4096).pack(rows))
    assert sorted(found, key=lambda row: row[0]) == sorted(codec.gather(rows), key=lambda row: row[0])
    assert sum(map(is_bundle, [row[0] for row in Bundler(codec, 4096).pack(rows)])) > 10


def test_streams_are_bundled_by_the_slots_of_their_readers() -> None:
    def topology(*operators: Operator) -> Topology:
        return Topology({"here": None}, {}, {each.name: each for each in operators})

    one = Operator("one", ("in",), "out", ("one@here#1",), slots=64)
    other = Operator("other", ("in",), "else", ("other@here#1",), slots=32)
    assert slots_of(topology(one), "in") == 64
    assert slots_of(topology(one, other), "in") == 0
    assert slots_of(topology(one), "out") == 0


def test_outputs_are_read_in_batches_of_rows_whatever_an_output_holds() -> None:
    wide = Output(1, b"k", 1, 0, bundled([(b"k", 0, b"\x91\x01")] * 25, SLOTS, SLOTS, timed=True)[0])
    alone = Output(1, b"k", 1, 0, (b"k", 0, b"\x91\x01"))
    assert in_batches([wide, wide, alone, alone], 25) == [[wide], [wide], [alone, alone]]
    assert in_batches([alone] * 25 + [wide], 30) == [[alone] * 25 + [wide], []]
    assert in_batches([], 30) == [[]]
