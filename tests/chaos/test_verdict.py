"""The verdict on a chaos run."""

from __future__ import annotations

import pytest

from chaos_plans import CLUSTER
from tiercel.chaos.plan import Kind
from tiercel.chaos.supervisor import InjectedFault, RunLog, kinds_of
from tiercel.chaos.verdict import Verdict, too_few
from tiercel.demo.audit import Audit


def verdict(audit: Audit, run_log: RunLog) -> Verdict:
    return Verdict.of(1, 1.0, CLUSTER, "backup", run_log, audit)


def test_verdict_counts_faults_by_kind_and_during_moves() -> None:
    faults = [
        InjectedFault(Kind.ROUTER, "cloud", 1.0, True, False),
        InjectedFault(Kind.ROUTER, "edge", 2.0, False, True),
        InjectedFault(Kind.DISK, "full", 3.0, True, True),
    ]
    found = verdict(Audit(9, 9, 0, 0, 0, 0, 0), RunLog(faults))
    assert (found.faults["router"], found.faults["disk"], found.faults["stop"]) == (2, 1, 0)
    assert (found.during_moves["router"], found.during_moves["disk"], found.during_scaling) == (1, 1, 1)
    assert found.good


def test_run_with_too_few_faults_names_the_missing_ones() -> None:
    kinds = kinds_of(CLUSTER, "backup")
    faults = [InjectedFault(kind, "", 0.0, n < 5) for kind in kinds for n in range(15)]
    assert too_few(20, kinds, faults) == []
    assert too_few(3, kinds, [InjectedFault(Kind.STOP, "", 0.0, True)] * 15) == [
        f"0 faults of kind {kind}, at least 1 wanted" for kind in kinds if kind is not Kind.STOP
    ]
    assert too_few(1, kinds, [InjectedFault(Kind.STOP, "", 0.0)] * 4) == [
        "4 faults, at least 5 wanted",
        "0 faults during moves, at least 2 wanted",
    ]


@pytest.mark.parametrize(
    ("audit", "run_log"),
    [
        (Audit(9, 8, 1, 0, 0, 0, 0), RunLog()),
        (Audit(9, 10, 0, 1, 0, 0, 0), RunLog()),
        (Audit(0, 0, 0, 0, 0, 0, 0), RunLog()),
        (Audit(9, 9, 0, 0, 0, 0, 0), RunLog(unexpected=["given up: cloud"])),
        (Audit(9, 9, 0, 0, 0, 0, 0), RunLog(stalled="nothing comes out")),
    ],
)
def test_any_failure_makes_the_verdict_bad(audit: Audit, run_log: RunLog) -> None:
    assert not verdict(audit, run_log).good
