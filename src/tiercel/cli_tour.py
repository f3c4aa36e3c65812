"""`tiercel demo --simulated`: a guided tour through the simulator, without Spark.

Responsible for: one live move told phase by phase, then a short campaign with faults.
Not responsible for: the runs (sim/).
"""

from __future__ import annotations

import time

from rich import box
from rich.console import Console
from rich.table import Table

from tiercel.cli_sim import counting, replay_command
from tiercel.sim.campaign import jobs_available, run_seeds
from tiercel.sim.deployment import Deployment
from tiercel.sim.points import Sketch, scenario_of
from tiercel.sim.process import Process
from tiercel.sim.run import Result, run
from tiercel.sim.scenario import FAULTS, Options

SEEDS = 40

# Step of the move -> what it means; in the order of a live move between two sites.
PHASES = {
    ("controller", "Durable>MoveRequest"): "the wish is on disk, the source's router is asked",
    ("target", "Prepare"): "the router at the destination's site is told what will come",
    ("destination", "Prepare"): "the destination makes room",
    ("origin", "Prepared"): "the source's router logs Begin; from here both get the keys' rows",
    ("source", "Capture"): "the source streams state key by key, and works on",
    ("destination", "Chunk"): "state arrives; the destination works in the shadow, its outputs unseen",
    ("destination", "EndOfKeys"): "all state is there",
    ("origin", "Ready"): "the digests of both agree: Flip, the decision",
    ("source", "FlipNotice"): "the source emits up to the flip, and no further",
    ("origin", "Cut"): "its last output is known",
    ("destination", "Dispatch:Adopt"): "the keys are the destination's, in its own log",
    ("destination", "EmitFrom"): "the destination emits",
    ("origin", "Settled"): "its checkpoint holds the keys: the move is done",
    ("source", "Forget"): "the source forgets its copy",
}


class Narrated(Deployment):
    """A deployment that notes when each step of its first move comes."""

    def __init__(self, sketch: Sketch) -> None:
        self.times_ms: dict[tuple[str, str], float] = {}
        self.first_move = ""
        super().__init__(scenario_of(sketch))

    def _crash_here(self, process: Process, move: str, step: str, effects: int) -> int | None:
        self.first_move = self.first_move or move
        if move == self.first_move:
            for role in self._roles(process, move):
                self.times_ms.setdefault((role, step), self.world.now_ms)
        return super()._crash_here(process, move, step, effects)


def tour() -> bool:
    """A live move step by step, then drawn deployments with faults; whether every promise was kept."""
    console = Console()
    started_s = time.monotonic()
    console.print("\n[bold]1. One live move between two sites, 4 ms apart, in virtual time[/bold]\n")
    deployment = Narrated(Sketch("demo", "live", 2))
    result = run(deployment.scenario, deployment=deployment)
    console.print(_phases(deployment))
    good = not result.violations
    console.print(f"\n{_gap(deployment)}")
    console.print(f"checked against a sequential run of the same rows: {_verdict(result)}")
    console.print(
        f"\n[bold]2. {SEEDS} drawn deployments with crashes, partitions, zombies and full disks[/bold]\n"
    )
    options = Options(faults=FAULTS, sites_max=6, scales=True)
    with counting("seeds", SEEDS) as count:
        summary = run_seeds(range(SEEDS), options, jobs_available(), count)
    for seed in summary.failed_seeds:
        print(f"seed {seed} broke a promise; replay: {replay_command(seed, options)}")
    print(summary.line)
    console.print(f"\n{time.monotonic() - started_s:.0f} s. Go on with: tiercel sim --seeds 1000")
    return good and not summary.violations


def _verdict(result: Result) -> str:
    if not result.violations:
        return "nothing lost, doubled or out of order"
    return "; ".join(f"{v.checker}: {v.text}" for v in result.violations[:3])


def _phases(deployment: Narrated) -> Table:
    table = Table("at ms", "+ ms", "who", "step", "what happens", box=box.SIMPLE_HEAD)
    times = {step: at for step, at in deployment.times_ms.items() if step in PHASES}
    begin = min(times.values(), default=0.0)
    for (role, step), at in sorted(times.items(), key=lambda item: item[1]):
        table.add_row(f"{at:.2f}", f"{at - begin:.2f}", role, step.rpartition(">")[2], PHASES[role, step])
    return table


def _gap(deployment: Narrated) -> str:
    """How long the stream of outputs paused during the move, and otherwise."""
    listener = deployment.listeners["alpha.out"]
    begin, end = min(deployment.times_ms.values()), max(deployment.times_ms.values())
    gaps = [(a, b - a) for a, b in zip(listener.seen_ms, listener.seen_ms[1:], strict=False)]
    during = [gap for at, gap in gaps if begin <= at <= end]
    before = [gap for at, gap in gaps if at < begin]
    return (
        f"longest pause between two outputs: {max(during, default=0.0):.1f} ms during the move, "
        f"{max(before, default=0.0):.1f} ms before it"
    )
