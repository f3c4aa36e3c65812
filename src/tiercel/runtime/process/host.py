"""The host of one machine: an asyncio driver that delivers events, performs effects and decides nothing.

Responsible for: sockets, timers, the order of effects, few large writes.
Not responsible for: decisions (the machine), durability (durability_gate.py), where the process runs
    (spark/).

One turn of the loop:

    frames of all peers --> events --> machine --> effects --> one commit --> Durable --> machine
                                                       |                                    |
                                                       v                                    v
                                               one write per peer                  one write per peer

A turn takes everything that has arrived, so batches grow under load. Without load, a message leaves in the
turn in which it arrived. Messages that need not be durable leave before the commit: the instances work while
the router writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, assert_never

from tiercel.core.errors import ProtocolViolation
from tiercel.core.machine.effects import (
    Continue,
    Effect,
    Exit,
    Launch,
    LoadCheckpoint,
    Note,
    ReadLog,
    Retire,
    Send,
    SetTimer,
    StorageKey,
    Unexpected,
    Write,
)
from tiercel.core.machine.events import (
    CheckpointLoaded,
    Connected,
    Continued,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    StateRead,
    TimerFired,
)
from tiercel.core.machine.names import Timer, TimerKind, TimerName
from tiercel.core.messages import Message
from tiercel.runtime.deployment import DeploymentDir, installed_version
from tiercel.runtime.net.addresses import machine_here
from tiercel.runtime.net.connection import HandshakeFailed
from tiercel.runtime.net.emulated_link import Links
from tiercel.runtime.net.peers import POLL_S, Peers
from tiercel.runtime.net.registry import Address, Registry
from tiercel.runtime.net.site_messages import ManifestQuery, ManifestReply
from tiercel.runtime.net.tls import TlsFiles
from tiercel.runtime.process.durability_gate import DurabilityGate, Storage
from tiercel.runtime.process.gauges import GAUGE_MESSAGES, GaugeBoard, Gauges
from tiercel.runtime.process.machine import (
    Machine,
    MissingState,
    MissingStore,
    OnEvents,
    tame_collector,
    wall_clock,
)
from tiercel.runtime.process.metrics import Meter, MetricsLine
from tiercel.runtime.process.send_buffer import SendBuffer
from tiercel.runtime.replication.primary import ProcessFenced
from tiercel.runtime.storage.store import Store, StoredVersion

log = logging.getLogger(__name__)

TURN_MS_MAX = 2.0  # then the turn ends, even if more has arrived: latency under load
STORY_MAX = 200  # notes kept for the report of a failure
LOCAL_READS_MAX = 1_000  # of the local store in one turn; a thread reads more than that


LoadShare = Callable[[LoadCheckpoint], Callable[[], CheckpointLoaded]]  # a thread's part, and then the loop's


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostConfig:
    """Everything a host needs beside its name and its machine."""

    # how it finds its peers and proves its membership
    registry: Registry
    secret: bytes
    dials: Callable[[], Iterable[str]] | Iterable[str] = ()
    tls: TlsFiles | None = None
    on_refused: Callable[[str, HandshakeFailed], object] | None = None
    # where others find it; a client does not listen
    listens: bool = True
    bind: str = "127.0.0.1"
    advertise: str = ""  # empty: the address it binds
    port: int = 0
    # emulated links between sites; nothing is emulated where a site is not known
    site: str = ""
    links: Links = dataclasses.field(default_factory=dict)
    # what it stores
    storage: Storage | None = None
    incarnation: int | None = None  # None: that of its store, or one that grows with time
    load_share: LoadShare | None = None
    # what its surroundings do for it
    on_launch: Callable[[str], object] | None = None
    on_retire: Callable[[str], object] | None = None
    manifest: bytes = b""  # what it tells whoever asks what runs here; only routers do
    metrics: Path | None = None
    gauge_board: GaugeBoard | None = None  # takes what all processes report; only the controller has one
    parent: int = 0  # the process whose end is the end of this one; 0: none

    @classmethod
    def of(cls, deployment: DeploymentDir, **options: Any) -> HostConfig:
        """The configuration of a process of this deployment."""
        return cls(registry=deployment.registry, secret=deployment.secret, **options)


class Host:
    """One process of a deployment."""

    def __init__(self, name: str, machine: Machine, config: HostConfig) -> None:
        self.name = name
        self.machine = machine
        self._config = config
        self._on_events: OnEvents = getattr(machine, "on_events", self._one_event)
        self._missing_state: MissingState | None = getattr(machine, "missing_state", None)
        self._reading = False  # a thread reads state for the first event that waits
        self._state_read: StateRead | None = None  # it has read this
        self.ended_because = ""
        self.story: deque[str] = deque(maxlen=STORY_MAX)
        self.turns = self.events = 0
        self.busy_s = 0.0
        self._registry = config.registry
        storage = config.storage
        self._gate = None if storage is None else DurabilityGate(storage, self)
        self._store = None if storage is None else storage.store
        self._replication = None if storage is None else storage.replication
        self._incarnation = self._first_incarnation(config)
        self._peers = Peers(
            self,
            name,
            config.secret,
            self._incarnation,
            config.registry,
            dials=self._peers_to_dial,
            bind=config.bind,
            port=config.port,
            tls=config.tls,
            on_refused=config.on_refused,
            site=config.site,
            links=config.links,
            relays=bool(config.manifest),
        )
        self._takeover: asyncio.Task[None] | None = None
        metrics = config.metrics
        self._meter = Meter(metrics, name, machine, self._replication) if metrics is not None else None
        self._clock = wall_clock()
        self._connections = self._peers.connections
        self._gauges = Gauges(name, self._meter, self._connections, config.gauge_board)
        self._waiting: deque[Event] = deque()
        self._unseen: Counter[str] = Counter()  # connections that the machine has not been told of yet
        self._planned = False
        self._began_ms = 0.0  # the current event
        self._send_buffer = SendBuffer(self._connections)
        self._timers: dict[TimerName, asyncio.TimerHandle] = {}

    @staticmethod
    def _first_incarnation(config: HostConfig) -> int:
        if config.incarnation is not None:
            return config.incarnation
        if config.storage is not None:
            return config.storage.store.incarnation
        return time.time_ns()  # a later start has a larger one

    # -- from start to end ----------------------------------------------------------------------------------

    async def run(self, stage: int = -1, attempt: int = -1, task: int = -1, executor: str = "") -> str:
        """Serve until the machine ends or a stop is requested; returns the reason."""
        self._loop = loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        polling: asyncio.Task[None] | None = None
        if self._meter is not None:
            self._meter.executor = executor or None
        try:
            if self._gate is not None:
                self._gate.start(loop)
            if self._config.listens:
                self._publish(await self._peers.listen(), stage, attempt, task, executor)
                polling = loop.create_task(self._poll_stop_request())
                tame_collector()
            self._peers.dial()
            self.ended_because = await self._ended
        finally:
            if polling is not None:
                polling.cancel()
            for timer in self._timers.values():
                timer.cancel()
            self._send_buffer.close()
            await self._peers.close()
            if self._gate is not None:
                await self._gate.close()
        if self._config.listens:
            self._registry.deregister_if_current(self.name, self._incarnation)
        return self.ended_because

    def _publish(self, endpoint: tuple[int, str], stage: int, attempt: int, task: int, executor: str) -> None:
        """Register the address of this process."""
        port, socket_path = endpoint
        address = (
            self.name,
            self._config.advertise or self._config.bind,
            port,
            os.getpid(),
            self._incarnation,
            socket_path,
        )
        self._registry.publish(Address(*address, stage, attempt, task, executor, machine_here()))

    def is_connected(self, peer: str) -> bool:
        return peer in self._connections

    def is_registered(self) -> bool:
        """Whether others can find this process; clients do not listen."""
        return not self._config.listens or self._registry.is_current(self.name, self._incarnation)

    @property
    def last_line(self) -> MetricsLine | None:
        """The figures of the last second; any thread may ask."""
        return None if self._meter is None else self._meter.last

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _poll_stop_request(self) -> None:
        while not self._ended.done():
            with contextlib.suppress(OSError):  # the shared directory cannot be read now; we try again
                if reason := self._registry.stop_reason(self.name, self._incarnation, self._config.parent):
                    self.end(reason)
                elif self._replication is not None:
                    self._replication.choose_replica()
                if self._registry.take_checkpoint_request(self.name):
                    self.deliver(TimerFired(Timer(TimerKind.CHECKPOINT)))
            self._gauges.tick(self.busy_s)
            await asyncio.sleep(POLL_S)

    # -- what the durability gate asks -----------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def on_durable(self, seq: int) -> None:
        self.deliver(Durable(seq))

    def send_held(self, peer: str, message: Message) -> None:
        self._send_buffer.add(peer, message)
        self._plan()

    def send_at_once(self, peer: str, message: Message) -> None:
        self._send_buffer.send_at_once(peer, message)

    def fail(self, error: BaseException) -> None:
        """End this process with an error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def drop(self, peer: str) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.close()

    def on_fenced(self, latest: int) -> None:
        """A later incarnation of this process has begun: this one ends, whatever it was about to do."""
        if not self._ended.done():
            self._ended.set_exception(ProcessFenced.by(self.name, self._incarnation, latest))

    # -- callbacks of peers ---------------------------------------------------------------------

    def _peers_to_dial(self) -> Iterable[str]:
        dials = self._config.dials
        peers = dials() if callable(dials) else dials
        return peers if self._replication is None else [*peers, *self._replication.dials()]

    def peer_connected(self, peer: str) -> None:
        if self._replication is not None and self._replication.is_replica(peer):
            self._replication.connected(peer)
        else:
            self.deliver(Connected(peer))

    def peer_disconnected(self, peer: str) -> None:
        if self._replication is not None and self._replication.is_replica(peer):
            self._replication.disconnected(peer)
            return
        self._send_buffer.forget(peer)
        if self._gate is not None:
            self._gate.forget(peer)
        self.deliver(Disconnected(peer))

    def peer_sent(self, peer: str, messages: list[Message]) -> None:
        if self._replication is not None and self._replication.is_replica(peer):
            try:
                self._replication.on_messages(peer, messages)
            except Exception as error:  # it may have failed to commit: we must not go on without that batch
                self._fail(error)
            return
        if type(messages[0]) is ManifestQuery:  # a client asks only this
            here = (self._config.manifest, installed_version(), self._clock())
            self.send_at_once(peer, ManifestReply(self.name, *here))
            return
        if not GAUGE_MESSAGES.isdisjoint(map(type, messages)):  # the machine knows nothing of them
            messages = self._gauges.take(peer, messages)
        self._waiting.extend([Received(peer, message) for message in messages])
        self._plan()

    # -- turns ---------------------------------------------------------------------------------

    def deliver(self, event: Event) -> None:
        """Give the machine an event, in the next turn."""
        if type(event) is Connected:
            self._unseen[event.peer] += 1
        self._waiting.append(event)
        self._plan()

    def shift_clock(self, ahead_ms: float) -> None:
        """Let this process see a clock that is ahead of that of its machine; before it runs."""
        clock = self._clock
        self._clock = lambda: clock() + ahead_ms

    def now_ms(self) -> float:
        return self._clock()

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects that a direct call of the machine returned. In the loop's thread."""
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
            self._send_buffer.flush()
            if self._gate is not None and not self._gate.is_open:
                self._commit(self._gate)
                self._send_buffer.flush()
        except Exception as error:
            self._fail(error)
            return
        if self._waiting and not self._reading:
            self._plan()
        self.turns += 1
        self.busy_s += time.monotonic() - begun

    def _fail(self, error: Exception) -> None:
        """End this process with an error and its last notes. Its next start recovers from its storage."""
        log.error("%s failed; its last notes:\n%s", self.name, "\n".join(self.story), exc_info=error)
        if not self._ended.done():
            self._ended.set_exception(error)

    def _work(self, until_s: float) -> None:
        waiting, clock = self._waiting, self._clock
        while waiting:
            event, before = waiting[0], len(waiting)
            if self._missing_state is not None and not self._has_state(event, self._missing_state):
                break
            try:
                self._began_ms = now_ms = clock()
                effects = self._on_events(waiting, now_ms)
                self.events += before - len(waiting)
                if type(event) is Connected:
                    self._saw(event.peer)
                self._perform(effects)
            except ProtocolViolation as violation:
                if not isinstance(event, Received):
                    raise
                log.warning("%s drops %s: %s", self.name, event.sender, violation)
                self.drop(event.sender)
            if time.monotonic() > until_s:
                break

    def _saw(self, peer: str) -> None:
        """The machine knows of a connection now: what it sends from here on is meant for it."""
        self._unseen[peer] -= 1
        if not self._unseen[peer]:
            del self._unseen[peer]

    def _one_event(self, waiting: deque[Event], now_ms: float) -> Sequence[Effect]:
        return self.machine.on_event(waiting.popleft(), now_ms)

    # -- evicted state: read before the event that needs it -------------------------------------

    def _has_state(self, event: Event, missing_state: MissingState) -> bool:
        """Whether the machine has all it needs for the first event; if not, a thread reads it.

        Meanwhile the events of the machine wait in their order, and the loop does everything else.
        """
        if self._reading:
            return False
        read = self._state_read
        if read is None:
            missing = missing_state(event)
            if not missing:
                return True
            read = self._read_here(missing)
            if read is None:
                self._reading = True
                reading = self._loop.run_in_executor(None, self._require_store().read_all, missing)
                reading.add_done_callback(self._on_state_read)
                return False
        self._state_read = None
        self.machine.on_event(read, self._clock())
        return True

    def _read_here(self, missing: Sequence[StorageKey]) -> StateRead | None:
        """Out of the local store, if it has all of it and it is not much."""
        if len(missing) > LOCAL_READS_MAX:
            return None
        found = self._require_store().read_local(missing)
        return StateRead(found) if len(found) == len(missing) else None

    def _on_state_read(self, reading: asyncio.Future[dict[StorageKey, StoredVersion]]) -> None:
        self._reading = False
        error = reading.exception()
        if self._ended.done():
            return
        if error is not None:
            self._ended.set_exception(error)
            return
        self._state_read = StateRead(reading.result())
        self._plan()

    def _commit(self, gate: DurabilityGate) -> None:
        """Commit until everything added is durable, or waits; `Durable` may make the machine write more."""
        while not gate.is_open and (seq := gate.commit()) is not None:
            if self._reading:
                self.deliver(Durable(seq))  # the machine must stay as it was when it was asked
            else:
                self._perform(self.machine.on_event(Durable(seq), self._clock()))
        gate.replicate()

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect.to, effect.message)
                case Write():
                    self._require_store().add(effect)
                case SetTimer():
                    self._set_timer(effect.name, effect.at_ms)
                case Continue():
                    self.deliver(Continued(self._clock() - self._began_ms))
                case ReadLog():
                    found = self._require_store().read_log(effect.inbox, effect.after, effect.limit)
                    self.deliver(LogRead(effect.inbox, effect.reader, found))
                case LoadCheckpoint():
                    if self._takeover is not None:
                        self._takeover.cancel()  # a newer request replaces the older one
                    if effect.takeover is None:
                        self.deliver(self._loaded(effect))
                    else:
                        self._takeover = self._loop.create_task(self._take_over(effect))
                case Note():
                    self.story.append(effect.text)
                    log.info("%s: %s", self.name, effect.text)
                case Unexpected():
                    log.warning("%s: unexpected message: %s", self.name, effect)
                    if self._meter is not None:
                        self._meter.unexpected += 1
                case Exit():
                    self._send_buffer.flush()
                    self.end(effect.reason)
                case Launch():
                    self._call_hook(self._config.on_launch, effect.instance)
                case Retire():
                    self._call_hook(self._config.on_retire, effect.instance)
                case _:
                    assert_never(effect)

    def _send(self, to: str, message: Message) -> None:
        if to not in self._connections or to in self._unseen:
            self._peers.demand(to)
            return  # lost with the connection that the machine knows; it repeats what matters
        if self._gate is not None and self._gate.holds(to, message):
            return
        self._send_buffer.add(to, message)

    def _require_store(self) -> Store:
        if self._store is None:
            raise MissingStore(self.name)
        return self._store

    def _loaded(self, effect: LoadCheckpoint) -> CheckpointLoaded:
        """Read the checkpoint of this process itself. The lock of the store keeps a predecessor out."""
        store = self._require_store()
        store.commit()
        found = store.items(values=effect.values, timers=effect.timers)
        return CheckpointLoaded(found, effect.number)

    async def _take_over(self, effect: LoadCheckpoint) -> None:
        """Load the share of a dead instance, in a thread: a backup may be slow, and peers expect answers."""
        load_share = self._config.load_share
        assert load_share is not None, "only instances take over state"
        try:
            finish = await self._loop.run_in_executor(None, load_share, effect)
            self.deliver(finish())
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _set_timer(self, name: TimerName, at_ms: float) -> None:
        planned = self._timers.pop(name, None)
        if planned is not None:
            planned.cancel()
        delay_s = max(0.0, (at_ms - self._clock()) / 1e3)
        self._timers[name] = self._loop.call_later(delay_s, self._on_timer, name)

    def _on_timer(self, name: TimerName) -> None:
        self._timers.pop(name, None)
        self.deliver(TimerFired(name))

    def _call_hook(self, hook: Callable[[str], object] | None, instance: str) -> None:
        if hook is None:
            log.warning("%s: this process cannot launch or retire %s", self.name, instance)
        else:
            hook(instance)
