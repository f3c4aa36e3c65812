"""Many runs: seeds or crash points over several processes, summed up.

Responsible for: which scenarios a campaign runs, spreading them, adding the results up.
Not responsible for: one run (run.py), showing progress (sim.py), shortening what failed (shrink.py).

Results come back in the order of the seeds, whatever the number of processes: two campaigns with the
same arguments give the same result.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

import msgspec

from tiercel.sim.check.checkers import Violation
from tiercel.sim.explore.crash_points import CRASH_POINTS, CrashPoint, enumerate_points
from tiercel.sim.explore.run import Result, run
from tiercel.sim.scenario.features import vary
from tiercel.sim.scenario.scenario import Options, Scenario, draw

CHUNK = 8  # runs per task: long enough to hide the hand-over, short enough for a steady progress
AHEAD = 4  # chunks per process that wait to be taken

Task = TypeVar("Task")
OnResult = Callable[[Result], object]


class Failure(msgspec.Struct, frozen=True):
    """A broken promise and the run that broke it."""

    seed: int
    violation: Violation
    point: str = ""  # runs of the enumeration have a crash point instead of a seed


class Summary(msgspec.Struct):
    """The result of a campaign."""

    seeds: int = 0
    moves: int = 0
    faults: int = 0
    points_hit: set[CrashPoint] = msgspec.field(default_factory=set)
    violations: list[Failure] = msgspec.field(default_factory=list)
    elapsed_s: float = 0.0
    walked: Counter[str] = msgspec.field(default_factory=Counter)  # rare path -> seeds that walked it

    def add(self, result: Result, point: str = "") -> None:
        self.seeds += 1
        self.moves += sum(result.moves.values())
        self.faults += result.faults
        self.walked.update(result.walked.keys())
        self.points_hit.update(CrashPoint(*hit) for hit in result.points_hit)
        self.violations += [Failure(result.seed, violation, point) for violation in result.violations]

    @property
    def failed_seeds(self) -> list[int]:
        return list(dict.fromkeys(failure.seed for failure in self.violations if not failure.point))

    @property
    def line(self) -> str:
        hit = len(self.points_hit.intersection(CRASH_POINTS))
        return (
            f"seeds={self.seeds} moves={self.moves} faults={self.faults} "
            f"crash_points={hit}/{len(CRASH_POINTS)} violations={len(self.violations)}"
        )


# -- the runs ------------------------------------------------------------------------------------------


def scenario_of(seed: int, options: Options) -> Scenario:
    """The scenario of a seed in a campaign; its crash points are those of the chosen strategies."""
    points: list[tuple[str, str, str, bool]] = [p for p in CRASH_POINTS if p.strategy in options.strategies]
    return vary(draw(seed, options, points=points), options)


def run_safely(scenario: Scenario) -> Result:
    """Run; an error of the simulator itself is a failure of that run, not the end of the campaign."""
    try:
        return run(scenario)
    except Exception as error:
        text = f"the run itself failed: {type(error).__name__}: {error}"
        return Result(scenario.seed, [Violation("simulator", text)], {}, 0, [], [], "", 0.0, 0)


def run_seed(seed: int, options: Options) -> Result:
    return run_safely(scenario_of(seed, options))


def _run_seed(task: tuple[int, Options]) -> Result:
    return run_seed(*task)


def _run_crash_point(task: tuple[str, Scenario]) -> tuple[str, Result]:
    point, scenario = task
    return point, run_safely(scenario)


# -- many runs -----------------------------------------------------------------------------------------


Outcome = TypeVar("Outcome")


def run_seeds(
    seeds: Iterable[int], options: Options, jobs: int, on_result: OnResult | None = None
) -> Summary:
    """Run all seeds over `jobs` processes; `on_result` is called with each result."""
    summary, started_s = Summary(), time.monotonic()
    for result in stream_seeds(seeds, options, jobs):
        summary.add(result)
        if on_result is not None:
            on_result(result)
    if "step" in options.faults and summary.seeds >= len(CRASH_POINTS) and not options.mutant:
        visit_missing(summary, options)
    summary.elapsed_s = time.monotonic() - started_s
    return summary


def visit_missing(summary: Summary, options: Options) -> None:
    """The crash points that no drawn move came by, each in a scenario of its own; they are not seeds."""
    for point, scenario in enumerate_points(options.strategies):
        if point not in summary.points_hit:
            summary.add(run_safely(scenario), str(point))
            summary.seeds -= 1


def stream_seeds(seeds: Iterable[int], options: Options, jobs: int) -> Generator[Result]:
    """The results of seeds, one after the other; the campaign stops when the caller stops iterating."""
    return stream(_run_seed, ((seed, options) for seed in seeds), jobs)


def run_crash_points(
    jobs: int,
    on_result: OnResult | None = None,
    strategies: Iterable[str] | None = None,
    nth: int = 1,
) -> Summary:
    """Run the enumeration: each crash point of the given strategies (all) in its own scenarios.

    `nth`: of a point's scenarios only the first and every n-th behind it.
    """
    found = enumerate_points() if strategies is None else enumerate_points(strategies)
    by_point = itertools.groupby(found, key=lambda pair: pair[0])
    pairs = itertools.chain.from_iterable(itertools.islice(several, 0, None, nth) for _, several in by_point)
    summary, started_s = Summary(), time.monotonic()
    for point, result in stream(_run_crash_point, ((str(p), s) for p, s in pairs), jobs):
        summary.add(result, point)
        if on_result is not None:
            on_result(result)
    summary.elapsed_s = time.monotonic() - started_s
    return summary


def jobs_available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stream(work: Callable[[Task], Outcome], tasks: Iterable[Task], jobs: int) -> Generator[Outcome]:
    """Outcomes in the order of their tasks; only a bounded number of tasks is handed out ahead."""
    if jobs <= 1:
        yield from map(work, tasks)
        return
    left = iter(tasks)
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    waiting: deque[Future[list[Outcome]]] = deque()
    try:
        while chunk := list(itertools.islice(left, CHUNK)):
            waiting.append(pool.submit(_work_chunk, work, chunk))
            if len(waiting) > jobs * AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _work_chunk(work: Callable[[Task], Outcome], tasks: list[Task]) -> list[Outcome]:
    return [work(task) for task in tasks]
