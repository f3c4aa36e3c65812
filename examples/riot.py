"""RIoTBench's Kalman filter of each sensor and field, and a line through it; half of them move meanwhile."""

from itertools import islice

import tiercel
from tiercel.apps.riot import tasks
from tiercel.apps.riot.generator import DATASETS, MESSAGE, Messages

CITY = DATASETS["city"]

with tiercel.start() as live:
    messages = live.stream("messages", MESSAGE, key="sensor")
    fields = messages.flat_map(tasks.Parse(CITY, checked=False), tasks.OBSERVATION).key_by("sensor", "field")
    filtered = fields.fold(
        tasks.kalman,
        (0, 0.0, tasks.FIRST_ERROR),
        tasks.FILTERED,
        state_schema="n bigint, estimate double, error double",
        instances={"local": 2},
    )
    lines = filtered.fold(tasks.regress, ([],), tasks.PREDICTED, state_schema="last array<double>")
    rows = iter(lines.subscribe(after=0))
    with messages.producer("city") as producer:
        for n, (_, row) in enumerate(islice(Messages(CITY, seed=1).rows(rate=1000), 20_000)):
            producer.send(row)
            if n == 10_000:
                moving = live.move("kalman", slots=range(2048), to="kalman@local#2")
        producer.flush()
    print(*moving.wait(), sep="\n")
    for received in islice(rows, 5):
        row = received.row
        print(f"{row.sensor} {row.field}: {row['mean']:.1f} is next")
