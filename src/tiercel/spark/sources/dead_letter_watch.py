"""The watch over dead letters that nobody reads: a row that is missing from a sink must not be silent.

Responsible for: counting the dead letters of a deployment, and a warning with the first reason.
Not responsible for: making them (core/instance/user_code.py, sources/), reading them (`stream.dead_letters`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tiercel.errors import UserError
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import decode_payloads

log = logging.getLogger(__name__)

POLL_S = 0.5
WARN_S = 30.0  # between two warnings about one stream


class DeadLetterWatch:
    """Reads streams of dead letters in a thread of its own, from their beginning."""

    def __init__(self, deployment: DeploymentDir, streams: Sequence[str]) -> None:
        self.counts: dict[str, int] = dict.fromkeys(streams, 0)
        self._readers = {stream: Subscriber(deployment, stream, after=0) for stream in streams}
        self._warned_s: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercel-dead-letters", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for reader in self._readers.values():
            reader.close()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            for stream, reader in self._readers.items():
                try:
                    entries = reader.poll(0.0)
                except UserError as failure:  # its log is gone: the other streams go on
                    log.debug("dead letters of %s: %s", stream, failure)
                    continue
                rows = decode_payloads([output.row[2] for entry in entries for output in entry.outputs])
                if rows:
                    self.counts[stream] += len(rows)
                    self._warn(stream, rows[0][0])  # the first column of every dead letter is its reason

    def _warn(self, stream: str, reason: str) -> None:
        now = time.monotonic()
        if now - self._warned_s.get(stream, -WARN_S) >= WARN_S:
            self._warned_s[stream] = now
            log.warning(
                "%d rows are dead letters of stream %s, and missing from the result; the first reason: %s",
                self.counts[stream],
                stream,
                reason,
            )
