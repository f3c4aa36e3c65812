"""The supervisor: which faults it injects, for how long, and on which clusters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos_plans import CLUSTER, first
from tiercel.chaos import supervisor
from tiercel.chaos.application_handle import ChangeProgress
from tiercel.chaos.plan import Fault, Kind
from tiercel.chaos.supervisor import Supervisor, check_master
from tiercel.cli import main as cli
from tiercel.errors import UserError


def test_a_local_session_has_no_executors_to_kill() -> None:
    assert {fault.kind for fault in first(60, master="local[12,4]")} == set(Kind) - {
        *(Kind.EXECUTOR, Kind.LOST_DISK, Kind.REPLICA),
    }


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_no_disk_is_lost_where_that_would_lose_rows(durability: str) -> None:
    assert {fault.kind for fault in first(60, durability=durability)} == set(Kind) - {
        Kind.LOST_DISK,
        Kind.REPLICA,
    }


class Planning(Supervisor):
    """Does none of it, and takes a second for each."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__(Path(), 7, CLUSTER, "replica", lambda text, share: None)
        self._clock, self._begun_s, self._seconds = clock, clock[0], seconds
        self._application = SimpleNamespace(  # type: ignore[assignment]
            dead=False,
            heartbeat=SimpleNamespace(failures={}),
            finish=lambda: None,
            wait_while_rows_flow=lambda done, quiet_s: True,
            end=lambda seconds: 0,
        )
        self.played: list[Fault] = []
        self._inject_faults()

    def _play(self, fault: Fault) -> None:
        self.played.append(fault)
        self._clock[0] += 1.0


@pytest.mark.parametrize(("seconds", "count"), [(0.5, len(Kind)), (4.5, len(Kind)), (29.5, 30)])
def test_run_lasts_for_its_time_and_until_each_kind_has_come(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    clock = [100.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert Planning(seconds, clock).played == first(count, durability="replica")


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "local", "local[*]", "local-cluster[2,6]"])
def test_shared_cluster_is_refused(master: str) -> None:
    with pytest.raises(UserError, match="local-cluster"):
        check_master(master)


def test_change_runs_from_acceptance_until_its_handle_is_done() -> None:
    track = ChangeProgress("keys")
    assert not track.runs_at(5.0)
    track.begun_s = 4.0
    assert (track.runs_at(3.9), track.runs_at(5.0)) == (False, True)
    track.ended_s = 6.0
    assert (track.runs_at(6.0), track.runs_at(6.1)) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "out of range"),
        (["--minutes", "-3"], "out of range"),
        (["--master", "yarn"], "local-cluster"),
        (["--durability", "none"], "one of: os, disk, backup"),
        (["--out", "{full}"], "is not empty"),
        (["--out", "{file}"], "cannot write"),
        (["--out", "{file}/chaos"], "cannot write"),
        (["--out", "/proc/none/chaos"], "cannot write"),
        (["--out", "/proc/self/task"], "cannot write"),
    ],
)
def test_invalid_options_of_chaos_are_refused_before_the_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    places = {"full": tmp_path / "full", "file": tmp_path / "full" / "file"}
    code = cli.run_app(["chaos", *(argument.format(**places) for argument in arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert "Traceback" not in captured.err
