"""Processes that faults hit: killed with all descendants, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiercel.chaos import targets as victims
from tiercel.chaos.processes import kill_all, kill_with_all_below, members
from tiercel.chaos.targets import Targets, kill_with_disk
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.runtime.storage.incarnations import IncarnationClaims
from waiting import until


def test_all_processes_of_a_session_are_killed_also_orphans_in_groups_of_their_own() -> None:
    child = "import os, time; os.setpgid(0, 0); time.sleep(600)"
    script = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('x', flush=True)"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", f"{script}; import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    leader.stdout.read(1)
    while len(members(leader.pid)) < 2:
        time.sleep(0.01)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert len(members(leader.pid)) == 1
    assert os.getpid() not in members(leader.pid)
    kill_all(leader.pid)
    assert members(leader.pid) == []


def executor_with_a_worker() -> subprocess.Popen[bytes]:
    child = "import time; print('x', end='', flush=True); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    executor = subprocess.Popen(
        [sys.executable, "-c", script, "--executor-id", "7"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert executor.stdout is not None
    executor.stdout.read(1)
    executor.stdout.close()
    assert len(members(executor.pid)) == 2
    return executor


def test_process_is_killed_with_its_descendants() -> None:
    """Workers of an executor that is killed alone live on for a while, and go on with their work."""
    executor = executor_with_a_worker()
    kill_with_all_below(executor.pid, executor.pid)
    executor.wait()
    until(lambda: members(executor.pid) == [], "it still runs")


def test_executor_is_killed_with_its_descendants_and_only_its_own_disk(tmp_path: Path) -> None:
    executor = executor_with_a_worker()
    for name in ("7", "8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert kill_with_disk(executor.pid, executor.pid, tmp_path) == "7"
    executor.wait()
    assert members(executor.pid) == []
    assert [path.name for path in tmp_path.iterdir()] == ["8"]


def test_process_without_a_running_replica_keeps_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was killed a moment ago is registered still, and was taken for a copy.

    Who was started again, and did not listen yet, was forgotten: an executor lost its disk, the application
    was killed while two of its instances were restored elsewhere, and both of their copies were gone.
    Who was retired, and killed before it could say so, was waited for: it owes nothing.
    """
    monkeypatch.setattr(victims, "SITES", ("cloud",))
    found = Targets(tmp_path, 1)
    place = DeploymentDir(tmp_path)
    for name in ("cloud", "controller", "replica 1 of cloud", "ledger@cloud#2"):
        place.registry.publish(Address(name, "127.0.0.1", 1, 1, 1))
    for name in ("cloud", "ledger@cloud#1"):
        incarnations = IncarnationClaims(place.incarnations, name)
        incarnations.set_holder(incarnations.claim(0).incarnation, "replica 1 of cloud")
    for running, copied, wanted, missing in (
        (["cloud", "replica 1 of cloud"], True, [], []),
        (["cloud"], True, [], ["cloud"]),
        (["replica 1 of cloud"], True, [], ["cloud"]),
        (["cloud", "replica 1 of cloud"], False, [], ["cloud"]),
        (["cloud", "replica 1 of cloud"], True, ["ledger@cloud#1"], ["ledger@cloud#1"]),
        (["cloud", "replica 1 of cloud", "ledger@cloud#1"], True, ["ledger@cloud#1"], []),
    ):
        place.set_desired_instances(wanted)
        monkeypatch.setattr(found, "_on_executors", lambda names=running: [(n, 1, 2) for n in names])
        monkeypatch.setattr(victims, "has_replica_copy", lambda place, name, copied=copied: copied)
        assert found.without_copy() == missing
