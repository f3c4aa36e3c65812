"""Writes the reference pages of docs/ out of the code: messages.md, rules.md, settings.md.

Responsible for: tables that cannot drift from the code. `python docs/generate.py` rewrites them,
    `python docs/generate.py --check` fails if one of them is out of date.
Not responsible for: prose (ARCHITECTURE.md, decisions/).

What the code cannot say for itself stands here: who sends a message to whom, and a rule in a few
words. The script refuses to run when a message has no line here, or a line has no message.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tiercel.core import messages, settings
from tiercel.core.messages import clients, instances, lanes, moves, replicas
from tiercel.sim.mutants import DIRECTED, MUTANTS

HERE = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py. Do not edit: change the code or the script. -->"
RULE_TESTS = "tests/rules/test_rules.py"

# -- messages ------------------------------------------------------------------------------------

Way = tuple[str, str]  # from -> to, and when it leaves

NOW = "at once"
WHEN_DURABLE = "when durable"
IN_LANE = "in a lane, when durable"
INSIDE = "inside another message"
AFTER_CHECKPOINT = "after the checkpoint it speaks of"

WAYS: dict[str, Way] = {
    # clients
    "Hello": ("producer -> router", NOW),
    "ProducerMark": ("router -> producer", WHEN_DURABLE),
    "ProducerFenced": ("router -> producer", WHEN_DURABLE),
    "Produce": ("producer -> router", NOW),
    "ProduceMobile": ("mobile source -> router", NOW),
    "MobileReceipt": ("router -> mobile source", WHEN_DURABLE),
    "Subscribe": ("subscriber -> router", NOW),
    "RangeQuery": ("subscriber -> router", NOW),
    "RangeReply": ("router -> subscriber", NOW),
    "Consumed": ("subscriber -> router", NOW),
    "Publish": ("router -> subscriber", "at once, durable entries only"),
    # instances
    "Attach": ("instance -> router", NOW),
    "AttachReply": ("router -> instance", WHEN_DURABLE),
    "Outlived": ("router -> instance", NOW),
    "ArrivalRole": ("router -> destination, in `AttachReply`", INSIDE),
    "DepartureRole": ("router -> source, in `AttachReply` and `FlipNotice`", INSIDE),
    "Resume": ("instance -> router", NOW),
    "Dispatch": ("router -> instance", NOW),
    "Confirmed": ("router -> instance", WHEN_DURABLE),
    "Outputs": ("instance -> router", NOW),
    "MoveOutputs": ("destination -> its router", NOW),
    "Checkpointed": ("instance -> router", AFTER_CHECKPOINT),
    # between routers
    "Prepare": ("source's router -> destination's router -> destination", "first hop when durable"),
    "MoveNotice": ("base of the notices", IN_LANE),
    "ShadowNotice": ("source's router -> destination's router", IN_LANE),
    "FlippedNotice": ("source's router -> destination's router", IN_LANE),
    "AbortedNotice": ("source's router -> destination's router", IN_LANE),
    "EmitFromNotice": ("source's router -> destination's router", IN_LANE),
    "EmittedNotice": ("source's router -> destination's router", IN_LANE),
    "ResumeNotice": ("source's router -> destination's router", IN_LANE),
    "DoneNotice": ("source's router -> destination's router", IN_LANE),
    "LaneFrame": ("router -> router", WHEN_DURABLE),
    "LaneReceipt": ("router -> router", "`settled` when durable, `taken` alone at once"),
    "Moved": ("router -> router", WHEN_DURABLE),
    "WatermarkReport": ("router -> every router", WHEN_DURABLE),
    # moves
    "Retirement": ("controller -> router", NOW),
    "Succession": ("controller -> router", WHEN_DURABLE),
    "RetirementReply": ("router -> controller", WHEN_DURABLE),
    "MoveRequest": ("controller -> source's router", WHEN_DURABLE),
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
    "Chunk": ("source -> destination", "when the log is durable up to the capture"),
    "EndOfKeys": ("source -> destination", "when the log is durable up to the last capture"),
    "ChunkReceipt": ("destination -> source", NOW),
    "Fetch": ("destination -> source", NOW),
    "Digests": ("source -> its router", NOW),
    "Ready": (
        "destination -> its router -> source's router",
        "first hop after the checkpoint, second when durable",
    ),
    "Installed": (
        "destination -> its router -> source's router",
        "first hop at once, second when durable",
    ),
    "FlipNotice": ("source's router -> source", WHEN_DURABLE),
    "Cut": ("source -> its router", NOW),
    "EmitFrom": ("destination's router -> destination", WHEN_DURABLE),
    "EmittedThrough": ("destination's router -> destination", NOW),
    "Settled": (
        "destination -> its router -> source's router",
        "first hop after the checkpoint, second when durable",
    ),
    "AbortNotice": ("router -> source, destination or another router", WHEN_DURABLE),
    "Forget": ("source's router -> source", WHEN_DURABLE),
    "Forgotten": ("source -> its router", AFTER_CHECKPOINT),
    "Said": ("instance -> its router, around what it says about a move", "as what it carries"),
    "Halt": ("router -> instance", WHEN_DURABLE),
    "Shadow": ("destination's router -> destination", NOW),
    # replicas
    "CopyQuery": ("process -> replica", NOW),
    "CopyState": ("replica -> process", NOW),
    "CopyRefused": ("replica -> process", NOW),
    "CopyPart": ("process -> replica, or back", "what is committed"),
    "CopyBatch": ("process -> replica", "after the commit, each turn"),
    "CopyReceipt": ("replica -> process", NOW),
    "CopyPull": ("process -> replica", NOW),
}

# -- rules ---------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A rule of the protocol in a few words, and the functions (module:qualified name) that keep it."""

    text: str
    places: tuple[str, ...]
    missing: str = ""  # what of it is not built


RULES: dict[str, Rule] = {
    "R1": Rule(
        "Its site's router de-duplicates a fixed producer, a mobile source only by the key's sequencer.",
        ("streams:Producers.accept", "inbox:Inbox.sequence", "clients:MobileSource.submit"),
    ),
    "R2": Rule(
        "The marks of a key's origins travel with the key, and are installed before its first append.",
        ("inbox:Inbox.give_marks", "inbox:Inbox.install_marks"),
    ),
    "R3": Rule(
        "Rows are held before they are appended; log order is processing order.",
        ("inbox:Inbox._sequence_here", "destination:DestinationMove.checkpoint_position"),
    ),
    "R4": Rule(
        "A change of path never reorders the rows of a sender and a key.",
        ("inbox:Inbox._number", "inbox:Inbox._sequence_here", "inbox:Inbox.find_returning"),
    ),
    "R5": Rule(
        "One lane per link and inbox: numbered frames, kept and sent again until they are settled.",
        ("lanes:Lane.add", "lanes:Lane.reconnected", "traffic:Traffic.on_lane_frame"),
    ),
    "R6": Rule(
        "Only what is durable leaves a site or enters a checkpoint, an output log or a shadow.",
        (
            "step:Journal.commit",
            "lanes:Lane.pump",
            "source:SourceMove.pump",
            "checkpoints:Checkpointer.try_store",
        ),
    ),
    "R7": Rule(
        "An output's identity is operator, key, key epoch, offset, n; the epoch grows at each Flip.",
        ("engine:Engine.call", "routing:RoutingTable.moved"),
    ),
    "R8": Rule(
        "An output is admitted once: one mark per instance, and one per key on the move.",
        ("traffic:Traffic.on_outputs", "arrivals:Arrival.admit"),
    ),
    "R9": Rule(
        "Mark, appends and outbox entries of one frame are one write; acknowledged after it.",
        ("step:Step.put", "router:Router._finish", "traffic:Traffic.emit"),
    ),
    "R10": Rule(
        "A stream's output log has one home; the destination emits once the source's outputs are there.",
        ("traffic:Traffic.log_outputs", "traffic:Traffic.unsettled_outputs", "departures:Departure.cut"),
    ),
    "R11": Rule(
        "A call is atomic; rows of one that raised are tried alone; dead letters are outputs or frames.",
        (
            "engine:Engine.call",
            "engine:Engine.call_alone",
            "keyed:Handle.roll_back",
            "traffic:Traffic.log_produced",
        ),
    ),
    "R12": Rule(
        "One call per log entry and key; entries are never merged.",
        ("processing:Processing._call_all", "inbox:Inbox.append"),
    ),
    "R13": Rule(
        "Iteration is in encoded order, attributes do not survive a call, both sides compare digests.",
        ("engine:Engine.call", "keyed:KeyState.digest", "departures:Departure.differing_key"),
    ),
    "R14": Rule(
        "Every routing entry has its own epoch, minted by the log that sequences it.",
        ("routing:RoutingTable.take", "routing:RoutingTable.moved"),
    ),
    "R15": Rule(
        "Going home is a move; only a newer slot sweeps an override; key and slot overlap.",
        ("routing:RoutingTable.take", "routing:RoutingTable.moved", "routing:overlap"),
        "eviction of overrides away from their owner",
    ),
    "R16": Rule(
        "A row is forwarded only to a strictly newer epoch; else it waits for the table.",
        ("inbox:Inbox.sequence", "inbox:Inbox.release_waiting"),
    ),
    "R17": Rule(
        "Log time never runs backwards; a moved key keeps its clock; no watermark overtakes a row.",
        ("arrivals:Arrival.on_flipped", "destination:DestinationMove._times", "event_time:EventTime.promise"),
    ),
    "R18": Rule(
        "The destination's watermark freezes at Prepare; Flip waits for the source's; Adopt fires the rest.",
        (
            "event_time:EventTime.output_promise",
            "departures:Departure.source_watermark_reached",
            "destination:DestinationMove._fire_passed",
        ),
    ),
    "R19": Rule(
        "Ticks are log entries, kept for held keys. Late rows never reach an operator in event time.",
        (
            "traffic:Traffic.on_tick",
            "destination:DestinationMove._catch_up",
            "event_time:EventTime.in_time",
            "event_time:EventTime.left_out",
        ),
    ),
    "R20": Rule(
        "Keys deleted before their capture are sent as absent; what is not mentioned had no state.",
        ("source:SourceMove.capture", "destination:DestinationMove._finish_if_complete"),
    ),
    "R21": Rule(
        "The source captures at its own offset; the shadow starts there and is complete at the flip.",
        (
            "departures:Departure.on_capture_from",
            "departures:Departure.shadow_complete",
            "source:SourceMove.on_flip",
            "destination:DestinationMove.on_emit_from",
        ),
    ),
    "R22": Rule(
        "Ready is a durable vote: then only the source's router ends the move; locked keys are refused.",
        ("arrivals:Arrival.on_ready", "movedesk:MoveDesk.check_unlocked", "router:Router.on_message"),
    ),
    "R23": Rule(
        "A silent source is taken over at what it emitted; above that its outputs are refused.",
        (
            "departures:Departure.take_over",
            "departures:Departure.refuses_output",
            "processing:Processing.take_departure",
        ),
    ),
    "R24": Rule(
        "The shadow is stored at the destination's site and limited; a destination restarts from there.",
        ("arrivals:Arrival.on_shadow", "arrivals:Arrival.feed_shadow", "departures:Departure.shadow"),
    ),
    "R25": Rule(
        "The source forgets once the destination's checkpoint covers the adoption; stale copies are dropped.",
        (
            "destination:DestinationMove.may_settle",
            "instance:Instance._forget",
            "instance:Instance._take_roles",
        ),
        "backup",
    ),
    "R26": Rule(
        "A decided move is never undone; Flip is the last offset of its keys in that log.",
        ("departures:Departure.abort", "recovery:_first_steps", "departures:Departure.flip"),
        "a reverse move ordered by the destination's router",
    ),
    "R27": Rule(
        "A checkpoint's position is a vector: the inbox, and each arriving move.",
        ("checkpoints:Checkpointer._take", "feed:Feed.share_of"),
    ),
    "R28": Rule(
        "Initial state enters before the first tuple. A feed stages rows and publishes one attempt under "
        "fixed numbers.",
        ("traffic:Traffic.take_in", "engine:Engine.call", "streams:Producers.accept"),
    ),
    "R29": Rule(
        "A newer life fences the older ones.",
        ("movedesk:MoveDesk.on_attach", "router:Router.on_message", "traffic:Traffic.on_outputs"),
    ),
    "R30": Rule(
        "Credit per reader and lane; state and control need none; a held row does not close its lane.",
        ("feed:Feed.offer", "traffic:Traffic.take", "traffic:Traffic.congested"),
        "a window of their own for the notices in a lane",
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


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def messages_page() -> str:
    groups = [clients, instances, lanes, moves, replicas]
    known = {cls.__name__ for module in groups for cls in message_classes(module)}
    public = set(messages.__all__) - {"Message", "AnyNotice"}
    if not known == public == set(WAYS):
        odd = sorted((known | public | set(WAYS)) - (known & public & set(WAYS)))
        message = f"docs/generate.py and tiercel.core.messages do not agree on: {', '.join(odd)}"
        raise SystemExit(message)
    lines = ["# Messages", "", NOTE, "", first_line(messages), ""]
    lines += [
        "*Leaves* says when a message goes out. *When durable*: once the write of the event that made it,",
        "and every write before it, are durable (`Step.send_durable`). *In a lane*: as a `LaneFrame`, which",
        "is stored, numbered, and repeated until it is settled. *At once*: it rests on nothing that is not",
        "durable, or it stays within the site, where a reader ahead of its log rolls back.",
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
            message = f"docs/generate.py: tiercel.core has no {place}; say where that rule lives now"
            raise SystemExit(message)
        thing = getattr(thing, name)
    return thing


def rules_page() -> str:
    lines = ["# Rules of the protocol", "", NOTE, ""]
    lines += [
        "Each rule closes a schedule that would break a promise. A *mutant* is a planted bug that takes the",
        "rule out; `tiercel sim --mutants` must notice every one of them, except those marked *directed*:",
        "they are too rare for random seeds, and a transcript shows them. The tests of a rule are the",
        f"functions `test_<rule>_...` of `{RULE_TESTS}`: they fail when the rule is taken out. A rule",
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
    lines += [*table(("rule", "in a few words", "where", "mutants", "test"), rows), ""]
    others = [(m.rule, f"`{n}`: {m.what}") for n, m in MUTANTS.items() if m.rule not in RULES]
    lines += ["Mutants that break a promise rather than one rule:", ""]
    lines += [*table(("promise", "mutant"), others), ""]
    lines += [
        "Promises: P1 exactly once, P2 in order, P3 one owner, P4 no global coordination, P5 no cost when",
        "idle, P6 a move ends, P7 bounded.",
        "",
    ]
    return "\n".join(lines)


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
    return "\n".join([*lines, *table(("setting", "default", "type", "why"), rows), ""])


PAGES = {"messages.md": messages_page, "rules.md": rules_page, "settings.md": settings_page}


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
