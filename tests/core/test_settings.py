"""Settings: each value is checked, and a refusal names it."""

from __future__ import annotations

import math

import pytest

from tiercel.core.errors import InvalidRequest
from tiercel.core.settings import Settings

MAY_BE_ZERO = ("memory_bytes_max", "subscription_entries_max", "site_idle_ms")
NUMBERS = [name for name in Settings.__struct_fields__ if name not in MAY_BE_ZERO]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, -0.5, 2e9, math.inf, math.nan])
def test_an_out_of_range_setting_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(**{name: value}).validate()
    assert refusal.value.what == f"setting {name} = {value!r}"
    assert refusal.value.expected == "expected a number above 0 and at most 1e9"
    assert refusal.value.hint


@pytest.mark.parametrize("value", [-1, 2e15, math.inf, math.nan, True])
def test_an_invalid_memory_limit_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(memory_bytes_max=value).validate()  # type: ignore[arg-type]
    assert refusal.value.expected == "expected 0 for no limit, or bytes, at most 1e15"


@pytest.mark.parametrize("value", [-1, 2e9, math.inf, math.nan, True])
def test_an_invalid_limit_of_subscriptions_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(subscription_entries_max=value).validate()  # type: ignore[arg-type]
    assert refusal.value.expected == "expected 0 to keep nothing, or at most 1e9"


@pytest.mark.parametrize("value", [-1, 2e9, math.inf, math.nan, True])
def test_an_invalid_wait_for_sites_that_are_cut_off_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(site_idle_ms=value).validate()
    assert refusal.value.expected == "expected 0 to wait for ever, or at most 1e9"


def test_a_setting_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Settings(retry_ms="soon").validate()  # type: ignore[arg-type]


def test_the_default_settings_are_valid() -> None:
    assert Settings().validate() == Settings()
