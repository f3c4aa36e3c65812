"""Static facts of a deployment: which operators are spared rows that are late."""

from __future__ import annotations

import pytest

from tiercel.core.model.topology import Operator, Stream, Topology


@pytest.mark.parametrize(("late_rows", "spared"), [(False, {0}), (True, set())])
def test_an_operator_that_asks_for_late_rows_is_given_them(late_rows: bool, spared: set[int]) -> None:
    streams = {"in": Stream("in", "cloud", delay_ms=0), "out": Stream("out", "cloud")}
    operator = Operator("op", ("in",), "out", ("op@cloud#1",), time_mode="eventTime", late_rows=late_rows)
    topology = Topology({"cloud": None}, streams, {"op": operator}).validate()
    assert topology.late_inputs("op") == spared
