"""The same queries in plain PySpark Structured Streaming, for comparison.

Responsible for: each query as a user of Spark would write it, without Tiercel.
Not responsible for: running and timing it (beside.py).

Winning bids have no form in streaming SQL that emits each once; Q4 and Q6 use Spark's own transformWithState
with the processors of processors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tiercel.apps.nexmark.processors import SELLER_MEAN, WINNING, SellerMean, WinningBids
from tiercel.apps.nexmark.queries import DELAY_MS, PATIENCE_MS

DELAY = f"{DELAY_MS} milliseconds"
Kinds = Mapping[str, DataFrame]  # persons, auctions, bids, with Beam's columns


def _timed(frame: DataFrame) -> DataFrame:
    return frame.withWatermark("dateTime", DELAY)


def _q1(kinds: Kinds) -> DataFrame:
    return kinds["bids"].selectExpr("auction", "price * 89 DIV 100 AS price", "bidder", "dateTime")


def _q2(kinds: Kinds) -> DataFrame:
    return kinds["bids"].filter("auction % 123 = 0").select("auction", "price")


def _q3(kinds: Kinds) -> DataFrame:
    persons = kinds["persons"].filter("state IN ('OR', 'ID', 'CA')").alias("p")
    auctions = kinds["auctions"].filter("category = 10").alias("a")
    found = auctions.join(persons, f.expr("a.seller = p.id"))
    return found.selectExpr("p.name", "p.city", "p.state", "a.id", "greatest(p.dateTime, a.dateTime) AS at")


def _winning(kinds: Kinds) -> DataFrame:
    offers = _timed(kinds["auctions"]).selectExpr(
        "id AS auction", "seller", "category", "reserve", "expires", "dateTime"
    )
    bids = _timed(kinds["bids"]).select("auction", "price", "bidder", "dateTime")
    both = offers.unionByName(bids, allowMissingColumns=True)
    return both.groupBy("auction").transformWithState(
        WinningBids(PATIENCE_MS), WINNING, "append", "eventTime", eventTimeColumnName="closed"
    )


def _q4(kinds: Kinds) -> DataFrame:
    windows = _winning(kinds).groupBy("category", f.window("closed", "10 seconds", "5 seconds"))
    return windows.agg(f.avg("price").alias("price"))


def _q5(kinds: Kinds) -> DataFrame:
    counts = (
        _timed(kinds["bids"])
        .groupBy(f.window("dateTime", "10 seconds", "5 seconds"), "auction")
        .agg(f.count("*").alias("n"))
    )
    ends = counts.groupBy(f.window(f.window_time("window"), "5 seconds"))  # one for each window before
    tops = ends.agg(f.max("n").alias("most"), f.collect_list(f.struct("auction", "n")).alias("all"))
    return tops.selectExpr("window.end AS windowEnd", "inline(filter(all, one -> one.n = most))")


def _q6(kinds: Kinds) -> DataFrame:
    return (
        _winning(kinds)
        .groupBy("seller")
        .transformWithState(SellerMean(), SELLER_MEAN, "append", "eventTime", eventTimeColumnName="closed")
    )


def _q7(kinds: Kinds) -> DataFrame:
    tops = (
        _timed(kinds["bids"])
        .groupBy(f.window("dateTime", "10 seconds"))
        .agg(
            f.max("price").alias("highest"),
            f.collect_list(f.struct("auction", "bidder", "price", "dateTime")).alias("all"),
        )
    )
    return tops.selectExpr("window.end AS windowEnd", "inline(filter(all, one -> one.price = highest))")


def _q8(kinds: Kinds) -> DataFrame:
    new = _windowed(kinds["persons"], "10 seconds", "10 seconds").alias("new")
    sold = _windowed(kinds["auctions"], "10 seconds", "10 seconds").alias("sold")
    return sold.join(new, f.expr("sold.seller = new.id AND sold.window = new.window")).selectExpr(
        "sold.seller",
        "sold.window",
        "new.name",
        "new.dateTime",
        "sold.id AS auction",
        "sold.reserve",
        "sold.dateTime AS dateTime_right",
    )


def _q7_drrs(kinds: Kinds) -> DataFrame:
    windows = _timed(kinds["bids"]).groupBy("bidder", f.window("dateTime", "10 seconds", "500 milliseconds"))
    return windows.agg(f.max("price").alias("price"))


def _q8_drrs(kinds: Kinds) -> DataFrame:
    new = _windowed(kinds["persons"], "40 seconds", "5 seconds").alias("new")
    sold = _windowed(kinds["auctions"], "40 seconds", "5 seconds").alias("sold")
    return sold.join(new, f.expr("sold.seller = new.id AND sold.window = new.window")).selectExpr(
        "sold.seller", "new.name", "sold.id AS auction", "sold.reserve", "sold.window.end AS windowEnd"
    )


def _windowed(frame: DataFrame, size: str, slide: str) -> DataFrame:
    """With the window as the only event time: Spark allows a stream one."""
    windows = _timed(frame).withColumn("window", f.window("dateTime", size, slide))
    return windows.withColumn("dateTime", f.expr("timestamp_micros(unix_micros(dateTime))"))


PLAIN: dict[str, Callable[[Kinds], DataFrame]] = {
    "q1": _q1,
    "q2": _q2,
    "q3": _q3,
    "q4": _q4,
    "q5": _q5,
    "q6": _q6,
    "q7": _q7,
    "q8": _q8,
    "q7-drrs": _q7_drrs,
    "q8-drrs": _q8_drrs,
}
