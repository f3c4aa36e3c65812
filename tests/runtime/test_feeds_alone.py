"""A feed whose deployment has ended: its batch fails after a while, and is not waited for without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from averages import Averages, averages, reading
from tiercel.bench.averages import INPUT, SITE
from tiercel.core.records import Row
from tiercel.errors import UserError
from tiercel.runtime import feeds
from tiercel.runtime.client import KEPT_FRAMES_MAX, Producer
from tiercel.runtime.feeds import Feed, Stage


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Averages]:
    with averages(tmp_path, checkpoint_ms=50.0) as running:
        yield running


@pytest.mark.parametrize("frames", [2, 2 * KEPT_FRAMES_MAX])
def test_a_batch_fails_when_its_router_is_gone_however_large_it_is(
    deployment: Averages, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    """One of more frames than a producer keeps waited for room, for ever: the query did not fail."""
    monkeypatch.setattr(feeds, "PATIENCE_S", 0.5)
    monkeypatch.setattr(feeds, "FRAME_ROWS_MAX", 10)
    close = Producer.close
    monkeypatch.setattr(Producer, "close", lambda self: close(self, 0.1))
    feed = Feed(deployment.place, "alone")
    stage = Stage(feed.staging(0), 0, 0)
    stage.add([deployment.columns.pack(reading("s", n)) for n in range(10 * frames)])
    file, read = stage.finish(), feeds.read_frames

    def read_when_it_is_gone(path: Path, skip: int = 0) -> Iterator[list[Row]]:
        deployment._hosts[0].end()
        yield from read(path, skip)

    monkeypatch.setattr(feeds, "read_frames", read_when_it_is_gone)
    told: list[str] = []

    def publish() -> None:
        try:
            feed.publish(0, INPUT, SITE, [file])
        except UserError as error:
            told.append(str(error))

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it waits"
    assert "not safe after 0.5 s" in told[0]
