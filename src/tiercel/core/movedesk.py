"""Moves at a router: requests, preparations, instances that attach, checkpoints, and the way to each move.

Responsible for: finding the departure or arrival a message belongs to; locks; attach and resume.
Not responsible for: the phases of a move (departures.py, arrivals.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core import heirs
from tiercel.core import messages as m
from tiercel.core.arrivals import DURABLE, Arrival
from tiercel.core.arrivals import Phase as ArrivalPhase
from tiercel.core.departures import DECIDED, Departure
from tiercel.core.departures import Phase as DeparturePhase
from tiercel.core.faults import InvalidRequest
from tiercel.core.feed import Phase as FeedPhase
from tiercel.core.inbox import Inbox
from tiercel.core.readers import Reader
from tiercel.core.records import OWN, SHADOW, Entry, KeySet, TableUpdate
from tiercel.core.routing import check_keys, overlap
from tiercel.core.step import Step
from tiercel.core.strategies import STRATEGIES
from tiercel.core.topology import operator_of, site_of
from tiercel.core.traffic import Traffic


class MoveDesk(Traffic):
    """Everything about moves that is not the life of one move."""

    # -- requests ----------------------------------------------------------------------------

    def on_move_request(self, step: Step, sender: str, request: m.MoveRequest) -> None:
        if request.move in self.departures:
            self.report_to(step, sender, self.departures[request.move])
            return
        if request.move in self.ended:
            step.send_durable(sender, m.MoveStatus(request.move, *self.ended[request.move]))
            return
        try:
            self.check_request(request)
        except InvalidRequest as refusal:  # for good: the same request may be under way once more
            self.ended[request.move] = ("refused", str(refusal))
            step.put(("ended", request.move), self.ended[request.move])
            step.send_durable(sender, m.MoveStatus(request.move, *self.ended[request.move]))
            return
        departure = self.departures[request.move] = Departure(self, self.inboxes[request.operator], request)
        departure.asked_by = sender
        departure.deadline_ms = step.now_ms + request.deadline_ms
        departure.save(step, DeparturePhase.PREPARING)  # so that a move's name is never tried twice
        self.report_to(step, sender, departure)
        departure.retry(step)

    def check_request(self, request: m.MoveRequest) -> None:
        """The closed list of faults that make a request impossible here."""
        operator = self.topology.operator(request.operator)
        strategy = STRATEGIES.get(request.strategy)
        if strategy is None:
            raise InvalidRequest.unknown("strategy", request.strategy, sorted(STRATEGIES))
        check_keys(request.keys, operator)
        for instance in (request.source, request.destination):
            if operator_of(instance) != request.operator:
                raise InvalidRequest(f"{instance!r} is not an instance of {request.operator!r}")
            self.topology.site(site_of(instance))
        if request.source == request.destination:
            raise InvalidRequest(
                f"move from {request.source!r} to itself", "expected two different instances"
            )
        if strategy.needs_determinism and not operator.deterministic:
            safe = sorted(name for name, s in STRATEGIES.items() if not s.needs_determinism)
            what = f"{operator.name!r} is declared non-deterministic; {request.strategy!r} would run it twice"
            raise InvalidRequest(what, f"expected one of: {', '.join(safe)}")
        inbox = self.inboxes[request.operator]
        self.check_owned(inbox, request)
        self.check_unlocked(inbox, request.keys, request.move, request.strategy)

    def check_owned(self, inbox: Inbox, request: m.MoveRequest) -> None:
        for slot in sorted(request.keys.slots):
            owner = inbox.table.slots[slot].instance
            if owner != request.source:
                raise InvalidRequest(
                    f"slot {slot} is not owned by {request.source!r}", f"its owner is {owner!r}"
                )
        for key in sorted(request.keys.keys):
            owner = inbox.table.route(key).instance
            if owner != request.source:
                raise InvalidRequest(
                    f"key {key!r} is not owned by {request.source!r}", f"its owner is {owner!r}"
                )

    def check_unlocked(self, inbox: Inbox, keys: KeySet, move: str, strategy: str) -> None:
        """Two moves at once must share no key; one that restarts the operator is alone."""
        if self.mutant == "overlapping-moves-accepted":
            return
        others: list[Departure | Arrival] = [*self.departures.values(), *self.arrivals.values()]
        ended = (DeparturePhase.DONE, DeparturePhase.ABORTED, ArrivalPhase.MERGED)
        for other in others:
            if other.inbox is not inbox or other.move == move or other.phase in ended:
                continue
            alone = STRATEGIES[strategy].halts or STRATEGIES[other.strategy_name].halts
            if alone or overlap(keys, other.keys, inbox.table.count):
                what = f"keys are locked by move {other.move!r} ({other.phase.value})"
                raise InvalidRequest(what, "wait until it has ended")

    def on_prepare(self, step: Step, sender: str, prepare: m.Prepare) -> None:
        arrival = self.arrivals.get(prepare.move)
        if arrival is not None:
            arrival.retry(step)
            if arrival.phase is not ArrivalPhase.PREPARING and arrival.record.adopted < 0:
                arrival.tell(step, m.Prepared(prepare.move, arrival.record.frozen_ms))
            return
        inbox = self.inboxes[prepare.operator]
        feed = inbox.feeds.get(prepare.destination)
        try:
            if feed is None or feed.phase not in (FeedPhase.LIVE, FeedPhase.CATCHING_UP):
                raise InvalidRequest(f"destination {prepare.destination!r} is not running")
            self.check_unlocked(inbox, prepare.keys, prepare.move, prepare.strategy)
        except InvalidRequest as refusal:
            self.send_router(step, site_of(prepare.source), m.Refused(prepare.move, str(refusal)))
            return
        frozen_ms = self.output_promise(prepare.operator)  # before the arrival itself holds it down
        arrival = self.arrivals[prepare.move] = Arrival(self, inbox, prepare)
        arrival.record.frozen_ms = frozen_ms
        self.trace_phase(step, prepare.move, "arrival", "asked", "preparing")
        step.send(prepare.destination, prepare)

    # -- reports -----------------------------------------------------------------------------

    def report(self, step: Step, departure: Departure) -> None:
        if departure.asked_by:
            self.report_to(step, departure.asked_by, departure)

    def report_to(self, step: Step, to: str, departure: Departure) -> None:
        status = m.MoveStatus(
            departure.move, departure.phase.value, departure.record.reason, *departure.moved
        )
        step.send_durable(to, status)

    def on_status_query(self, step: Step, sender: str, n: int, known: dict[str, tuple[int, int]]) -> None:
        """Whole tables are long: only those that the asker has not seen are told again."""
        for departure in self.departures.values():
            departure.asked_by = sender
        versions = {name: (self.incarnation, inbox.table.version) for name, inbox in self.inboxes.items()}
        unknown = [name for name, version in versions.items() if known.get(name) != version]
        tables = {name: self.sequenced_here(self.inboxes[name]) for name in unknown}
        step.send_durable(
            sender,
            m.StatusReply(
                [d.request for d in self.departures.values()],
                [m.MoveStatus(d.move, d.phase.value, d.record.reason) for d in self.departures.values()],
                tables,
                {
                    f.instance: f.keys
                    for i in self.inboxes.values()
                    for f in i.feeds.values()
                    if f.phase is not FeedPhase.DETACHED
                },
                n,
                versions,
            ),
        )

    def sequenced_here(self, inbox: Inbox) -> TableUpdate:
        table = inbox.table
        here = {instance for instance in table.owners() if site_of(instance) == self.site}
        return TableUpdate(
            {s: r for s, r in enumerate(table.slots) if r.instance in here},
            {k: r for k, r in table.overrides.items() if r.instance in here},
        )

    def trace_phase(self, step: Step, move: str, side: str, before: str, after: str) -> None:
        step.note(f"{move} {side} at {self.site}: {before} -> {after}")

    # -- notices from the source's router ----------------------------------------------------

    def on_notice(self, step: Step, sender: str, inbox: str, notice: m.AnyNotice) -> None:
        arrival = self.arrivals.get(notice.move)
        if arrival is None:
            if isinstance(notice, m.ShadowNotice):
                self.send_router(
                    step, sender, m.Refused(notice.move, f"{self.site} was restarted and forgot it")
                )
            elif isinstance(notice, m.FlippedNotice) and notice.move not in self.merged:
                arrival = self.arrivals[notice.move] = Arrival(self, self.inboxes[inbox], notice.prepare)
                arrival.on_flipped(step, notice)
            return
        match notice:
            case m.ShadowNotice():
                arrival.on_shadow(step, notice)
            case m.FlippedNotice():
                arrival.on_flipped(step, notice)
            case m.EmittedNotice():
                step.send(arrival.destination, m.EmittedThrough(notice.move, notice.offset))
            case m.EmitFromNotice():
                arrival.on_emit_from(step, notice)
            case m.ResumeNotice():
                arrival.inbox.unpause(step, arrival.move)
            case m.DoneNotice():
                arrival.on_done(step)
            case m.AbortedNotice() if arrival.phase not in (ArrivalPhase.ADOPTED, ArrivalPhase.MERGED):
                self.drop_arrival(step, arrival)
            case _:
                pass

    def drop_arrival(self, step: Step, arrival: Arrival) -> None:
        self.trace_phase(step, arrival.move, "arrival", arrival.phase.value, "forgotten")
        del self.arrivals[arrival.move]
        arrival.forget(step)
        step.send_durable(arrival.destination, m.AbortNotice(arrival.move))

    def end_departure(self, step: Step, departure: Departure) -> None:
        """Nothing more is owed to anyone; only how it ended is remembered."""
        self.departures.pop(departure.move, None)
        self.ended[departure.move] = (departure.phase.value, departure.record.reason)
        step.delete(("departure", departure.move))
        step.put(("ended", departure.move), self.ended[departure.move])
        self.report(step, departure)

    def to_destination(self, step: Step, arrival: Arrival, message: m.Message) -> None:
        feed = arrival.inbox.feeds.get(arrival.destination)
        if feed is not None and feed.phase in (FeedPhase.LIVE, FeedPhase.CATCHING_UP):
            step.send(arrival.destination, message)  # else it is fed when it resumes

    def shadow_backlog(self, departure: Departure) -> int:
        """Shadow entries that the destination's side does not have yet, or does not have durably."""
        if departure.to_site != self.site:
            return len(self.lane(departure.to_site, departure.inbox.name).frames)
        arrival = self.arrivals.get(departure.move)
        return len(arrival.shadow) if arrival is not None else 0

    def set_shadow_hook(self, inbox: Inbox) -> None:
        """Entries are shown to moves only while there are moves: an idle path has no such step."""
        interested = [
            d
            for d in self.departures.values()
            if d.inbox is inbox and d.phase in (DeparturePhase.SHADOWING, DeparturePhase.COMPARING)
        ]

        def hook(step: Step, entry: Entry) -> None:
            for departure in interested:
                departure.shadow_appended(step, entry)

        def floor() -> int | None:
            return min((f for d in interested if (f := d.trim_floor()) is not None), default=None)

        inbox.shadow_hook = hook if interested else None
        inbox.trim_floor = floor

    # -- instances come and go ---------------------------------------------------------------

    def on_attach(self, step: Step, message: m.Attach) -> None:
        inbox = self.inboxes[operator_of(message.instance)]
        if inbox.kept_out(message.instance):
            inbox.wait_or_end(step, message)
            return
        reader = inbox.readers.get(message.instance)
        last_life = reader.life if reader is not None else 0
        if message.life < last_life and self.mutant != "zombie-not-fenced":
            step.send(message.instance, m.Outlived(message.life))  # Spark believes it dead, or should
            return
        feed = inbox.feeds.get(message.instance)
        if feed is None:
            feed = inbox.new_feed(message.instance)
        feed.inherited = inbox.heirs.get(message.instance)
        feed.attach(message.life, message.session)
        fresh = reader is None
        if reader is None:
            # a newcomer owns nothing that is in the log
            reader = Reader(0, inbox.offset, {}, inbox.watermark_ms)
        if message.life > last_life:
            reader = msgspec.structs.replace(reader, life=message.life)
            inbox.readers[message.instance] = reader
            step.put(("reader", inbox.name, message.instance), reader)
            step.delete(("retired", inbox.name, message.instance))
            inbox.relaunched(step, message.instance, message.life)
            self.life_began(step, message.instance)
        inbox.limit_feeds()
        known = message.life == last_life  # same process, new connection: it still has what is not durable
        arrivals = [
            a.role()
            for a in self.arrivals.values()
            if a.destination == message.instance and (known or a.phase in DURABLE)
        ]
        departures = [r for d in self.departures.values() if d.source == message.instance and (r := d.role())]
        reply = m.AttachReply(
            message.life,
            message.session,
            self.incarnation,
            reader.applied,
            reader.start_watermark_ms,
            fresh,
            feed.flush_no,
            inbox.ends,
            arrivals,
            departures,
            feed.inherited,
            reader.stored,
            inbox.offset,
        )
        step.send_durable(message.instance, reply)

    def life_began(self, step: Step, instance: str) -> None:
        for departure in list(self.departures.values()):
            if departure.source == instance:
                departure.source_restarted(step)
        for arrival in list(self.arrivals.values()):
            if arrival.destination == instance and arrival.phase not in DURABLE:
                self.forgotten_by_destination(step, arrival)

    def forgotten_by_destination(self, step: Step, arrival: Arrival) -> None:
        self.send_router(step, arrival.from_site, m.Refused(arrival.move, "the destination was restarted"))
        if arrival.move in self.arrivals:
            self.drop_arrival(step, arrival)

    def on_resume(self, step: Step, message: m.Resume) -> None:
        inbox = self.inboxes[operator_of(message.instance)]
        feed = inbox.feeds.get(message.instance)
        if feed is None or feed.life != message.life or feed.session != message.session:
            return
        if feed.phase is not FeedPhase.FENCED:
            return
        moves = dict(message.moves)
        for arrival in list(self.arrivals.values()):
            if arrival.destination == message.instance:
                position = moves.get(arrival.move)
                if position is None and arrival.phase is ArrivalPhase.SHADOWING:
                    self.forgotten_by_destination(step, arrival)
                    continue
                if 0 <= arrival.record.merged <= message.applied:
                    continue
                if position is None and arrival.record.adopted >= 0:
                    moves[arrival.move] = (OWN, arrival.record.adopted)
                arrival.feed_shadow(step, position or (SHADOW, -1))
        feed.resume(message.applied, moves, inbox.trimmed)
        feed.watermark_ms = max(feed.watermark_ms, message.watermark_ms)

    def on_checkpointed(self, step: Step, message: m.Checkpointed) -> None:
        inbox = self.inboxes[operator_of(message.instance)]
        feed = inbox.feeds.get(message.instance)
        fenced = feed is not None and feed.life != message.life and self.mutant != "zombie-not-fenced"
        if feed is None and message.instance not in inbox.readers:  # retired: it works on for nobody
            step.send(message.instance, m.Outlived(message.life))
        if feed is None or fenced:
            return
        own = {move: offset for move, (stage, offset) in message.moves.items() if stage == OWN}
        for arrival in list(self.arrivals.values()):
            if arrival.destination == message.instance:
                position = message.moves.get(arrival.move, (SHADOW, -1))
                if arrival.checkpointed(step, position, message.applied):
                    del self.arrivals[arrival.move]
                    self.merged[arrival.move] = None
                    step.put(("merged", arrival.move), True)
                    arrival.forget(step)
                elif arrival.record.adopted >= 0:
                    own.setdefault(arrival.move, arrival.record.adopted)
        reader = inbox.readers[message.instance] = Reader(message.life, message.applied, own, stored=True)
        step.put(("reader", inbox.name, message.instance), reader)
        feed.keys = message.keys
        heirs.covered(self, step, inbox, message.instance, message.applied)
        inbox.trim(step)

    def retire(self, step: Step, sender: str, instance: str) -> None:
        """Let an instance go that owns nothing: from here on it holds nothing up and gets nothing."""
        inbox = self.inboxes[operator_of(instance)]
        needed = self._needed(inbox, instance)
        if not needed:
            inbox.feeds.pop(instance, None)
            inbox.attaching.pop(instance, None)
            self._forget_reader(step, inbox, instance)
            for departure in list(self.departures.values()):
                if departure.source == instance:
                    self.end_departure(step, departure)  # nobody is left to forget the keys
            for arrival in [a for a in self.arrivals.values() if a.destination == instance]:
                del self.arrivals[arrival.move]
                arrival.forget(step)
        step.send_durable(sender, m.RetirementReply(instance, not needed))

    def let_go(self, step: Step, inbox: Inbox, instance: str) -> None:
        """Who is gone, owned nothing and took part in nothing may never come back: it holds nothing up.

        It may be one that was retired while it was on its way here. If it does come, it comes as a new one.
        """
        moving = any(d.source == instance for d in self.departures.values())
        moving = moving or any(a.destination == instance for a in self.arrivals.values())
        if not moving and not self._needed(inbox, instance):
            self._forget_reader(step, inbox, instance)

    def _needed(self, inbox: Inbox, instance: str) -> bool:
        leaving = any(
            d.source == instance and d.phase is not DeparturePhase.DONE for d in self.departures.values()
        )
        coming = any(
            a.destination == instance and a.phase is not ArrivalPhase.MERGED for a in self.arrivals.values()
        )
        return instance in inbox.table.owners() or leaving or coming

    def _forget_reader(self, step: Step, inbox: Inbox, instance: str) -> None:
        inbox.let_go(step, instance)
        heirs.give_up(self, step, inbox, instance)

    # -- time --------------------------------------------------------------------------------

    def on_retry(self, step: Step) -> None:
        for departure in list(self.departures.values()):
            overdue = step.now_ms > departure.deadline_ms and departure.phase not in DECIDED
            if overdue:
                departure.abort(step, f"not decided within {departure.request.deadline_ms:g} ms")
            else:
                departure.retry(step)
        for arrival in list(self.arrivals.values()):
            arrival.retry(step)

    def outputs_admitted(self, step: Step, inbox: Inbox, instance: str) -> None:
        for departure in list(self.departures.values()):
            if departure.source == instance:
                departure.advance(step)

    def on_move_message(self, step: Step, sender: str, message: Any) -> None:
        move: str = getattr(message, "move", "")
        departure, arrival = self.departures.get(move), self.arrivals.get(move)
        from_instance = bool(operator_of(sender))
        match message:
            case m.MoveRequest():
                self.on_move_request(step, sender, message)
            case m.Succession():
                heirs.succeed(self, step, sender, message)
            case m.StatusQuery():
                self.on_status_query(step, sender, message.n, message.known)
            case m.Prepare():
                self.on_prepare(step, sender, message)
            case m.Prepared() if from_instance and arrival is not None:
                arrival.on_prepared(step, message)
            case m.Ready() if from_instance and arrival is not None:
                arrival.on_ready(step, message)
            case m.Settled() if from_instance and arrival is not None:
                arrival.on_settled(step)
            case m.Installed() if from_instance and arrival is not None:
                arrival.on_installed(step)
            case m.AbortNotice():
                if arrival is not None and arrival.phase not in (ArrivalPhase.ADOPTED, ArrivalPhase.MERGED):
                    self.drop_arrival(step, arrival)
            case _ if departure is not None:
                departure.on_message(step, message)
            case m.Prepared() | m.Ready() | m.CaptureFrom():  # we forgot that move, so it was never decided
                self.send_router(step, sender, m.AbortNotice(move), durable=True)
            case _:
                pass  # a letter about a move that has ended
