"""The programs of the outages: what they tell. They run on clusters in tests/spark/test_cluster.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from documented import fields, named, section
from tiercel.chaos import outages
from tiercel.chaos import standalone_cluster as standalone
from tiercel.chaos.steady_traffic import TrafficFault
from tiercel.errors import UserError

PAGE = "Outages on a cluster"


def test_report_has_the_documented_fields() -> None:
    assert set(outages.Report.__struct_fields__) == fields(PAGE)
    for part in (outages.Outage, outages.Decommission):
        assert set(part.__struct_fields__) <= named(section(PAGE))


@pytest.mark.parametrize("failure", [TrafficFault("row 7 came twice"), UserError("cloud is not back")])
@pytest.mark.parametrize("program", [outages, standalone], ids=["outages", "standalone"])
def test_error_of_an_outage_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, program: ModuleType, failure: Exception
) -> None:
    def run(*facts: object) -> None:
        raise failure

    stopped: list[bool] = []
    session = SimpleNamespace(
        stop=lambda: stopped.append(True), sparkContext=SimpleNamespace(applicationId="nobody")
    )
    monkeypatch.setattr(program, "open_session", lambda *_, **__: session)
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(standalone, "cluster", lambda directory: nullcontext(("spark://nowhere", [])))
    monkeypatch.setattr(sys, "argv", [program.__name__])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == f"error: {failure}"  # Python prints it to stderr, and ends with 1
    assert stopped == [True]
