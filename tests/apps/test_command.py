"""The command `tiercel app`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tiercel.apps import run as apps_run
from tiercel.apps.catalogue import APPS
from tiercel.apps.run import Progress, Result
from tiercel.apps.verdict import Comparison
from tiercel.cli import app as cli_app
from tiercel.cli import main as cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run_app(["app", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out, captured.err


def result(**faults: int) -> Result:
    counts: dict[str, Any] = {"lost": 0, "doubled": 0, "invented": 0, "wrong": 0, "reordered": 0, **faults}
    compared = Comparison(expected=3, found=3, **counts)
    return Result("keycount", {}, 1, 1, 1.0, 3, 3.0, [], [], {"counts": compared}, 0, [], {})


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("found", "code"), [(result(), 0), (result(lost=1), 1), (result(reordered=2), 1)])
def test_exit_code_is_the_verdict(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: Result,
    code: int,
    as_json: bool,
) -> None:
    monkeypatch.setattr(apps_run, "run", lambda *_: found)
    ended, out, _ = run(capsys, "run", "keycount", *(["--json"] if as_json else []))
    assert ended == code
    if as_json:
        assert json.loads(out)["good"] == (code == 0)
    else:
        assert ("every row is what the oracle expects" in out) == (code == 0)


def test_a_run_in_which_the_oracle_expects_nothing_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Comparison(expected=0, found=0, lost=0, doubled=0, invented=0, wrong=0, reordered=0)
    found = Result("keycount", {}, 1, 1, 1.0, 0, 0.0, [], [], {"counts": empty}, 0, [], {})
    monkeypatch.setattr(apps_run, "run", lambda *_: found)
    code, out, _ = run(capsys, "run", "keycount")
    assert code == 1
    assert "nothing was checked" in out


def test_list_has_every_application_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == sorted(APPS)
    assert "--set cars=1000 (1 to 5,000,000)" in out
    code, out, _ = run(capsys, "list", "--json")
    assert sorted(json.loads(out)) == sorted(APPS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run paint", "unknown application 'paint'"),
        ("run keycount --rate 1000000000", "rate = 1,000,000,000"),
        ("run keycount --seconds 0", "seconds = 0"),
        ("run keycount --during explode", "keycount: unknown change 'explode'"),
        ("run keycount --set keys", "--set 'keys'"),
        ("run keycount --set cars=3", "keycount: unknown option 'cars'"),
        ("run traffic --set cars=1000000 --set state_bytes=1000000", "traffic: 1,000,000 cars"),
        ("run traffic --set cars=3 --set probes=4", "traffic: 4 probes"),
    ],
)
def test_bad_input_is_named_and_nothing_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr(apps_run, "run", lambda *_: pytest.fail("it ran"))
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "expected" in err


def test_the_live_view_shows_rates_latency_and_findings() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    rates = cli_app._Rates()
    rates.of("means", 0)
    rates._before["means"] = (rates._before["means"][0] - 1.0, 0, 0.0)
    progress = Progress("running", 3.0, 900, {"means": 800}, [1.0, 2.0, 9.0], ["car 7 on segment 3"], 12)
    console.print(cli_app._panel(progress, ["move took 0.05 s: m1", "running"], rates))
    shown = console.export_text()
    for part in (
        "3.0 s  running",
        "900",
        "800",
        "p50 2.0 ms, p99 9.0 ms",
        "12 findings",
        "car 7 on",
        "move took",
    ):
        assert part in shown
    assert 700 < rates.of("means", 800) <= 800
