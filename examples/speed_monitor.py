"""Mean speed of each car, an alert above 120 km/h; ten cars change their instance while it runs."""

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tiercel


class SpeedMonitor(StatefulProcessor):
    def init(self, handle):
        self.seen = handle.getValueState("seen", "n long, total double")

    def handleInputRows(self, key, rows, timerValues):
        n, total = self.seen.get() or (0, 0.0)
        for row in rows:
            n, total = n + 1, total + row.speed
            yield Row(car=key[0], n=n, mean=total / n, alert=total / n > 120)
        self.seen.update((n, total))

    def close(self):
        pass


spark = tiercel.session()
rate = spark.readStream.format("rate").option("rowsPerSecond", 200).load()
cars = rate.selectExpr("concat('car-', value % 20) AS car", "CAST(50 + value % 100 AS DOUBLE) AS speed")

with tiercel.start(spark) as live:
    positions = live.stream("positions", "car string, speed double", key="car")
    speeds = positions.transform_with_state(
        SpeedMonitor(), "car string, n long, mean double, alert boolean", name="speed", instances={"local": 2}
    )
    positions.feed(cars)
    for row, _, _ in speeds.subscribe(after=0):
        if (row.car, row.n) == ("car-7", 10):
            moving = live.move("speed", keys=[f"car-{n}" for n in range(10)], to="speed@local#2")
        if (row.car, row.n) == ("car-7", 30):
            break
    print(row)
    print(*moving.wait(), sep="\n")
spark.stop()
