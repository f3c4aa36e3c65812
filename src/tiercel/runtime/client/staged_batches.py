"""Batches of rows that executors stage in files and the driver publishes once: the feed of a DataFrame.

Responsible for: files that hold a batch until it is acknowledged, which attempt counts, the numbers of its
    frames, removing old files.
Not responsible for: converting rows (spark/sources), sending them (producer.py).

    executors   rows --> feeds/FEED/BATCH/PARTITION-ATTEMPT-….frames   any attempt, any number of times
    driver      --> feeds/FEED/BATCH.json                              the plan: these files, these numbers
                --> frames under exactly these numbers                 the router drops duplicates
                --> done, files removed

The plan is made once. A driver that commits the batch again, after a crash at any point, follows the first
plan and sends the same frames under the same numbers: nothing is lost, and nothing is applied twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiercel.core.model.keys import ABSENT_WATERMARK
from tiercel.core.model.log import Row
from tiercel.errors import UserError
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.files import force, force_directory, write_whole

FRAME_ROWS_MAX = 500
FRAME_BYTES_MAX = 4 * 1024 * 1024  # a frame of wide rows is split; the wire accepts 64 MiB
LENGTH_BYTES = 4
PLANS_KEPT = 100  # Spark repeats at most this many batches by default
NO_PROGRESS_S = 600.0  # without any acknowledgement, before publishing fails

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode


class StagedFile(msgspec.Struct, frozen=True):
    """One partition's share of a batch."""

    partition: int
    file: str
    frames: int
    rows: int
    rejected: int = 0  # rows that did not fit the schema: dead letters
    newest_ms: int = ABSENT_WATERMARK  # of its rows' event times
    rejected_file: str = ""  # the file of the rejected rows
    rejected_frames: int = 0


class PublishPlan(msgspec.Struct, frozen=True):
    """How a batch is published: these files in this order, their frames numbered from `first` on.

    Dead letters go first. The router slows a feed down by delaying the acknowledgement of its last frame, and
    it acknowledges dead letters at once, because no operator processes them.
    """

    stream: str
    site: str
    first: int
    files: list[StagedFile]
    done: bool = False
    dead_letters: str = ""  # the stream of the rejected rows

    @property
    def frames(self) -> int:
        return sum(file.frames + file.rejected_frames for file in self.files)

    def parts(self) -> Iterator[tuple[str, str, int]]:
        """(stream, file, how many frames), in the order of the numbers."""
        yield from (
            (self.dead_letters, file.rejected_file, file.rejected_frames)
            for file in self.files
            if file.rejected_frames
        )
        yield from ((self.stream, file.file, file.frames) for file in self.files)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def rejected(self) -> int:
        return sum(file.rejected for file in self.files)

    @property
    def newest_ms(self) -> int:
        return max((file.newest_ms for file in self.files), default=ABSENT_WATERMARK)


# -- staging, on executors --------------------------------------------------------------------


class StagingWriter:
    """Writes the rows of one partition into a file that appears when it is complete."""

    def __init__(self, directory: Path, partition: int, attempt: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._partition = partition
        # a unique name: a batch that is run again repeats attempt numbers, perhaps with other rows
        self._path = directory / f"{partition}-{attempt}-{uuid.uuid4().hex}.frames"
        self._draft = self._path.with_suffix(".draft")
        self._file = self._draft.open("wb")
        self._rows: list[Row] = []
        self._count = self._frames = 0
        self._newest_ms = ABSENT_WATERMARK

    def add(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self._count += len(rows)
        self._newest_ms = max([self._newest_ms, *[row[1] for row in rows]])
        while len(self._rows) >= FRAME_ROWS_MAX:
            self._write(self._rows[:FRAME_ROWS_MAX])
            del self._rows[:FRAME_ROWS_MAX]

    def finish(self, dead_letters: StagedFile | None = None) -> StagedFile:
        """`dead_letters`: what was staged of the rows that did not fit."""
        if self._rows:
            self._write(self._rows)
        with self._file as file:
            force(file)
        self._draft.replace(self._path)
        force_directory(self._path.parent)
        rejected = (
            (0, "", 0)
            if dead_letters is None
            else (dead_letters.rows, dead_letters.file, dead_letters.frames)
        )
        return StagedFile(
            self._partition,
            self._path.name,
            self._frames,
            self._count,
            rejected[0],
            self._newest_ms,
            *rejected[1:],
        )

    def abandon(self) -> None:
        self._file.close()
        self._draft.unlink(missing_ok=True)

    def _write(self, rows: Sequence[Row]) -> None:
        body = _encode(rows)
        if len(body) > FRAME_BYTES_MAX and len(rows) > 1:
            half = len(rows) // 2
            self._write(rows[:half])
            self._write(rows[half:])
        else:
            self._file.write(len(body).to_bytes(LENGTH_BYTES) + body)
            self._frames += 1


def read_frames(path: Path, skip: int = 0) -> Iterator[list[Row]]:
    """The frames of a staged file, without the first `skip`."""
    with path.open("rb") as file:
        while head := file.read(LENGTH_BYTES):
            length = int.from_bytes(head)
            if skip > 0:
                skip -= 1
                file.seek(length, os.SEEK_CUR)
            else:
                yield _decode(file.read(length))


# -- publishing, in the driver ----------------------------------------------------------------


class BatchPublisher:
    """Publishes the batches of one query, or a single batch with its own name."""

    def __init__(self, deployment: DeploymentDir, name: str) -> None:
        self.deployment = deployment
        self.name = name
        self.directory = deployment.feeds / name

    def staging(self, batch: int) -> Path:
        return self.directory / str(batch)

    def plan(self, batch: int) -> PublishPlan | None:
        try:
            return msgspec.json.decode(self._plan_path(batch).read_bytes(), type=PublishPlan)
        except FileNotFoundError:
            return None

    def publish(
        self, batch: int, stream: str, site: str, files: Sequence[StagedFile], dead_letters: str = ""
    ) -> PublishPlan:
        """Send a batch unless that has been done; returns when all of it is acknowledged.

        Rows that did not fit go to the stream `dead_letters`.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        plan = self.plan(batch)
        if plan is None or not plan.done:
            with Producer(
                self.deployment,
                stream,
                name=f"feed|{self.name}",
                site=plan.site if plan else site,
                joins=True,
            ) as producer:
                if plan is None:
                    ordered = sorted(files, key=lambda file: file.partition)
                    made = PublishPlan(
                        stream, site, producer.acknowledged + 1, ordered, dead_letters=dead_letters
                    )
                    plan = self._make_plan(batch, made)
                self._send(producer, batch, plan)
                _while_progressing(producer, producer.flush)
            plan = msgspec.structs.replace(plan, done=True)
            write_whole(self._plan_path(batch), msgspec.json.encode(plan))
        self._remove_old(batch)
        return plan

    def forget(self) -> None:
        """Remove the plans: a single batch is never repeated."""
        for plan in self.directory.glob("*.json"):
            plan.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def drop(self, batch: int) -> None:
        """Remove a failed batch. A planned batch stays, because a part of it may have been sent."""
        if self.plan(batch) is None:
            shutil.rmtree(self.staging(batch), ignore_errors=True)

    def _plan_path(self, batch: int) -> Path:
        return self.directory / f"{batch}.json"

    def _make_plan(self, batch: int, plan: PublishPlan) -> PublishPlan:
        """Store this plan, unless one exists; returns the plan that counts."""
        path = self._plan_path(batch)
        draft = path.with_suffix(f".{os.getpid()}")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(plan))
            force(file)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
            force_directory(path.parent)
        draft.unlink()
        return self.plan(batch) or plan

    def _send(self, producer: Producer, batch: int, plan: PublishPlan) -> None:
        known = producer.acknowledged
        if known < plan.first - 1:
            raise UserError(
                f"the router of site {plan.site!r} knows {known} frames of this feed, but batch {batch} "
                f"begins with frame {plan.first}: its log has lost acknowledged frames",
                expected=f"a router that knows frame {plan.first - 1}",
                hint="durability='disk' survives a power loss; a new checkpoint location begins a new feed",
            )
        facts = self.deployment.manifest().topology.streams.get(plan.stream)
        delay_ms = None if facts is None else facts.delay_ms
        seq, end = plan.first, plan.first + plan.frames - 1
        for stream, file, frames in plan.parts():
            path = self.staging(batch) / file
            last = seq + frames - 1
            if last > known:
                skip = max(0, known - seq + 1)
                for number, rows in enumerate(read_frames(path, skip), seq + skip):
                    mark = None
                    if delay_ms is not None and stream == plan.stream:  # as in Spark, rows of a batch
                        mark = plan.newest_ms - delay_ms if number == end else ABSENT_WATERMARK  # share one
                    send = functools.partial(producer.send_frame, number, rows)
                    _while_progressing(producer, functools.partial(send, watermark_ms=mark, stream=stream))
            seq = last + 1

    def _remove_old(self, batch: int) -> None:
        for path in self.directory.iterdir():
            if path.is_dir() and path.name.isdecimal() and int(path.name) <= batch:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".json" and path.stem.isdecimal() and int(path.stem) <= batch - PLANS_KEPT:
                path.unlink(missing_ok=True)


def _while_progressing(producer: Producer, step: Callable[..., None]) -> None:
    """Repeat a step that times out, as long as the router acknowledges frames."""
    while True:
        before = producer.acknowledged
        try:
            step(timeout_s=NO_PROGRESS_S)
            return
        except UserError:
            if producer.acknowledged == before:
                raise
