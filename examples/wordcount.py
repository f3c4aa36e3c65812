"""Word count in windows of two seconds, of two operators; half of the words of an instance move."""

import tiercel
from tiercel.operators import count, tumbling

SENTENCES = ["to be or not to be", "that is the question", "whether it is nobler in the mind to suffer"]


def split(row):
    return [(word, row.at) for word in row.sentence.split(" ")]


with tiercel.start() as live:
    rate = live.spark.readStream.format("rate").option("rowsPerSecond", 45).load()
    sentences = live.stream(
        "sentences", "number long, sentence string, at timestamp", key="number", event_time="at"
    )
    choice = " ".join(f"WHEN {n} THEN '{sentence}'" for n, sentence in enumerate(SENTENCES))
    sentences.feed(
        rate.selectExpr("value AS number", f"CASE value % 3 {choice} END AS sentence", "timestamp AS at")
    )
    words = sentences.flat_map(split, "word string, at timestamp").key_by("word", name="splitter")
    counts = words.window(tumbling("2 seconds")).agg(
        count().alias("n"), name="counter", instances={"local": 2}
    )
    rows = iter(counts.subscribe(after=0))
    print(next(rows).row)
    moving = live.move(
        "counter", slots=range(0, 4096, 2), source="counter@local#1", to="counter@local#2", retries=3
    )
    print(*moving.wait(), sep="\n")
    print(next(received.row for received in rows if received.row.n == 30))  # a word of every third sentence
