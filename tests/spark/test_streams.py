"""Transforms, keys, unions and chains in one graph, on Spark, while keys move, equal plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oracle import until
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.spark.api.streams import LiveStream

CARS = [f"car-{n}" for n in range(12)]
SEGMENTS = ["north", "south", "west"]
CHUNKS, SEQS = 8, 10  # rows of each car: CHUNKS * SEQS
BOTH = {"cloud": 1, "edge": 1}

READING = "car string, seq long, segment string, speed double"
TOTAL = "car string, seq long, segment string, half long, total double"
WORST = "segment string, car string, seq long, half long, n long, worst double"
JOINED = "car string, reading long, fix long, n long"

Values = tuple[Any, ...]


def readings(chunk: int) -> list[Values]:
    rows = [(n, seq) for seq in range(chunk * SEQS, (chunk + 1) * SEQS) for n in range(len(CARS))]
    return [(CARS[n], seq, SEGMENTS[(n + seq) % 3], float((n * 7 + seq * 11) % 90)) for n, seq in rows]


def is_fast(row: Any) -> bool:
    return bool(row.speed > 20)


def in_mph(row: Any) -> dict[str, Any]:
    return {"car": row.car, "mph": row.speed * 0.5, "segment": row.segment, "seq": row.seq}


def in_halves(row: Any) -> Iterator[Values]:
    """Fast rows count twice, very slow ones not at all."""
    for half in range(2 if row.mph > 30 else 1 if row.mph > 12 else 0):
        yield (row.car, row.seq, row.segment, half, row.mph)


class Totals(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (total,) = self.total.get() or (0.0,)
        for row in rows:
            total += row.mph
            yield Row(car=key[0], seq=row.seq, segment=row.segment, half=row.half, total=total)
        self.total.update((total,))


class Worst(StatefulProcessor):
    """The highest total that any car of a segment has shown there."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.worst = handle.getValueState("worst", "n long, worst double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, worst = self.worst.get() or (0, 0.0)
        for row in rows:
            n, worst = n + 1, max(worst, row.total)
            yield Row(segment=key[0], car=row.car, seq=row.seq, half=row.half, n=n, worst=worst)
        self.worst.update((n, worst))


class Join(StatefulProcessor):
    """Readings and fixes of a car, as they come: columns of the other stream are null."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (n,) = self.count.get() or (0,)
        for row in rows:
            n += 1
            assert (row.seq is None) != (row.fix is None)
            yield Row(car=key[0], reading=row.seq, fix=row.fix, n=n)
        self.count.update((n,))


def last_two(state: Values, row: Any) -> tuple[Values, Values]:
    """A fold behind a processor: the total of this row and of the row before."""
    return (row.total,), (row.car, row.seq, row.half, state[0], row.total)


def by(column: int, rows: Iterable[Values]) -> dict[Any, list[Values]]:
    found: dict[Any, list[Values]] = defaultdict(list)
    for row in rows:
        found[row[column]].append(row)
    return found


def totals_of(rows: Iterable[Values]) -> dict[str, list[Values]]:
    """What filter, map, flat_map and the operator behind them make of readings, per car."""
    found: dict[str, list[Values]] = defaultdict(list)
    for car, seq, segment, speed in rows:
        if speed > 20:
            mph = speed * 0.5
            for half in range(2 if mph > 30 else 1 if mph > 12 else 0):
                total = (found[car][-1][-1] if found[car] else 0.0) + mph
                found[car].append((car, seq, segment, half, total))
    return found


def worst_of(rows: Iterable[Values]) -> list[Values]:
    """What one segment makes of totals, in the order in which they came."""
    found: list[Values] = []
    for car, seq, segment, half, total in rows:
        worst = max(total, found[-1][-1] if found else 0.0)
        found.append((segment, car, seq, half, len(found) + 1, worst))
    return found


def read(stream: LiveStream, count: int) -> list[Values]:
    found: list[Values] = []
    with stream.subscribe(after=0) as subscriber:

        def come() -> bool:
            found.extend(tuple(received.row) for received in subscriber.poll(1.0))
            return len(found) >= count

        until(come, lambda: f"{stream.name}: {len(found)} of {count} rows have come")
    assert len(found) == count
    return found


def test_transforms_unions_and_chains_equal_plain_python_while_keys_move(
    spark: SparkSession, tmp_path: Path
) -> None:
    with tiercel.start(spark, ["cloud", "edge"], tmp_path / "storage") as live:
        source = live.stream("readings", READING, key="car")
        fixes = live.stream("fixes", "car string, fix long", key="car")
        mph = source.filter(is_fast).map(in_mph, "car string, seq long, segment string, mph double")
        halves = mph.flat_map(in_halves, "car string, seq long, segment string, half long, mph double")
        totals = halves.transform_with_state(Totals(), TOTAL, instances=BOTH)
        worst = totals.key_by("segment").transform_with_state(Worst(), WORST, instances=BOTH)
        pairs = totals.fold(
            last_two,
            (0.0,),
            "car string, seq long, half long, before double, total double",
            state_schema="total double",
        )
        joined = source.union(fixes).transform_with_state(Join(), JOINED, instances=BOTH)
        slow = source.filter(lambda row: row.speed <= 20).key_by("segment", name="slow")

        sent: list[Values] = []
        with source.producer("cars", site="edge") as cars, fixes.producer("gps") as gps:
            for chunk in range(CHUNKS):
                to = "edge" if chunk % 2 == 0 else "cloud"
                moves = [
                    live.move("totals", keys=CARS, to=to),
                    live.move("worst", keys=SEGMENTS, to=to),
                    live.move("join", keys=CARS, to=to),
                ]
                rows = readings(chunk)
                for n in range(0, len(rows), 10):
                    cars.send_many(rows[n : n + 10])
                    gps.send_many([(car, chunk * len(rows) + n) for car in CARS])
                sent += rows
                assert all(moving.wait() for moving in moves)  # each has moved something
            cars.flush()
            gps.flush()

        expected = totals_of(sent)
        count = sum(map(len, expected.values()))
        assert count > len(sent) / 2  # the steps let most of it through
        found = read(totals, count)
        assert by(0, found) == expected

        seen = read(worst, count)
        for segment, rows in by(0, seen).items():
            order = [row[1:4] for row in rows]  # in which the totals of all cars have come here
            known = {(t[0], t[1], t[3]): t for totals_ in expected.values() for t in totals_}
            came = [known[identity] for identity in order]
            assert rows == worst_of(came)
            for car, of_car in by(0, came).items():
                assert of_car == [row for row in expected[car] if row[2] == segment]

        pairs_expected = {
            car: [
                (car, row[1], row[3], before[-1], row[-1])
                for before, row in zip([(0.0,), *rows], rows, strict=False)
            ]
            for car, rows in expected.items()
        }
        assert by(0, read(pairs, count)) == pairs_expected

        fixed = [
            chunk * len(readings(0)) + n for chunk in range(CHUNKS) for n in range(0, len(readings(0)), 10)
        ]
        for car, rows in by(0, read(joined, len(sent) + len(fixed) * len(CARS))).items():
            assert [n for *_, n in rows] == list(range(1, len(rows) + 1))
            assert [reading for _, reading, _, _ in rows if reading is not None] == list(range(CHUNKS * SEQS))
            assert [fix for _, _, fix, _ in rows if fix is not None] == fixed
            assert car in CARS

        slow_sent = [row for row in sent if row[3] <= 20]
        assert by(0, read(slow, len(slow_sent))) == by(0, slow_sent)
