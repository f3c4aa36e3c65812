"""The history of moves: written line by line, read under any driver; parts of a move become one report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercel.cli import main as cli
from tiercel.control.predict import Prediction
from tiercel.spark import move_history
from tiercel.spark.move_history import MoveHistory, MoveReport, merged

ONE, TWO = "totals@cloud#1", "totals@cloud#2"


def part(move: str, at_ms: float, state: str = "done", reason: str = "", **more: float) -> MoveReport:
    phases = {"preparing": 1.0, "flipped": at_ms / 2, state: at_ms}
    return MoveReport(
        *(move, "totals", ONE, TWO, "live", state, reason, 10, 1_000, phases),
        messages=7,
        overlap=more.get("overlap", 1.0),
        requested_at=1e9,
    )


def test_a_later_driver_reads_what_an_earlier_one_has_written(tmp_path: Path) -> None:
    MoveHistory(tmp_path).add(part("m1", 50.0))
    MoveHistory(tmp_path).add(part("m2", 70.0))
    assert [report.move for report in MoveHistory(tmp_path).reports()] == ["m1", "m2"]


def test_the_parts_of_a_move_are_one_report() -> None:
    report = merged([part("m1.1", 50.0, overlap=0.5), part("m1.2", 80.0, overlap=1.0)])
    assert (report.move, report.parts, report.keys, report.bytes_moved) == ("m1", 2, 20, 2_000)
    assert (report.messages, report.overlap, report.duration_ms) == (14, 0.75, 80.0)
    assert list(report.phases) == ["preparing", "flipped", "done"]


def test_a_move_of_which_a_part_was_undone_is_undone_with_its_reason() -> None:
    report = merged([part("m1.1", 50.0), part("m1.2", 80.0, "undone", "the destination was restarted")])
    assert (report.move, report.state, report.reason) == ("m1.2", "undone", "the destination was restarted")


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    history = MoveHistory(tmp_path)
    history.add(part("m1", 50.0))
    with (tmp_path / "moves.jsonl").open("ab") as file:
        file.write(b'{"move":"m2","oper')
    assert [report.move for report in history.reports()] == ["m1"]


def test_the_history_is_bounded_and_the_latest_moves_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_history, "FILE_BYTES_MAX", 2_000)
    history = MoveHistory(tmp_path)
    for n in range(100):
        history.add(part(f"m{n}", 50.0))
    found = [report.move for report in history.reports()]
    assert found[-1] == "m99"
    assert len(found) < 40


def test_a_directory_that_cannot_be_written_costs_a_line_and_no_move(tmp_path: Path) -> None:
    MoveHistory(tmp_path / "missing").add(part("m1", 50.0))
    assert MoveHistory(tmp_path / "missing").reports() == []


def test_a_report_shows_the_prediction_beside_the_fact() -> None:
    from msgspec.structs import replace

    report = replace(part("m1", 50.0), prediction=Prediction("live", 2.0, 3.0, 40.0, 900))
    assert "done after 50.0 ms" in str(report)
    assert "predicted: 40.0 ms, 900 bytes" in str(report)


def test_the_command_refuses_a_directory_without_a_deployment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_app(["state", "moves", str(tmp_path)]) == 2
    assert "holds no deployment" in capsys.readouterr().err
    assert cli.run_app(["state", "moves", str(tmp_path), "--last", "0"]) == 2
    assert "--last 0" in capsys.readouterr().err


def test_the_lines_are_json_that_other_programs_can_read(tmp_path: Path) -> None:
    MoveHistory(tmp_path).add(part("m1", 50.0))
    (line,) = (tmp_path / "moves.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["phases"]["done"] == 50.0
