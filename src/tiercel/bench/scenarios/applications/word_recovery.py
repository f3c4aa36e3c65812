"""`tiercel bench word-recovery`: recovery of SEEP's word count, by size of state and by what it begins with.

Responsible for: one death for each number of words and each way: from a checkpoint, by a replay of the whole
    log, and from the source, which sends everything again to a fresh deployment; a run without a death.
Not responsible for: the application (apps/wordcount.py).

    every word once | sentences at a rate | kill -9 of the counter, then the sentence that closes the window

The counter emits when its window closes. Recovery is the time from the kill to the last count, and the floor
is the same time without a kill. Every count is compared with a sequential run.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tiercel
from tiercel.apps.app import SITE, Event
from tiercel.apps.wordcount import START, WORDS_PER_SENTENCE, WordCount, WordCountOptions, word_of
from tiercel.bench.report import Line
from tiercel.chaos.processes import check_ours, kill
from tiercel.errors import UserError

ShowProgress = Callable[[str], None]

WAYS = ("none", "checkpoint", "replay", "source")
CHECKPOINT_MS = 5_000.0  # as SEEP
NEVER_MS = 1e9
WINDOW_S = 86_400  # one window: it closes when the last sentence says so
SLOTS = 12
TICK_S = 0.005
WAIT_S_MAX = 240.0
CHUNK = 500
COUNTER = f"counter@{SITE}#1"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    entries: Sequence[int]
    ways: Sequence[str]
    rate: int
    seconds: float
    seed: int


def measure(options: Options, show_progress: ShowProgress) -> list[Line]:
    """One row for each number of entries."""
    spark = tiercel.session("tiercel-bench", slots=SLOTS)
    spark.sparkContext.setLogLevel("OFF")  # Spark prints the loss of each worker
    rows = []
    try:
        for entries in options.entries:
            row: Line = {"entries": entries}
            faults = 0
            for way in options.ways:
                show_progress(f"{entries:,} words: {way}")
                took_s, wrong = _one(spark, options, entries, way)
                row["floor_s" if way == "none" else f"{way}_s"] = round(took_s, 3)
                faults += wrong
            rows.append({**row, "faults": faults})
    finally:
        spark.stop()
    return rows


class _Deployed:
    """One deployment of the word count with both of its ends."""

    def __init__(self, live: tiercel.Live) -> None:
        self.live = live
        built = WordCount().build(live, WordCountOptions(window_s=WINDOW_S), {SITE: 1})
        self.subscriber = built.outputs["counts"].subscribe(after=0)
        self.producer = built.inputs["sentences"].producer("words")

    def send(self, events: Sequence[Event]) -> None:
        for n in range(0, len(events), CHUNK):
            self.producer.send_many([row for _, _, row in events[n : n + CHUNK]])

    def kill(self) -> None:
        pid = next(p.pid for p in self.live.status().processes if p.name == COUNTER)
        kill(check_ours(pid, [os.getpid()]))

    def counts(self, wanted: int) -> dict[str, int]:
        """The counts of the window, when all have come."""
        found: dict[str, int] = {}
        give_up = time.monotonic() + WAIT_S_MAX
        while len(found) < wanted:
            for word, _, count in self.subscriber.poll_values(0.05):
                found[word] = found.get(word, 0) + count
            if time.monotonic() > give_up:
                raise UserError(
                    f"{wanted - len(found):,} of {wanted:,} words have no count after {WAIT_S_MAX:g} s"
                )
        return found


@contextmanager
def _deployed(spark: Any, checkpoint_ms: float) -> Iterator[_Deployed]:
    with tiercel.start(spark, [SITE], settings=tiercel.Settings(checkpoint_ms=checkpoint_ms)) as live:
        yield _Deployed(live)


def _one(spark: Any, options: Options, entries: int, way: str) -> tuple[float, int]:
    """Seconds from the death to the last count, and how many counts are wrong."""
    app, chosen = WordCount(), WordCountOptions(words=entries, window_s=WINDOW_S)
    first = every_word(entries)
    load = list(
        islice(app.generate(chosen, options.seed, options.rate), round(options.rate * options.seconds))
    )
    last = app.last_events(chosen, load[-1][0])
    with _deployed(spark, NEVER_MS if way == "replay" else CHECKPOINT_MS) as run:
        run.send(first)
        run.producer.flush(WAIT_S_MAX)
        begun = time.monotonic()
        sent = 0
        while sent < len(load):
            due = min(len(load), int((time.monotonic() - begun) * options.rate) + 1)
            run.send(load[sent:due])
            sent = due
            time.sleep(TICK_S)
        run.producer.flush(WAIT_S_MAX)
        if way == "source":
            with _deployed(spark, CHECKPOINT_MS) as fresh:
                fresh.producer.flush()
                run.kill()
                killed = time.monotonic()
                fresh.send([*first, *load, *last])
                found = fresh.counts(entries)
                took_s = time.monotonic() - killed
        else:
            if way != "none":
                run.kill()
            killed = time.monotonic()
            run.send(last)
            found = run.counts(entries)
            took_s = time.monotonic() - killed
    wanted = Counter(word for _, _, row in (*first, *load) for word in row[1].split(" "))
    return took_s, sum(found.get(word) != count for word, count in wanted.items())


def every_word(entries: int) -> list[Event]:
    """Sentences that have each word once: they fill the state."""
    words = [word_of(n) for n in range(entries)]
    sentences = [words[n : n + WORDS_PER_SENTENCE] for n in range(0, entries, WORDS_PER_SENTENCE)]
    return [(0, "sentences", (-2 - n, " ".join(part), START)) for n, part in enumerate(sentences)]
