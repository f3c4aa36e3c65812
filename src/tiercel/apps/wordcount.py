"""`wordcount`: SEEP's windowed word count: a splitter without state, then a counter of words in a window.

Responsible for: its generator, its two operators and its oracle.

SEEP's source sends sentences of 12 words and about 140 characters; the counter holds up to 10^5 words and
emits after each window of 30 s.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tiercel import Live
from tiercel.apps.app import App, Built, Event, Options, Output, Values
from tiercel.apps.service import Service
from tiercel.operators import count, tumbling

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WORDS_PER_SENTENCE = 12
WORD_CHARACTERS = 11  # 12 words and 11 spaces: 143 characters
LAST = "\x04"  # the word of the last sentence, which closes every window


class WordCountOptions(Options, frozen=True, kw_only=True):
    """Options of `wordcount`."""

    words: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000  # different words: entries of state
    window_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 30
    service_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # that a word waits in the counter


def word_of(number: int) -> str:
    """A word of eleven characters."""
    return f"w{number:0{WORD_CHARACTERS - 1}d}"


def split_sentence(row: Any) -> list[tuple[str, datetime.datetime]]:
    """One row for each word."""
    return [(word, row.at) for word in row.sentence.split(" ")]


def _window_end_ms(values: Values) -> int:
    end: datetime.datetime = values[1][1]
    return round((end - START).total_seconds() * 1_000)


class WordCount(App[WordCountOptions]):
    """Sentences in, the count of each word of each window out."""

    name = "wordcount"
    about = "windowed word count of two operators (SEEP)"
    options = WordCountOptions
    outputs: ClassVar[Mapping[str, Output]] = {
        "counts": Output(("word", "window"), _window_end_ms, key="word")
    }

    def generate(self, options: WordCountOptions, seed: int, rate: int) -> Iterator[Event]:
        draw = random.Random(seed)
        n = 0
        while True:
            moment = n * 1_000 // rate
            words = [word_of(draw.randrange(options.words)) for _ in range(WORDS_PER_SENTENCE)]
            yield moment, "sentences", (n, " ".join(words), START + datetime.timedelta(milliseconds=moment))
            n += 1

    def last_events(self, options: WordCountOptions, moment: int) -> list[Event]:
        end = moment + options.window_s * 1_000
        return [(end, "sentences", (-1, LAST, START + datetime.timedelta(milliseconds=end)))]

    def build(self, live: Live, options: WordCountOptions, instances: Mapping[str, int]) -> Built:
        sentences = live.stream(
            "sentences", "number long, sentence string, at timestamp", key="number", event_time="at"
        )
        words = sentences.flat_map(split_sentence, "word string, at timestamp").key_by(
            "word", name="splitter"
        )
        if options.service_us:
            words = words.filter(Service(options.service_us))
        counts = words.window(tumbling(f"{options.window_s} seconds")).agg(
            count().alias("count"), name="counter", instances=instances
        )
        return Built({"sentences": sentences}, {"counts": counts}, "counter")

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: WordCountOptions
    ) -> Mapping[str, DataFrame]:
        words = inputs["sentences"].select(f.explode(f.split("sentence", " ")).alias("word"), "at")
        counted = words.groupBy("word", f.window("at", f"{options.window_s} seconds")).count()
        return {"counts": counted.filter(f.col("word") != LAST)}
