"""Generator of the reference pages of docs/ and of the state diagrams in ARCHITECTURE.md.

Responsible for: tables and diagrams that follow the code. `python docs/generate.py` rewrites them,
    `python docs/generate.py --check` fails if one of them is out of date.
Not responsible for: prose (ARCHITECTURE.md outside its markers, decisions/), measured results (measure.py).

This script adds what the code does not state: the sender and receiver of a message, and each rule in one
sentence. It refuses to run when a message has no line here, or a line has no message.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tiercel.core import messages, settings
from tiercel.core.messages import batch as batches
from tiercel.core.messages import client as clients
from tiercel.core.messages import feed as feeds
from tiercel.core.messages import instance as instances
from tiercel.core.messages import migration as moves
from tiercel.core.messages import site_link as outboxes
from tiercel.core.migration import phases
from tiercel.runtime.net import gauge_messages as gauges
from tiercel.runtime.net import replication_messages as replicas
from tiercel.runtime.net import site_messages as sites
from tiercel.sim.explore.mutants import DIRECTED, MUTANTS

HERE = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py. Do not edit: change the code or the script. -->"
RULE_TESTS = "tests/rules/test_rules.py"

# -- messages ------------------------------------------------------------------------------------

Way = tuple[str, str]  # from -> to, and when it leaves

NOW = "at once"
WHEN_DURABLE = "when durable"
IN_OUTBOX = "in the site outbox, when durable"
INSIDE = "inside another message"
AFTER_CHECKPOINT = "after the checkpoint it reports"

WAYS: dict[str, Way] = {
    # clients
    "Hello": ("producer -> router", NOW),
    "ProducerAck": ("router -> producer", WHEN_DURABLE),
    "ProducerFenced": ("router -> producer", WHEN_DURABLE),
    "Produce": ("producer -> router", NOW),
    "ProduceMobile": ("mobile source -> router", NOW),
    "MobileReceipt": ("router -> mobile source", WHEN_DURABLE),
    "Subscribe": ("subscriber -> router", NOW),
    "EndSubscription": ("subscriber -> router", NOW),
    "StreamCongested": ("home router -> routers", NOW),
    "RangeQuery": ("subscriber -> router", NOW),
    "RangeReply": ("router -> subscriber", NOW),
    "Consumed": ("subscriber -> router", NOW),
    "Publish": ("router -> subscriber", "at once, durable entries only"),
    # batch tasks
    "BatchTask": ("in every message of a batch task", INSIDE),
    "BatchBegin": ("batch task -> router", NOW),
    "BatchBegun": ("router -> batch task", WHEN_DURABLE),
    "BatchFrame": ("batch task -> router", NOW),
    "BatchFrameTaken": ("router -> batch task", WHEN_DURABLE),
    "BatchEnd": ("batch task -> router", NOW),
    "BatchOutputs": ("router -> batch task", WHEN_DURABLE),
    "BatchRefused": ("router -> batch task", NOW),
    "TimerQuery": ("planner of a query -> router", NOW),
    "TimerPlaces": ("router -> planner of a query", WHEN_DURABLE),
    "StagedPart": ("in `FeedCommit`", INSIDE),
    "FeedCommit": ("driver of a feed -> router", NOW),
    "FeedPublished": ("router -> driver of a feed", "each frame; `done` when durable"),
    "FeedForget": ("driver of a feed -> router", NOW),
    "Unsubscribe": ("batch task -> router", NOW),
    # instances
    "Attach": ("instance -> router", NOW),
    "AttachReply": ("router -> instance", WHEN_DURABLE),
    "InstanceFenced": ("router -> instance", NOW),
    "IncomingRole": ("router -> destination, in `AttachReply`", INSIDE),
    "OutgoingRole": ("router -> source, in `AttachReply` and `FlipToSource`", INSIDE),
    "Resume": ("instance -> router", NOW),
    "Dispatch": ("router -> instance", NOW),
    "Confirmed": ("router -> instance", WHEN_DURABLE),
    "Outputs": ("instance -> router", NOW),
    "MoveOutputs": ("destination -> its router", NOW),
    "Checkpointed": ("instance -> router", AFTER_CHECKPOINT),
    # between routers
    "Prepare": ("source's router -> destination's router -> destination", "first hop when durable"),
    "MoveNotice": ("base of the notices", IN_OUTBOX),
    "ShadowNotice": ("source's router -> destination's router", IN_OUTBOX),
    "FlipToDestination": ("source's router -> destination's router", IN_OUTBOX),
    "AbortedNotice": ("source's router -> destination's router", IN_OUTBOX),
    "EmitFromNotice": ("source's router -> destination's router", IN_OUTBOX),
    "EmittedNotice": ("source's router -> destination's router", IN_OUTBOX),
    "ResumeNotice": ("source's router -> destination's router", IN_OUTBOX),
    "ServedByNotice": ("source's router -> destination's router", IN_OUTBOX),
    "DoneNotice": ("source's router -> destination's router", IN_OUTBOX),
    "SiteFrame": ("router -> router", WHEN_DURABLE),
    "SiteFrameReceipt": ("router -> router", "`settled` when durable, `taken` alone at once"),
    "OwnerChanged": ("router -> router", WHEN_DURABLE),
    "WatermarkReport": ("router -> every router", WHEN_DURABLE),
    # moves
    "Retirement": ("controller -> router", NOW),
    "TakeoverRequest": ("controller -> router", WHEN_DURABLE),
    "RetirementReply": ("router -> controller", WHEN_DURABLE),
    "MoveRequest": ("controller -> source's router", WHEN_DURABLE),
    "OutcomeStored": ("controller -> source's router", "when durable"),
    "MarksForgotten": ("router -> owner's router", "when durable"),
    "MoveStatus": ("source's router -> controller", "when durable; a refusal at once"),
    "StatusQuery": ("controller -> router", NOW),
    "StatusReply": ("router -> controller", WHEN_DURABLE),
    "Prepared": (
        "destination -> its router -> source's router",
        "first hop at once, second when durable",
    ),
    "Refused": ("destination's router, or source -> source's router", NOW),
    "Capture": ("source's router -> source", WHEN_DURABLE),
    "CaptureFrom": ("source -> its router", NOW),
    "Captured": ("source -> its router", NOW),
    "SetStandby": ("controller -> router of the instance", "when stored, and after each reconnect"),
    "StandbyRole": ("router -> instance", "when durable, and when the instance resumes"),
    "Increment": ("instance -> its standby", "after a checkpoint, within a window"),
    "IncrementReceipt": ("standby -> instance", NOW),
    "Chunk": ("source -> destination", "when the log is durable up to the capture"),
    "UnitReceipt": ("destination -> source", NOW),
    "UnitRequest": ("destination -> source", NOW),
    "Backlog": ("source router -> source", NOW),
    "Digests": ("source -> its router", NOW),
    "Ready": (
        "destination -> its router -> source's router",
        "first hop after the checkpoint, second when durable",
    ),
    "StateComplete": (
        "destination -> its router -> source's router",
        "first hop at once, second when durable",
    ),
    "FlipToSource": ("source's router -> source", WHEN_DURABLE),
    "SourceStopped": ("source -> its router", NOW),
    "EmitFrom": ("destination's router -> destination", WHEN_DURABLE),
    "EmittedThrough": ("destination's router -> destination", NOW),
    "DestinationCheckpointed": (
        "destination -> its router -> source's router",
        "first hop after the checkpoint, second when durable",
    ),
    "ServedBy": ("destination's router -> destination", NOW),
    "DestinationReplaced": ("destination's router -> source's router", WHEN_DURABLE),
    "AbortNotice": ("router -> source, destination or another router", WHEN_DURABLE),
    "Forget": ("source's router -> source", WHEN_DURABLE),
    "Forgotten": ("source -> its router", AFTER_CHECKPOINT),
    "FromInstance": ("instance -> its router; wraps its messages about a move", "as the message inside"),
    "RestartRequest": ("router -> instance", WHEN_DURABLE),
    "Shadow": ("destination's router -> destination", NOW),
    # replicas
    "ReplicaQuery": ("process -> replica", NOW),
    "ReplicaState": ("replica -> process", NOW),
    "ReplicaFenced": ("replica -> process", NOW),
    "ReplicaSnapshotPart": ("process -> replica, or back", "what is committed"),
    "ReplicaBatch": ("process -> replica", "after the commit, each turn"),
    "ReplicaAck": ("replica -> process", NOW),
    "ReplicaPull": ("process -> replica", NOW),
    # sites as applications
    "LaunchInstance": ("controller -> agent of another site", "when a request needs it, again and again"),
    "RetireInstance": ("controller -> agent of another site", "when its router has released it"),
    "ManifestQuery": ("client or driver -> router", NOW),
    "ManifestReply": ("router -> client or driver", NOW),
    # gauges
    "GaugeReport": ("instance -> router -> controller", "once a second"),
    "SiteReport": ("agent -> controller", "once a second"),
    "Ping": ("router -> router of another site", "once a second"),
    "Pong": ("router -> router of another site", NOW),
}

# -- rules ---------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A rule of the protocol in one sentence, and the functions (module:qualified name) that enforce it."""

    text: str
    places: tuple[str, ...]
    missing: str = ""  # the part that is not built


RULES: dict[str, Rule] = {
    "R1": Rule(
        "The site's router drops repeats of a fixed producer; the key's sequencer drops repeats of a "
        "mobile source.",
        (
            "logs.producers:ProducerTable.accept",
            "logs.sequencer:Sequencer.sequence",
            "clients:MobileSource.submit",
        ),
    ),
    "R2": Rule(
        "The marks of a key's origins travel with the key; its new router installs them before its "
        "first append.",
        ("logs.sequencer:Sequencer.give_marks", "logs.sequencer:Sequencer.install_marks"),
    ),
    "R3": Rule(
        "A router holds early rows before it appends them; the order of the log is the processing order.",
        (
            "logs.sequencer:Sequencer._sequence_here",
            "migration.destination_instance:StateReceiver.checkpoint_position",
        ),
    ),
    "R4": Rule(
        "A change of path never reorders the rows that one sender has for one key.",
        (
            "logs.sequencer:Sequencer.number",
            "logs.sequencer:Sequencer._sequence_here",
            "logs.sequencer:Sequencer.await_own_rows",
        ),
    ),
    "R5": Rule(
        "One site outbox for each link and inbox: it stores numbered frames and repeats them until they "
        "are settled.",
        (
            "logs.site_outbox:SiteOutbox.add",
            "logs.site_outbox:SiteOutbox.reconnected",
            "router.forwarding:Forwarding.on_frame",
        ),
    ),
    "R6": Rule(
        "Only durable data leaves a site or enters a checkpoint, an output log or a shadow.",
        (
            "machine.step:Journal.commit",
            "logs.site_outbox:SiteOutbox.pump",
            "migration.source_instance:StateSender.pump",
            "instance.checkpoint_writer:CheckpointWriter.try_store",
        ),
    ),
    "R7": Rule(
        "The identity of an output is operator, key, key epoch, offset, n; each Flip raises the epoch.",
        ("instance.user_code:ProcessorRunner.call", "model.routing:RoutingTable.moved"),
    ),
    "R8": Rule(
        "A router admits an output once: one mark for each instance, and one for each moving key.",
        ("router.outputs:OutputAdmission.on_outputs", "migration.destination_router:IncomingMove.admit"),
    ),
    "R9": Rule(
        "Mark, appends and outbox frames of one frame are one write; the router acknowledges after it.",
        ("machine.step:Step.put", "router.router:Router._finish", "router.outputs:OutputAdmission.emit"),
    ),
    "R10": Rule(
        "A stream's output log has one home; the destination emits once the source's outputs are there.",
        (
            "router.outputs:FanOut.log_outputs",
            "router.forwarding:Forwarding.unsettled_outputs",
            "migration.source_router:OutgoingMove.stop_source",
        ),
    ),
    "R11": Rule(
        "A call is atomic; after an error each row runs alone; dead letters are outputs or frames.",
        (
            "instance.user_code:ProcessorRunner.call",
            "instance.user_code:ProcessorRunner.call_alone",
            "state.handle:Handle.roll_back",
            "router.intake:Intake.log_produced",
        ),
    ),
    "R12": Rule(
        "One call for each log entry and key; entries are never merged.",
        ("instance.processing:Processing.call_all", "logs.inbox:Inbox.append"),
    ),
    "R13": Rule(
        "Iteration follows the encoded order, attributes do not survive a call, and both sides compare "
        "digests.",
        (
            "instance.user_code:ProcessorRunner.call",
            "state.handle:KeyState.digest",
            "migration.source_router:OutgoingMove.differing_key",
        ),
    ),
    "R14": Rule(
        "Every routing entry has its own epoch, assigned by the log that sequences it.",
        ("model.routing:RoutingTable.take", "model.routing:RoutingTable.moved"),
    ),
    "R15": Rule(
        "A return to the slot's owner is a move; only a newer slot removes an override; key and slot "
        "overlap.",
        ("model.routing:RoutingTable.take", "model.routing:RoutingTable.moved", "model.routing:overlap"),
        "removal of overrides at other sites than the owner's",
    ),
    "R16": Rule(
        "A router forwards a row only to a strictly newer epoch; otherwise the row waits for the table.",
        ("logs.sequencer:Sequencer.sequence", "logs.sequencer:Sequencer.release_waiting"),
    ),
    "R17": Rule(
        "Log time never runs backwards; a moved key keeps its clock; no watermark overtakes a row.",
        (
            "migration.destination_router:IncomingMove.on_flipped",
            "migration.destination_instance:StateReceiver._times",
            "model.routing:RoutingTable.clock_ms",
            "router.watermarks:Watermarks.promise",
        ),
    ),
    "R18": Rule(
        "The destination's watermark freezes at Prepare; Flip waits for the source's; Adopt fires the "
        "timers in between.",
        (
            "router.watermarks:Watermarks.output_promise",
            "migration.source_router:OutgoingMove.source_watermark_reached",
            "migration.destination_instance:StateReceiver.fire_passed",
        ),
    ),
    "R19": Rule(
        "Ticks are log entries, held for held keys; late rows never reach an operator in event time.",
        (
            "router.outputs:OutputAdmission.on_tick",
            "migration.destination_instance:StateReceiver._catch_up",
            "router.watermarks:Watermarks.in_time",
            "router.watermarks:Watermarks.left_out",
        ),
    ),
    "R20": Rule(
        "The source sends keys deleted before their capture as absent; a key without mention had no state.",
        (
            "migration.source_instance:StateSender.capture",
            "migration.destination_instance:StateReceiver._finish_if_complete",
        ),
    ),
    "R21": Rule(
        "The source captures at its own offset; the shadow starts there and is complete at the flip.",
        (
            "migration.source_router:OutgoingMove.on_capture_from",
            "migration.source_router:OutgoingMove.shadow_complete",
            "migration.source_instance:StateSender.on_flip",
            "migration.destination_instance:StateReceiver.on_emit_from",
        ),
    ),
    "R22": Rule(
        "Ready is a durable vote: afterwards only the source's router ends the move; routers refuse "
        "locked keys.",
        (
            "migration.destination_router:IncomingMove.on_ready",
            "migration.coordinator:MoveCoordinator.check_unlocked",
            "router.router:Router.on_message",
        ),
    ),
    "R23": Rule(
        "The router replaces a silent source at its last admitted output, and refuses its later outputs.",
        (
            "migration.source_router:OutgoingMove.take_over",
            "migration.source_router:OutgoingMove.refuses_output",
            "migration.source_instance:StateSender.on_decided",
        ),
    ),
    "R24": Rule(
        "The destination's site stores the shadow, up to a limit; a restarted destination continues "
        "from there.",
        (
            "migration.destination_router:IncomingMove.on_shadow",
            "migration.destination_router:IncomingMove.feed_shadow",
            "migration.source_router:OutgoingMove.shadow",
        ),
    ),
    "R25": Rule(
        "The source forgets once the destination's checkpoint covers the adoption; instances drop stale "
        "state.",
        (
            "migration.destination_instance:StateReceiver.may_settle",
            "migration.instance_moves:InstanceMoves._forget",
            "migration.instance_moves:InstanceMoves.take_roles",
        ),
        "backup",
    ),
    "R26": Rule(
        "A decided move is never undone; Flip is the last offset of its keys in that log.",
        (
            "migration.source_router:OutgoingMove.abort",
            "router.router:Router._recover",
            "migration.source_router:OutgoingMove.flip",
        ),
        "a reverse move ordered by the destination's router",
    ),
    "R27": Rule(
        "The position of a checkpoint is a vector: the inbox, and each incoming move.",
        ("instance.checkpoint_writer:CheckpointWriter._take", "logs.dispatch:DispatchCursor.share_of"),
    ),
    "R28": Rule(
        "Initial state enters before the first tuple; the first commit of a feed's batch decides what is "
        "published, once.",
        (
            "router.outputs:FanOut.route_rows",
            "instance.user_code:ProcessorRunner.call",
            "logs.staged:StagedLogs.is_decided",
            "logs.staged:StagedLogs.advance",
        ),
    ),
    "R29": Rule(
        "A newer incarnation fences the older ones.",
        (
            "router.sessions:Sessions.on_attach",
            "router.router:Router.on_message",
            "router.outputs:OutputAdmission.on_outputs",
        ),
    ),
    "R30": Rule(
        "Each reader and outbox has credit; state and control need none; a held row does not block its "
        "outbox.",
        (
            "logs.dispatch:DispatchCursor.offer",
            "router.forwarding:Forwarding.take",
            "router.intake:Intake.congested",
        ),
        "separate credit for the notices in a site outbox",
    ),
    "R31": Rule(
        "State travels in units. A unit is whole with its last chunk; its other keys had no state.",
        (
            "migration.units:unit_of",
            "migration.source_instance:StateSender._next_chunk",
            "migration.destination_instance:StateReceiver.has_beginning",
        ),
    ),
    "R32": Rule(
        "From the cut on the source's copies never change; units leave once the cut is logged.",
        (
            "migration.source_instance:StateSender.may_send",
            "migration.source_instance:StateSender.stop_if_reached",
        ),
    ),
    "R33": Rule(
        "The source keeps a unit that is durable at the destination only in its storage, until Forget.",
        (
            "migration.destination_instance:StateReceiver.on_units_stored",
            "migration.source_instance:StateSender.release",
        ),
    ),
    "R34": Rule(
        "A checkpoint has the units that are here; a router keeps the rows of the others.",
        (
            "migration.destination_instance:StateReceiver.uncovered_units",
            "migration.destination_instance:StateReceiver.is_covered",
            "instance.checkpoint_writer:CheckpointWriter.covered_positions",
        ),
    ),
    "R35": Rule(
        "A flip-first source stops where it is; the destination gets the rows between cut and flip first.",
        (
            "migration.source_router:OutgoingMove.earliest_stop",
            "migration.source_router:OutgoingMove.start_cut_shadow",
            "migration.destination_instance:StateReceiver.shadow_ended",
        ),
    ),
    "R36": Rule(
        "If source or destination of a decided move dies for good, a successor of it finishes the move.",
        (
            "migration.parallel_recovery:serve",
            "migration.destination_router:IncomingMove.replaced_by",
            "migration.parallel_recovery:with_served",
        ),
    ),
    "R40": Rule(
        "A key is taken from a copy with every increment of the named session, if unchanged since.",
        (
            "migration.standby:StandbySender.is_unchanged",
            "migration.standby:StandbyCopy.is_of",
            "migration.standby:StandbyCopy.has_all_before",
        ),
    ),
    "R45": Rule(
        "Rows of a device are processed once, in the order of their numbers; what is refused is named.",
        (
            "logs.sequencer:Sequencer.take_or_defer",
            "logs.device_numbers:DeviceNumbers.came_behind",
            "logs.device_numbers:DeviceNumbers.gap_skipped",
            "router.device_rows:DeviceRows.route_rows",
        ),
    ),
    "R46": Rule(
        "A bundle stays whole where its keys are treated alike; elsewhere it is taken apart, in order.",
        (
            "logs.inbox:Inbox.owner_of_bundle",
            "logs.inbox:Inbox.bundles_first",
            "migration.instance_moves:InstanceMoves.without_bundles_of_moves",
            "instance.processing:Processing.may_stay_whole",
            "router.outputs:OutputAdmission.each_alone",
        ),
    ),
    "R47": Rule(
        "A predicted move flips when rows enter at its destination's site; rows elsewhere undo it.",
        (
            "migration.source_router:OutgoingMove.rows_are_there",
            "migration.source_router:OutgoingMove.rows_came",
        ),
    ),
}


# -- pages ---------------------------------------------------------------------------------------


def message_classes(module: Any) -> list[type]:
    """The classes of one module of messages, in the order of its source."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and issubclass(value, msgspec.Struct)
    ]
    return sorted(found, key=lambda cls: inspect.getsourcelines(cls)[1])


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def messages_page() -> str:
    groups = [clients, batches, feeds, instances, outboxes, moves, replicas, sites, gauges]
    known = {cls.__name__ for module in groups for cls in message_classes(module)}
    public = set(messages.__all__) - {"Message", "AnyNotice", "MoveOutcome"}
    public |= {cls.__name__ for module in (replicas, sites, gauges) for cls in message_classes(module)}
    if not known == public == set(WAYS):
        odd = sorted((known | public | set(WAYS)) - (known & public & set(WAYS)))
        message = f"docs/generate.py and tiercel.core.messages do not agree on: {', '.join(odd)}"
        raise SystemExit(message)
    lines = ["# Messages", "", NOTE, "", first_line(messages), ""]
    lines += [
        "The column *leaves* says when the sender sends a message. *When durable*: once the write of",
        "the same event, and every write before it, is durable (`Step.send_durable`). *In the site outbox*:",
        "as a `SiteFrame`, which the router stores, numbers, and repeats until it is settled. *At once*: the",
        "message depends on durable data only, or stays within the site, where a reader ahead of its log",
        "rolls back.",
        "",
    ]
    for module in groups:
        lines += [f"## {module.__name__.removeprefix('tiercel.')}", "", first_line(module), ""]
        rows = [
            (f"`{cls.__name__}`", WAYS[cls.__name__][0], first_line(cls), WAYS[cls.__name__][1])
            for cls in message_classes(module)
        ]
        lines += [*table(("message", "from -> to", "meaning", "leaves"), rows), ""]
    return "\n".join(lines)


def resolve(place: str) -> Any:
    """The function a place names; raises if the code has no such thing."""
    module, _, path = place.partition(":")
    thing: Any = importlib.import_module(f"tiercel.core.{module}")
    for name in path.split("."):
        if not hasattr(thing, name):
            message = f"docs/generate.py: tiercel.core has no {place}; name the place of that rule"
            raise SystemExit(message)
        thing = getattr(thing, name)
    return thing


def rules_page() -> str:
    lines = ["# Rules of the protocol", "", NOTE, ""]
    lines += [
        "Each rule prevents a schedule that would break a guarantee. A *mutant* is a planted bug that",
        "removes the rule. `tiercel sim --mutants` must notice every mutant, except those marked *directed*:",
        "random seeds reach them too rarely, so a transcript shows them. The tests of a rule are the",
        f"functions `test_<rule>_...` of `{RULE_TESTS}`. They fail when the rule is removed. A rule",
        "without a mutant has transcripts of the real machines there, each with its own counter-proof.",
        "Places are in `tiercel.core`.",
        "",
    ]
    rows = []
    for name, rule in RULES.items():
        for place in rule.places:
            resolve(place)
        text = rule.text + (f" Not built: {rule.missing}." if rule.missing else "")
        kills = [f"`{mutant}`: {m.what}" for mutant, m in MUTANTS.items() if m.rule == name]
        kills += [f"`{mutant}` (directed): {m.what}" for mutant, m in DIRECTED.items() if m.rule == name]
        places = "<br>".join(f"`{place}`" for place in rule.places)
        rows.append((name, text, places, "<br>".join(kills) or "none", f"`test_{name}_...`"))
    lines += [*table(("rule", "text", "where", "mutants", "test"), rows), ""]
    others = [(m.rule, f"`{n}`: {m.what}") for n, m in MUTANTS.items() if m.rule not in RULES]
    lines += ["Mutants that break a guarantee rather than one rule:", ""]
    lines += [*table(("guarantee", "mutant"), others), ""]
    lines += [
        "Guarantees: P1 exactly once, P2 in order, P3 one owner, P4 no global coordination, P5 no cost when",
        "idle, P6 a move ends, P7 bounded.",
        "",
    ]
    return "\n".join(lines)


AT_LIMIT = {  # setting -> what happens when the limit is reached
    "dispatch_rows_max": "the reader falls behind and reads the log later",
    "backlog_rows_max": "the router delays acknowledgements to producers",
    "outbox_frames_max": "the router delays acknowledgements to producers",
    "site_frames_max": "the site outbox waits for receipts",
    "held_rows_max": "the router drops the row, and asks for its frame again when the row is next",
    "numbered_keys_max": "the router forgets the numbers of keys without rows under way",
    "shadow_entries_max": "the move is undone",
    "withheld_max": "the destination stops processing K, and only K",
    "chunks_unacked_max": "the source captures no further",
    "publish_entries_max": "the subscriber gets nothing until it has consumed some",
    "stream_entries_max": "the oldest entry is deleted, unless a named subscription needs it",
    "subscription_entries_max": "the router delays acknowledgements to producers",
    "memory_bytes_max": "the instance evicts the keys that were not used for longest",
}


def settings_page() -> str:
    source = inspect.getsource(settings.Settings)
    comments = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, re.MULTILINE))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    values = settings.Settings()
    rows = []
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            value = getattr(values, name)
            shown = (
                f"{value:,}"
                if isinstance(value, int)
                else f"{value:,g}"
                if isinstance(value, float)
                else value
            )
            rows.append(
                (f"`{name}`", str(shown) or "(empty)", ast.unparse(node.annotation), comments.get(name, ""))
            )
    lines = ["# Settings", "", NOTE, "", first_line(settings), first_line(settings.Settings), ""]
    lines += ["`Settings.validate` refuses values that could never work.", ""]
    lines += [*table(("setting", "default", "type", "why"), rows), "", "## At a limit", ""]
    lines += ["The simulator compares every queue with its limit after every event.", ""]
    limits = [(f"`{name}`", effect) for name, effect in AT_LIMIT.items() if hasattr(values, name)]
    if len(limits) != len(AT_LIMIT):
        message = (
            f"docs/generate.py: no such setting: {set(AT_LIMIT) - {f for f in values.__struct_fields__}}"
        )
        raise SystemExit(message)
    return "\n".join([*lines, *table(("limit", "effect when it is reached"), limits), ""])


DIAGRAMS = re.compile(r"(<!-- generated: phases -->\n).*?(<!-- end -->)", re.DOTALL)


def state_diagrams() -> str:
    """One diagram for each role of a move, out of its transition table."""
    lines = []
    for role in (value for value in vars(phases).values() if isinstance(value, phases.Role)):
        arrows: dict[tuple[str, str], list[str]] = {}
        for row in role.rows:
            for following in row.next:
                if following is not row.phase:
                    arrows.setdefault((row.phase.name, following.name), []).append(row.event)
        lines += [f"The {role.name}:", "", "```mermaid", "stateDiagram-v2"]
        lines += [f"    %% {role.phases.__name__}"]
        lines += [f"    [*] --> {phase.name}" for phase in role.start]
        named: set[tuple[str, str]] = set()  # the target and events of arrows that have been drawn
        for (start, end), events in sorted(arrows.items(), key=lambda arrow: _place(role, *arrow[0])):
            label = ", ".join(dict.fromkeys(events))
            lines += [f"    {start} --> {end}" + ("" if (end, label) in named else f": {label}")]
            named.add((end, label))
        ends = {start for start, _ in arrows}
        lines += [f"    {phase.name} --> [*]" for phase in role.phases if phase.name not in ends]
        lines += ["```", ""]
    return "\n".join(lines)


def _place(role: phases.Role[Any], start: str, end: str) -> tuple[int, int]:
    """Where an arrow stands in a diagram: by target, then by origin, in the order of the enum."""
    order = list(role.phases.__members__)
    return order.index(end), order.index(start)


def architecture_page() -> str:
    """ARCHITECTURE.md with the diagrams as they should be now."""
    text = (HERE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return DIAGRAMS.sub(lambda found: f"{found[1]}\n{state_diagrams()}\n{found[2]}", text)


def packages_page() -> str:
    """Every package, with the first line of its docstring."""
    source = HERE.parent / "src" / "tiercel"
    rows = []
    for path in sorted(source.rglob("__init__.py"), key=lambda path: path.parent.parts):
        place = path.parent.relative_to(source).as_posix()
        if place != ".":
            summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            rows.append((f"`{place}`", summary))
    return "\n".join(
        [
            "# Map of the source",
            "",
            NOTE,
            "",
            "Each package's `__init__` continues: what lives there, and who may call it.",
            "`pyproject.toml` has the import contracts.",
            "",
            *table(("package in `src/tiercel`", "holds"), rows),
            "",
        ]
    )


PAGES = {
    "../ARCHITECTURE.md": architecture_page,
    "packages.md": packages_page,
    "messages.md": messages_page,
    "rules.md": rules_page,
    "settings.md": settings_page,
    "cli.md": runpy.run_path(str(HERE / "generate_cli.py"))["cli_page"],
}


def outdated() -> list[str]:
    """The pages that are not what the code says now."""
    return [
        name
        for name, page in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        old = outdated()
        if old:
            print(f"out of date: {', '.join(old)}; run: python docs/generate.py", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
