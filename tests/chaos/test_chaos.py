"""The parts of a chaos run that need no Spark: plan, load, record, processes, disks, verdict."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from small import until
from tiercel import cli
from tiercel.bench.processes import kill_all, kill_with_all_below, members
from tiercel.chaos import supervisor, victims
from tiercel.chaos.child import Track
from tiercel.chaos.disk import Disk, limited
from tiercel.chaos.judge import Verdict, too_few
from tiercel.chaos.ledger import ACCOUNTS, CHUNK_FRAMES, FRAME_ROWS, entered, frames, reference
from tiercel.chaos.plan import DECK, Fault, Kind, chosen, plan
from tiercel.chaos.record import Inputs, Outputs
from tiercel.chaos.supervisor import Chronicle, Struck, Supervisor, check_master, kinds_of
from tiercel.chaos.victims import Victims, kill_with_disk
from tiercel.errors import UserError
from tiercel.runtime.lives import Lives
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Address
from tiercel.spark.audit import Audit

CLUSTER = "local-cluster[2,6,1024]"


def first(count: int, seed: int = 7, master: str = CLUSTER, durability: str = "backup") -> list[Fault]:
    return list(itertools.islice(plan(seed, kinds_of(master, durability)), count))


# -- the plan --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert first(50) == first(50)
    assert first(50) != first(50, seed=8)


def test_every_kind_comes_once_before_any_comes_twice() -> None:
    for seed in range(20):
        assert sorted(f.kind for f in first(len(Kind), seed, durability="replica")) == sorted(Kind)


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_faults_have_five_of_each_kind_and_thirty_that_are_meant_for_moves(seed: int) -> None:
    for durability in ("backup", "replica"):
        faults = first(100, seed, durability=durability)
        assert min(Counter(fault.kind for fault in faults).values()) >= 5
        assert sum(fault.in_move for fault in faults) >= 30
        assert any(fault.change and fault.change.what == "scale" for fault in faults)
        assert all(fault.change is not None for fault in faults if fault.in_move)


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
        self._child = SimpleNamespace(  # type: ignore[assignment]
            dead=False,
            beat=SimpleNamespace(failures={}),
            finish=lambda: None,
            wait_while_going_on=lambda done, quiet_s: True,
            end=lambda seconds: 0,
        )
        self.played: list[Fault] = []
        self._strike_on()

    def _play(self, fault: Fault) -> None:
        self.played.append(fault)
        self._clock[0] += 1.0


@pytest.mark.parametrize(("seconds", "count"), [(0.5, len(Kind)), (4.5, len(Kind)), (29.5, 30)])
def test_a_run_goes_on_until_its_time_is_over_and_each_kind_has_come(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    clock = [100.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert Planning(seconds, clock).played == first(count, durability="replica")


def test_every_kind_has_its_share_of_a_deck() -> None:
    assert set(DECK) == set(Kind)


def test_a_draw_means_each_of_several_with_the_same_chance() -> None:
    assert [chosen("abc", draw / 6) for draw in range(6)] == list("aabbcc")


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "local", "local[*]", "local-cluster[2,6]"])
def test_a_cluster_that_others_may_use_is_refused(master: str) -> None:
    with pytest.raises(UserError, match="local-cluster"):
        check_master(master)


# -- load, reference and record ----------------------------------------------------------------------


def test_the_accounts_of_two_producers_are_different_and_numbers_grow_over_all_chunks() -> None:
    rows = [[row for chunk in range(5) for frame in frames(1, n, chunk) for row in frame] for n in (0, 1)]
    assert not {account for account, _, _ in rows[0]} & {account for account, _, _ in rows[1]}
    for mine in rows:
        assert [n for _, n, _ in mine] == list(range(5 * CHUNK_FRAMES * FRAME_ROWS))
        assert all(0 <= account < ACCOUNTS for account, _, _ in mine)


def test_an_output_tells_a_lost_a_doubled_and_a_reordered_row() -> None:
    rows = [(1, n, 10 * n) for n in range(4)]
    last = list(reference(rows))[-1]
    a, b, c, d = rows
    for wrong in ([a, b, d], [a, b, b, c, d], [b, a, c, d]):
        assert list(reference(wrong))[-1] != last
    assert entered(0, 0, 0, 0) == (1, 1)


def test_a_chunk_that_was_recorded_is_read_back_by_the_next_life(tmp_path: Path) -> None:
    chunk = frames(3, 1, 4)
    assert Inputs(tmp_path, "p").chunk(4) is None
    Inputs(tmp_path, "p").add(4, chunk)
    assert Inputs(tmp_path, "p").chunk(4) == chunk
    assert Inputs(tmp_path, "q").chunk(4) is None


def test_the_next_life_of_a_reader_goes_on_behind_what_is_recorded_and_ignores_a_draft(
    tmp_path: Path,
) -> None:
    outputs = Outputs(tmp_path)
    outputs.add([])
    outputs.add([(1, 0, 5, 0, 1, 9), (1, 1, 6, 0, 1, 9), (2, 0, 5, 1, 2, 8)])
    outputs.add([(7, 0, 5, 2, 3, 7)])
    (tmp_path / "_000000000008-000000000009.parquet").write_bytes(b"half")
    again = Outputs(tmp_path)
    assert (again.last, again.rows) == (outputs.last, outputs.rows) == (7, 4)


# -- processes -----------------------------------------------------------------------------------------


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


def test_a_change_runs_from_when_it_was_taken_on_until_its_handle_says_done() -> None:
    track = Track("keys")
    assert not track.runs_at(5.0)
    track.begun_s = 4.0
    assert (track.runs_at(3.9), track.runs_at(5.0)) == (False, True)
    track.ended_s = 6.0
    assert (track.runs_at(6.0), track.runs_at(6.1)) == (True, False)


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


def test_a_process_is_killed_with_all_below_it() -> None:
    """Workers of an executor that is killed alone live on for a while, and go on with their work."""
    executor = executor_with_a_worker()
    kill_with_all_below(executor.pid, executor.pid)
    executor.wait()
    until(lambda: members(executor.pid) == [], "it lives on")


def test_an_executor_is_killed_with_all_below_it_and_its_disk_and_other_disks_stay(tmp_path: Path) -> None:
    executor = executor_with_a_worker()
    for name in ("7", "8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert kill_with_disk(executor.pid, executor.pid, tmp_path) == "7"
    executor.wait()
    assert members(executor.pid) == []
    assert [path.name for path in tmp_path.iterdir()] == ["8"]


# -- disks ---------------------------------------------------------------------------------------------


def test_a_mounted_disk_is_full_for_a_while_and_then_has_room_again(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        if not disk.mounted:
            pytest.skip("nothing can be mounted here")
        place = disk.directory / "file"
        with disk.without_space():
            while os.statvfs(disk.directory).f_bavail:
                time.sleep(0.01)
            with pytest.raises(OSError, match="No space left") as failure:
                place.write_bytes(bytes(100_000))
            assert failure.value.errno == errno.ENOSPC
        place.write_bytes(bytes(100_000))
        assert [path.name for path in disk.directory.iterdir()] == ["file"]
    assert not disk.directory.exists()


def test_where_nothing_can_be_mounted_a_process_cannot_write_for_a_while(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        open(sys.argv[1], 'wb', buffering=0).write(b'x')\n"
        "        print('written', flush=True)\n"
        "    except OSError as error:\n"
        "        print(error.strerror, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def tried() -> str:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write("\n")
            return writer.stdout.readline().strip()

        assert tried() == "written"
        with limited([writer.pid]):
            assert tried() == "File too large"
        assert tried() == "written"
        writer.stdin.close()


# -- verdict and command -------------------------------------------------------------------------------


def verdict(audit: Audit, chronicle: Chronicle) -> Verdict:
    return Verdict.of(1, 1.0, CLUSTER, "backup", chronicle, audit)


def test_a_verdict_counts_faults_by_kind_and_those_that_fell_into_a_move() -> None:
    faults = [
        Struck(Kind.ROUTER, "cloud", 1.0, True, False),
        Struck(Kind.ROUTER, "edge", 2.0, False, True),
        Struck(Kind.DISK, "full", 3.0, True, True),
    ]
    found = verdict(Audit(9, 9, 0, 0, 0, 0, 0), Chronicle(faults))
    assert (found.faults["router"], found.faults["disk"], found.faults["stop"]) == (2, 1, 0)
    assert (found.during_moves["router"], found.during_moves["disk"], found.during_scaling) == (1, 1, 1)
    assert found.good


def test_a_run_that_could_do_too_little_says_what_is_missing() -> None:
    kinds = kinds_of(CLUSTER, "backup")
    faults = [Struck(kind, "", 0.0, n < 5) for kind in kinds for n in range(15)]
    assert too_few(20, kinds, faults) == []
    assert too_few(3, kinds, [Struck(Kind.STOP, "", 0.0, True)] * 15) == [
        f"0 faults of kind {kind}, at least 1 wanted" for kind in kinds if kind is not Kind.STOP
    ]
    assert too_few(1, kinds, [Struck(Kind.STOP, "", 0.0)] * 4) == [
        "4 faults, at least 5 wanted",
        "0 faults during moves, at least 2 wanted",
    ]


@pytest.mark.parametrize(
    ("audit", "chronicle"),
    [
        (Audit(9, 8, 1, 0, 0, 0, 0), Chronicle()),
        (Audit(9, 10, 0, 1, 0, 0, 0), Chronicle()),
        (Audit(0, 0, 0, 0, 0, 0, 0), Chronicle()),
        (Audit(9, 9, 0, 0, 0, 0, 0), Chronicle(unasked=["given up: cloud"])),
        (Audit(9, 9, 0, 0, 0, 0, 0), Chronicle(stalled="nothing comes out")),
    ],
)
def test_nothing_less_than_everything_is_good(audit: Audit, chronicle: Chronicle) -> None:
    assert not verdict(audit, chronicle).good


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_what_cannot_be_done_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    places = {"full": tmp_path / "full", "file": tmp_path / "full" / "file"}
    code = cli.run_app(["chaos", *(argument.format(**places) for argument in arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert said in captured.err
    assert "Traceback" not in captured.err


# -- second copies ---------------------------------------------------------------------------------


def test_who_has_no_second_copy_that_runs_must_keep_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was killed a moment ago is registered still, and was taken for a copy.

    Who was started again, and did not listen yet, was forgotten: an executor lost its disk, the application
    was killed while two of its instances were restored elsewhere, and both of their copies were gone.
    Who was retired, and killed before it could say so, was waited for: it owes nothing.
    """
    monkeypatch.setattr(victims, "SITES", ("cloud",))
    found = Victims(tmp_path, 1)
    place = Place(tmp_path)
    for name in ("cloud", "controller", "replica 1 of cloud", "ledger@cloud#2"):
        place.registry.publish(Address(name, "127.0.0.1", 1, 1, 1))
    for name in ("cloud", "ledger@cloud#1"):
        lives = Lives(place.lives, name)
        lives.note_held(lives.claim(0).life, "replica 1 of cloud")
    for running, copied, wanted, missing in (
        (["cloud", "replica 1 of cloud"], True, [], []),
        (["cloud"], True, [], ["cloud"]),
        (["replica 1 of cloud"], True, [], ["cloud"]),
        (["cloud", "replica 1 of cloud"], False, [], ["cloud"]),
        (["cloud", "replica 1 of cloud"], True, ["ledger@cloud#1"], ["ledger@cloud#1"]),
        (["cloud", "replica 1 of cloud", "ledger@cloud#1"], True, ["ledger@cloud#1"], []),
    ):
        place.want(wanted)
        monkeypatch.setattr(found, "_on_executors", lambda names=running: [(n, 1, 2) for n in names])
        monkeypatch.setattr(victims, "has_copy", lambda place, name, copied=copied: copied)
        assert found.without_copy() == missing
