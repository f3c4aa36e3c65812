"""The programs of the outages: what they tell. They run on clusters in tests/spark/test_cluster.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from documented import fields, named, section
from tiercel.bench import outages, standalone
from tiercel.bench.steady import TrafficFault
from tiercel.errors import UserError

PAGE = "Outages on a cluster"


def test_the_report_has_the_fields_that_are_documented() -> None:
    assert set(outages.Report.__struct_fields__) == fields(PAGE)
    for part in (outages.Outage, outages.Departure):
        assert set(part.__struct_fields__) <= named(section(PAGE))


@pytest.mark.parametrize("failure", [TrafficFault("row 7 came twice"), UserError("cloud is not back")])
@pytest.mark.parametrize("program", [outages, standalone], ids=["outages", "standalone"])
def test_what_must_not_happen_is_told_in_a_line(
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
