"""Feeds: a batch that is staged by any number of attempts is published once, by its first commit."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from machines_in_memory import SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.batch_client import BatchClient, CommitClient
from tiercel.core.logs import staged
from tiercel.core.machine.events import Connected
from tiercel.core.model.log import Row
from tiercel.core.settings import Settings

FEED = "f"
INSTANCES = ("op@a#0", "op@a#1")


def deployment(**settings: Any) -> SmallDeployment:
    return SmallDeployment(topology(("a",), instances=INSTANCES), Settings(**settings)).start()


def rows(*values: int, slot: int = 0) -> list[Row]:
    return [(key_in(slot), 0, value) for value in values]


class Feed:
    """The tasks and the driver of one query that feeds the stream `in`."""

    def __init__(self, site: SmallDeployment, name: str = FEED) -> None:
        self.site, self.name = site, name
        self.attempts = self.drivers = 0

    def task(self, batch: int, partition: int, *frames: list[Row]) -> m.StagedPart:
        """One attempt that stages these frames."""
        self.attempts += 1
        attempt = f"{self.name}-{self.attempts}"
        client = self._join(attempt, BatchClient("a", ""))
        self._do(attempt, client.begin(m.BatchTask(self.name, batch, partition, attempt), "in"))
        for frame in frames:
            self._do(attempt, client.submit("in", frame, b""))
        assert client.untaken == 0
        self.site.stop(attempt)
        return m.StagedPart(attempt, len(frames))

    def commit(self, batch: int, *parts: m.StagedPart) -> CommitClient:
        self.drivers += 1
        name = f"driver-{self.name}-{self.drivers}"
        client = self._join(name, CommitClient("a"))
        commit = m.FeedCommit(m.BatchTask(self.name, batch, -1), "in", list(parts))
        self._do(name, client.commit(commit))
        return client

    def _join(self, name: str, client: Any) -> Any:
        self.site.machines[name] = client
        self.site.handle(name, Connected("a"))
        self.site.handle("a", Connected(name))
        return client

    def _do(self, name: str, effects: list[Any]) -> None:
        self.site.perform(name, effects)
        self.site.run()


def published(site: SmallDeployment) -> list[int]:
    return [row[2] for entry in site.log("a") for part in entry.parts.values() for row in part]


def stored(site: SmallDeployment) -> list[Any]:
    """What storage holds of staged rows."""
    logs = [key for key in site.disks["a"] if key[0] == "inbox" and key[1].startswith("staged|")]
    return logs + [key for key in site.disks["a"] if key[0] in ("staged", "publication")]


def test_nothing_is_seen_of_a_batch_before_its_commit_and_all_of_it_after() -> None:
    site = deployment()
    feed = Feed(site)
    parts = [feed.task(0, 0, rows(1, 2), rows(3)), feed.task(0, 1, rows(4, slot=3))]
    assert published(site) == []
    assert feed.commit(0, *parts).done
    assert published(site) == [1, 2, 3, 4]
    assert stored(site) == []
    assert site.disks["a"]["feed", FEED] == 0


def test_only_the_attempts_that_the_commit_names_are_published() -> None:
    site = deployment()
    feed = Feed(site)
    feed.task(0, 0, rows(1))  # it failed half-way
    counts = feed.task(0, 0, rows(1), rows(2))
    feed.task(0, 0, rows(1), rows(2))  # a speculative copy
    assert feed.commit(0, counts).done
    assert published(site) == [1, 2]
    assert stored(site) == []


def test_a_batch_that_is_run_again_after_its_commit_adds_nothing() -> None:
    site = deployment()
    feed = Feed(site)
    feed.commit(0, feed.task(0, 0, rows(1)))
    again = feed.task(0, 1, rows(1))  # the driver died; the rows are in another partition now
    assert stored(site) == [], "rows of a batch that is decided are not even stored"
    assert feed.commit(0, again).done
    assert published(site) == [1]
    assert feed.commit(1, feed.task(1, 0, rows(2))).done
    assert published(site) == [1, 2]


def test_a_task_of_a_decided_batch_need_not_send_its_rows() -> None:
    site = deployment()
    feed = Feed(site)
    feed.commit(0, feed.task(0, 0, rows(1)))
    feed.task(0, 0, rows(1))
    frames = [message for _, _, message in site.sent if isinstance(message, m.BatchFrame)]
    assert [len(frame.rows) for frame in frames] == [1, 0]


def test_staged_rows_that_are_missing_fail_the_commit() -> None:
    site = deployment()
    feed = Feed(site)
    part = feed.task(0, 0, rows(1))
    refused = feed.commit(0, part, m.StagedPart("lost", 2)).refused
    assert "batch 0 of feed f: nothing of 2 staged frames are here" in refused
    assert "1 frames of 2 staged" in feed.commit(0, m.StagedPart(part.attempt, 2)).refused
    assert published(site) == []
    assert feed.commit(0, part).done


def test_a_router_that_lost_a_batch_is_found() -> None:
    site = deployment()
    feed = Feed(site)
    feed.commit(0, feed.task(0, 0, rows(1)))
    refused = feed.commit(2, feed.task(2, 0, rows(3))).refused
    assert "batch 2 of feed f follows batch 0" in refused
    assert "lost acknowledged frames" in refused
    assert Feed(site, "new").commit(7, Feed(site, "new").task(7, 0, rows(9))).done, (
        "any batch may be a feed's first"
    )


def test_a_restarted_router_publishes_the_rest_of_a_decided_batch_once() -> None:
    site = deployment()
    feed = Feed(site)
    part = feed.task(0, 0, *[rows(n) for n in range(10)])
    site.withholds = lambda sender, to, message: isinstance(message, m.FeedPublished)
    waiting = feed.commit(0, part)
    assert not waiting.done
    site.restart("a")
    site.run()
    assert published(site) == list(range(10))
    site.withholds = lambda sender, to, message: False
    assert feed.commit(0, part).done
    assert published(site) == list(range(10))


def test_a_batch_waits_for_slow_instances_and_its_commit_too() -> None:
    site = deployment(backlog_rows_max=3)
    feed = Feed(site)
    for instance in INSTANCES:
        site.stop(instance)
    commit = feed.commit(0, feed.task(0, 0, *[rows(n) for n in range(10)]))
    assert len(published(site)) == 4, "the backlog is above its limit"
    assert not commit.done
    for instance in INSTANCES:
        site.start(instance)
    site.advance_ms(100)
    assert commit.done
    assert published(site) == list(range(10))


def test_a_delayed_acknowledgement_does_not_wait_for_an_instance_that_has_nothing_to_read() -> None:
    site = deployment(backlog_rows_max=3)
    for instance in INSTANCES:
        site.stop(instance)
    site.produce("a", *rows(1, 2, 3, 4))
    for instance in INSTANCES:  # the second one has no rows: it never sends outputs
        site.start(instance)
    site.advance_ms(100)
    assert [ack.seq for ack in site.messages("a", "p", m.ProducerAck)] == [1]


def test_a_batch_that_is_given_up_leaves_nothing() -> None:
    site = deployment()
    feed = Feed(site)
    feed.task(0, 0, rows(1))
    site.send("a", m.FeedForget(FEED, 0), "driver")
    assert stored(site) == []
    feed.commit(0, feed.task(0, 0, rows(1)))
    site.send("a", m.FeedForget(FEED, 0), "driver")
    site.send("a", m.FeedForget(FEED), "driver")
    assert published(site) == [1]
    assert ("feed", FEED) not in site.disks["a"]


def test_dead_letters_are_published_with_their_batch_once() -> None:
    site = deployment()
    feed = Feed(site)
    feed.attempts += 1
    client = feed._join("t", BatchClient("a", ""))
    feed._do("t", client.begin(m.BatchTask(FEED, 0, 0, "t"), "in"))
    feed._do("t", client.submit("in", rows(1), b""))
    feed._do("t", client.submit("dead", [(b"k", 0, ("no", b"k", 1, b""))], b""))
    assert site.outputs("dead") == []
    for _ in range(2):
        assert feed.commit(0, m.StagedPart("t", 2)).done
    assert len(site.outputs("dead")) == 1


def run_feeds(seed: int) -> tuple[list[int], list[int]]:
    """Two feeds, batches in changing partitions; processes restart, drivers die around commits."""
    random = Random(seed)
    site = deployment(backlog_rows_max=random.choice([4, 1_000]))
    feeds = [Feed(site, "f"), Feed(site, "g")]
    number, expected = 0, []
    for batch in range(5):
        for feed in feeds:
            values = list(range(number, number + random.randint(0, 12)))
            number += len(values)
            expected += values
            for _ in range(random.randint(1, 3)):  # drivers that die before, in or after their commit
                parts, left = [], list(values)
                for partition in range(random.randint(1, 3)):
                    mine = left if partition == 2 else left[: random.randint(0, len(left))]
                    left = left[len(mine) :]
                    frames = [
                        rows(*mine[n : n + 2], slot=random.randrange(SLOTS)) for n in range(0, len(mine), 2)
                    ]
                    for _ in range(random.randint(1, 2)):
                        part = feed.task(batch, partition, *frames)
                    parts.append(part)
                if left:
                    parts.append(feed.task(batch, 9, rows(*left)))
                what = random.random()
                if what < 0.2:
                    site.restart("a")
                elif what < 0.4:
                    site.restart(random.choice(INSTANCES))
                elif what < 0.6:
                    site.withholds = lambda sender, to, message: isinstance(message, m.FeedPublished)
                    feed.commit(batch, *parts)
                    site.withheld.clear()
                    site.withholds = lambda sender, to, message: False
                    if random.random() < 0.5:
                        site.restart("a")
            committed = feed.commit(batch, *parts)
            for _ in range(50):
                if committed.done or committed.refused:
                    break
                site.advance_ms(100)
            assert committed.done, committed.refused
    return sorted(published(site)), expected


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_published_once_through_attempts_restarts_and_dead_drivers(seed: int) -> None:
    found, expected = run_feeds(seed)
    assert found == sorted(expected)


def failing(seeds: int = 40) -> int:
    failures = 0
    for seed in range(seeds):
        try:
            found, expected = run_feeds(seed)
            failures += found != sorted(expected)
        except (AssertionError, KeyError, IndexError):
            failures += 1
    return failures


def test_without_the_rule_that_the_first_commit_decides_rows_are_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged.StagedLogs, "is_decided", lambda self, feed, batch: False)
    assert failing() > 0


def test_without_the_position_in_the_same_write_rows_are_doubled_or_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = staged.StagedLogs.advance

    def forgets(self: staged.StagedLogs, step: Any, feed: str) -> None:
        advance(self, step, feed)
        step.puts.pop(("publication", feed), None)
        for key in [key for key in step.deletes if key[0] == "inbox"]:
            del step.deletes[key]

    monkeypatch.setattr(staged.StagedLogs, "advance", forgets)
    monkeypatch.setattr(
        staged.StagedLogs, "finish", lambda self, step, feed: self.publications.pop(feed).batch
    )
    assert failing() > 0
