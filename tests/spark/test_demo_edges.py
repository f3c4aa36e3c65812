"""`tiercel demo --edges`: two Spark applications, cars that drive between them, and keys that follow."""

from __future__ import annotations

import json

import pytest

from tiercel.cli import main as cli


@pytest.mark.long
def test_keys_follow_cars_between_two_applications_and_no_output_is_lost_or_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run_app(["demo", "--edges", "--seconds", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outputs"] == found["rows"] > 0
    assert found["crossings"] > 0
    assert any("-> edge" in one for one in found["hand_overs"])
    assert len(set(found["drivers"].values())) == 2, "each site has a driver of its own"
    assert found["lost"] == found["doubled"] == found["reordered"] == found["wrong"] == 0


def test_a_drive_of_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_app(["demo", "--edges", "--seconds", "0"]) == 2
    assert "--seconds 0 is out of range" in capsys.readouterr().err
