"""The search for the largest load: which rates it tries, and when a rate holds."""

from __future__ import annotations

import pytest

from tiercel.apps.catalogue import find_app
from tiercel.apps.figures import Phase
from tiercel.apps.run import Result
from tiercel.apps.verdict import Comparison
from tiercel.bench.scenarios.applications.largest_load import judge, search


@pytest.mark.parametrize(
    ("limit", "tried", "found"),
    [
        (3_300, [1_000, 2_000, 4_000, 3_000, 3_500], 3_000),
        (900, [1_000], 0),
        (10**9, [1_000, 2_000, 4_000, 8_000], 8_000),
    ],
    ids=["between", "not even the first", "more than may be tried"],
)
def test_search_ends_at_the_largest_rate_that_held(limit: int, tried: list[int], found: int) -> None:
    asked: list[int] = []

    def holds(rate: int) -> bool:
        asked.append(rate)
        return rate <= limit

    assert search(holds, 1_000, 10_000, steps=2) == found
    assert asked == tried


@pytest.mark.parametrize(
    ("max_ms", "events_per_s", "lost", "holds"),
    [
        (4_999.0, 1_000.0, 0, True),
        (5_001.0, 1_000.0, 0, False),
        (1.0, 900.0, 0, False),
        (1.0, 1_000.0, 1, False),
    ],
    ids=["in time", "an answer too late", "a sender too slow", "a row lost"],
)
def test_a_rate_holds_only_with_every_answer_in_time_and_right(
    max_ms: float, events_per_s: float, lost: int, holds: bool
) -> None:
    phase = Phase("whole run", "", 10.0, 100, 10.0, 1.0, 1.0, max_ms)
    outputs = {"out": Comparison(100, 100 - lost, lost, 0, 0, 0, 0)}
    result = Result("toll", {}, 1, 1_000, 10.0, 10_000, events_per_s, [], [phase], outputs, 0, [], {})
    assert judge(result, limit_s=5.0)["holds"] is holds


def test_load_factor_of_toll_counts_expressways() -> None:
    app = find_app("toll")
    assert app.load_facts(app.options(), 3_400) == {"load_factor": 2.0, "cars": 101_090}
