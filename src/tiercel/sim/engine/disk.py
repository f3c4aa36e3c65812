"""A virtual disk: batches are seen at once, become durable in order, and a crash keeps a prefix.

Responsible for: what a process finds on its disk when it restarts.
Not responsible for: reading and writing (process.py), the meaning of keys (core/).

    write --> waiting --sync starts--> in the sync --sync ends--> durable, on_durable(seq)
                 |                          |
                 +--------- crash ----------+---> a random prefix of both is durable, the rest gone

One sync covers every batch that waits when it starts (group commit) and is reported once, with
the seq of its last batch, which stands for all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from tiercel.core.machine.effects import StorageKey, Write
from tiercel.sim.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from tiercel.core.model.log import Entry

INBOX_TABLE = "inbox"  # keys (INBOX_TABLE, inbox, offset) make up the logs that `read_log` reads
OS_SYNC_MS = 0.01  # durability "os": the batch only has to reach the kernel's page cache


class StoredValueChanged(AssertionError):
    """Someone changed a value after writing it: on a real disk that change would not be there."""


class InboxLog:
    """Entries of one inbox by offset: appended at the end, trimmed at the front."""

    __slots__ = ("entries", "first", "last")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.first = 0  # no entry lies below it
        self.last = -1  # no entry lies above it

    def put(self, offset: int, entry: Entry) -> None:
        """Add or replace an entry."""
        if not self.entries:
            self.first = self.last = offset
        elif offset > self.last:
            self.last = offset
        elif offset < self.first:
            self.first = offset
        self.entries[offset] = entry

    def remove(self, offset: int) -> None:
        """Forget an entry; to remove what is not there changes nothing."""
        entries = self.entries
        if entries.pop(offset, None) is None or not entries:
            return
        while self.first not in entries:
            self.first += 1
        while self.last not in entries:
            self.last -= 1

    def read(self, after: int, limit: int) -> list[Entry]:
        """List up to `limit` entries above `after`, in order of offset."""
        entries = self.entries
        found: list[Entry] = []
        if not entries:
            return found
        for offset in range(max(after + 1, self.first), self.last + 1):
            if len(found) >= limit:
                break
            entry = entries.get(offset)
            if entry is not None:
                found.append(entry)
        return found


OnDurable = Callable[[int], object]


class Disk:
    """The storage of one process name; it outlives the incarnations that write to it.

    `sync_ms` is the mean time of a sync, `read_ms` the time of every read (so reads stay in order).

    Stored values are immutable by convention and never copied. `check_aliasing` (slow) detects
    violations: it remembers how each value looked when it was written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        sync_ms: float,
        durability: Literal["disk", "os"] = "disk",
        read_ms: float = 0.05,
        name: str = "disk",
        check_aliasing: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._sync_ms = sync_ms if durability == "disk" else OS_SYNC_MS
        self.durability = durability
        self.read_ms = read_ms
        self.name = name
        self.syncs = 0
        self._visible: dict[StorageKey, Any] = {}
        self._durable: dict[StorageKey, Any] = {}
        self._logs: dict[str, InboxLog] = {}  # index of the inbox keys in `_visible`
        self._waiting: list[tuple[Write, OnDurable]] = []  # visible, not durable, oldest first
        self.durable_batches = 0  # the copy with more batches is the newer one
        self._syncing = False
        self._generation = 0  # grows at a crash, so that a sync under way then reports nothing
        self._slow_factor = 1.0
        self._slow_until_ms = 0.0
        self._full_until_ms = 0.0
        self._whole_ms = 0.0  # when the whole share of a takeover has arrived
        self._looks: dict[int, tuple[Any, str]] | None = {} if check_aliasing else None

    def write(self, write: Write, on_durable: OnDurable) -> None:
        """Take one atomic batch; `on_durable` of the last batch of a sync is called after it."""
        if self._looks is not None:
            for value in write.puts.values():
                self._looks.setdefault(id(value), (value, repr(value)))
        self._visible.update(write.puts)
        for key, value in write.puts.items():
            if key[0] == INBOX_TABLE:
                log = self._logs.get(key[1])
                if log is None:
                    log = self._logs[key[1]] = InboxLog()
                log.put(key[2], value)
        for key in write.deletes:
            self._visible.pop(key, None)
            if key[0] == INBOX_TABLE and key[1] in self._logs:
                self._logs[key[1]].remove(key[2])
        self._waiting.append((write, on_durable))
        if not self._syncing:
            self._start_sync()

    def read_log(self, inbox: str, after: int, limit: int) -> list[Entry]:
        """List up to `limit` entries of an inbox above `after`, in order, durable or not."""
        log = self._logs.get(inbox)
        found = [] if log is None else log.read(after, limit)
        self._check_looks(found)
        return found

    def read(self, key: StorageKey) -> Any:
        """The value stored under this key, durable or not."""
        value = self._visible[key]
        self._check_looks([value])
        return value

    def items(self) -> dict[StorageKey, Any]:
        """Copy all that can be read now, durable or not; in the order of places, as a real store has it."""
        self._check_looks(self._visible.values())
        return {place: self._visible[place] for place in sorted(self._visible, key=_order)}

    def copy_durable(self) -> dict[StorageKey, Any]:
        """Copy what a power loss at this instant would leave for certain."""
        self._check_looks(self._durable.values())
        return dict(self._durable)

    def crash(self, lose_unsynced: bool) -> None:
        """End what the process had under way here; nothing is reported durable any more.

        With `lose_unsynced` (power loss) a random prefix of the unsynced batches survives;
        without (only the process died) the kernel finishes all of them.
        """
        waiting = self._waiting
        kept = self._scheduler.rng.randint(0, len(waiting)) if lose_unsynced else len(waiting)
        self._scheduler.trace("disk crash", self.name, kept, len(waiting))
        for write, _ in waiting[:kept]:
            self._apply(write)
        self._lose_what_has_not_come()
        self._waiting = []
        self._syncing = False
        self._generation += 1
        self._show(dict(self._durable))
        self._check_looks(self._visible.values())

    def replace_with_takeover(self, items: dict[StorageKey, Any], coming_ms: float) -> None:
        """Replace the content by the share of a dead instance, whose values arrive within `coming_ms`."""
        self._waiting = [(Write(write.seq, {}, ()), on_durable) for write, on_durable in self._waiting]
        self._durable = dict(items)
        self.durable_batches += 1
        self._show(dict(items))
        self._whole_ms = self._scheduler.now_ms + coming_ms
        self.hold_durability(coming_ms)

    def hold_durability(self, coming_ms: float) -> None:
        """Rule: nothing becomes durable before all of the state that it depends on has arrived."""
        self.full(coming_ms)

    def _lose_what_has_not_come(self) -> None:
        """A crash during a takeover loses the share: a driver must not use part of it."""
        if self._scheduler.now_ms < self._whole_ms:
            self._durable.clear()

    def adopt(self, other: Disk) -> None:
        """Replace everything by a copy of another place's durable content."""
        self.crash(lose_unsynced=True)
        self._durable = other.copy_durable()
        self.durable_batches = other.durable_batches
        self._show(dict(self._durable))

    def fork(self) -> Disk:
        """Split off a copy that takes over the batches under way, with their callbacks.

        It is the disk of a zombie: no other process sees its later writes. This disk still counts the
        batches as its own until it crashes, so the caller must crash it next.
        """
        twin = Disk(
            self._scheduler,
            sync_ms=self._sync_ms,
            durability=self.durability,
            read_ms=self.read_ms,
            name=self.name + " (zombie)",
        )
        twin._looks = self._looks
        twin._slow_factor, twin._slow_until_ms = self._slow_factor, self._slow_until_ms
        twin._full_until_ms = self._full_until_ms
        twin._whole_ms = self._whole_ms
        twin._durable = dict(self._durable)
        twin.durable_batches = self.durable_batches
        twin._show(dict(self._visible))
        twin._waiting = list(self._waiting)
        if twin._waiting:
            twin._start_sync()
        return twin

    def slow(self, factor: float, for_ms: float) -> None:
        """Make the syncs that start within this time take `factor` times as long."""
        self._scheduler.trace("disk slow", self.name, factor, for_ms)
        self._slow_factor = factor
        self._slow_until_ms = self._scheduler.now_ms + for_ms

    def full(self, for_ms: float) -> None:
        """Let nothing become durable for this time; the batches are kept and synced afterwards."""
        self._scheduler.trace("disk full", self.name, for_ms)
        self._full_until_ms = max(self._full_until_ms, self._scheduler.now_ms + for_ms)

    def _start_sync(self) -> None:
        self._syncing = True
        scheduler = self._scheduler
        delay_ms = scheduler.drawn_ms(self._sync_ms)
        if scheduler.now_ms < self._slow_until_ms:
            delay_ms *= self._slow_factor
        scheduler.call_after(delay_ms, self._end_sync, self._generation, len(self._waiting))

    def _end_sync(self, generation: int, covered: int) -> None:
        if generation != self._generation:
            return
        if self._scheduler.now_ms < self._full_until_ms:
            self._scheduler.call_at(self._full_until_ms, self._end_sync, generation, covered)
            return
        waiting = self._waiting
        for index in range(covered):
            self._apply(waiting[index][0])
        last, on_durable = waiting[covered - 1]
        del waiting[:covered]
        self.syncs += 1
        self._syncing = False
        if waiting:
            self._start_sync()
        on_durable(last.seq)

    def _apply(self, write: Write) -> None:
        self.durable_batches += 1
        durable = self._durable
        durable.update(write.puts)
        for key in write.deletes:
            durable.pop(key, None)

    def _show(self, content: dict[StorageKey, Any]) -> None:
        self._visible = content
        self._logs = {}
        for key, value in content.items():
            if key[0] == INBOX_TABLE:
                self._logs.setdefault(key[1], InboxLog()).put(key[2], value)

    def _check_looks(self, values: Iterable[Any]) -> None:
        if self._looks is None:
            return
        for value in values:
            _, look = self._looks[id(value)]
            if repr(value) != look:
                message = (
                    f"seed {self._scheduler.seed}, {self._scheduler.now_ms:.3f} ms, {self.name}: "
                    f"written as {look}, now {value!r}"
                )
                raise StoredValueChanged(message)


def _order(place: StorageKey) -> list[tuple[str, Any]]:
    return [(type(part).__name__, part) for part in place]
