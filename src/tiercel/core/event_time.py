"""Event time at a site: what it promises, what its logs conclude, which rows are late, which streams idle.

Responsible for: when a watermark enters a log, and that no row of a stream with a delay comes behind it.
Not responsible for: what a watermark does to keys (instance.py), the sums (watermarks.py).

Late is decided twice, both times for good. Where a row enters: the site has promised that nothing at or
below its promise comes from here. Where it is appended (inbox.py): the log may know a watermark that the
site it came from had not heard of, because a site that is new or was idle holds nobody back.
"""

from __future__ import annotations

from tiercel.core import messages as m
from tiercel.core.inbox import Inbox
from tiercel.core.records import ABSENT_WATERMARK, INITIAL, Row, Watermark
from tiercel.core.site import Site
from tiercel.core.step import Step
from tiercel.core.topology import Stream
from tiercel.core.watermarks import FOREVER


class EventTime(Site):
    """What a router knows of event time."""

    # -- sources -----------------------------------------------------------------------------

    def promise_source(self, step: Step, stream: str, source: str, watermark_ms: int) -> None:
        """This source of a stream, a producer or the stream itself at this site, is that far."""
        for operator in self.consumers(stream):
            promises = self.promises[operator]
            sources = promises.sources
            promises.unwritten.discard(source)
            promises.news = promises.news or source not in sources
            if source not in sources or watermark_ms > sources[source]:
                sources[source] = watermark_ms
                step.put(("source", operator, source), watermark_ms)

    def written(self, step: Step, stream: Stream) -> None:
        """Rows of a stream that makes its own watermark: from now on this site is waited for."""
        self.promise_source(step, stream.name, stream.name, ABSENT_WATERMARK)
        if stream.idle_ms is not None:
            self.last_rows_ms[stream.name] = step.now_ms
            for operator in self.consumers(stream.name):
                promises = self.promises[operator]
                promises.news = promises.news or stream.name in promises.idle
                promises.idle.discard(stream.name)
            self.look_for_rows(step, stream, step.now_ms + stream.idle_ms)

    def look_for_rows(self, step: Step, stream: Stream, at_ms: float) -> None:
        """One timer per stream, also for a thousand rows; none while it is idle."""
        if stream.name not in self.looking and self.event_time:
            self.looking.add(stream.name)
            step.timer(f"idle|{stream.name}", at_ms)

    def on_look(self, step: Step, name: str) -> None:
        """Nothing came for as long as it may: the stream is not waited for at this site until it does."""
        stream = self.topology.streams[name]
        assert stream.idle_ms is not None
        self.looking.discard(name)
        if any(slowed == name for _, slowed in self.owed.values()):
            self.last_rows_ms[name] = step.now_ms  # rows do not come because we do not want them yet
        due_ms = self.last_rows_ms[name] + stream.idle_ms
        if step.now_ms < due_ms:
            self.look_for_rows(step, stream, due_ms)
            return
        for operator in self.consumers(name):
            self.promises[operator].idle.add(name)
            self.promises[operator].unwritten.discard(name)

    def first_looks(self, step: Step) -> None:
        """After a start: a stream has its time to show itself."""
        for stream in self.topology.streams.values():
            if stream.idle_ms is not None and self.consumers(stream.name):
                self.last_rows_ms[stream.name] = step.now_ms
                self.look_for_rows(step, stream, step.now_ms + stream.idle_ms)

    # -- late rows ---------------------------------------------------------------------------

    def in_time(self, operator: str, rows: list[Row]) -> list[Row]:
        """What this site has promised holds: rows at or below it are late, and no operator sees them."""
        promised = self.intake_promise(operator)
        mark = max(self.inboxes[operator].watermark_ms, promised if promised < FOREVER else ABSENT_WATERMARK)
        kept = [row for row in rows if row[1] > mark]
        if len(kept) < len(rows):
            self.came_late(operator, [row for row in rows if row[1] <= mark])
        return kept

    def left_out(self, inbox: Inbox, row: Row) -> bool:
        """Where it came from it was in time, but its log knows more."""
        if row[1] > inbox.watermark_ms or row[1] == INITIAL or self.mutant == "late-rows-taken":
            return False
        tagged = len(self.topology.operators[inbox.name].inputs) > 1
        if tagged and row[2][0] not in inbox.timed:
            return False
        self.came_late(inbox.name, [row])
        return True

    def came_late(self, operator: str, rows: list[Row]) -> None:
        """These rows are left out."""
        self.late[operator] = self.late.get(operator, 0) + len(rows)

    # -- promises ----------------------------------------------------------------------------

    def output_promise(self, operator: str) -> int:
        """No output of this operator from this site will come from input at or below this."""
        inbox = self.inboxes[operator]
        low = inbox.watermark_ms
        for instance in inbox.readers:
            feed = inbox.feeds.get(instance)
            low = min(low, feed.watermark_ms if feed is not None else -1)
        for arrival in self.arrivals.values():
            if arrival.inbox is inbox and arrival.freezes:
                low = min(low, arrival.record.frozen_ms)
        return low

    def intake_promise(self, operator: str) -> int:
        """No row at or below this will enter the system here for this operator."""
        low = self.promises[operator].worth()
        for stream in self.topology.operators[operator].inputs:
            upstream = self.topology.producer_of(stream)
            if upstream is not None:
                low = min(low, self.output_promise(upstream))
        return low

    def promise(self, step: Step) -> None:
        """Tell every site what this one promises, where that has grown; conclude; log."""
        for operator, promises in self.promises.items():
            low = self.intake_promise(operator)
            for lane in self.lanes.values():
                if lane.inbox == operator and lane.watermarks and self.mutant != "watermark-overtakes":
                    low = min([low, *lane.watermarks.values()])
            if promises.to_tell(low):
                promises.tell(self.site, low)
                self._tell_others(step, operator)
            inbox = self.inboxes[operator]
            conclusion = promises.conclusion()
            if conclusion > inbox.watermark_ms:
                inbox.append(step, {}, Watermark(conclusion))
            if promises.all_idle and inbox.watermark_ms > promises.known:
                self._tell_others(
                    step, operator
                )  # nobody has anything else to say: logs would differ for ever

    def _tell_others(self, step: Step, operator: str) -> None:
        report = self._report(operator)
        self.promises[operator].known = max(self.promises[operator].known, report.concluded_ms)
        for site in self.topology.sites:
            if site != self.site:
                early = self.mutant == "promised-before-durable"
                (step.send if early else step.send_durable)(site, report)

    def repeat_promises(self, step: Step, site: str) -> None:
        for operator, promises in self.promises.items():
            if promises.told >= 0 or promises.sources:
                step.send_durable(site, self._report(operator))

    def _report(self, operator: str) -> m.WatermarkReport:
        promises, log = self.promises[operator], self.inboxes[operator]
        return m.WatermarkReport(operator, promises.told, tuple(promises.sources), log.watermark_ms)
