"""Mean speed and reports of each car in the last three seconds, every second; ten cars move meanwhile."""

import tiercel
from tiercel.operators import count, mean, sliding

with tiercel.start() as live:
    rate = live.spark.readStream.format("rate").option("rowsPerSecond", 200).load()
    cars = live.stream(
        "cars", "car string, speed double, at timestamp", key="car", event_time="at", delay="1 second"
    )
    cars.feed(
        rate.selectExpr(
            "concat('car-', value % 20) AS car", "double(50 + value % 100) AS speed", "timestamp AS at"
        )
    )
    recent = cars.window(sliding("3 seconds", "1 second")).agg(
        mean("speed"), count().alias("n"), name="recent", instances={"local": 2}
    )
    rows = iter(recent.subscribe(after=0))
    print(next(rows).row)  # Row(car='car-0', window=Row(start=..., end=...), avg(speed)=..., n=...)
    print(*live.move("recent", keys=[f"car-{n}" for n in range(10)], to="recent@local#2").wait(), sep="\n")
    print(next(received.row for received in rows if received.row.n == 30))
