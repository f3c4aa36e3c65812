"""The asyncio driver: hosts one machine, performs its effects, decides nothing.

Responsible for: sockets, timers, the store, the order of effects; leaving in as few frames as possible.
Not responsible for: deciding anything (the machine), where the process runs (spark/).

One turn of the loop:

    frames of all peers --> events --> machine --> effects --> one commit --> Durable --> machine
                                                       |                                    |
                                                       v                                    v
                                               one write per peer                  one write per peer

A turn takes everything that has arrived, so batches grow under load by themselves; with nothing
waiting a message leaves in the same turn it came in. What need not be durable leaves before the commit:
the instances work while the router writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import assert_never

from tiercel.core.effects import (
    Effect,
    Exit,
    Launch,
    LoadCheckpoint,
    Note,
    ReadLog,
    Retire,
    Send,
    SetTimer,
    Write,
)
from tiercel.core.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.core.faults import ProtocolViolation
from tiercel.core.messages import Message
from tiercel.runtime.addresses import machine_here
from tiercel.runtime.link import HandshakeFailed
from tiercel.runtime.machine import Machine, MissingStore, OnEvents, tame_collector, wall_clock
from tiercel.runtime.metrics import Meter
from tiercel.runtime.outbox import Outbox
from tiercel.runtime.peers import LOOK_S, Peers
from tiercel.runtime.registry import Address, Registry
from tiercel.runtime.replication import Fenced, Replication
from tiercel.runtime.safekeeping import Safekeeping
from tiercel.runtime.store import Store
from tiercel.runtime.tls import TlsFiles

log = logging.getLogger(__name__)

TURN_MS_MAX = 2.0  # then what is ready leaves, even if more has come: latency under load
STORY_MAX = 200  # notes kept for the report of a failure


LoadShare = Callable[[LoadCheckpoint], Callable[[], CheckpointLoaded]]  # a thread's part, and then the loop's


class Host:
    """One process of a deployment."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        registry: Registry,
        secret: bytes,
        *,
        dials: Callable[[], Iterable[str]] | Iterable[str] = (),
        store: Store | None = None,
        backup: Safekeeping | None = None,
        replication: Replication | None = None,
        life: int | None = None,
        bind: str = "127.0.0.1",
        advertise: str = "",
        port: int = 0,
        tls: TlsFiles | None = None,
        listens: bool = True,
        on_refused: Callable[[str, HandshakeFailed], object] | None = None,
        on_launch: Callable[[str], object] | None = None,
        on_retire: Callable[[str], object] | None = None,
        metrics: Path | None = None,
        load_share: LoadShare | None = None,
        parent: int = 0,
    ) -> None:
        self.name = name
        self.machine = machine
        self._on_events: OnEvents = getattr(machine, "on_events", self._one_event)
        self.ended_because = ""
        self.story: deque[str] = deque(maxlen=STORY_MAX)
        self.turns = self.events = 0
        self.busy_s = 0.0
        self._registry = registry
        self._store = store
        self._backup = backup
        self._replication = replication
        if life is None:
            life = store.life if store is not None else time.time_ns()  # a later start has a larger one
        self._life = life
        self._dials = dials
        self._listens = listens
        self._parent = parent  # the process without which we are nobody's task; 0: none
        self._advertise = advertise or bind
        self._peers = Peers(
            self,
            name,
            secret,
            life,
            registry,
            dials=self._whom_to_dial,
            bind=bind,
            port=port,
            tls=tls,
            on_refused=on_refused,
        )
        self._load_share = load_share
        self._inheriting: asyncio.Task[None] | None = None
        self._on_launch, self._on_retire = on_launch, on_retire
        self._meter = Meter(metrics, name, machine, replication) if metrics is not None else None
        self._clock = wall_clock()
        self._links = self._peers.links
        self._waiting: deque[Event] = deque()
        self._planned = False
        self._outbox = Outbox(self._links)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._syncing = False
        self._synced = self._durable = 0

    # -- life ----------------------------------------------------------------------------------

    async def run(self, stage: int = -1, attempt: int = -1, task: int = -1, executor: str = "") -> str:
        """Serve until the machine ends or the registry dismisses us; returns the reason."""
        self._loop = loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        looking: asyncio.Task[None] | None = None
        try:
            if self._replication is not None:
                self._replication.start(self._outbox.say_at_once, self._drop, self._vouch, self._give_way)
            if self._backup is not None:
                self._backup.start(lambda seq: loop.call_soon_threadsafe(self._on_shipped, seq))
            if self._listens:
                self._publish(await self._peers.listen(), stage, attempt, task, executor)
                looking = loop.create_task(self._look_whether_wanted())
                tame_collector()
            self._peers.dial()
            self.ended_because = await self._ended
        finally:
            if looking is not None:
                looking.cancel()
            for timer in self._timers.values():
                timer.cancel()
            self._outbox.close()
            await self._peers.close()
            if self._store is not None:
                try:
                    self._store.commit()
                    if self._backup is not None:
                        await loop.run_in_executor(None, self._backup.shipper.close)
                finally:
                    self._store.close()
        if self._listens:
            self._registry.leave(self.name, self._life)
        return self.ended_because

    def _publish(self, where: tuple[int, str], stage: int, attempt: int, task: int, executor: str) -> None:
        """Tell everyone where we listen. A client does not: nobody needs to find it."""
        port, nearby = where
        here = (self.name, self._advertise, port, os.getpid(), self._life, nearby)
        self._registry.publish(Address(*here, stage, attempt, task, executor, machine_here()))

    def is_found(self) -> bool:
        """Whether everyone can know where we listen."""
        return not self._listens or self._registry.lists(self.name, self._life)

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _look_whether_wanted(self) -> None:
        while not self._ended.done():
            with contextlib.suppress(OSError):  # the shared directory has a bad moment; we look again
                if reason := self._registry.unwanted(self.name, self._life, self._parent):
                    self.end(reason)
                elif self._replication is not None:
                    self._replication.choose()
                if self._registry.checkpoint_asked(self.name):
                    self.take(TimerFired("checkpoint"))
            if self._meter is not None:
                self._meter.tick(self.busy_s)
            await asyncio.sleep(LOOK_S)

    def _give_way(self, latest: int) -> None:
        """We were believed dead, and another life has begun: ours ends, whatever it was about to do."""
        if not self._ended.done():
            self._ended.set_exception(Fenced.by(self.name, self._life, latest))

    # -- what our peers do ---------------------------------------------------------------------

    def _whom_to_dial(self) -> Iterable[str]:
        wanted = self._dials() if callable(self._dials) else self._dials
        return wanted if self._replication is None else [*wanted, *self._replication.dials()]

    def peer_connected(self, peer: str) -> None:
        if self._replication is not None and self._replication.concerns(peer):
            self._replication.connected(peer)
        else:
            self.take(Connected(peer))

    def peer_disconnected(self, peer: str) -> None:
        if self._replication is not None and self._replication.concerns(peer):
            self._replication.disconnected(peer)
            return
        self._outbox.forget(peer)
        if self._backup is not None:
            self._backup.forget(peer)
        self.take(Disconnected(peer))

    def peer_said(self, peer: str, messages: list[Message]) -> None:
        if self._replication is not None and self._replication.concerns(peer):
            try:
                self._replication.take(peer, messages)
            except Exception as error:  # it may commit: a link that ends would let us go on without a batch
                self._fail(error)
            return
        self._waiting.extend([Received(peer, message) for message in messages])
        self._plan()

    # -- turns ---------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Give the machine an event, in the next turn."""
        self._waiting.append(event)
        self._plan()

    def now_ms(self) -> float:
        return self._clock()

    def perform(self, effects: Sequence[Effect]) -> None:
        """What a caller of the machine was told to do, in this process's next turn. For the loop's thread."""
        self._perform(effects)
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._planned = False
        if self._ended.done():
            return
        begun = time.monotonic()
        try:
            self._work(begun + TURN_MS_MAX / 1e3)
            self._outbox.leave()
            if self._store is not None and self._durable < self._store.queued:
                self._commit(self._store)
                if self._replication is not None:
                    self._replication.flush()
                self._outbox.leave()
        except Exception as error:
            self._fail(error)
            return
        if self._waiting:
            self._plan()
        self.turns += 1
        self.busy_s += time.monotonic() - begun

    def _fail(self, error: Exception) -> None:
        """This process ends, and begins anew from what is stored."""
        log.error("%s failed; its last words:\n%s", self.name, "\n".join(self.story), exc_info=error)
        if not self._ended.done():
            self._ended.set_exception(error)

    def _work(self, until_s: float) -> None:
        waiting, clock = self._waiting, self._clock
        while waiting:
            event, before = waiting[0], len(waiting)
            try:
                effects = self._on_events(waiting, clock())
                self.events += before - len(waiting)
                self._perform(effects)
            except ProtocolViolation as violation:
                if not isinstance(event, Received):
                    raise
                log.warning("%s drops %s: %s", self.name, event.sender, violation)
                self._drop(event.sender)
            if time.monotonic() > until_s:
                break

    def _one_event(self, waiting: deque[Event], now_ms: float) -> Sequence[Effect]:
        return self.machine.on_event(waiting.popleft(), now_ms)

    def _commit(self, store: Store) -> None:
        """Until all that was added is durable and the machine knows; what it does then may be more of it.

        A read of the log commits as well: what is written need not be told yet.
        """
        while self._durable < store.queued:
            seq = store.commit()
            if store.durability == "disk":
                self._sync()
                return
            self._synced = seq
            if self._replication is not None or (self._backup is not None and self._backup.safe_first):
                return
            self._durable = seq
            self._perform(self.machine.on_event(Durable(seq), self._clock()))

    def _drop(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.close()

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect.to, effect.message)
                case Write():
                    self._needed_store().add(effect)
                case SetTimer():
                    self._set_timer(effect.name, effect.at_ms)
                case ReadLog():
                    found = self._needed_store().read_log(effect.inbox, effect.after, effect.limit)
                    self.take(LogRead(effect.inbox, effect.reader, found))
                case LoadCheckpoint():
                    if self._inheriting is not None:
                        self._inheriting.cancel()  # whoever asks again does not wait for that any more
                    if effect.inherited is None:
                        self.take(self._loaded(effect))
                    else:
                        self._inheriting = self._loop.create_task(self._inherit(effect))
                case Note():
                    self.story.append(effect.text)
                    log.info("%s: %s", self.name, effect.text)
                case Exit():
                    self._outbox.leave()
                    self.end(effect.reason)
                case Launch():
                    self._ask(self._on_launch, effect.instance)
                case Retire():
                    self._ask(self._on_retire, effect.instance)
                case _:
                    assert_never(effect)

    def _send(self, to: str, message: Message) -> None:
        if to not in self._links:
            return  # lost, as the effect says; the machine says it again when the peer connects
        if self._backup is not None and self._backup.holds(to, message, self._needed_store().written):
            return
        self._outbox.say(to, message)

    def _needed_store(self) -> Store:
        if self._store is None:
            raise MissingStore(self.name)
        return self._store

    def _loaded(self, effect: LoadCheckpoint) -> CheckpointLoaded:
        """This place is ours alone: the store's lock keeps a predecessor out."""
        store = self._needed_store()
        store.commit()
        found = store.items(values=effect.values, timers=effect.timers)
        return CheckpointLoaded(found, store, effect.number)

    async def _inherit(self, effect: LoadCheckpoint) -> None:
        """In a thread: it may come from far away, and our peers must not think that we are dead."""
        assert self._load_share is not None, "only instances inherit"
        try:
            take_over = await self._loop.run_in_executor(None, self._load_share, effect)
            self.take(take_over())
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _set_timer(self, name: str, at_ms: float) -> None:
        planned = self._timers.pop(name, None)
        if planned is not None:
            planned.cancel()
        delay_s = max(0.0, (at_ms - self._clock()) / 1e3)
        self._timers[name] = self._loop.call_later(delay_s, self._wake, name)

    def _wake(self, name: str) -> None:
        self._timers.pop(name, None)
        self.take(TimerFired(name))

    def _ask(self, hook: Callable[[str], object] | None, instance: str) -> None:
        if hook is None:
            log.warning("%s: nobody here can launch or retire %s", self.name, instance)
        else:
            hook(instance)

    # -- durability `disk`: one sync for everything that waits ---------------------------------

    def _sync(self) -> None:
        store = self._needed_store()
        if not self._syncing and self._synced < store.written:
            self._syncing = True
            synced = self._loop.run_in_executor(None, store.sync)
            synced.add_done_callback(lambda done, seq=store.written: self._on_synced(done, seq))  # type: ignore[misc]

    def _on_synced(self, done: asyncio.Future[None], seq: int) -> None:
        self._syncing = False
        if self._ended.done():
            return
        if (error := done.exception()) is not None:
            self._ended.set_exception(error)
            return
        self._synced = seq
        self._vouch()
        self._sync()

    # -- a backup: what rests on it waits for it -----------------------------------------------

    def _on_shipped(self, seq: int) -> None:
        if self._ended.done() or self._backup is None:
            return
        for peer, message in self._backup.on_shipped(seq):
            self._outbox.say(peer, message)
        self._vouch()
        self._plan()

    def _vouch(self) -> None:
        """Tell the machine how far its writes are durable now."""
        safe = self._synced
        if self._backup is not None and self._backup.safe_first:
            safe = min(safe, self._backup.shipped)
        if self._replication is not None:
            safe = min(safe, self._replication.safe)
        if safe > self._durable:
            self._durable = safe
            self.take(Durable(safe))
