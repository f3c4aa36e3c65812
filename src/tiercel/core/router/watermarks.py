"""Event time at a site: its promises, the watermarks of its logs, late rows and idle streams.

Responsible for: the time at which a watermark enters a log; dropping late rows of a stream with a delay.
Not responsible for: the effects of a watermark on keys (core/instance/).

The promise of a site holds for every path of its rows. A row that was accepted here and is not yet in the log
of its owner holds the promise back: its frame stores the promise at the time when the frame was made. So a
watermark never overtakes a row, however often the row is forwarded.

A stream with its own watermark may be written at any site, at any time. A site where it was never written, or
where it is idle, does not hold the watermark back. When the stream is written there, the site's promise falls
to the watermark of the stream. Rows behind the watermark of a log are late by then. As in Spark, an operator
has no watermark before every such input has been written somewhere, or has been idle.

A watermark that one log has concluded holds for every other log, because a promise covers rows to any log. So
logs that get the first report of such a site at different times agree again. If all sites are idle, the
highest known watermark is reported to all.

A row is found late at two places, both times finally. Where a row enters: the site has promised that it
accepts nothing at or below its promise. Where a row is appended (core/logs/inbox.py): the log may have a
watermark that the sending site did not know, because a new or idle site holds no log back.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercel.core import messages as m
from tiercel.core.logs.inbox import Inbox
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.model.bundle import is_bundle, opened
from tiercel.core.model.keys import ABSENT_WATERMARK
from tiercel.core.model.log import INITIAL, Row, Watermark
from tiercel.core.model.topology import Stream
from tiercel.core.router.state import RouterState

FOREVER = 1 << 62  # no source here: nothing to wait for


class WatermarkTracker:
    """The reports about one operator's watermark that this site receives and sends."""

    def __init__(self, sites: Iterable[str], timed: Iterable[str] = ()) -> None:
        self.reported: dict[str, int] = dict.fromkeys(sites, -1)
        self.announced = -1
        self.news = True  # this site has a source that the others do not know
        self.sources: dict[str, int] = {}  # fixed producers, and streams written at this site -> watermark
        self.idle: set[str] = set()  # streams that the promise of this site ignores
        self.unwritten = set(timed)  # inputs with their own watermark that were written at no site yet
        self._concluded = -1  # the highest reported watermark of a log
        self.known = -1  # the highest watermark of a log that all sites know
        self.absent: set[str] = set()  # sites that are cut off, and not waited for

    def worth(self) -> int:
        """The lowest watermark of this site's sources."""
        low = min([mark for source, mark in self.sources.items() if source not in self.idle], default=FOREVER)
        return min(low, -1) if self.unwritten and low < FOREVER else low

    def must_announce(self, low: int) -> bool:
        """Whether to report this promise to the other sites: it has grown, or there is a new source."""
        return low > self.announced or (self.news and bool(self.sources))

    def tell(self, site: str, low: int) -> None:
        """Record the promise that this site reports."""
        self.announced, self.news = low, False
        self.reported[site] = low

    def record_report(
        self, site: str, watermark_ms: int, sources: Iterable[str] = (), concluded_ms: int = -1
    ) -> None:
        """Record a site's latest report. It replaces the one before, even if it is lower."""
        self.unwritten.difference_update(sources)
        self.reported[site] = watermark_ms
        self._concluded = max(self._concluded, concluded_ms)
        self.known = max(self.known, concluded_ms)  # a site reports to all sites

    @property
    def all_idle(self) -> bool:
        """Whether no site has an active source, so that none will report a higher promise."""
        return min(self._present(), default=-1) >= FOREVER

    def _present(self) -> list[int]:
        return [mark for site, mark in self.reported.items() if site not in self.absent]

    def conclusion(self) -> int:
        """The watermark of all sites: no site sends a row at or below it. -1 while no site has a source."""
        low = min(self._present(), default=-1)
        return max(self._concluded, -1 if low >= FOREVER else low)


class Watermarks:
    """The event time of one router."""

    def __init__(self, state: RouterState) -> None:
        self.state = state
        topology, site = state.topology, state.site
        self.promises = {
            name: WatermarkTracker(topology.sites, topology.timed_inputs(name)) for name in topology.operators
        }
        for stream in topology.streams.values():
            for producer, at in stream.producers.items():
                for operator_name in topology.consumers(stream.name) if at == site else ():
                    self.promises[operator_name].sources[producer] = -1
        for name, inbox in state.inboxes.items():
            inbox.timed = topology.late_inputs(name, any_site=state.settings.site_idle_ms > 0)
            inbox.left_out = self.left_out
        self.active = any(o.time_mode == "eventTime" for o in topology.operators.values())
        self.late: dict[str, int] = {}  # operator -> late rows at this site, in this incarnation
        self._idle_timers: set[str] = set()  # streams with an idle time-out that is running

    def load(self, key: StorageKey, value: int) -> None:
        """Load the stored watermark of a source."""
        _, operator, source = key
        self.promises[operator].sources[source] = value
        self.promises[operator].unwritten.discard(source)

    def on_report(self, site: str, message: m.WatermarkReport) -> None:
        self.promises[message.operator].record_report(
            site, message.watermark_ms, message.sources, message.concluded_ms
        )

    def promise_source(self, step: Step, stream: str, source: str, watermark_ms: int) -> None:
        """Record the watermark of a source: a producer, or a stream at this site."""
        for operator in self.state.consumers(stream):
            promises = self.promises[operator]
            sources = promises.sources
            promises.unwritten.discard(source)
            promises.news = promises.news or source not in sources
            if source not in sources or watermark_ms > sources[source]:
                sources[source] = watermark_ms
                step.put(("source", operator, source), watermark_ms)

    def written(self, step: Step, stream: Stream) -> None:
        """Record that a stream with its own watermark was written here: the others wait for this site."""
        self.promise_source(step, stream.name, stream.name, ABSENT_WATERMARK)
        if stream.idle_ms is not None:
            self.state.last_rows_ms[stream.name] = step.now_ms
            for operator in self.state.consumers(stream.name):
                promises = self.promises[operator]
                promises.news = promises.news or stream.name in promises.idle
                promises.idle.discard(stream.name)
            self.arm_idle_timer(step, stream, step.now_ms + stream.idle_ms)

    def arm_idle_timer(self, step: Step, stream: Stream, at_ms: float) -> None:
        """Set the idle timer of a stream, unless one is set or the stream is idle."""
        if stream.name not in self._idle_timers and self.active:
            self._idle_timers.add(stream.name)
            step.timer(Timer(TimerKind.IDLE, stream.name), at_ms)

    def on_idle_timer(self, step: Step, name: str) -> None:
        """Mark a stream without rows as idle: the watermark ignores it here until it is written again."""
        stream = self.state.topology.streams[name]
        assert stream.idle_ms is not None
        self._idle_timers.discard(name)
        if any(slowed == name for _, slowed in self.state.deferred_acks.values()):
            self.state.last_rows_ms[name] = step.now_ms  # rows are missing because of our back-pressure
        due_ms = self.state.last_rows_ms[name] + stream.idle_ms
        if step.now_ms < due_ms:
            self.arm_idle_timer(step, stream, due_ms)
            return
        for operator in self.state.consumers(name):
            self.promises[operator].idle.add(name)
            self.promises[operator].unwritten.discard(name)

    def start_idle_timers(self, step: Step) -> None:
        """Start the idle timers of all streams after a start."""
        for stream in self.state.topology.streams.values():
            if stream.idle_ms is not None and self.state.consumers(stream.name):
                self.state.last_rows_ms[stream.name] = step.now_ms
                self.arm_idle_timer(step, stream, step.now_ms + stream.idle_ms)

    # -- sites that are cut off ----------------------------------------------------------------

    def start_site_timers(self, step: Step) -> None:
        """After a start no site is connected yet; one that does not come is not waited for either."""
        for site in self.state.topology.sites:
            if site != self.state.site:
                self.site_left(step, site)

    def site_left(self, step: Step, site: str) -> None:
        """A site has lost its connection: event time waits for it for a while, by default for ever."""
        if self.active and self.state.settings.site_idle_ms > 0:
            step.timer(Timer(TimerKind.ABSENT, site), step.now_ms + self.state.settings.site_idle_ms)

    def on_absent_timer(self, site: str) -> None:
        """Do not wait for a site that is still cut off. Its rows may be late when it comes back."""
        if site not in self.state.connected:
            for promises in self.promises.values():
                promises.absent.add(site)

    def site_came(self, site: str) -> None:
        """Wait for a site again."""
        for promises in self.promises.values():
            promises.absent.discard(site)

    def in_time(self, operator: str, rows: list[Row]) -> list[Row]:
        """The rows above this site's promise. Rows at or below it are late, and no operator sees them."""
        promised = self.intake_promise(operator)
        mark = max(
            self.state.inboxes[operator].watermark_ms, promised if promised < FOREVER else ABSENT_WATERMARK
        )
        if any([row[1] <= mark and is_bundle(row[0]) for row in rows]):
            rows = opened(rows)
        withheld = [row for row in rows if row[1] > mark]
        if len(withheld) < len(rows):
            self.came_late(operator, [row for row in rows if row[1] <= mark])
        return withheld

    def left_out(self, inbox: Inbox, row: Row) -> bool:
        """Rule R19: a log appends no row behind its watermark, even if it was in time where it entered."""
        if row[1] > inbox.watermark_ms or row[1] == INITIAL:
            return False
        tagged = self.state.topology.operators[inbox.name].numbers_inputs
        if tagged and row[2][0] not in inbox.timed:
            return False
        self.came_late(inbox.name, [row])
        return True

    def came_late(self, operator: str, rows: list[Row]) -> None:
        """Count late rows."""
        self.late[operator] = self.late.get(operator, 0) + len(rows)

    def output_promise(self, operator: str) -> int:
        """The watermark of this site's outputs: none comes from input at or below it."""
        inbox = self.state.inboxes[operator]
        low = inbox.watermark_ms
        for instance in inbox.readers:
            cursor = inbox.cursors.get(instance)
            low = min(low, cursor.watermark_ms if cursor is not None else -1)
        return min([low, *inbox.frozen_ms.values()]) if inbox.frozen_ms else low

    def intake_promise(self, operator: str) -> int:
        """The watermark of this site's intake: it accepts no row at or below it for this operator."""
        low = self.promises[operator].worth()
        for stream in self.state.topology.operators[operator].inputs:
            upstream = self.state.topology.producer_of(stream)
            if upstream is not None:
                low = min(low, self.output_promise(upstream))
        return low

    def promise(self, step: Step) -> None:
        """Report grown promises to every site, and append the watermark of all sites to the logs."""
        for operator, promises in self.promises.items():
            low = self.intake_promise(operator)
            if self.state.outboxes:
                low = min(low, self.promise_under_way(operator))
            if promises.must_announce(low):
                promises.tell(self.state.site, low)
                self._tell_others(step, operator)
            inbox = self.state.inboxes[operator]
            conclusion = promises.conclusion()
            if conclusion > inbox.watermark_ms:
                inbox.append(step, {}, Watermark(conclusion))
            if promises.all_idle and inbox.watermark_ms > promises.known:
                self._tell_others(
                    step, operator
                )  # no site reports more: without this the logs would differ for ever

    def promise_under_way(self, operator: str) -> int:
        """Rule R17: the lowest promise at the time when a row still in flight left this site."""
        frames = [o.watermarks.values() for o in self.state.outboxes.values() if o.inbox == operator]
        return min((mark for marks in frames for mark in marks), default=FOREVER)

    def _tell_others(self, step: Step, operator: str) -> None:
        report = self._report(operator)
        self.promises[operator].known = max(self.promises[operator].known, report.concluded_ms)
        for site in self.state.topology.sites:
            if site != self.state.site:
                self.send_report(step, site, report)

    def send_report(self, step: Step, site: str, report: m.WatermarkReport) -> None:
        """Rule R6: send a promise once everything that it depends on is durable."""
        step.send_durable(site, report)

    def repeat_promises(self, step: Step, site: str) -> None:
        for operator, promises in self.promises.items():
            if promises.announced >= 0 or promises.sources:
                step.send_durable(site, self._report(operator))

    def _report(self, operator: str) -> m.WatermarkReport:
        promises, log = self.promises[operator], self.state.inboxes[operator]
        return m.WatermarkReport(operator, promises.announced, tuple(promises.sources), log.watermark_ms)
