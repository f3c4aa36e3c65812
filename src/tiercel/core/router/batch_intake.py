"""Rows of batch tasks: the tasks of a user's own query send rows, and wait for the outputs that these cause.

Responsible for: appending each row of a micro-batch once, also if its task is tried again; telling a task
    when all of its outputs are in the output log; outputs of timers, which belong to no row.
Not responsible for: what is known of a batch (core/logs/batches.py), reading outputs (output_log.py).

    BatchBegin --> BatchBegun --> BatchFrame ... --> BatchEnd --(all outputs are in the log)--> BatchOutputs

Outputs of timers are noted as numbered places of the output log. The query asks for their last number before
it plans a batch (`TimerQuery`), and one task of the batch yields the places that were planned for it.

The stream of a batch task is read by one operator, and all of its instances are at this site. So the outputs
of a row are those of its inbox entry, whichever instances emit them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.logs.batches import BatchTable
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.output_log import OutputLog
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.model.bundle import check_bundles
from tiercel.core.model.log import Output
from tiercel.core.model.topology import site_of
from tiercel.core.router.moves import Moves
from tiercel.core.router.outputs import FanOut
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import Watermarks


class BatchIntake:
    """The batch tasks that write streams of this site."""

    def __init__(self, state: RouterState, watermarks: Watermarks, fan_out: FanOut, moves: Moves) -> None:
        self.state = state
        self._watermarks = watermarks
        self._fan_out = fan_out
        self._moves = moves
        self._tables: dict[str, BatchTable] = {}  # by stream
        self._waiting: dict[tuple[str, m.BatchTask], tuple[str, int]] = {}  # -> stream, last entry
        self._untaken: list[tuple[str, m.BatchTask, int, str]] = []  # receipts that wait for slow instances
        self._polls: dict[str, m.TimerQuery] = {}  # peer -> its question, which waits
        operators, streams = state.topology.operators.items(), state.topology.streams
        self._timed = {
            name: operator.inputs[0]
            for name, operator in operators
            if operator.output in streams and streams[operator.output].in_query
        }  # operator inside a query -> its input

    def load(self, key: StorageKey, value: Any) -> None:
        self._table(key[1]).load(key, value)

    def _table(self, stream: str) -> BatchTable:
        table = self._tables.get(stream)
        if table is None:
            table = self._tables[stream] = BatchTable(stream)
        return table

    # -- messages of batch tasks -----------------------------------------------------------------

    def on_message(self, step: Step, sender: str, message: m.BatchBegin | m.BatchFrame | m.BatchEnd) -> None:
        try:
            match message:
                case m.BatchBegin():
                    self._on_begin(step, sender, message)
                case m.BatchFrame():
                    self._on_frame(step, sender, message)
                case m.BatchEnd():
                    self._on_end(step, sender, message)
        except InvalidRequest as refusal:
            step.send(sender, m.BatchRefused(message.task, str(refusal)))

    def _on_begin(self, step: Step, sender: str, message: m.BatchBegin) -> None:
        _, log = self._ends(message.stream)
        table = self._table(message.stream)
        part, begins = table.begin(step, message.task, log.offset)
        if begins:
            self.promise(step, message.stream, table)
        after = part.after
        if message.timers is not None:
            part.timers = table.places(*message.timers)
            table.forget_timers(step, message.timers[0])
            after = part.timers[0].entry - 1 if part.timers else after
        step.send_durable(sender, m.BatchBegun(message.task, after, len(part.frames)))

    def promise(self, step: Step, stream: str, table: BatchTable) -> None:
        """Rule R19: as in Spark, the rows of a batch are late by the watermark of the batches before it."""
        facts = self.state.topology.streams.get(stream)
        if facts is not None and facts.delay_ms is not None and table.newest_ms >= 0:
            self._watermarks.written(step, facts)
            self._watermarks.promise_source(step, stream, stream, table.newest_ms - facts.delay_ms)

    def _on_frame(self, step: Step, sender: str, message: m.BatchFrame) -> None:
        task = message.task
        check_bundles(message.rows)
        found = self._table_of(task)
        if found is None:
            return  # the connection has changed: the task begins again
        table = found
        if not table.is_known(task, message.frame, message.digest):
            if message.frame > len(table.parts[task.partition].frames):
                return  # a frame before it was lost with a connection
            if not message.rows:
                what = f"batch {task.batch} of query {task.query}: the router has lost rows that it had"
                raise InvalidRequest(what, "expected the storage of the first attempt")
            self._append(step, table, message)
        if self._congested(table.stream):
            self._untaken.append((sender, task, message.frame, table.stream))
        else:
            step.send_durable(sender, m.BatchFrameTaken(task, message.frame))

    def _append(self, step: Step, table: BatchTable, message: m.BatchFrame) -> None:
        task = message.task
        if message.stream == table.stream:
            inbox, _ = self._ends(table.stream)
            before = inbox.offset
            self._fan_out.route_rows(step, table.stream, message.rows)
            offset = inbox.offset if inbox.offset > before else 0
        else:
            source = f"{task.query}|{task.partition}|{message.frame}".encode()
            refused = [Output(task.batch, source, 0, n, row) for n, row in enumerate(message.rows)]
            self._fan_out.log_outputs(step, message.stream, refused)
            offset = 0
        table.add(step, task, message.digest, offset, message.newest_ms)

    def _on_end(self, step: Step, sender: str, message: m.BatchEnd) -> None:
        task = message.task
        table = self._table_of(task)
        if table is None or message.frames > len(table.parts[task.partition].frames):
            return
        part = table.parts[task.partition]
        if part.timers is not None:
            offsets = sorted({offset for place in part.timers for offset in place.offsets})
            last = max((place.entry for place in part.timers), default=part.after)
            step.send_durable(sender, m.BatchOutputs(task, offsets, last))
            return
        if message.frames < len(part.frames):
            raise table.changed(task, f"{message.frames} frames of rows instead of {len(part.frames)}")
        self._waiting[sender, task] = (table.stream, max(part.offsets, default=0))
        self.progressed(step)

    def _table_of(self, task: m.BatchTask) -> BatchTable | None:
        """The table that knows this task; None if it has not begun here."""
        for table in self._tables.values():
            if table.current is not None and table.current.query == task.query:
                table.check_query(task)
                if table.current.batch == task.batch and task.partition in table.parts:
                    return table
        return None

    def _ends(self, stream: str) -> tuple[Inbox, OutputLog]:
        """The one inbox that the rows of a stream go to, and the one log that their outputs come to."""
        topology = self.state.topology
        readers = self.state.consumers(stream)
        sites = {site_of(i) for name in readers for i in topology.operators[name].instances}
        log = self.state.streams.get(topology.operators[readers[0]].output) if len(readers) == 1 else None
        if log is None or sites != {self.state.site} or len(topology.sites) > 1:
            raise InvalidRequest(
                f"batch tasks write stream {stream!r}",
                "expected one operator that reads it, and one site",
                "use live.stream(...).feed(df) and dataframe()",
            )
        return self.state.inboxes[readers[0]], log

    # -- outputs of timers -----------------------------------------------------------------------

    def emitted(self, step: Step, operator: str, outputs: Sequence[Output], after: int, through: int) -> None:
        """Outputs of the inbox entries (after, through] are in the log: note those that no task waits for."""
        stream = self._timed.get(operator)
        if stream is not None and outputs:
            table = self._table(stream)
            if not table.are_of_rows(after, through):
                _, log = self._ends(stream)
                table.add_timers(step, log.offset, {output.offset for output in outputs})

    def on_timer_query(self, step: Step, sender: str, message: m.TimerQuery) -> None:
        """Rule R19: the query asks between two batches, so the watermark of the batches before may pass."""
        self.promise(step, message.stream, self._table(message.stream))
        self._polls[sender] = message

    def _answer_polls(self, step: Step) -> None:
        for peer, query in list(self._polls.items()):
            table = self._table(query.stream)
            inbox, _ = self._ends(query.stream)
            if table.last_timer > query.after or (query.settled and self.all_emitted(inbox, inbox.offset)):
                del self._polls[peer]
                step.send_durable(peer, m.TimerPlaces(query.stream, table.last_timer))

    # -- complete outputs ------------------------------------------------------------------------

    def progressed(self, step: Step) -> None:
        """Outputs were admitted, or a move has changed: answer the tasks whose outputs are complete."""
        for (peer, task), (stream, last) in list(self._waiting.items()):
            inbox, log = self._ends(stream)
            if self.all_emitted(inbox, last):
                del self._waiting[peer, task]
                offsets = self._tables[stream].parts[task.partition].offsets
                step.send_durable(peer, m.BatchOutputs(task, offsets, log.offset))
        if self._untaken:
            self._release(step)
        if self._polls:
            self._answer_polls(step)

    def all_emitted(self, inbox: Inbox, offset: int) -> bool:
        """A batch task has its outputs when every owner, old and new, has emitted them."""
        return inbox.all_processed(offset) and self._moves.all_emit(inbox.name, offset)

    def _congested(self, stream: str) -> bool:
        inbox, _ = self._ends(stream)
        return inbox.backlog_rows > self.state.settings.backlog_rows_max

    def _release(self, step: Step) -> None:
        waiting, self._untaken = self._untaken, []
        for peer, task, frame, stream in waiting:
            if self._congested(stream):
                self._untaken.append((peer, task, frame, stream))
            else:
                step.send_durable(peer, m.BatchFrameTaken(task, frame))

    @property
    def active(self) -> bool:
        return bool(self._waiting or self._untaken or self._polls)

    def disconnected(self, peer: str) -> None:
        for waits in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[waits]
        self._untaken = [receipt for receipt in self._untaken if receipt[0] != peer]
        self._polls.pop(peer, None)
