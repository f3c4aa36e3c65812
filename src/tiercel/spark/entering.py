"""What enters a deployment when it begins: instances, initial state, then the DataFrames that feed it.

Responsible for: instances that work; initial state once in the life of a deployment; feeds as named queries
    of Spark.
Not responsible for: how rows become tuples (ends.py, feed.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tiercel.errors import UserError
from tiercel.runtime.copies import describe
from tiercel.runtime.place import Place
from tiercel.spark.console import Console
from tiercel.spark.ends import RowProducer
from tiercel.spark.hosting import Hosting, could_not_start, reason_of
from tiercel.spark.kept_state import PackedState
from tiercel.spark.schema import Columns
from tiercel.spark.streams import Feed

ATTACH_S_MAX = 60.0
INITIAL_ROWS = 500  # of initial state in one frame
INITIAL_BYTES = 4 * 1024 * 1024  # the same; a key's whole state may be large


def wait_attached(place: Place, hosting: Hosting, console: Console, instances: Iterable[str]) -> None:
    """Until they work: their routers have heard of them."""
    give_up = time.monotonic() + ATTACH_S_MAX
    missing = set(instances)
    while missing and time.monotonic() < give_up:
        for name in missing & set(hosting.failures):
            raise could_not_start(name, hosting.failures[name])
        console.refresh()
        missing -= console.running()
        missing &= set(place.wanted())  # the controller may have let one go meanwhile
        if missing:
            time.sleep(0.02)
    if missing:
        raise UserError(
            f"{', '.join(sorted(missing))} did not attach within {ATTACH_S_MAX:g} s",
            expected="every instance in touch with the router of its site",
            hint="the executors' logs say what they wait for; they must reach each other's ports",
        )


def give_initial_state(place: Place, operator: str, columns: Columns, given: DataFrame | PackedState) -> None:
    """Before the first tuple, once in the life of a deployment; sorted, so that a second try resumes."""
    if is_given(place, operator):
        return
    with RowProducer(place, f"{operator}.initial", name=f"initial-{operator}") as producer:
        if isinstance(given, PackedState):
            _refuse_another_source(place, operator, given.source)
            rows = given.rows()
        else:
            frame = given.sort(*columns.key, *[c for c in given.columns if c not in columns.key])
            rows = map(columns.pack, frame.toLocalIterator(prefetchPartitions=True))
        producer.send_initial(rows, INITIAL_ROWS, INITIAL_BYTES)
        producer.flush()
    manifest = place.manifest()
    manifest = msgspec.structs.replace(manifest, given=(*manifest.given, operator))
    place.write(manifest)
    describe(manifest)  # who restores this deployment need not have that state again


def is_given(place: Place, operator: str) -> bool:
    """Whether an operator has got all of its initial state."""
    return operator in place.manifest().given


def _refuse_another_source(place: Place, operator: str, source: str) -> None:
    """What one try has begun with, the next one goes on with: frames are told apart by their number."""
    begun = place.directory / f"initial-{operator}.source"
    with contextlib.suppress(FileNotFoundError):
        before = begun.read_text(encoding="utf-8")
        if before != source:
            what = f"the initial state of {operator!r} is {source}"
            raise UserError(what, expected=f"{before}: an earlier start has begun with it")
    begun.write_text(source, encoding="utf-8")


def check_feed_name(feed: Feed, others: Iterable[Feed]) -> None:
    """A query's name is its own while it runs, and names its checkpoint."""
    if any(o.name == feed.name and (o.query is None or o.query.isActive) for o in others):
        raise UserError(
            f"there is a feed {feed.name!r} already", expected="a name of its own", hint="feed(…, name=…)"
        )


def start_feed(place: Place, feed: Feed) -> None:
    checkpoint = feed.options.pop("checkpoint", str(place.feeds / f"checkpoint-{feed.name}"))
    trigger = feed.options.pop("trigger", "")
    writer = (
        feed.frame.writeStream.format("tiercel")
        .queryName(feed.name)
        .option("checkpointLocation", checkpoint)
        .option("storage", str(place.directory))
        .option("stream", feed.stream)
        .option("site", feed.site)
        .options(**feed.options)
    )
    if trigger == "availableNow":
        writer = writer.trigger(availableNow=True)
    elif trigger:
        writer = writer.trigger(processingTime=trigger)
    try:
        feed.query = writer.start()
    except PySparkException as error:
        raise UserError(
            f"feed {feed.name!r} cannot start: {reason_of(error)}",
            expected="a query that Spark can run, under a name that no other query of the session has",
            hint="another name: feed(…, name=…), or transform_with_state(…, name=…)",
        ) from error
