"""The plan of a chaos run: faults and changes, drawn from one seed.

Responsible for: the next fault, whether it hits a running move, and its random draws.
Not responsible for: the processes (targets.py), injecting faults (supervisor.py), judging (verdict.py).

Pure: the same seed and kinds give the same plan. The target of a fault is a draw in [0, 1), because the
running processes are known only at the time of the fault.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple, TypeVar

import msgspec

from tiercel.core.migration.strategies import PRINCIPAL

T = TypeVar("T")


class Kind(enum.StrEnum):
    """Kinds of faults. One more is a member, its share of a deck, and what the supervisor does then."""

    INSTANCE = "instance"  # kill -9 of an instance's worker
    ROUTER = "router"  # kill -9 of a router's worker
    REPLICA = "replica"  # kill -9 of the worker that holds others' copies in its memory
    EXECUTOR = "executor"  # kill -9 of an executor with everything on it
    LOST_DISK = "executor-disk"  # an executor and its disk
    APPLICATION = (
        "application"  # kill -9 of driver, executors and all tasks; then a new one on the same storage
    )
    DISK = "disk"  # the storage is full for seconds
    STOP = "stop"  # SIGSTOP of a process for seconds


DECK: Mapping[Kind, int] = {  # so many of each: what takes longest to recover from is rarest
    Kind.INSTANCE: 6,
    Kind.ROUTER: 4,
    Kind.STOP: 3,
    Kind.DISK: 2,
    Kind.EXECUTOR: 2,
    Kind.LOST_DISK: 2,
    Kind.REPLICA: 1,
    Kind.APPLICATION: 1,
}
SCALING = ("live",) * 6 + ("pause",) * 3 + ("restart",)
MOVING = (*SCALING, *(name for name in PRINCIPAL if name not in SCALING), "auto")  # every strategy
IN_MOVE = 0.6  # of all faults; some moves end before the fault
OVERLAP = 0.25  # of all faults: the next one comes before the deployment has recovered
SCALE = 0.4  # of the faults outside of moves come with a scale-out or scale-in
CLOUD_MAX, EDGE_MAX = 3, 2
DELAY_S = (0.0, 0.06)  # into a move
PAUSE_S = (0.3, 2.0)  # before a fault outside of one
STOP_S = (0.5, 5.0)
DISK_S = (1.0, 4.0)


class Change(msgspec.Struct, frozen=True, tag=True):
    """A reconfiguration. Draws are in [0, 1): what they choose among is known to the application."""

    what: str  # keys | slots | scale
    strategy: str
    source: float = 0.0  # which instance loses keys
    target: float = 0.0  # which other one gets them
    share: float = 0.0  # how many of them
    instances: dict[str, int] = {}  # of a scale: how many at each site


class Fault(NamedTuple):
    """One fault, and what it should meet."""

    kind: Kind
    victim: float
    seconds: float  # for which a process is stopped or a disk is full
    change: Change | None  # asked for before
    in_move: bool  # inject it while that change runs
    delay_s: float
    overlap: bool


def plan(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Faults without end: first one of each kind, then decks of `DECK`, each shuffled."""
    random = Random(f"chaos/{seed}")
    deck = list(kinds)
    while True:
        random.shuffle(deck)
        for kind in deck:
            yield _fault(random, kind)
        deck = [kind for kind in kinds for _ in range(DECK[kind])]


def _fault(random: Random, kind: Kind) -> Fault:
    in_move = random.random() < IN_MOVE
    change = None
    if in_move:
        change = draw_move(random)
    elif random.random() < SCALE:
        wanted = {"cloud": random.randint(1, CLOUD_MAX), "edge": random.randint(1, EDGE_MAX)}
        change = Change("scale", random.choice(SCALING), instances=wanted)
    seconds = random.uniform(*(DISK_S if kind is Kind.DISK else STOP_S))
    delay_s = random.uniform(*(DELAY_S if in_move else PAUSE_S))
    overlap = random.random() < OVERLAP
    return Fault(kind, random.random(), seconds, change, in_move, delay_s, overlap)


def draw_move(random: Random) -> Change:
    """Some keys, or some slots, of one instance to another."""
    return Change(
        random.choice(("keys", "slots")),
        random.choice(MOVING),
        random.random(),
        random.random(),
        random.uniform(0.2, 1.0),
    )


def chosen(among: Sequence[T], draw: float) -> T:
    """The one of them that a draw in [0, 1) means."""
    return among[int(draw * len(among))]
