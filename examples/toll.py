"""Linear Road's segment statistics: cars and speed of each segment in five minutes; half of them move."""

from itertools import islice

import tiercel
from tiercel.apps.toll.generator import INPUT, REPORT, Road, Traffic
from tiercel.operators import approx_count_distinct, mean, sliding

with tiercel.start() as live:
    reports = live.stream("reports", INPUT, key=["xway", "dir", "seg"], event_time="at", delay="1 second")
    statistics = reports.window(sliding("5 minutes", "1 minute")).agg(
        mean("spd").alias("speed"),
        approx_count_distinct("vid").alias("cars"),
        name="statistics",
        instances={"local": 2},
    )
    rows = iter(statistics.subscribe(after=0))
    with reports.producer("road") as producer:
        for second, traffic in enumerate(islice(Traffic(Road(cars=900, segments=10), seed=1).seconds(), 700)):
            producer.send_many([row for _, row in traffic if row[0] == REPORT])
            if second == 350:
                moving = live.move("statistics", slots=range(2048), to="statistics@local#2")
        producer.flush()
    print(*moving.wait(), sep="\n")
    for received in islice(rows, 60):
        row = received.row
        if row.speed < 40 and row.cars > 50:
            print(f"direction {row.dir}, segment {row.seg}: {row.cars} cars at {row.speed:.0f} mph")
