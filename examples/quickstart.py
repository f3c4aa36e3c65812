"""The mean speed of each car, from a streaming DataFrame; ten cars change their instance while it runs."""

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tiercel


class Mean(StatefulProcessor):
    def init(self, handle):
        self.seen = handle.getValueState("seen", "n long, total double")

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            n, total = self.seen.get() or (0, 0.0)
            self.seen.update((n + 1, total + row.speed))
            yield Row(car=key[0], n=n + 1, mean=(total + row.speed) / (n + 1))


with tiercel.start() as live:
    rate = live.spark.readStream.format("rate").option("rowsPerSecond", 200).load()
    cars = live.stream("cars", "car string, speed double", key="car")
    cars.feed(rate.selectExpr("concat('car-', value % 20) AS car", "double(50 + value % 100) AS speed"))
    means = cars.transform_with_state(Mean(), "car string, n long, mean double", instances={"local": 2})
    rows = iter(means.subscribe(after=0))
    print(next(rows).row)
    print(*live.move("mean", keys=[f"car-{n}" for n in range(10)], to="mean@local#2").wait(), sep="\n")
    print(next(received.row for received in rows if received.row.n == 30))
