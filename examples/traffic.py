"""Traffic monitoring: the running average of each car's speed, and who speeds; the cars of a segment move."""

import tiercel

LIMIT_MPH = 60.0


def running_mean(state, row):
    n, total = state[0] + 1, state[1] + row.speed
    return (n, total), (row.car, row.segment, n, total / n, total / n > LIMIT_MPH)


with tiercel.start() as live:
    rate = live.spark.readStream.format("rate").option("rowsPerSecond", 400).load()
    cars = live.stream("cars", "car long, segment int, speed double", key="car")
    cars.feed(
        rate.selectExpr(
            "value % 40 AS car",
            "int(value % 40 + value / 400) % 10 AS segment",  # every car drives on
            "double(20 + hash(value) % 60 + value % 40) AS speed",
        )
    )
    means = cars.fold(
        running_mean,
        (0, 0.0),
        "car long, segment int, n long, mean double, speeding boolean",
        state_schema="n long, total double",
        name="vehicle-stats",
        instances={"local": 2},
    )
    segment, rows = {}, iter(means.subscribe(after=0))
    for received in rows:
        segment[received.row.car] = received.row.segment
        if len(segment) == 40:
            break
    there = [car for car, where in segment.items() if where == 3]
    print(*live.move("vehicle-stats", keys=there, to="vehicle-stats@local#2").wait(), sep="\n")
    print(next(received.row for received in rows if received.row.speeding))
    print(next(received.row for received in rows if received.row.car in there and received.row.n == 30))
