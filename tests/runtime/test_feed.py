"""The batches of a feed over real connections: staged at the router, published by one commit."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from averages import DEAD_LETTERS, Averages, averages, reading
from tiercel.bench.operators import INPUT, SITE
from tiercel.core.messages import BatchTask, StagedPart
from tiercel.core.model.log import Row
from tiercel.errors import UserError
from tiercel.runtime.client import feed as feeds
from tiercel.runtime.client.batch_task import BatchTaskClient
from tiercel.runtime.client.feed import FeedClient, keep_site
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, RowCodec

FEED = "a-query"
ROWS = 1_200  # of a partition


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Averages]:
    with averages(tmp_path / "storage", checkpoint_ms=50.0) as running:
        yield running


def packed(deployment: Averages, first: int, count: int) -> list[Row]:
    return [deployment.columns.pack(reading(f"s{n % 3}", n)) for n in range(first, first + count)]


def staged(deployment: Averages, batch: int, dead_letters: int = 0) -> list[StagedPart]:
    """Two partitions, each in frames of 100 rows, numbered on over batches."""
    parts = []
    for partition in (0, 1):
        client = BatchTaskClient(deployment.place, SITE)
        task = BatchTask(FEED, batch, partition, uuid.uuid4().hex)
        client.begin(task, INPUT)
        first = 2 * ROWS * batch + ROWS * partition
        for n in range(0, ROWS, 100):
            client.send(INPUT, packed(deployment, first + n, 100))
        letters = RowCodec(FEED_DEAD_LETTER_SCHEMA)
        for n in range(dead_letters):
            client.send(DEAD_LETTERS, [letters.pack(("why", None, n, "{}", FEED, batch, partition))])
        client.flush()
        client.close()
        parts.append(StagedPart(task.attempt, ROWS // 100 + dead_letters))
    return parts


def commit(deployment: Averages, batch: int, parts: list[StagedPart]) -> None:
    with FeedClient(deployment.place, SITE, FEED) as client:
        client.commit(batch, INPUT, parts, -1)


def numbers(deployment: Averages) -> list[int]:
    return [row["n"] for row in deployment.averages()]


def test_committing_a_batch_again_changes_nothing(deployment: Averages) -> None:
    for batch in (0, 1):
        parts = staged(deployment, batch)
        commit(deployment, batch, parts)
        commit(deployment, batch, parts)
        commit(deployment, batch, staged(deployment, batch))  # as a driver that was started again
    deployment.wait_for(4 * ROWS)
    found = numbers(deployment)
    assert sorted(found) == list(range(4 * ROWS))
    for sensor in range(3):  # in the order of the partitions
        assert [n for n in found if n % 3 == sensor] == list(range(sensor, 4 * ROWS, 3))


def test_staged_rows_outlive_the_router_that_took_them(deployment: Averages) -> None:
    parts = staged(deployment, 0)
    deployment.restart_router()
    commit(deployment, 0, parts)
    deployment.wait_for(2 * ROWS)
    assert sorted(numbers(deployment)) == list(range(2 * ROWS))


def test_a_batch_is_published_once_by_a_router_that_restarts_while_it_publishes(deployment: Averages) -> None:
    parts = staged(deployment, 0)
    committing = threading.Thread(target=commit, args=(deployment, 0, parts))
    committing.start()
    deployment.restart_router()
    committing.join()
    deployment.wait_for(2 * ROWS)
    assert sorted(numbers(deployment)) == list(range(2 * ROWS))


def test_dead_letters_are_published_with_their_batch(deployment: Averages) -> None:
    parts = staged(deployment, 0, dead_letters=2)
    assert deployment.dead_letters() == []
    commit(deployment, 0, parts)
    commit(deployment, 0, parts)
    assert sorted((letter["partition"], letter["offset"]) for letter in deployment.dead_letters()) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_router_that_lost_acknowledged_batches_is_detected(deployment: Averages, tmp_path: Path) -> None:
    commit(deployment, 0, staged(deployment, 0))
    with pytest.raises(UserError, match="lost acknowledged frames"):
        commit(deployment, 2, staged(deployment, 2))


def test_router_that_lost_what_was_staged_refuses_the_commit(deployment: Averages, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing of 3 staged frames are here"):
        commit(deployment, 0, [StagedPart("another router's", 3)])


def test_commit_fails_when_its_router_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "NO_PROGRESS_S", 1.0)
    with averages(tmp_path / "gone") as deployment:
        parts = staged(deployment, 0)
        client = FeedClient(deployment.place, SITE, FEED)
    with pytest.raises(UserError, match="is not published for 1 s"):
        client.commit(0, INPUT, parts, -1)
    client.close()
    shutil.rmtree(tmp_path / "gone")


def test_a_feed_stays_at_its_site(deployment: Averages) -> None:
    keep_site(deployment.place, FEED, SITE)
    keep_site(deployment.place, FEED, SITE)
    with pytest.raises(UserError, match=f"has written at site '{SITE}', and now writes at 'elsewhere'"):
        keep_site(deployment.place, FEED, "elsewhere")
