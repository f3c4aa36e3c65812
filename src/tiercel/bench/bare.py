"""Router and instance with the move code taken out: what a tuple's path costs without it.

Responsible for: the same steps for a row, a frame, an output and a checkpoint, and none for moves.
Not responsible for: moving anything; a request for a move is a fault here.

Each method is its original without the lines that look for moves; a test compares them line by line, so
that a change of the original is made here too. Hosted as the real ones are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tiercel.core import messages as m
from tiercel.core.effects import Effect
from tiercel.core.events import Event, Received
from tiercel.core.feed import LIVE
from tiercel.core.inbox import AWAY, Inbox
from tiercel.core.instance import Instance
from tiercel.core.records import Control, Entry, Key, Row, Watermark
from tiercel.core.router import ORDINARY, Router
from tiercel.core.runs import count_rows
from tiercel.core.step import Step
from tiercel.core.topology import operator_of
from tiercel.spark.hosting import Build, build_host


class BareInbox(Inbox):
    """Keys have owners, and stay with them."""

    def resolve(self, key: Key) -> str:
        route = self.table.route(key)
        target = route.instance if route.site == self.site else AWAY + route.site
        self._routes[key] = target
        return target

    def append(self, step: Step, parts: dict[str, list[Row]], control: Control | None = None) -> Entry:
        self.offset += 1
        now = int(step.now_ms)
        if now > self.time_ms:
            self.time_ms = now
        entry = Entry(self.offset, self.time_ms, parts, control)
        if type(control) is Watermark:
            self.watermark_ms = control.value_ms
        step.put(("inbox", self.name, self.offset), entry)
        step.put(("head", self.name), (self.offset, self.time_ms, self.watermark_ms))
        counts = {name: count_rows(rows) for name, rows in parts.items()}
        count = sum(counts.values())
        if control is None:
            for name, rows in parts.items():
                feed = self.feeds.get(name)
                if feed is not None:
                    feed.appended(self.offset, counts[name])
                    if feed.phase is LIVE:
                        feed.offer(entry, {name: rows} if len(parts) > 1 else parts, counts[name])
        else:
            for feed in self.feeds.values():
                share = {n: r for n, r in parts.items() if n == feed.instance}
                rows_of_it = sum(counts[name] for name in share)
                if share:
                    feed.appended(self.offset, rows_of_it)
                if feed.phase is LIVE:
                    feed.offer(entry, share, rows_of_it)
        self.tail.keep(entry, count, self.feeds.values())
        self.count_backlog(count)
        return entry


class BareRouter(Router):
    """Rows in, rows out."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        for inbox in self.inboxes.values():
            inbox.__class__ = BareInbox

    def _ordinary(self, event: Event) -> bool:
        return self.boot is None and type(event) is Received and type(event.message) in ORDINARY

    def on_outputs(self, step: Step, message: m.Outputs) -> None:
        inbox = self.inboxes[operator_of(message.instance)]
        feed = inbox.feeds.get(message.instance)
        if feed is None or feed.life != message.life:
            return
        mark = inbox.emitted.get(message.instance, 0)
        if message.through > mark:
            outputs = message.outputs
            if self.consumers(self.topology.operators[inbox.name].output):
                outputs = list(outputs)
            if outputs and message.first <= mark:
                outputs = [o for o in outputs if o.offset > mark]
            inbox.emitted[message.instance] = message.through
            step.put(("emitted", inbox.name, message.instance), message.through)
            self.emit(step, inbox.name, outputs, message.rows if outputs is message.outputs else None)
            if message.dead_letters:
                self.emit_dead(step, inbox.name, [o for o in message.dead_letters if o.offset > mark])
        feed.flush_no = message.flush
        feed.processed(message.through)
        confirmed = m.Confirmed(message.life, message.flush, inbox.offset, feed.lag_rows)
        step.send_durable(message.instance, confirmed)
        feed.watermark_ms = max(feed.watermark_ms, message.watermark_ms)
        feed.timers = message.timers
        if message.timers:
            self.keep_ticking(step, inbox)
        inbox.passed(inbox.slowest_through())
        if self.owed:
            self.pay_owed(step)

    def _finish(self, step: Step) -> list[Effect]:
        if self.event_time:
            self.promise(step)
        for inbox in self.inboxes.values():
            for feed in inbox.feeds.values():
                if feed.phase is not LIVE and feed.wants_read():
                    kept = inbox.tail.behind(feed.cursor)
                    if kept is not None:
                        feed.replay(kept, inbox.offset)
                    else:
                        feed.reading = True
                        step.read_log(inbox.name, feed.cursor, self.settings.read_entries_max, feed.instance)
                if feed.pending:
                    feed.flush(step)
        if step.puts or step.deletes:
            seq = self.journal.written + 1
            offsets = [
                (inbox, inbox.offset) for inbox in self.inboxes.values() if inbox.offset > inbox.durable
            ]
            ends = [
                (lane, lane.next_n - 1) for lane in self.lanes.values() if lane.next_n - 1 > lane.durable_n
            ]
            self._unsynced.append((seq, offsets, ends))
            for stream in self.streams.values():
                stream.written(seq)
        return self.journal.commit(step)


class BareInstance(Instance):
    """Processes what it is sent."""

    def process(self, step: Step, entry: Entry) -> None:
        self.time_ms = entry.time_ms
        for name, rows in entry.parts.items():
            if name == self.name and entry.offset > self.applied:
                self._call_all(rows, entry)
        if entry.control is not None and entry.offset > self.applied:
            self._on_control(step, entry)
        self.applied = max(self.applied, entry.offset)

    def flush(self, step: Step) -> None:
        dead, self.engine.dead_letters = self.engine.dead_letters, []
        timers = self.engine.has_timers and not self.engine.event_time and self.space.has_timers
        self.flushes += 1
        outputs, self._out = self._out, []
        rows = count_rows([output.row for output in outputs])
        self.outputs += rows
        step.send(
            self.router,
            m.Outputs(
                self.name,
                self.life,
                self.flushes,
                self.applied,
                outputs[0].offset if outputs else self.applied,
                outputs,
                dead,
                self.watermark_ms,
                timers,
                rows,
            ),
        )

    def _on_confirmed(self, step: Step, message: m.Confirmed) -> None:
        if message.life != self.life:
            return
        self.confirmed = max(self.confirmed, message.flush)
        self.durable = max(self.durable, message.durable)
        self.lag = message.lag
        self.checkpointer.try_store(step)


bare_build: Build = partial(build_host, make_router=BareRouter, make_instance=BareInstance)
