"""A staged batch is published once, whoever commits it, however often, and wherever it stopped before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from averages import LETTERS, Averages, averages, reading
from tiercel.bench.averages import INPUT, SITE
from tiercel.core.records import Row
from tiercel.errors import UserError
from tiercel.runtime import feeds
from tiercel.runtime.client import Producer
from tiercel.runtime.feeds import Feed, Plan, Stage, StagedFile, read_frames
from tiercel.spark.schema import FEED_LETTER_SCHEMA, Columns


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Averages]:
    with averages(tmp_path, checkpoint_ms=50.0) as running:
        yield running


def packed(deployment: Averages, first: int, count: int) -> list[Row]:
    return [deployment.columns.pack(reading(f"s{n % 3}", n)) for n in range(first, first + count)]


def staged(deployment: Averages, feed: Feed, batch: int, attempt: int = 0) -> list[StagedFile]:
    """Two partitions with 1,200 rows each, numbered on over batches."""
    files = []
    for partition in (1, 0):
        stage = Stage(feed.staging(batch), partition, attempt)
        stage.add(packed(deployment, 2_400 * batch + 1_200 * partition, 1_200))
        files.append(stage.finish())
    return files


def numbers(deployment: Averages) -> list[int]:
    """The n of every output, in the order of the log."""
    return [row["n"] for row in deployment.averages()]


def of_sensor(found: list[int], sensor: int) -> list[int]:
    return [n for n in found if n % 3 == sensor]


def test_frames_come_back_from_their_file_and_wide_rows_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "FRAME_BYTES_MAX", 3_000)
    rows: list[Row] = [(b"k", 0, ["x" * 1_000, n]) for n in range(10)]
    stage = Stage(tmp_path, 3, 1)
    stage.add(rows)
    file = stage.finish(StagedFile(3, "refused.frames", 1, 2))
    assert (file.partition, file.rows) == (3, 10)
    assert (file.bad, file.bad_file, file.bad_frames) == (2, "refused.frames", 1)
    frames = list(read_frames(tmp_path / file.file))
    assert len(frames) == file.frames > 1
    assert [row for frame in frames for row in frame] == rows
    assert list(read_frames(tmp_path / file.file, skip=2)) == frames[2:]


def test_a_batch_that_is_committed_again_changes_nothing(deployment: Averages) -> None:
    feed = Feed(deployment.place, "query-1")
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
def test_a_commit_that_was_cut_off_is_finished_as_it_was_planned(
    deployment: Averages, published: int, attempt: int
) -> None:
    feed = Feed(deployment.place, "query-1")
    files = sorted(staged(deployment, feed, 0), key=lambda file: file.partition)
    feed._decide(0, Plan(INPUT, SITE, 1, files))
    with Producer(deployment.place, INPUT, name="feed|query-1") as producer:
        frames = [f for file in files for f in read_frames(feed.staging(0) / file.file)]
        for seq, rows in enumerate(frames[:published], 1):
            producer.send_frame(seq, rows)
    stage = Stage(feed.staging(0), 0, attempt)  # the later attempt has got other rows: they do not count
    stage.add(packed(deployment, 100_000, 100))
    plan = feed.publish(0, INPUT, SITE, [stage.finish()])
    assert plan.done
    assert plan.files == files
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))


LETTER = Columns(FEED_LETTER_SCHEMA)


def staged_with_letters(deployment: Averages, feed: Feed) -> list[StagedFile]:
    """Two partitions with 1,200 rows and 700 dead letters each: three and two frames."""
    files = []
    for partition in (1, 0):
        stage, refused = Stage(feed.staging(0), partition, 0), Stage(feed.staging(0), partition, 0)
        stage.add(packed(deployment, 1_200 * partition, 1_200))
        refused.add([LETTER.pack(("no", None, n, "{}", feed.name, 0, partition)) for n in range(700)])
        files.append(stage.finish(refused.finish()))
    return files


@pytest.mark.parametrize("published", [0, 1, 3, 4, 5, 10])
def test_dead_letters_are_part_of_the_plan(deployment: Averages, published: int) -> None:
    """Whoever repeats the batch, after so many frames of it, sends the same frames under the same numbers."""
    feed = Feed(deployment.place, "query-1")
    files = sorted(staged_with_letters(deployment, feed), key=lambda file: file.partition)
    feed._decide(0, Plan(INPUT, SITE, 1, files, letters=LETTERS))
    parts = [(LETTERS, f.bad_file) for f in files] + [(INPUT, f.file) for f in files]
    frames = [(s, f) for s, file in parts for f in read_frames(feed.staging(0) / file)]
    with Producer(deployment.place, INPUT, name="feed|query-1", joins=True) as producer:
        for seq, (stream, rows) in enumerate(frames[:published], 1):
            producer.send_frame(seq, rows, stream=stream)
    for _ in range(2):
        plan = feed.publish(0, INPUT, SITE, staged_with_letters(deployment, feed), LETTERS)
    assert (plan.done, plan.frames, plan.rows, plan.bad) == (True, 10, 2_400, 1_400)
    assert plan.files == files
    letters = deployment.letters()
    assert [(row["partition"], row["offset"]) for row in letters] == [
        (p, n) for p in (0, 1) for n in range(700)
    ]
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))


def test_a_plan_of_before_there_were_dead_letters_is_followed(deployment: Averages) -> None:
    feed = Feed(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed._decide(0, Plan(INPUT, SITE, 1, sorted(files, key=lambda file: file.partition)))
    path = feed.directory / "0.json"
    plan = json.loads(path.read_bytes())
    del plan["letters"]
    for file in plan["files"]:
        del file["bad_file"], file["bad_frames"]
        file["bad"] = 3
    path.write_text(json.dumps(plan))
    assert feed.publish(0, INPUT, SITE, [], LETTERS).done
    deployment.wait_for(2_400)
    assert sorted(numbers(deployment)) == list(range(2_400))
    assert deployment.letters() == []


def test_a_batch_that_failed_before_it_was_planned_leaves_nothing(deployment: Averages) -> None:
    feed = Feed(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed.drop(0)
    assert not feed.staging(0).exists()
    files = staged(deployment, feed, 0)
    feed._decide(0, Plan(INPUT, SITE, 1, files))
    feed.drop(0)
    assert feed.staging(0).exists()


def test_only_the_last_plans_are_kept(deployment: Averages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PLANS_KEPT", 2)
    feed = Feed(deployment.place, "query-1")
    for batch in range(4):
        feed.publish(batch, INPUT, SITE, [])
    assert sorted(path.name for path in feed.directory.iterdir()) == ["2.json", "3.json"]


def test_a_router_that_has_forgotten_frames_is_noticed(deployment: Averages) -> None:
    feed = Feed(deployment.place, "query-1")
    files = staged(deployment, feed, 0)
    feed._decide(0, Plan(INPUT, SITE, 40, files))
    with pytest.raises(UserError, match="knows 0 frames of this feed, but batch 0 begins with frame 40"):
        feed.publish(0, INPUT, SITE, files)
