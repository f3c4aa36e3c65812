"""The receiving side of a move, in the destination instance.

Responsible for: holding rows of a key until its state is there, processing in step with the source
    without emitting, the vote, and emitting from the cut on.
Not responsible for: the order of what comes in (arrivals.py feeds it), storing (instance.py).

    RECEIVING --every key--> IN_STEP --Compare, checkpoint--> VOTED --Adopt--> ADOPTED --Done--> merged
    RECEIVING --Adopt--> RECEIVING (adopted) --every key--> ADOPTED                 (flip first)

The emit filter: outputs are kept until EmitFrom(r) says that everything up to r came from the
source and has arrived; those at or below r are dropped, the rest goes out in order.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

from tiercel.core import messages as m
from tiercel.core.keyspace import KeySpace, nobody
from tiercel.core.records import (
    OWN,
    SHADOW,
    Adopt,
    Compare,
    Control,
    Key,
    KeyImage,
    KeySet,
    Output,
    Position,
    Row,
    TableUpdate,
    Tick,
    Watermark,
)
from tiercel.core.routing import slot_of
from tiercel.core.snapshots import Digests
from tiercel.core.step import Step
from tiercel.core.strategies import STRATEGIES

if TYPE_CHECKING:
    from tiercel.core.processing import Processing


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    RECEIVING = "receiving"  # rows of a key wait until its state is there
    IN_STEP = "in step"  # every key is here; rows are processed as they come, nothing is emitted
    VOTED = "voted"  # a checkpoint has every key; only the source's router may end this now
    ADOPTED = "adopted"  # the keys are ours; emits once EmitFrom has come


Item = tuple[Position, int, list[Row], Control | None]  # position, time, rows, control


class Marks:
    """The watermarks of the source's log and of our own, at the position that is being processed."""

    __slots__ = ("own_ms", "shadow_ms")

    def __init__(self, shadow_ms: int, own_ms: int) -> None:
        self.shadow_ms, self.own_ms = shadow_ms, own_ms

    def pass_by(self, position: Position, control: Control | None) -> None:
        if isinstance(control, Watermark):
            if position[0] == SHADOW:
                self.shadow_ms = max(self.shadow_ms, control.value_ms)
            else:
                self.own_ms = max(self.own_ms, control.value_ms)


class DestinationMove:
    """One key set on its way into this instance."""

    def __init__(
        self, instance: Processing, move: str, keys: KeySet, source: str, strategy: str, epochs: TableUpdate
    ) -> None:
        self.instance = instance
        self.move = move
        self.keys = keys
        self.source = source
        self.strategy = strategy
        self.epochs = epochs  # of the keys before the flip
        self.owned = False
        self.phase = Phase.RECEIVING
        self.complete = False
        self.position: Position = (SHADOW, -1)
        self.adopt: Adopt | None = None
        self.adopted_at = -1
        self.emit_from: int | None = None
        self.space = KeySpace(instance.operator.slots, self.epoch_of, *instance.engine.about_keys)
        self.at: dict[Key, Position] = {}  # up to where the image of a key already is
        self.floor_wm: dict[Key, int] = {}
        self.marks = Marks(-1, -1)
        self.held: dict[Key, list[Item]] = {}
        self.controls: list[Item] = []
        self.stalled: deque[Item] = (
            deque()
        )  # behind a Compare that came before the last key, or a full buffer
        self.kept: list[tuple[int, Output]] = []  # (stage, output) not yet allowed out
        self.kept_dead: list[tuple[int, Output]] = []
        self.next_chunk = 0
        self._chunk_seen = -1
        self.chunks: int | None = None
        self.touched: set[Key] = set()
        self.digests: Digests | None = None  # as of Compare
        self.covered = False  # a checkpoint holds every key as of Compare, or later
        self.vote_position: Position | None = None
        self.settled_told = False

    def epoch_of(self, key: Key) -> int:
        """A new key's epoch: the old owner's until the adoption, then the new one.

        As the adoption says, not as our table does: in a replay that may not have come so far.
        """
        routes = self.adopt.update if self.owned and self.adopt is not None else self.epochs
        route = routes.keys.get(key) or routes.slots.get(slot_of(key, self.space.slots))
        return route.epoch if route is not None else 0

    # -- state comes in ----------------------------------------------------------------------

    def on_chunk(self, step: Step, chunk: m.Chunk) -> None:
        if self.complete:
            self.next_chunk = max(self.next_chunk, chunk.n + 1)  # we have it from a checkpoint
        elif chunk.n == self.next_chunk:
            self.next_chunk += 1
            for image in chunk.images:
                self._install(image)
            self._finish_if_complete(step)
        step.send(self.source, m.ChunkReceipt(self.move, self.next_chunk))

    def on_end_of_keys(self, step: Step, message: m.EndOfKeys) -> None:
        self.chunks = message.chunks
        self._finish_if_complete(step)

    def fetch_if_stuck(self, step: Step) -> None:
        """Nothing came since the last look: the source may not know that we have begun anew."""
        if STRATEGIES[self.strategy].flips_first and self.next_chunk == self._chunk_seen:
            step.send(self.source, m.Fetch(self.move))
        self._chunk_seen = self.next_chunk

    def _install(self, image: KeyImage) -> None:
        key = image.key
        self.space.install(image, self.epoch_of(key))
        self.at[key] = (SHADOW, image.at)
        self.floor_wm[key] = image.watermark_ms
        self._catch_up(key)

    def _catch_up(self, key: Key) -> None:
        """What was held for this key, with the ticks and watermarks that passed meanwhile, in order."""
        items = sorted([*self.held.pop(key, []), *self.controls], key=lambda item: item[0])
        marks = Marks(-1, self.adopt.own_watermark_ms if self.adopt is not None else -1)
        for position, time_ms, rows, control in items:
            marks.pass_by(position, control)
            if control is None:
                self._call(key, rows, position, time_ms, marks)
            else:
                self._control_for(key, position, time_ms, control, marks)

    def _finish_if_complete(self, step: Step) -> None:
        if self.complete or self.chunks is None or self.next_chunk < self.chunks:
            return
        for key in sorted(self.held):
            self.at[key] = (SHADOW, -1)  # it had no state and none was deleted: born after the capture began
            self._catch_up(key)
        self.complete = True
        self.controls.clear()
        if self.adopt is not None:
            self.phase = Phase.ADOPTED
        else:
            self.phase = Phase.IN_STEP
        self.instance.tell(step, m.Installed(self.move))
        self._go_on(step)

    # -- rows come in ------------------------------------------------------------------------

    def feed(
        self, step: Step, position: Position, time_ms: int, rows: list[Row], control: Control | None
    ) -> None:
        """The next item of the shadow feed or, once adopted, of our own log."""
        if position <= self.position:
            return
        self.position = position
        item = (position, time_ms, rows, control)
        if self.stalled or self._must_stall(control):
            self.stalled.append(item)
        else:
            self._process(step, item)

    def _must_stall(self, control: Control | None) -> bool:
        if isinstance(control, Compare):
            return not self.complete
        return self.emit_from is None and len(self.kept) >= self.instance.settings.suppressed_max

    def _go_on(self, step: Step) -> None:
        while self.stalled and not self._must_stall(self.stalled[0][3]):
            self._process(step, self.stalled.popleft())
        if not self.stalled and self.vote_position is not None and self.phase is Phase.IN_STEP:
            self.instance.checkpoint_soon(step)  # the one taken at Compare could not cover what was stalled

    def _process(self, step: Step, item: Item) -> None:
        position, time_ms, rows, control = item
        if isinstance(control, Compare):
            self.digests = Digests(self.space, self.touched)
            self.vote_position = position
            self.instance.digest_some(step, self.move)
            self.instance.checkpoint_soon(step)
            return
        if isinstance(control, Adopt):
            self._own(step, control)
            return
        if control is not None:
            if not self.complete and self.instance.settings.mutant != "ticks-not-held":
                self.controls.append(item)
            self.marks.pass_by(position, control)
            for key in self.space.due(self._due(position, time_ms, control)):
                if position <= self.at.get(key, (SHADOW, -1)):
                    self.space.remind(key)  # its image has this; what is due in it waits for the next one
                else:
                    self._control_for(key, position, time_ms, control, self.marks)
            return
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(row[0], []).append(row)
        for key, of_key in by_key.items():
            if self.complete or key in self.at:
                self._call(key, of_key, position, time_ms, self.marks)
            else:
                self.held.setdefault(key, []).append((position, time_ms, of_key, None))

    def say_ready(self, step: Step) -> None:
        """The vote: a checkpoint has every key, and this is what they are."""
        self.covered = True
        if self.digests is not None and self.digests.complete:
            instance = self.instance
            instance.tell(step, m.Ready(self.move, instance.life, self.digests.found))

    # -- calls -------------------------------------------------------------------------------

    def _times(self, key: Key, position: Position, time_ms: int, marks: Marks) -> tuple[int, int]:
        """The key's clock never runs backwards, whichever log it reads."""
        floor = self.floor_wm.get(key, -1)
        if position[0] == SHADOW:
            return time_ms, max(floor, marks.shadow_ms)
        adopt = self.adopt
        assert adopt is not None
        return max(time_ms, adopt.time_ms), max(floor, adopt.watermark_ms, marks.own_ms)

    def _due(self, position: Position, time_ms: int, control: Control) -> int:
        """Up to which timer value this tick or watermark fires."""
        engine = self.instance.engine
        if engine.event_time:
            if not isinstance(control, Watermark):
                return -1
            floor = self.adopt.watermark_ms if self.adopt is not None and position[0] == OWN else -1
            return max(control.value_ms, floor)
        if not isinstance(control, Tick):
            return -1
        return max(time_ms, self.adopt.time_ms) if self.adopt is not None and position[0] == OWN else time_ms

    def _call(self, key: Key, rows: list[Row], position: Position, time_ms: int, marks: Marks) -> None:
        if position <= self.at.get(key, (SHADOW, -1)):
            return  # its image already has this
        self.touched.add(key)
        instance = self.instance
        self.space.about_to_change([key])
        state = self.space.state(key)
        time_ms, watermark_ms = self._times(key, position, time_ms, marks)
        out: list[Output] = []
        engine = instance.engine
        before, engine.dead_letters = engine.dead_letters, []
        engine.call(state, key, rows, time_ms, watermark_ms, position[1], out)
        dead, engine.dead_letters = engine.dead_letters, before
        self.space.touched(key, state, engine.handle.new_timers)
        self._out(position, out, dead)

    def _control_for(
        self, key: Key, position: Position, time_ms: int, control: Control, marks: Marks
    ) -> None:
        state = self.space.keys.get(key)
        if state is None or not state.timers or position <= self.at.get(key, (SHADOW, -1)):
            return
        due = self._due(position, time_ms, control)
        if min(state.timers) > due:
            return
        self.touched.add(key)
        instance = self.instance
        self.space.about_to_change([key])
        time_ms, watermark_ms = self._times(key, position, time_ms, marks)
        if isinstance(control, Watermark):
            watermark_ms = max(watermark_ms, due)
        out: list[Output] = []
        engine = instance.engine
        before, engine.dead_letters = engine.dead_letters, []
        engine.fire(state, key, due, time_ms, watermark_ms, position[1], out)
        dead, engine.dead_letters = engine.dead_letters, before
        self.space.touched(key, state, engine.handle.new_timers)
        self._out(position, out, dead)

    # -- the emit filter ---------------------------------------------------------------------

    def _out(self, position: Position, out: list[Output], dead: list[Output]) -> None:
        for kept, outputs in ((self.kept, out), (self.kept_dead, dead)):
            if self.emit_from is None or position > (SHADOW, self._bound()):
                kept += [(position[0], o) for o in outputs]

    def _bound(self) -> int:
        assert self.emit_from is not None
        if self.instance.settings.mutant == "emit-filter-off-by-one":
            return self.emit_from - 1
        return self.emit_from

    def on_emitted_through(self, offset: int) -> None:
        """The source's outputs up to here have arrived: ours need not be kept."""
        self.kept = [(s, o) for s, o in self.kept if s == OWN or o.offset > offset]
        self.kept_dead = [(s, o) for s, o in self.kept_dead if s == OWN or o.offset > offset]

    def on_emit_from(self, step: Step, offset: int) -> None:
        if self.emit_from is None:
            self.emit_from = offset
            if self.instance.settings.mutant == "suppressed-not-released":
                offset = 1 << 60
            bound = self._bound() if offset == self.emit_from else offset
            self.kept = [(s, o) for s, o in self.kept if s == OWN or o.offset > bound]
            self.kept_dead = [(s, o) for s, o in self.kept_dead if s == OWN or o.offset > bound]
            self._go_on(step)

    def flush(self, step: Step) -> None:
        """Send what may go out; entries in order, so that each key's outputs are in order."""
        early = self.instance.settings.mutant == "emits-before-cut" and self.adopt is not None
        if (self.emit_from is None and not early) or not (self.kept or self.kept_dead):
            return
        for stage in (SHADOW, OWN):
            outputs = [o for s, o in self.kept if s == stage]
            dead = [o for s, o in self.kept_dead if s == stage]
            if outputs or dead:
                instance = self.instance
                step.send(
                    instance.router,
                    m.MoveOutputs(instance.name, instance.life, self.move, stage, outputs, dead),
                )
        self.kept, self.kept_dead = [], []

    # -- the end -----------------------------------------------------------------------------

    def on_adopt(self, step: Step, adopt: Adopt, offset: int) -> None:
        """The keys are ours from this entry of our log on."""
        if self.owned:
            return  # a replay of entries that a checkpoint of arrivals was already past
        self.adopted_at = offset
        if self.strategy == "live":
            self.feed(step, (OWN, offset), adopt.time_ms, [], adopt)
        else:
            self.position = max(self.position, (OWN, offset))
            self._own(step, adopt)

    def _own(self, step: Step, adopt: Adopt) -> None:
        self.adopt = adopt
        self.owned = True
        self.marks.own_ms = max(self.marks.own_ms, adopt.own_watermark_ms)
        for key, state in self.space.keys.items():
            state.epoch = self.instance.routes.route(key).epoch
        if self.complete:
            self.phase = Phase.ADOPTED
        self._fire_passed(step, adopt)

    def _fire_passed(self, step: Step, adopt: Adopt) -> None:
        """Our log may be past timers of theirs, and never say so again: then Adopt is a watermark for them.

        Once the move is done our site's promise counts for them too; what it fires must have come before.
        """
        ahead = adopt.own_watermark_ms > adopt.watermark_ms
        if ahead and self.instance.settings.mutant != "passed-timers-not-fired":
            passed = Watermark(adopt.own_watermark_ms)
            self._process(step, ((OWN, self.adopted_at), adopt.time_ms, [], passed))

    def let_go(self) -> None:
        """It has ended: what it held goes now, not when the collector finds it."""
        self.space.epoch_of = nobody
        self.digests = None

    def checkpoint_position(self) -> Position | None:
        """What a checkpoint taken now may claim; nothing while something is held."""
        if self.instance.settings.mutant == "checkpoint-with-holes":
            return self.position
        return self.position if self.complete and not self.stalled else None

    def may_settle(self, covered: Position) -> bool:
        return (
            self.phase is Phase.ADOPTED
            and self.emit_from is not None
            and not self.kept
            and not self.stalled
            and covered >= (OWN, self.adopted_at)
        )
