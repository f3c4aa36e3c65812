"""`tiercel demo --simulated`: a guided tour of the simulator, without Spark.

Responsible for: one live move step by step, then a short campaign with faults.
Not responsible for: the runs (sim/).
"""

from __future__ import annotations

import time

from rich import box
from rich.console import Console
from rich.table import Table

from tiercel.cli.sim import counting, replay_command
from tiercel.sim.engine.process import Process
from tiercel.sim.explore.campaign import jobs_available, run_seeds
from tiercel.sim.explore.crash_points import Sketch, scenario_of
from tiercel.sim.explore.run import Result, run
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.scenario import FAULTS, Options

SEEDS = 40

# Step of the move -> what it means; in the order of a live move between two sites.
PHASES = {
    (
        "controller",
        "Durable>MoveRequest",
    ): "the request is durable and goes to the source router",
    ("target", "Prepare"): "the source router has announced the move",
    ("destination", "Prepare"): "the destination instance gets ready",
    ("origin", "Prepared"): "logs Begin; from now on both instances get the keys' rows",
    ("source", "Capture"): "sends state key by key, and keeps processing",
    ("destination", "Chunk"): "state arrives; it processes too, its outputs are withheld",
    ("origin", "Ready"): "both instances have equal state: decides the flip",
    ("source", "FlipToSource"): "the source stops emitting at the flip",
    ("origin", "SourceStopped"): "the offset of its last output is known",
    ("destination", "Dispatch:Adopt"): "the destination owns the keys, in its own log",
    ("destination", "EmitFrom"): "the destination starts to emit",
    ("origin", "DestinationCheckpointed"): "its checkpoint contains the keys: the move is done",
    ("source", "Forget"): "the source deletes its copy",
}


PROCESSES = {  # role of a step -> its process, as shown
    "controller": "controller",
    "origin": "source router",
    "target": "destination router",
    "source": "source instance",
    "destination": "destination instance",
}


class NarratedDeployment(Deployment):
    """A deployment that records the time of each step of its first move."""

    def __init__(self, sketch: Sketch) -> None:
        self.times_ms: dict[tuple[str, str], float] = {}
        self.first_move = ""
        super().__init__(scenario_of(sketch))

    def _crash_here(self, process: Process, move: str, step: str, effects: int) -> int | None:
        self.first_move = self.first_move or move
        if move == self.first_move:
            for role in self._roles(process, move):
                self.times_ms.setdefault((role, step), self.scheduler.now_ms)
        return super()._crash_here(process, move, step, effects)


def tour() -> bool:
    """Show a live move step by step, then random deployments with faults; returns whether all is well."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 120))
    started_s = time.monotonic()
    console.print("\n[bold]1. One live move between two sites, 4 ms apart, in virtual time[/bold]\n")
    deployment = NarratedDeployment(Sketch("demo", "live", 2))
    result = run(deployment.scenario, deployment=deployment)
    console.print(_phases(deployment))
    good = not result.violations
    console.print(f"\n{_gap(deployment)}")
    console.print(f"checked against a sequential run of the same rows: {_verdict(result)}")
    console.print(
        f"\n[bold]2. {SEEDS} random deployments with crashes, partitions, zombies and full disks[/bold]\n"
    )
    options = Options(faults=FAULTS, sites_max=6, scales=True)
    with counting("seeds", SEEDS) as count:
        summary = run_seeds(range(SEEDS), options, jobs_available(), count)
    for seed in summary.failed_seeds:
        print(f"seed {seed} broke a promise; replay: {replay_command(seed, options)}")
    print(summary.line)
    console.print(
        f"\n{time.monotonic() - started_s:.0f} s. Next: tiercel sim --seeds 1000, or on Spark: tiercel demo"
    )
    return good and not summary.violations


def _verdict(result: Result) -> str:
    if not result.violations:
        return "nothing lost, doubled or out of order"
    return "; ".join(f"{v.checker}: {v.text}" for v in result.violations[:3])


def _phases(deployment: NarratedDeployment) -> Table:
    table = Table("ms", "process", "message", "what happens", box=box.SIMPLE_HEAD)
    times = {step: at for step, at in deployment.times_ms.items() if step in PHASES}
    begin = min(times.values(), default=0.0)
    for (role, step), at in sorted(times.items(), key=lambda item: item[1]):
        name = step.rpartition(">")[2].rpartition(":")[2]
        table.add_row(f"{at - begin:.1f}", PROCESSES[role], name, PHASES[role, step])
    return table


def _gap(deployment: NarratedDeployment) -> str:
    """The longest pause between two outputs, during the move and before it."""
    listener = deployment.listeners["alpha.out"]
    begin, end = min(deployment.times_ms.values()), max(deployment.times_ms.values())
    gaps = [(a, b - a) for a, b in zip(listener.seen_ms, listener.seen_ms[1:], strict=False)]
    during = [gap for at, gap in gaps if begin <= at <= end]
    before = [gap for at, gap in gaps if at < begin]
    return (
        f"longest pause between two outputs: {max(during, default=0.0):.1f} ms during the move, "
        f"{max(before, default=0.0):.1f} ms before it"
    )
