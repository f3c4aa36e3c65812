"""NEXMark's queries as Spark batch jobs: what every row of a streaming run must be equal to.

Responsible for: the SQL of each query over all rows of `persons`, `auctions` and `bids`.
Not responsible for: the comparison.

The columns have Beam's names here: `id` is the id of a person or an auction.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

_WINNING = """
    SELECT auction, seller, category, price, bidder, expires - INTERVAL '1 millisecond' AS closed FROM (
        SELECT a.id AS auction, a.seller, a.category, a.expires, b.price, b.bidder,
               row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.dateTime, b.bidder) AS place
        FROM {bids} b JOIN {auctions} a ON b.auction = a.id
        WHERE b.dateTime < a.expires AND b.price >= a.reserve)
    WHERE place = 1"""

SQL = {
    "q1": "SELECT auction, price * 89 DIV 100 AS price, bidder, dateTime FROM {bids}",
    "q2": "SELECT auction, price FROM {bids} WHERE auction % 123 = 0",
    "q3": """
    SELECT p.name, p.city, p.state, a.id, greatest(p.dateTime, a.dateTime) AS at
    FROM {auctions} a JOIN {persons} p ON a.seller = p.id
    WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": """
    SELECT category, window, avg(price) AS price FROM (WINNING)
    GROUP BY category, window(closed, '10 seconds', '5 seconds')""",
    "q5": """
    WITH counts AS (SELECT window.end AS windowEnd, auction, count(*) AS n FROM {bids}
                    GROUP BY window(dateTime, '10 seconds', '5 seconds'), auction)
    SELECT windowEnd, auction, n FROM (SELECT *, max(n) OVER (PARTITION BY windowEnd) AS most FROM counts)
    WHERE n = most""",
    "q6": """
    SELECT seller, (2 * sum(price) OVER last + count(*) OVER last) DIV (2 * count(*) OVER last) AS price,
           closed
    FROM (WINNING)
    WINDOW last AS (PARTITION BY seller ORDER BY closed, auction ROWS BETWEEN 9 PRECEDING AND CURRENT ROW)""",
    "q7": """
    WITH windowed AS (SELECT window(dateTime, '10 seconds').end AS windowEnd, * FROM {bids})
    SELECT windowEnd, auction, bidder, price, dateTime
    FROM (SELECT *, max(price) OVER (PARTITION BY windowEnd) AS highest FROM windowed)
    WHERE price = highest""",
    "q8": """
    WITH new AS (SELECT window(dateTime, '10 seconds') AS window, id, name, dateTime FROM {persons}),
         sold AS (SELECT window(dateTime, '10 seconds') AS window, id, seller, reserve, dateTime
                  FROM {auctions})
    SELECT sold.seller, sold.window, new.name, new.dateTime, sold.id AS auction, sold.reserve,
           sold.dateTime AS dateTime_right
    FROM sold JOIN new ON sold.seller = new.id AND sold.window = new.window""",
    "q7-drrs": """
    SELECT bidder, window, max(price) AS price FROM {bids}
    GROUP BY bidder, window(dateTime, '10 seconds', '500 milliseconds')""",
    "q8-drrs": """
    WITH new AS (SELECT window(dateTime, '40 seconds', '5 seconds').end AS windowEnd, id, name
                 FROM {persons}),
         sold AS (SELECT window(dateTime, '40 seconds', '5 seconds').end AS windowEnd, id, seller, reserve
                  FROM {auctions})
    SELECT sold.seller, new.name, sold.id AS auction, sold.reserve, sold.windowEnd
    FROM sold JOIN new ON sold.seller = new.id AND sold.windowEnd = new.windowEnd""",
}


def expected(spark: SparkSession, query: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """The rows of a query; inputs are `persons`, `auctions` and `bids`, those that it reads."""
    return spark.sql(SQL[query].replace("WINNING", _WINNING), None, **inputs)
