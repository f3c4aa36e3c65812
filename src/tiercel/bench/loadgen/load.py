"""The load: producer, subscriber and checker in one machine.

Responsible for: open-loop and closed-loop load, checks of every output, a record of both ends.
Not responsible for: sockets and time (runtime/host.py drives it like any machine), the process around it
    (process.py), statistics (metrics.py).

An output must be the next of its key, find the state that its predecessors left, and carry the
right average. Otherwise a tuple, or its state, was lost, doubled or reordered.

The machine sends the core's messages itself, because a thread between it and the socket would be measured
too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import monotonic_ns

import msgspec
import numpy as np

from tiercel.bench.operators import INPUT, OUTPUT, SITE
from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Event, Received, TimerFired
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row
from tiercel.core.model.row_batch import count_rows, split
from tiercel.spark.operators.processor_adapter import encode_key

_encode = msgspec.msgpack.Encoder().encode  # the same bytes as RowCodec makes; a test compares them
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, float, int]).decode

PRODUCER = "load"
TICK_NS = 1_000_000  # tuples of one millisecond leave together, as from a sensor gateway
PROBE_TICKS = 5
DRAWN = 1 << 17  # tuples until the same draws come again
MOVE_ENDS = ("done", "aborted", "refused")
BURST_TICKS_MAX = 50  # a late load makes up for it in pieces; the delay counts as latency


def due_in_tick(tick: int, rate: int) -> int:
    """How many tuples are due in a tick, so that every second has `rate` of them."""
    return (tick + 1) * rate * TICK_NS // 1_000_000_000 - tick * rate * TICK_NS // 1_000_000_000


class Faults(msgspec.Struct):
    """Counts of what must not happen."""

    lost: int = 0
    doubled_or_reordered: int = 0
    wrong_state: int = 0

    @property
    def total(self) -> int:
        return self.lost + self.doubled_or_reordered + self.wrong_state


class Record:
    """Both ends of an open-loop run, one number per tuple and column."""

    def __init__(self) -> None:
        self.in_sensor, self.in_n, self.in_due_ns = array("q"), array("q"), array("q")
        self.sensor, self.n, self.due_ns, self.emitted_ns = array("q"), array("q"), array("q"), array("q")


class Load:
    """Feeds one router and reads the output stream."""

    def __init__(self, keys: int, output: str = OUTPUT) -> None:
        self.keys: list[Key] = [encode_key(n) for n in range(keys)]
        self.sent = [0] * keys
        self.seen = [0] * keys
        self.produced = self.received = 0
        self.acknowledged = 0
        self.faults = Faults()
        self.record = Record()
        self.statuses: list[tuple[int, m.MoveStatus]] = []
        self.connected = False
        self.closed_loop_max = 0  # tuples under way at most; 0: no closed loop
        self.frame_rows = 500
        self.favoured = 0  # the first so many keys get nine of ten tuples; 0: all get as many
        self.in_use = keys  # the first so many get tuples
        self._output = output
        self._seq = 0
        self._next_key = 0
        self.hot: Sequence[int] = ()  # these keys get every second tuple, in turn; empty: none
        self._drawn: list[int] = []  # sensors in the order of their tuples, repeated; empty: all in turn
        self._next_tick_ns = 0  # 0: no open loop
        self._rate = 0
        self._probes: Sequence[int] = ()
        self._tick = 0
        self._move: m.MoveRequest | None = None

    # -- what the benchmark asks for ---------------------------------------------------------

    def start_open_loop(self, rate: int, probes: Sequence[int] = ()) -> int:
        """Send `rate` tuples a second over all keys, and each probe key every 5 ms; first tick now."""
        self._rate = rate
        self._probes = probes
        self._tick = 0
        self._next_tick_ns = monotonic_ns() + TICK_NS
        return self._next_tick_ns

    def change_rate(self, rate: int) -> None:
        """From the next tick on, send `rate` tuples a second."""
        self._rate = rate

    def focus(self, keys: int) -> None:
        """From now on only the first keys get tuples."""
        self.in_use, self._next_key = min(keys, len(self.keys)), 0

    def draw(self, sensors: Sequence[int], zipf: float, seed: int) -> None:
        """From now on only these keys get tuples, in proportion to 1 / rank**zipf; their ranks are random."""
        rng = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, len(sensors) + 1) ** zipf
        ranked = rng.permutation(np.asarray(sensors))
        drawn = rng.choice(ranked, DRAWN, p=weights / weights.sum()) if zipf else ranked  # without: in turn
        self._drawn = drawn.tolist()
        self._next_key = 0

    def stop(self) -> None:
        self._next_tick_ns = self.closed_loop_max = 0

    def request(self, move: m.MoveRequest) -> None:
        self._move = move

    @property
    def quiet(self) -> bool:
        return self.received >= self.produced

    @property
    def move_ended(self) -> bool:
        return bool(self.statuses) and self.statuses[-1][1].phase in MOVE_ENDS

    # -- machine -----------------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Received(message=m.Publish() as message):
                self._judge(message)
                return [Send(SITE, m.Consumed(message.stream, message.entries[-1].offset)), *self._fill()]
            case Received(message=m.ProducerAck() as message):
                self.acknowledged = max(self.acknowledged, message.seq)
            case Received(message=m.MoveStatus() as message):
                self.statuses.append((monotonic_ns(), message))
                if message.phase in MOVE_ENDS:
                    self._move = None
            case TimerFired(name="tick"):
                return self._on_tick()
            case TimerFired(name="fill"):
                return self._fill()
            case Connected():
                self.connected = True
                return [Send(SITE, m.Hello(PRODUCER)), Send(SITE, m.Subscribe(self._output, 0))]
            case _:
                pass
        return []

    def _on_tick(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._move is not None and self._tick % 5 == 0:  # the reply to a repeated request is its state
            effects.append(Send(SITE, self._move))
        now = monotonic_ns()
        for _ in range(BURST_TICKS_MAX):
            if not 0 < self._next_tick_ns <= now:
                break
            sensors = self._take(due_in_tick(self._tick, self._rate))
            if self._tick % PROBE_TICKS == 0:
                sensors += self._probes
            if sensors:
                effects.append(self._frame(sensors, self._next_tick_ns, self.record))
            self._next_tick_ns += TICK_NS
            self._tick += 1
        return effects

    def _fill(self) -> list[Effect]:
        effects: list[Effect] = []
        while self.produced - self.received + self.frame_rows <= self.closed_loop_max:
            effects.append(self._frame(self._take(self.frame_rows), 0, None))
        return effects

    def _take(self, count: int) -> list[int]:
        """The next sensors; a stride that is prime to their number visits all, in no simple order."""
        total, at = self.in_use, self._next_key
        if self._drawn:
            self._next_key = at + count
            return [self._drawn[n % len(self._drawn)] for n in range(at, at + count)]
        if self.hot:
            self._next_key += count
            return [
                self.hot[n // 2 % len(self.hot)] if n % 2 else 389 * (n // 2) % total
                for n in range(at, at + count)
            ]
        if self.favoured:
            self._next_key += count
            return [
                389 * n % self.favoured if n % 10 else 389 * (n // 10) % total for n in range(at, at + count)
            ]
        self._next_key = (at + 389 * count) % total
        return [(at + 389 * i) % total for i in range(count)]

    def _frame(self, sensors: list[int], due_ns: int, record: Record | None) -> Send:
        keys, sent, encode = self.keys, self.sent, _encode
        rows: list[Row] = []
        for sensor in sensors:
            n = sent[sensor] = sent[sensor] + 1
            rows.append((keys[sensor], 0, encode((sensor, n, due_ns, float(n)))))
            if record is not None:
                record.in_n.append(n)
        if record is not None:
            record.in_sensor.extend(sensors)
            record.in_due_ns.extend([due_ns] * len(sensors))
        self.produced += len(rows)
        self._seq += 1
        return Send(SITE, m.Produce(PRODUCER, self._seq, INPUT, rows))

    def _judge(self, message: m.Publish) -> None:
        now, seen, faults, decode = monotonic_ns(), self.seen, self.faults, _decode
        record = self.record
        for entry in message.entries:
            for payload in [one for output in entry.outputs for one in split(output.row[2])]:
                sensor, n, count, average, due_ns = decode(payload)
                if n != seen[sensor] + 1:
                    if n > seen[sensor]:
                        faults.lost += n - seen[sensor] - 1
                    else:
                        faults.doubled_or_reordered += 1
                if count != n or average != (n + 1) / 2:  # the values of a key are 1.0, 2.0, 3.0, ...
                    faults.wrong_state += 1
                seen[sensor] = n
                if due_ns:  # 0: closed loop, where nothing is due
                    record.sensor.append(sensor)
                    record.n.append(n)
                    record.due_ns.append(due_ns)
                    record.emitted_ns.append(now)
            self.received += count_rows([output.row for output in entry.outputs])
