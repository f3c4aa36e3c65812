"""The verdict: a Spark batch job compares the recorded outputs with a sequential run over the same inputs.

Responsible for: the reference, the comparison, and the verdict.
Not responsible for: the recording (recording.py), the counting itself (demo/audit.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.chaos.plan import Kind
from tiercel.chaos.supervisor import InjectedFault, RunLog, kinds_of
from tiercel.chaos.workload import BALANCE, TRANSFER, reference
from tiercel.demo.audit import Audit, compare

if TYPE_CHECKING:
    import pandas

SLOTS = 2
SMALL_BYTES = 1 << 14
FAULTS_PER_MINUTE = 5.0
IN_MOVES_PER_MINUTE = 1.5
OF_EACH_KIND_PER_MINUTE = 0.25


class Verdict(msgspec.Struct, frozen=True):
    """A run in numbers."""

    seed: int
    minutes: float
    master: str
    durability: str
    audit: Audit
    faults: dict[str, int]  # by kind
    during_moves: dict[str, int]  # kind -> faults during a running move
    during_scaling: int  # and how many others into a scale-out or scale-in
    changes: dict[str, int]  # moves and scalings, by how they ended
    starts: int  # of the application
    failed_starts: int  # each was tried again
    continued: int  # moves of one application that were still open when the next one was up
    unexpected: list[str]
    stalled: str
    disk: str  # the way in which the disk gets full
    too_few: list[str]  # kinds of faults with fewer than the minimum

    @property
    def good(self) -> bool:
        return self.audit.inputs > 0 and not (self.audit.faults or self.unexpected or self.stalled)

    @classmethod
    def of(
        cls, seed: int, minutes: float, master: str, durability: str, run_log: RunLog, audit: Audit
    ) -> Verdict:
        counts = Counter(fault_done.kind for fault_done in run_log.faults)
        met = Counter(fault_done.kind for fault_done in run_log.faults if fault_done.in_move)
        return cls(
            seed,
            minutes,
            master,
            durability,
            audit,
            {kind.value: counts[kind] for kind in Kind},
            {kind.value: met[kind] for kind in Kind},
            sum(fault_done.in_scale and not fault_done.in_move for fault_done in run_log.faults),
            run_log.changes,
            run_log.starts,
            len(run_log.failed_starts),
            run_log.continued,
            run_log.unexpected,
            run_log.stalled,
            run_log.disk,
            too_few(minutes, kinds_of(master, durability), run_log.faults),
        )


def too_few(minutes: float, kinds: Sequence[Kind], faults: Sequence[InjectedFault]) -> list[str]:
    """The faults that are missing to the minimum of a run of this length, in words."""
    counts = Counter(fault_done.kind for fault_done in faults)
    found = [("faults", len(faults), FAULTS_PER_MINUTE)]
    found += [("faults during moves", sum(fault_done.in_move for fault_done in faults), IN_MOVES_PER_MINUTE)]
    found += [(f"faults of kind {kind}", counts[kind], OF_EACH_KIND_PER_MINUTE) for kind in kinds]
    return [
        f"{count} {what}, at least {round(rate * minutes)} wanted"
        for what, count, rate in found
        if count < round(rate * minutes)
    ]


def sequential(transfers: pandas.DataFrame) -> pandas.DataFrame:
    """The balances of one account, in the order in which its transfers were sent."""
    import pandas

    rows = transfers.sort_values("n")[["account", "n", "amount"]].itertuples(index=False, name=None)
    return pandas.DataFrame(reference(rows), columns=["account", "n", "count", "chain"])


def judge(spark: Any, recorded: Path) -> Audit:
    """Every recorded output against what a sequential run over the recorded inputs gives."""
    result = ("account AS key", "n AS seq", "struct(count, chain) AS result")
    spark.conf.set("spark.sql.files.openCostInBytes", SMALL_BYTES)  # thousands of files, of a few kB each
    inputs = spark.read.schema(TRANSFER).parquet(str(recorded / "inputs"))
    expected = inputs.groupBy("account").applyInPandas(sequential, BALANCE).selectExpr(*result)
    outputs = spark.read.schema(f"position bigint, place bigint, {BALANCE}").parquet(
        str(recorded / "outputs")
    )
    return compare(spark, expected, outputs.selectExpr(*result, "position AS written", "place"))
