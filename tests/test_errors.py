"""Errors that a user can mend: their text."""

from __future__ import annotations

import pickle

from tiercel.core.errors import InvalidRequest
from tiercel.errors import UserError


def test_a_user_error_has_the_fault_the_expectation_and_a_hint() -> None:
    error = UserError("no site 'edge-9'", expected="one of cloud, edge-1", hint="tiercel sites")
    assert str(error) == "no site 'edge-9'\nexpected: one of cloud, edge-1\nhint: tiercel sites"
    assert error.exit_code == 2


def test_a_user_error_leaves_out_missing_parts() -> None:
    assert str(UserError("the port is taken")) == "the port is taken"


def test_a_user_error_survives_the_way_from_a_spark_task_to_the_driver() -> None:
    error = UserError("what", expected="expected", hint="hint")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_refusal_of_the_core_is_reported_once_to_the_caller() -> None:
    refusal = InvalidRequest("unknown site 'mars'", "expected one of: cloud", "list them")
    assert str(UserError.of(refusal)) == "unknown site 'mars'\nexpected: one of: cloud\nhint: list them"
    assert str(UserError.of(InvalidRequest("nothing"))) == "nothing"
