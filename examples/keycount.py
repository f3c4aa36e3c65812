"""A count per key, keys by Zipf's law; the hottest keys move to an instance of their own."""

import random

import tiercel

KEYS, HOT = 1_000, range(10)


def count_key(state, row):
    return (state[0] + 1,), (row.key, state[0] + 1)


with tiercel.start() as live:
    records = live.stream("records", "key long", key="key")
    counts = records.fold(
        count_key, (0,), "key long, n long", state_schema="n long", name="counter", instances={"local": 2}
    )
    draw = random.Random(1)
    shares = [1 / rank for rank in range(1, KEYS + 1)]
    with records.producer("load") as producer, counts.subscribe(after=0) as outputs:
        producer.send_many([(key,) for key in draw.choices(range(KEYS), shares, k=2_000)])
        live.scale("counter", {"local": 3}).wait()
        moving = live.move("counter", keys=HOT, to="counter@local#3")
        producer.send_many([(key,) for key in draw.choices(range(KEYS), shares, k=2_000)])
        print(*moving.wait(), sep="\n")
        producer.flush()
        print(next(received.row for received in outputs if received.row.n == 30))
