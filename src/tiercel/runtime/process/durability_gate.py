"""The durability gate: decides how far the writes of a process are durable, and holds what rests on them.

Responsible for: one commit per turn; waiting for the disk, a replica and a backup, as the deployment asks;
    `Confirmed` messages that leave only when a backup holds the log they confirm.
Not responsible for: uploading (backup/uploader.py), replicating (replication/primary.py), sending (host.py).

    commit --> write-ahead log --(disk: sync)----(replica holds it)----(strict: backup holds it)--> durable

An instance learns that a checkpoint is durable only when its backup has it, so nothing is trimmed that a
restored instance needs again. A router confirms a part of the log to its instances only when its own backup
has that part. No checkpoint therefore rests on entries that a lost disk could take back: whichever process is
restored, a log is never behind the checkpoints of its readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tiercel.core.machine.effects import Write
from tiercel.core.messages import Confirmed, Message
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.replication.primary import Replication
from tiercel.runtime.storage.store import Store

HELD_MAX = 1_024  # per peer; a later message confirms all that the earlier ones confirm


class BackupGate:
    """How far the backup of a process is, and the messages that wait for it.

    With `is_strict`, nothing is durable before it is in the backup.
    """

    def __init__(self, uploader: BackupUploader, *, is_strict: bool) -> None:
        self.uploader = uploader
        self.is_strict = is_strict
        self.uploaded = 0  # through this seq
        self._held: dict[str, list[tuple[int, Message]]] = {}

    def start(self, on_uploaded: Callable[[int], object]) -> None:
        self.uploader.start(on_uploaded)

    def holds(self, to: str, message: Message, written: int) -> bool:
        """Whether this message must wait until everything written so far is in the backup."""
        if self.is_strict or type(message) is not Confirmed or written <= self.uploaded:
            return False
        held = self._held.setdefault(to, [])
        held.append((written, message))
        if len(held) > HELD_MAX:
            self._held[to] = held[::-2][::-1]  # every second one, and the last in any case
        return True

    def forget(self, peer: str) -> None:
        """The peer disconnected: it gets these messages again, or later ones, when it returns."""
        self._held.pop(peer, None)

    def on_uploaded(self, seq: int) -> list[tuple[str, Message]]:
        """The messages that may leave now; of several to one peer only the last."""
        self.uploaded = max(self.uploaded, seq)
        ready: list[tuple[str, Message]] = []
        for peer, held in list(self._held.items()):
            free = [message for written, message in held if written <= self.uploaded]
            ready += [(peer, message) for message in free[-1:]]
            self._held[peer] = held[len(free) :]
        return ready


class Storage(NamedTuple):
    """An open store, and the backup and the replica that follow it, if there are any."""

    store: Store
    backup: BackupGate | None = None
    replication: Replication | None = None


class GateOwner(Protocol):
    """What the gate asks of its host. All in the loop's thread."""

    @property
    def has_ended(self) -> bool: ...

    def on_durable(self, seq: int) -> None: ...

    def on_fenced(self, latest: int) -> None: ...

    def send_held(self, peer: str, message: Message) -> None: ...

    def send_at_once(self, peer: str, message: Message) -> None: ...

    def drop(self, peer: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class DurabilityGate:
    """The writes of one process, from the machine until they are durable."""

    def __init__(self, storage: Storage, owner: GateOwner) -> None:
        self.store, self._backup, self._replication = storage
        self._owner = owner
        self._synced = 0  # on the disk, or in the write-ahead log if that is enough
        self._durable = 0  # the machine knows
        self._is_syncing = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        owner = self._owner
        if self._replication is not None:
            self._replication.start(owner.send_at_once, owner.drop, self._advance, owner.on_fenced)
        if self._backup is not None:
            self._backup.start(lambda seq: loop.call_soon_threadsafe(self._on_uploaded, seq))

    async def close(self) -> None:
        """Commit and upload the rest, then close the store."""
        try:
            self.store.commit()
            if self._backup is not None:
                await self._loop.run_in_executor(None, self._backup.uploader.close)
        finally:
            self.store.close()

    def add(self, write: Write) -> None:
        self.store.add(write)

    @property
    def is_open(self) -> bool:
        """Whether everything that was added is durable, and the machine knows."""
        return self._durable >= self.store.queued

    def commit(self) -> int | None:
        """Commit what was added; returns its seq if it is durable now, None if it must wait.

        A read of the log commits as well, without telling the machine.
        """
        seq = self.store.commit()
        if self.store.durability == "disk":
            self._sync()
            return None
        self._synced = seq
        if self._replication is not None or (self._backup is not None and self._backup.is_strict):
            return None
        self._durable = seq
        return seq

    def replicate(self) -> None:
        """Send what was committed to the replica."""
        if self._replication is not None:
            self._replication.flush()

    def holds(self, to: str, message: Message) -> bool:
        """Whether a message must wait; it is sent through `send_held` when it may leave."""
        return self._backup is not None and self._backup.holds(to, message, self.store.written)

    def forget(self, peer: str) -> None:
        if self._backup is not None:
            self._backup.forget(peer)

    # -- durability `disk`: one sync for everything that waits -----------------------------------

    def _sync(self) -> None:
        if not self._is_syncing and self._synced < self.store.written:
            self._is_syncing = True
            synced = self._loop.run_in_executor(None, self.store.sync)
            synced.add_done_callback(lambda done, seq=self.store.written: self._on_synced(done, seq))  # type: ignore[misc]

    def _on_synced(self, done: asyncio.Future[None], seq: int) -> None:
        self._is_syncing = False
        if self._owner.has_ended:
            return
        if (error := done.exception()) is not None:
            self._owner.fail(error)
            return
        self._synced = seq
        self._advance()
        self._sync()

    # -- what else must hold it ------------------------------------------------------------------

    def _on_uploaded(self, seq: int) -> None:
        if self._owner.has_ended or self._backup is None:
            return
        for peer, message in self._backup.on_uploaded(seq):
            self._owner.send_held(peer, message)
        self._advance()

    def _advance(self) -> None:
        """Tell the machine how far its writes are durable now."""
        durable = self._synced
        if self._backup is not None and self._backup.is_strict:
            durable = min(durable, self._backup.uploaded)
        if self._replication is not None:
            durable = min(durable, self._replication.acknowledged)
        if durable > self._durable:
            self._durable = durable
            self._owner.on_durable(durable)
