"""A staged batch is published once, however often it is committed and wherever it stopped before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from averages import DEAD_LETTERS, Averages, averages, reading
from tiercel.bench.operators import INPUT, SITE
from tiercel.core.model.log import Row
from tiercel.errors import UserError
from tiercel.runtime.client import staged_batches as feeds
from tiercel.runtime.client.producer import UNACKED_FRAMES_MAX, Producer
from tiercel.runtime.client.staged_batches import (
    BatchPublisher,
    PublishPlan,
    StagedFile,
    StagingWriter,
    read_frames,
)
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, RowCodec


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Averages]:
    with averages(tmp_path, checkpoint_ms=50.0) as running:
        yield running


def packed(deployment: Averages, first: int, count: int) -> list[Row]:
    return [deployment.columns.pack(reading(f"s{n % 3}", n)) for n in range(first, first + count)]


def staged(deployment: Averages, feed: BatchPublisher, batch: int, attempt: int = 0) -> list[StagedFile]:
    """Two partitions with 1,200 rows each, numbered on over batches."""
    files = []
    for partition in (1, 0):
        stage = StagingWriter(feed.staging(batch), partition, attempt)
        stage.add(packed(deployment, 2_400 * batch + 1_200 * partition, 1_200))
        files.append(stage.finish())
    return files


def numbers(deployment: Averages) -> list[int]:
    """The n of every output, in the order of the log."""
    return [row["n"] for row in deployment.averages()]


def of_sensor(found: list[int], sensor: int) -> list[int]:
    return [n for n in found if n % 3 == sensor]


def test_staged_frames_are_read_back_and_wide_rows_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "FRAME_BYTES_MAX", 3_000)
    rows: list[Row] = [(b"k", 0, ["x" * 1_000, n]) for n in range(10)]
    stage = StagingWriter(tmp_path, 3, 1)
    stage.add(rows)
    file = stage.finish(StagedFile(3, "refused.frames", 1, 2))
    assert (file.partition, file.rows) == (3, 10)
    assert (file.rejected, file.rejected_file, file.rejected_frames) == (2, "refused.frames", 1)
    frames = list(read_frames(tmp_path / file.file))
    assert len(frames) == file.frames > 1
    assert [row for frame in frames for row in frame] == rows
    assert list(read_frames(tmp_path / file.file, skip=2)) == frames[2:]


def test_committing_a_batch_again_changes_nothing(deployment: Averages) -> None:
    feed = BatchPublisher(deployment.place, "query-1")
    for batch in (0, 1):
        plan = feed.publish(batch, INPUT, SITE, staged(deployment, feed, batch))
        assert (plan.first, plan.frames, plan.rows) == (1 + 6 * batch, 6, 2_400)
        again = feed.publish(batch, INPUT, SITE, staged(deployment, feed, batch, attempt=1))
        assert again == plan
        assert not feed.staging(batch).exists()
    deployment.wait_for(4_800)
    found = numbers(deployment)
    assert sorted(found) == list(range(4_800))
    for sensor in range(3):  # partitions in order, batches in order
        assert of_sensor(found, sensor) == sorted(of_sensor(found, sensor))


@pytest.mark.parametrize("attempt", [0, 7], ids=["run again", "task again"])
@pytest.mark.parametrize("published", [0, 2, 6])
def test_interrupted_commit_is_finished_by_its_first_plan(
    deployment: Averages, published: int, attempt: int
) -> None:
    feed = BatchPublisher(deployment.place, "query-1")
    files = sorted(staged(deployment, feed, 0), key=lambda file: file.partition)
    feed._make_plan(0, PublishPlan(INPUT, SITE, 1, files))
    with Producer(deployment.place, INPUT, name="feed|query-1") as producer:
        frames = [f for file in files for f in read_frames(feed.staging(0) / file.file)]
        for seq, rows in enumerate(frames[:published], 1):
            producer.send_frame(seq, rows)
    stage = StagingWriter(
        feed.staging(0), 0, attempt
    )  # the later attempt has got other rows: they do not count
    stage.add(packed(deployment, 100_000, 100))
    plan = feed.publish(0, INPUT, SITE, [stage.finish()])
    assert plan.done
    assert plan.files == files
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))


LETTER = RowCodec(FEED_DEAD_LETTER_SCHEMA)


def staged_with_letters(deployment: Averages, feed: BatchPublisher) -> list[StagedFile]:
    """Two partitions with 1,200 rows and 700 dead letters each: three and two frames."""
    files = []
    for partition in (1, 0):
        stage, refused = (
            StagingWriter(feed.staging(0), partition, 0),
            StagingWriter(feed.staging(0), partition, 0),
        )
        stage.add(packed(deployment, 1_200 * partition, 1_200))
        refused.add([LETTER.pack(("no", None, n, "{}", feed.name, 0, partition)) for n in range(700)])
        files.append(stage.finish(refused.finish()))
    return files


@pytest.mark.parametrize("published", [0, 1, 3, 4, 5, 10])
def test_dead_letters_are_published_with_their_batch(deployment: Averages, published: int) -> None:
    """Whoever repeats the batch, after so many frames of it, sends the same frames under the same numbers."""
    feed = BatchPublisher(deployment.place, "query-1")
    files = sorted(staged_with_letters(deployment, feed), key=lambda file: file.partition)
    feed._make_plan(0, PublishPlan(INPUT, SITE, 1, files, dead_letters=DEAD_LETTERS))
    parts = [(DEAD_LETTERS, f.rejected_file) for f in files] + [(INPUT, f.file) for f in files]
    frames = [(s, f) for s, file in parts for f in read_frames(feed.staging(0) / file)]
    with Producer(deployment.place, INPUT, name="feed|query-1", joins=True) as producer:
        for seq, (stream, rows) in enumerate(frames[:published], 1):
            producer.send_frame(seq, rows, stream=stream)
    for _ in range(2):
        plan = feed.publish(0, INPUT, SITE, staged_with_letters(deployment, feed), DEAD_LETTERS)
    assert (plan.done, plan.frames, plan.rows, plan.rejected) == (True, 10, 2_400, 1_400)
    assert plan.files == files
    letters = deployment.dead_letters()
    assert [(row["partition"], row["offset"]) for row in letters] == [
        (p, n) for p in (0, 1) for n in range(700)
    ]
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))


def test_plan_without_dead_letters_is_still_followed(deployment: Averages) -> None:
    feed = BatchPublisher(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed._make_plan(0, PublishPlan(INPUT, SITE, 1, sorted(files, key=lambda file: file.partition)))
    path = feed.directory / "0.json"
    plan = json.loads(path.read_bytes())
    del plan["dead_letters"]
    for file in plan["files"]:
        del file["rejected_file"], file["rejected_frames"]
        file["rejected"] = 3
    path.write_text(json.dumps(plan))
    assert feed.publish(0, INPUT, SITE, [], DEAD_LETTERS).done
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))
    assert deployment.dead_letters() == []


def test_batch_that_failed_before_its_plan_leaves_no_files(deployment: Averages) -> None:
    feed = BatchPublisher(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed.drop(0)
    assert not feed.staging(0).exists()
    files = staged(deployment, feed, 0)
    feed._make_plan(0, PublishPlan(INPUT, SITE, 1, files))
    feed.drop(0)
    assert feed.staging(0).exists()


def test_only_the_last_plans_are_retained(deployment: Averages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PLANS_KEPT", 2)
    feed = BatchPublisher(deployment.place, "query-1")
    for batch in range(4):
        feed.publish(batch, INPUT, SITE, [])
    assert sorted(path.name for path in feed.directory.iterdir()) == ["2.json", "3.json"]


def test_router_that_lost_acknowledged_frames_is_detected(deployment: Averages) -> None:
    feed = BatchPublisher(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed._make_plan(0, PublishPlan(INPUT, SITE, 40, files))
    with pytest.raises(UserError, match="knows 0 frames of this feed, but batch 0 begins with frame 40"):
        feed.publish(0, INPUT, SITE, files)


@pytest.mark.parametrize("frames", [2, 2 * UNACKED_FRAMES_MAX])
def test_publishing_fails_when_its_router_is_gone_however_large_the_batch(
    deployment: Averages, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    """One of more frames than a producer keeps waited for room, for ever: the query did not fail."""
    monkeypatch.setattr(feeds, "NO_PROGRESS_S", 0.5)
    monkeypatch.setattr(feeds, "FRAME_ROWS_MAX", 10)
    close = Producer.close
    monkeypatch.setattr(Producer, "close", lambda self: close(self, 0.1))
    feed = BatchPublisher(deployment.place, "alone")
    stage = StagingWriter(feed.staging(0), 0, 0)
    stage.add([deployment.columns.pack(reading("s", n)) for n in range(10 * frames)])
    file, read = stage.finish(), feeds.read_frames

    def read_when_it_is_gone(path: Path, skip: int = 0) -> Iterator[list[Row]]:
        deployment._hosts[0].end()
        yield from read(path, skip)

    monkeypatch.setattr(feeds, "read_frames", read_when_it_is_gone)
    errors: list[str] = []

    def publish() -> None:
        try:
            feed.publish(0, INPUT, SITE, [file])
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it waits"
    assert "not acknowledged after 0.5 s" in errors[0]
