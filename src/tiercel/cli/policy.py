"""`tiercel policy`: list, simulate, replay, show, history, dry-run.

Responsible for: checking the options, tables and JSON.
Not responsible for: policies and limits (control/), the model of a load (sim/policies), the policies of a
    running deployment (spark/cluster/policy_thread.py), whose record is read here.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tiercel.control.limits import Limits
from tiercel.control.policies.named import POLICIES, make_policy
from tiercel.control.proposals import Decision
from tiercel.control.replay import decode_views, replay
from tiercel.errors import UserError
from tiercel.sim.policies.traces import TRACES
from tiercel.sim.policies.trial import TrialResult, run_trial

policy = typer.Typer(
    name="policy",
    help="Policies that scale and move by themselves: try them, replay them, see what they decided.\n\n"
    "Example: tiercel policy simulate --trace ramp --policy rate",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FILE_WIDTH = 160  # of a table that is not printed to a terminal

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Storage = Annotated[Path, typer.Argument(help="The storage directory of a deployment.")]
PolicyName = Annotated[str, typer.Option("--policy", help="A shipped policy; tiercel policy list.")]
OptionPairs = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the policy, as NAME=VALUE; repeatable.")
]
Least = Annotated[int, typer.Option("--min", help="Instances at least.")]
Most = Annotated[int, typer.Option("--max", help="Instances at most.")]


@policy.command("list", short_help="List the shipped policies with their options, and the traces.")
def list_all(as_json: AsJson = False) -> None:
    """List the shipped policies with their options and defaults, and the loads that can be simulated.

    Example: tiercel policy list
    """
    lines = [
        {"kind": "policy", "name": name, "options": _options_of(kind), "what": _first_line(kind)}
        for name, kind in POLICIES.items()
    ]
    lines += [
        {"kind": "trace", "name": name, "options": "", "what": (make.__doc__ or "").strip()}
        for name, make in TRACES.items()
    ]
    _print(lines, as_json)


def _options_of(kind: Any) -> str:
    fields = msgspec.structs.fields(kind)
    parts = [
        field.name if field.required else f"{field.name}={field.default}"
        for field in fields
        if field.name != "operator"
    ]
    return ", ".join(parts)


def _first_line(kind: Any) -> str:
    module = sys.modules[kind.__module__].__doc__ or ""
    return module.partition("\n")[0].partition(": ")[2]


@policy.command(short_help="Run a policy on a made-up load, beside an oracle that knows the future.")
def simulate(
    trace: Annotated[str, typer.Option(help="The load: tiercel policy list; or all.")] = "all",
    name: Annotated[str, typer.Option("--policy", help="busy or rate; or both.")] = "both",
    seed: Annotated[int, typer.Option(help="Of the load.")] = 1,
    start_s: Annotated[float, typer.Option(help="Seconds until a new instance works.")] = 5.0,
    option: OptionPairs = None,
    least: Least = 1,
    most: Most = 16,
    decisions: Annotated[bool, typer.Option("--decisions", help="Print the history of decisions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a policy on made-up loads, with the real governor and planner, beside an oracle.

    late_s: seconds in which a row waited longer than a second. turns: changes of direction. Exit code 1 if a
    policy flaps: more than one change of direction for each change of the load.

    Example: tiercel policy simulate --trace flash-crowd --policy rate --decisions
    """
    if start_s <= 0:
        raise UserError(f"--start-s {start_s:g}", expected="a number above 0")
    traces = sorted(TRACES) if trace == "all" else [trace]
    names = ["busy", "rate"] if name == "both" else [name]
    limits = Limits(instances_min={"*": least}, instances_max={"*": most})
    trials = [
        run_trial(t, n, seed=seed, options=_parsed(option), limits=limits, start_s=start_s)
        for t in traces
        for n in names
    ]
    if decisions:
        for result, history in trials:
            print(f"# {result.policy} on {result.trace}", file=sys.stderr if as_json else sys.stdout)
            for decision in history:
                print(f"{decision.at_s:6.0f} s  {decision}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        _print([{**msgspec.structs.asdict(result), "flaps": result.flaps} for result, _ in trials], as_json)
    else:
        _print([_summary(result) for result, _ in trials], as_json)
    if any(result.flaps for result, _ in trials):
        raise typer.Exit(1)


def _summary(result: TrialResult) -> dict[str, Any]:
    return {
        "trace": result.trace,
        "policy": result.policy,
        "changes": result.changes,
        "turns": f"{result.turns} (load {result.load_turns})",
        "late s": result.late_s,
        "longest wait s": result.longest_s,
        "instance-seconds": result.instance_seconds,
        "of the oracle": f"{result.oracle_instance_seconds} ({result.oracle_changes} changes)",
        "late s if fixed": result.unmoved_late_s,
    }


@policy.command("replay", short_help="Run recorded views through a policy, and see what it would have done.")
def replay_file(
    file: Annotated[Path, typer.Argument(help="Recorded views, one JSON object a line; or a storage.")],
    operator: Annotated[str, typer.Option(help="The operator; by default the only one of the views.")] = "",
    name: PolicyName = "rate",
    option: OptionPairs = None,
    least: Least = 1,
    most: Most = 8,
    as_json: AsJson = False,
) -> None:
    """Run recorded views through a policy, and see what it would have decided. Nothing is changed.

    Example: tiercel policy replay /data/tiercel/policy/views.jsonl --policy rate --max 4
    """
    path = file / "policy" / "views.jsonl" if file.is_dir() else file
    if not path.exists():
        raise UserError(
            f"no file {path}",
            expected="views as a deployment with a policy records them",
            hint="live.policy()",
        )
    views = decode_views(path.read_bytes().splitlines())
    if not views:
        raise UserError(f"{path} has no views", expected="at least one line")
    known = sorted({name for view in views for name in view.operators})
    if not operator and len(known) == 1:
        operator = known[0]
    if operator not in known:
        raise UserError(f"--operator {operator!r}", expected=f"one of: {', '.join(known)}")
    limits = Limits(instances_min={"*": least}, instances_max={"*": most})
    history = replay(views, name, make_policy(name, operator, _parsed(option)).decide, limits)
    _print_decisions(history, as_json)


@policy.command(short_help="Show the policies of a deployment with their limits.")
def show(storage: Storage, as_json: AsJson = False) -> None:
    """Show the policies of a deployment with their options and limits, as its driver recorded them.

    Example: tiercel policy show /data/tiercel
    """
    path = _recorded(storage) / "policies.json"
    _print(msgspec.json.decode(path.read_bytes()) if path.exists() else [], as_json)


@policy.command(short_help="Show what the policies of a deployment decided, and why.")
def history(
    storage: Storage,
    last: Annotated[int, typer.Option(help="Lines, the newest ones.")] = 50,
    changes: Annotated[bool, typer.Option("--changes", help="Only changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the policies of a deployment decided and why, also when they decided to do nothing.

    Example: tiercel policy history /data/tiercel --changes
    """
    path = _recorded(storage) / "history.jsonl"
    decode = msgspec.json.Decoder(Decision).decode
    found = [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    _print_decisions([d for d in found if d.is_change or not changes][-last:], as_json)


@policy.command("dry-run", short_help="What a policy would do with the views that a deployment records.")
def dry_run(
    storage: Storage,
    operator: Annotated[str, typer.Option(help="The operator; by default the only one.")] = "",
    name: PolicyName = "rate",
    option: OptionPairs = None,
    least: Least = 1,
    most: Most = 8,
    as_json: AsJson = False,
) -> None:
    """Say what a policy would decide for the load that a deployment has recorded. Nothing is changed.

    Example: tiercel policy dry-run /data/tiercel --policy busy --option threshold=0.5
    """
    _recorded(storage)
    replay_file(storage, operator, name, option, least, most, as_json)


def _recorded(storage: Path) -> Path:
    from tiercel.runtime.deployment import DeploymentDir

    DeploymentDir(storage).manifest()  # a clear error if this is no deployment's directory
    return storage / "policy"


def _parsed(pairs: list[str] | None) -> dict[str, Any]:
    """Options as typed: numbers as numbers."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"--option {pair!r}", expected="NAME=VALUE, as in target=0.6")
        try:
            found[name] = msgspec.json.decode(text.encode())
        except msgspec.DecodeError:
            found[name] = text
    return found


def _print_decisions(decisions: list[Decision], as_json: bool) -> None:
    if as_json:
        _print([msgspec.to_builtins(decision) for decision in decisions], as_json)
        return
    lines = [
        {
            "at": datetime.fromtimestamp(decision.at_s, UTC).strftime("%H:%M:%S"),
            "policy": decision.policy,
            "proposal": str(decision.proposal),
            "outcome": decision.outcome.value,
            "times": decision.repeated + 1,
            "reason": decision.reason,
        }
        for decision in decisions
    ]
    _print(lines, as_json)


def _print(lines: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines)).decode())
        return
    if not lines:
        print("nothing")
        return
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(str(value) for value in line.values()))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)
