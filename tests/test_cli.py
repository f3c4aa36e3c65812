"""Promises of the command line: what it prints, its exit codes, and no traceback for bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.cli import main as cli
from tiercel.cli import sim as cli_sim
from tiercel.core.migration.strategies import PRINCIPAL
from tiercel.sim.check.checkers import Violation
from tiercel.sim.explore.campaign import Summary
from tiercel.sim.explore.crash_points_table import STEPS
from tiercel.sim.explore.mutants import MUTANTS, Kill
from tiercel.sim.explore.run import Result
from tiercel.sim.scenario.features import DRAWN_FEATURES, FEATURES
from tiercel.sim.scenario.scenario import FAULTS, Options

PLANTED = "source-forgets-early"
SUMMARY = r"seeds=\d+ moves=\d+ faults=\d+ crash_points=\d+/\d+ violations=\d+"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run_app(list(arguments))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out, captured.err


# -- runs ----------------------------------------------------------------------------------------------


def test_seeds_without_faults_pass_and_end_with_the_summary_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sim", "--seeds", "4", "--faults", "none", "--jobs", "1")
    assert code == 0
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])
    assert out.splitlines()[-1].endswith("violations=0")


def test_a_run_under_a_mutant_fails_and_prints_how_to_replay_and_a_short_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "sim", "--seeds", "8", "--mutant", PLANTED, "--jobs", "1")
    assert code == 1
    assert re.search(rf"replay: tiercel sim --seed \d+ --mutant {PLANTED} --trace", out)
    assert "shortened in" in out
    assert re.fullmatch(SUMMARY, out.splitlines()[-1])


def test_the_replay_command_of_a_failing_seed_fails_again(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "sim", "--seeds", "8", "--mutant", PLANTED, "--jobs", "1", "--json")
    found = json.loads(out)
    seed, command = next(iter(found["replays"].items()))
    assert found["violations"][0]["seed"] == int(seed)
    code, out, _ = run(capsys, *command.split()[1:])
    assert code == 1
    assert found["violations"][0]["violation"]["checker"] in out


def test_replay_prints_the_run_and_the_same_trace_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    traces = []
    for more in (["--trace"], ["--trace"], []):
        _, out, _ = run(capsys, "sim", "--seed", "3", *more)
        traces.append(re.search(r"trace=([0-9a-f]+)", out))
        assert ("start cloud" in out) == bool(more)
    assert len({found.group(1) for found in traces if found}) == 1
    assert None not in traces


def test_killed_mutant_is_reported_with_checker_and_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("sim", "--mutants", "--mutant", PLANTED, "--seeds", "40", "--jobs", "1")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert re.search(rf"^{PLANTED} +[a-z-]+ at seed \d+$", out, re.MULTILINE)
    assert out.splitlines()[-1] == "killed 1/1"


def test_a_mutant_that_survives_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    survivors = {"timers-not-moved"}
    monkeypatch.setattr(cli_sim, "hunt", lambda name, *_: None if name in survivors else Kill("state", 3))
    code, out, _ = run(capsys, "sim", "--mutants")
    assert code == 1
    assert re.search(r"^timers-not-moved +SURVIVED", out, re.MULTILINE)
    assert out.splitlines()[-1] == f"killed {len(MUTANTS) - 1}/{len(MUTANTS)}"


def test_a_violation_at_a_crash_point_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary()
    summary.add(
        Result(1, [Violation("state", "two owners")], {"done": 1}, 1, [], [], "", 1.0, 0), "live/x/y/after"
    )
    monkeypatch.setattr(cli_sim, "run_crash_points", lambda *_: summary)
    code, out, _ = run(capsys, "sim", "--points")
    assert code == 1
    assert "live/x/y/after: state: two owners" in out


def test_the_replay_command_repeats_what_differs_from_the_defaults() -> None:
    options = Options(strategies=("pause",), faults=("crash", "step"), mutant=PLANTED)
    assert cli_sim.replay_command(7, options) == (
        f"tiercel sim --seed 7 --strategy pause --faults crash,step --mutant {PLANTED} --trace"
    )
    drawn = Options(strategies=PRINCIPAL, faults=FAULTS, features=DRAWN_FEATURES)
    assert cli_sim.replay_command(7, drawn) == "tiercel sim --seed 7 --trace"
    other = Options(strategies=PRINCIPAL, faults=FAULTS, features=("small-shadows",))
    command = "tiercel sim --seed 7 --without all --with small-shadows --trace"
    assert cli_sim.replay_command(7, other) == command


def test_simulated_demo_shows_a_live_move_and_checks_its_seeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.cli.demo_simulated.SEEDS", 3)
    code, out, _ = run(capsys, "demo", "--simulated")
    assert "Flip" in out
    assert "the source deletes its copy" in " ".join(out.split())
    assert code == (0 if "violations=0" in out else 1)


# -- lists and help ------------------------------------------------------------------------------------


def test_every_name_that_options_take_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "strategies": STEPS,
        "faults": FAULTS,
        "features": FEATURES,
        "mutants": MUTANTS,
        "checkers": ("exactly-once-input", "one-owner", "core-bug"),
        "sites": ("cloud",),
        "operators": ("alpha",),
        "instances": ("alpha@edge1#1", "alpha@edge2#0"),
        "points": ("live/source/Capture/before", "live/source/Capture/after"),
    }
    assert set(expected) == set(cli_sim.LISTS)
    for kind, names in expected.items():
        code, out, _ = run(capsys, "sim", "--list", kind)
        assert code == 0
        assert {line.split()[0] for line in out.splitlines()}.issuperset(names), kind


@pytest.mark.parametrize("command", [[], ["sim"], ["demo"], ["chaos"]])
def test_every_command_has_help_with_an_example(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert re.search(r"Examples?:\s+tiercel", out)


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--strategy", "teleport"],
            ["'teleport'", "live, pause, restart, push", "tiercel sim --list strategies"],
        ),
        (["--strategy", "live,,pause"], ["''", "live, pause, restart"]),
        (["--faults", "crash,flood"], ["'flood'", "crash, step", "tiercel sim --list faults"]),
        (["--mutant", "nobody"], ["'nobody'", "timers-not-moved", "tiercel sim --list mutants"]),
        (["--mutants", "--mutant", "nobody"], ["'nobody'", "tiercel sim --list mutants"]),
        (["--list", "moons"], ["'moons'", "strategies, faults"]),
        (["--seeds", "0"], ["--seeds 0", "from 1 to"]),
        (["--seeds", "-5"], ["--seeds -5", "from 1 to"]),
        (["--seeds", "99999999999"], ["--seeds 99999999999", "from 1 to"]),
        (["--seeds", "many"], ["--seeds", "integer"]),
        (["--first", "-1"], ["--first -1", "from 0 to"]),
        (["--seed", "-1"], ["--seed -1", "from 0 to"]),
        (["--jobs", "-2"], ["--jobs -2", "from 0 to"]),
        (["--trace"], ["--trace", "--seed 42"]),
        (["--points", "--mutants"], ["--points", "at most one"]),
        (["--sites", "mars"], ["--sites"]),
    ],
)
def test_bad_input_names_the_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: list[str]
) -> None:
    code, out, err = run(capsys, "sim", *arguments)
    assert code == 2
    assert out == ""
    for part in message:
        assert part in err


@pytest.mark.parametrize("seconds", ["0", "-1", "1e9", "nan"])
def test_the_demo_refuses_a_time_out_of_range(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    code, out, err = run(capsys, "demo", "--seconds", seconds)
    assert (code, out) == (2, "")
    assert "--seconds" in err
    assert "from 2 to 600" in err


def test_demo_refuses_a_directory_with_other_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    theirs = tmp_path / "recorded" / "music.txt"
    theirs.parent.mkdir()
    theirs.touch()
    code, _, err = run(capsys, "demo", "--out", str(tmp_path))
    assert code == 2
    assert "holds something else" in err
    assert theirs.exists()


@pytest.mark.parametrize("place", ["{file}", "{file}/demo", "/proc/none/demo", "/proc/self"])
def test_demo_names_the_directory_it_cannot_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    out = place.format(file=tmp_path / "file")
    code, _, err = run(capsys, "demo", "--out", out)
    assert code == 2
    assert f"cannot write to {Path(out).resolve()}: " in err


def test_the_entry_point_exits_with_the_code_and_without_a_traceback() -> None:
    command = [sys.executable, "-m", "tiercel", "sim", "--seeds", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --seeds 0 is out of range")
    assert "Traceback" not in ended.stderr


# -- policies --------------------------------------------------------------------------------------------


def test_a_simulated_policy_is_shown_beside_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "policy", "simulate", "--trace", "ramp", "--policy", "rate", "--json")
    (line,) = json.loads(out)
    assert code == 0
    assert line["trace"] == "ramp"
    assert 0 < line["oracle_instance_seconds"] < line["instance_seconds"]


def test_recorded_views_are_replayed_through_a_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    busy = {"name": "op@a#1", "rate": 900.0, "arrivals": 2_000.0, "busy": 1.0}
    views = [{"at_s": n, "operators": {"op": {"name": "op", "instances": [busy]}}} for n in range(3)]
    file = tmp_path / "views.jsonl"
    file.write_text("\n".join(map(json.dumps, views)), encoding="utf-8")
    code, out, _ = run(capsys, "policy", "replay", str(file), "--max", "2", "--json")
    (line,) = json.loads(out)
    assert code == 0
    assert (line["outcome"], line["proposal"]["instances"], line["repeated"]) == ("dry run", 2, 2)
    assert "2000 rows/s arrive" in line["reason"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("simulate", "--trace", "sawtooth"), "unknown trace 'sawtooth'"),
        (("simulate", "--policy", "clever"), "unknown policy 'clever'"),
        (("simulate", "--policy", "rate", "--option", "target=1.5"), "target = 1.5"),
        (("simulate", "--policy", "rate", "--option", "target"), "--option 'target'"),
        (("simulate", "--min", "3", "--max", "2"), "min = 3 is above max = 2"),
        (("simulate", "--start-s", "0"), "--start-s 0"),
        (("replay", "nowhere.jsonl"), "no file nowhere.jsonl"),
        (("replay", "{file}"), "line 1 is no view"),
        (("history", "{directory}"), "no deployment"),
    ],
)
def test_a_policy_command_that_cannot_work_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    file = tmp_path / "views.jsonl"
    file.write_text("[1, 2]", encoding="utf-8")
    given = [a.format(file=file, directory=tmp_path / "empty") for a in arguments]
    code, _, err = run(capsys, "policy", *given)
    assert code == 2
    assert named in err
