"""NEXMark's Q5: the auctions with the most bids in 10 s, every 5 s; half of the counts move meanwhile."""

import datetime
from itertools import islice

import tiercel
from tiercel.apps.nexmark.generator import BID, Nexmark
from tiercel.apps.nexmark.processors import HOT_ITEM, HighestOfWindow
from tiercel.operators import count, sliding

with tiercel.start() as live:
    bids = live.stream("bids", BID, key="auction", event_time="dateTime", delay="100 milliseconds")
    counts = bids.window(sliding("10 seconds", "5 seconds")).agg(
        count().alias("n"), window_time="at", output_key="at", name="bid-counts", instances={"local": 2}
    )
    hot = counts.transform_with_state(HighestOfWindow(), HOT_ITEM, name="hot-items", time_mode="eventTime")
    rows = iter(hot.subscribe(after=0))
    with bids.producer("nexmark") as producer:
        for n, block in enumerate(Nexmark(seed=1, rate=500).blocks(20_000)):  # 40 s of event time
            producer.send_columns(block.bids)
            if n == 1:
                moving = live.move("bid-counts", slots=range(2048), to="bid-counts@local#2")
        producer.flush()
    print(*moving.wait(), sep="\n")
    for received in islice(rows, 5):
        end = received.row.windowEnd.astimezone(datetime.UTC)
        print(f"{end:%H:%M:%S} auction {received.row.auction}: {received.row.n} bids")
