"""Virtual connections between processes: first in first out while they last, lost when they break.

Responsible for: which message arrives when, and when each side sees a connection come and go.
Not responsible for: what processes do with messages (process.py), when faults come (scenario/).

A link joins two names that may talk. A connection is a pair of channels, one per direction,
between two endpoints; an endpoint is one incarnation of a process. Each side of a connection
goes through

    (none) --Connected--> announced --Disconnected--> (none)

and receives messages only while the connection is announced. A broken connection delivers nothing, even
to a side that has not seen the disconnect yet; only the final messages of a process that dies may still
arrive before its disconnect. `fork_zombie` leaves two endpoints with one name: a peer that has seen the
successor's connection sends there, and still receives from the zombie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tiercel.core.machine.events import Connected, Disconnected, Event, Received
from tiercel.sim.engine.scheduler import Scheduler

MESSAGE_BYTES = 64  # of a message without `size_bytes`
JITTER_SHARE = 0.2  # of the latency: what a message may be late, so that links overtake each other


class Endpoint:
    """One incarnation of a process, as the network sees it."""

    __slots__ = ("alive", "channels", "deliver", "name", "replaced")

    def __init__(self, name: str, deliver: Callable[[Event], object]) -> None:
        self.name = name
        self.deliver = deliver
        self.alive = True
        self.replaced = False  # a zombie: a peer that is connected to its successor closes this connection
        self.channels: dict[str, Channel] = {}  # by peer; only connections announced to this side


class Channel:
    """One direction of one connection."""

    __slots__ = (
        "announced",
        "back",
        "deliver",
        "free_ms",
        "held",
        "last_ms",
        "open",
        "source",
        "target",
        "way",
    )

    back: Channel

    def __init__(self, way: Way, source: Endpoint, target: Endpoint) -> None:
        self.way = way
        self.source = source
        self.target = target
        self.deliver = target.deliver
        self.open = True
        self.announced = False  # the source knows of the connection
        self.last_ms = 0.0  # nothing is delivered before what was sent earlier
        self.free_ms = 0.0  # when the last byte so far has left the source
        self.held: list[tuple[Any, int]] | None = None  # a list while the way is clogged


class Way:
    """One direction of a link; what is wrong with it outlasts its connections."""

    __slots__ = ("bytes_per_ms", "channels", "clogged_until_ms", "jitter_ms", "latency_ms", "number")

    def __init__(self, number: int, latency_ms: float, bytes_per_ms: float | None) -> None:
        self.number = number
        self.latency_ms = latency_ms
        self.jitter_ms = latency_ms * JITTER_SHARE
        self.bytes_per_ms = bytes_per_ms
        self.clogged_until_ms = 0.0
        self.channels: list[Channel] = []  # open ones; more than one with a zombie or final messages


class Link:
    """Two names that may talk; `forth` leads from `a` to `b`, `back` from `b` to `a`."""

    def __init__(self, a: str, b: str, forth: Way, back: Way) -> None:
        self.a = a
        self.b = b
        self.forth = forth
        self.back = back
        self.cut_until_ms = 0.0
        self.attempt = 0  # only the latest planned attempt to connect is made


class Network:
    """All links and connections of a run, with the faults that can happen to them.

    Times are means; each use draws its own. `connect_ms`: from the attempt until a side sees the connection.
    `death_ms`: until a side sees a reset. `silence_ms`: until a side gives up a peer that does not answer.
    `backoff_ms`: before a retry. `final_messages_share`: how often messages of a dying process still arrive
    before its peer sees the disconnect; otherwise they are lost, as they are if the peer has not seen the
    connection yet. The network asks for sizes where bandwidth is limited, and elsewhere only with
    `count_bytes`: a large message has to add up its parts to know its size.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        connect_ms: float = 1.0,
        death_ms: float = 1.0,
        silence_ms: float = 40.0,
        backoff_ms: float = 10.0,
        final_messages_share: float = 0.5,
        count_bytes: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._random = scheduler.rng.random
        self._connect_ms = connect_ms
        self._death_ms = death_ms
        self._silence_ms = silence_ms
        self._backoff_ms = backoff_ms
        self._final_messages_share = final_messages_share
        self._count_bytes = count_bytes
        self._links: dict[frozenset[str], Link] = {}
        self._links_of: dict[str, list[Link]] = {}
        self._current: dict[str, Endpoint] = {}  # by name; zombies are not in it
        self._arrive_call = self._arrive  # bound once: binding per message would cost
        self.messages_delivered = 0
        self.messages_lost = 0
        self.bytes_delivered = 0

    def declare(self, a: str, b: str, latency_ms: float, bandwidth_bytes_per_ms: float | None = None) -> None:
        """Allow two names to talk; they connect whenever both are up. Declaring again is an error."""
        pair = frozenset((a, b))
        if len(pair) != 2 or pair in self._links:
            message = f"cannot declare a link {a} - {b}: the names are equal or already linked"
            raise ValueError(message)
        number = 2 * len(self._links)
        forth = Way(number, latency_ms, bandwidth_bytes_per_ms)
        back = Way(number + 1, latency_ms, bandwidth_bytes_per_ms)
        self._links[pair] = link = Link(a, b, forth, back)
        self._links_of.setdefault(a, []).append(link)
        self._links_of.setdefault(b, []).append(link)
        self._plan_attempt(link, self._scheduler.drawn_ms(self._connect_ms))

    def attach(self, name: str, deliver: Callable[[Event], object]) -> Endpoint:
        """Bring up a process: it connects to every peer that is up, and is called with events."""
        if name in self._current:
            message = f"{name} is attached already: detach or disown its endpoint first"
            raise ValueError(message)
        self._current[name] = endpoint = Endpoint(name, deliver)
        for link in self._links_of.get(name, ()):
            self._plan_attempt(link, self._scheduler.drawn_ms(self._connect_ms))
        return endpoint

    def detach(self, endpoint: Endpoint) -> None:
        """Take down a process (or zombie); its peers see the disconnect a little later."""
        endpoint.alive = False
        for channel in self._disown(endpoint):
            if channel.target is endpoint:
                self._close(channel)
            elif self._random() < self._final_messages_share and channel.back.announced:
                self._fall_silent(channel)
            else:
                self._break(channel, self._death_ms)

    def disown(self, endpoint: Endpoint) -> None:
        """Make room for a successor; the zombie keeps the connections both sides know of."""
        for channel in self._disown(endpoint):
            if channel.open and not (channel.announced and channel.back.announced):
                self._break(channel, self._death_ms)

    def send(self, a: str, b: str, message: Any) -> None:
        """Send from the process that now has the name `a`."""
        endpoint = self._current.get(a)
        if endpoint is None:
            self.messages_lost += 1
        else:
            self.send_from(endpoint, b, message)

    def send_from(self, endpoint: Endpoint, to: str, message: Any) -> None:
        """Send on the connection this endpoint has with a peer; dropped if it has none."""
        channel = endpoint.channels.get(to)
        if channel is None or not channel.open:
            self.messages_lost += 1
            return
        way = channel.way
        scheduler = self._scheduler
        size = 0
        at_ms = scheduler.now_ms
        if self._count_bytes or way.bytes_per_ms is not None:
            size = getattr(message, "size_bytes", MESSAGE_BYTES)
        if way.bytes_per_ms is not None:
            if channel.free_ms > at_ms:
                at_ms = channel.free_ms
            channel.free_ms = at_ms = at_ms + size / way.bytes_per_ms
        at_ms += way.latency_ms + way.jitter_ms * self._random()
        if at_ms < channel.last_ms:
            at_ms = channel.last_ms
        else:
            channel.last_ms = at_ms
        scheduler.call_at(at_ms, self._arrive_call, channel, message, size)

    def connected(self, a: str, b: str) -> bool:
        """Whether the processes that now have these names both know of a connection."""
        channel = self._between(a, b)
        return channel is not None and channel.announced and channel.back.announced

    def break_connection(self, a: str, b: str) -> None:
        """Reset the connection of two names; both sides see it, then they connect again."""
        link = self._links[frozenset((a, b))]
        self._scheduler.trace("break", a, b)
        self._break_all(link, self._death_ms)

    def partition(
        self, group_a: Iterable[str], group_b: Iterable[str], for_ms: float, one_way: bool = False
    ) -> None:
        """Cut every link between the groups; each side gives up after a time-out of its own.

        One way: what group a sends does not arrive, what b sends still does, until one side's
        time-out breaks the connection. Healed before that, what was sent is not lost (TCP would
        have sent it again); what never happens is a gap within a connection.
        """
        scheduler = self._scheduler
        heads, tails = frozenset(group_a), frozenset(group_b)
        scheduler.trace("partition", sorted(heads), sorted(tails), for_ms, one_way)
        for link in self._links.values():
            if link.a in heads and link.b in tails:
                way = link.forth
            elif link.a in tails and link.b in heads:
                way = link.back
            else:
                continue
            link.cut_until_ms = max(link.cut_until_ms, scheduler.now_ms + for_ms)
            if one_way:
                self._clog(way, scheduler.now_ms + for_ms)
                scheduler.call_after(scheduler.drawn_ms(self._silence_ms), self._give_up, link)
            else:
                self._break_all(link, self._silence_ms)

    def stall(self, group_a: Iterable[str], group_b: Iterable[str], for_ms: float, share: float) -> None:
        """Hold what group a sends to group b, on some of the links; when that ends, it is lost.

        Neither side is told before: connections stay open, as behind a door that hears and does not answer.
        """
        scheduler = self._scheduler
        heads, tails = frozenset(group_a), frozenset(group_b)
        scheduler.trace("stall", sorted(heads), sorted(tails), for_ms)
        until_ms = scheduler.now_ms + for_ms
        for link in self._links.values():
            ends = (link.a in heads and link.b in tails, link.a in tails and link.b in heads)
            if any(ends) and self._random() < share:
                link.cut_until_ms = max(link.cut_until_ms, until_ms)
                scheduler.call_at(until_ms, self._break_all, link, self._death_ms)  # before it is unclogged
                self._clog(link.forth if ends[0] else link.back, until_ms)

    def clog(self, a: str, b: str, for_ms: float, one_way: bool = False) -> None:
        """Hold up what travels between two names (or only from a to b); nothing is lost."""
        link = self._links[frozenset((a, b))]
        self._scheduler.trace("clog", a, b, for_ms, one_way)
        until_ms = self._scheduler.now_ms + for_ms
        ways = (link.forth, link.back) if link.a == a else (link.back, link.forth)
        for way in ways[:1] if one_way else ways:
            self._clog(way, until_ms)

    def swizzle(self, names: Iterable[str], for_ms: float) -> None:
        """Clog all links of some of the names, one name after the other; unclog in another order.

        FoundationDB's best fault: each ending finds another part of the system waiting.
        """
        rng = self._scheduler.rng
        pool = sorted(names)
        chosen = rng.sample(pool, rng.randint(1, len(pool)))
        for name in chosen:
            start_ms = rng.uniform(0, for_ms / 2)
            end_ms = rng.uniform(for_ms / 2, for_ms)
            self._scheduler.call_after(start_ms, self._clog_name, name, end_ms - start_ms)

    def heal(self) -> None:
        """End every partition and clog now."""
        now_ms = self._scheduler.now_ms
        self._scheduler.trace("heal")
        for link in self._links.values():
            link.cut_until_ms = min(link.cut_until_ms, now_ms)
            for way in (link.forth, link.back):
                way.clogged_until_ms = min(way.clogged_until_ms, now_ms)
                self._unclog(way)
            self._plan_attempt(link, self._scheduler.drawn_ms(self._backoff_ms))

    def _arrive(self, channel: Channel, message: Any, size: int) -> None:
        if not channel.open:
            self.messages_lost += 1
        elif channel.held is not None:
            channel.held.append((message, size))
        else:
            self.messages_delivered += 1
            self.bytes_delivered += size
            self._scheduler.mark(channel.way.number)
            channel.deliver(Received(channel.source.name, message))

    def _plan_attempt(self, link: Link, delay_ms: float) -> None:
        link.attempt += 1
        self._scheduler.call_after(delay_ms, self._connect, link, link.attempt)

    def _connect(self, link: Link, attempt: int) -> None:
        a, b = self._current.get(link.a), self._current.get(link.b)
        if attempt != link.attempt or a is None or b is None or self._between(link.a, link.b):
            return
        scheduler = self._scheduler
        blocked_until_ms = max(link.cut_until_ms, link.forth.clogged_until_ms, link.back.clogged_until_ms)
        if blocked_until_ms > scheduler.now_ms:
            wait_ms = blocked_until_ms - scheduler.now_ms
            self._plan_attempt(link, wait_ms + scheduler.drawn_ms(self._backoff_ms))
            return
        scheduler.trace("connect", link.a, link.b)
        forth, back = Channel(link.forth, a, b), Channel(link.back, b, a)
        forth.back, back.back = back, forth
        for channel in (forth, back):
            channel.way.channels.append(channel)
            announced_ms = scheduler.now_ms + scheduler.drawn_ms(self._connect_ms)
            channel.back.last_ms = announced_ms  # nothing arrives before its receiver knows the sender
            scheduler.call_at(announced_ms, self._announce_connected, channel)

    def _announce_connected(self, channel: Channel) -> None:
        if not channel.open:
            return
        endpoint, peer = channel.source, channel.target.name
        old = endpoint.channels.get(peer)
        if old is not None:
            if old.target.replaced:
                self._close(old.back)
            self._announce_disconnected(old)
        if endpoint.alive:  # it may die of any event
            channel.announced = True
            endpoint.channels[peer] = channel
            endpoint.deliver(Connected(peer))

    def _announce_disconnected(self, channel: Channel) -> None:
        endpoint, peer = channel.source, channel.target
        if not peer.alive:
            self._close(channel.back)
        if endpoint.alive and endpoint.channels.get(peer.name) is channel:
            del endpoint.channels[peer.name]
            endpoint.deliver(Disconnected(peer.name))

    def _close(self, channel: Channel) -> None:
        if channel.open:
            channel.open = False
            channel.way.channels.remove(channel)
            if channel.held is not None:
                self.messages_lost += len(channel.held)
                channel.held = None

    def _fall_silent(self, channel: Channel) -> None:
        """The source has died: nothing reaches it, and its final messages arrive before the disconnect."""
        self._close(channel.back)
        news_ms = channel.way.latency_ms + self._scheduler.drawn_ms(self._death_ms)
        self._scheduler.call_after(news_ms, self._announce_disconnected, channel.back)

    def _break(self, channel: Channel, notice_ms: float) -> float:
        """Close both directions; return how long it takes until both sides know."""
        longest_ms = 0.0
        for side in (channel, channel.back):
            self._close(side)
            if side.source.alive:
                delay_ms = self._scheduler.drawn_ms(notice_ms)
                longest_ms = max(longest_ms, delay_ms)
                self._scheduler.call_after(delay_ms, self._announce_disconnected, side)
        return longest_ms

    def _break_all(self, link: Link, notice_ms: float) -> None:
        announced_ms = 0.0
        for channel in link.forth.channels + link.back.channels:
            if channel.open:
                announced_ms = max(announced_ms, self._break(channel, notice_ms))
        self._plan_attempt(link, announced_ms + self._scheduler.drawn_ms(self._backoff_ms))

    def _give_up(self, link: Link) -> None:
        if link.cut_until_ms > self._scheduler.now_ms:
            self._break_all(link, self._death_ms)

    def _clog(self, way: Way, until_ms: float) -> None:
        if until_ms > way.clogged_until_ms:
            way.clogged_until_ms = until_ms
            self._scheduler.call_at(until_ms, self._unclog, way)
        for channel in way.channels:
            if channel.held is None:
                channel.held = []

    def _clog_name(self, name: str, for_ms: float) -> None:
        for link in self._links_of.get(name, ()):
            self.clog(link.a, link.b, for_ms)

    def _unclog(self, way: Way) -> None:
        if way.clogged_until_ms > self._scheduler.now_ms:
            return
        for channel in list(way.channels):
            held, channel.held = channel.held or [], None
            for message, size in held:
                self._arrive(channel, message, size)

    def _between(self, a: str, b: str) -> Channel | None:
        source, target = self._current.get(a), self._current.get(b)
        link = self._links[frozenset((a, b))]
        for channel in (link.forth if link.a == a else link.back).channels:
            if channel.source is source and channel.target is target:
                return channel
        return None

    def _disown(self, endpoint: Endpoint) -> list[Channel]:
        """Take the name from an endpoint; return its open channels, those from it before those to it."""
        if self._current.get(endpoint.name) is endpoint:
            del self._current[endpoint.name]
        links = self._links_of.get(endpoint.name, ())
        channels = [channel for link in links for channel in link.forth.channels + link.back.channels]
        mine = [channel for channel in channels if endpoint in (channel.source, channel.target)]
        return sorted(mine, key=lambda channel: channel.target is endpoint)
