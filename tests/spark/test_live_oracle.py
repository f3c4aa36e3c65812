"""An unmodified processor outputs the same under Tiercel as under Spark, while it is moved and killed."""

# TIERCEL_ORACLE_SEED=anything draws other inputs. Without it they are the same in every run.

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from oracle import Outputs, differences, under_spark, under_tiercel
from oracle_cases import CASES, EXAMPLES_LEAST, Case
from pyspark.sql import SparkSession

ROUTERS_TOO = {"value state", "event-time timers", "join", "initial state"}

Oracle = Callable[[str], tuple[Case, Outputs, list[int]]]


@pytest.fixture(scope="module")
def oracle(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Oracle]:
    """What Spark says to a case. It is asked for the next one while Tiercel is at work.

    Not for all at once: other processes run the other cases.
    """
    directory = tmp_path_factory.mktemp("spark")
    cases = {name: make() for name, make in CASES.items()}
    wanted = [name for name in CASES if any(f"[{name}]" in item.name for item in request.session.items)]
    answers: dict[str, Future[tuple[Outputs, list[int]]]] = {}

    def ask(name: str) -> tuple[Case, Outputs, list[int]]:
        here = wanted.index(name)
        for case in wanted[here : here + 2]:
            if case not in answers:
                answers[case] = background.submit(under_spark, directory / case, spark, cases[case])
        return (cases[name], *answers[name].result())

    with ThreadPoolExecutor(1) as background:
        yield ask
        background.shutdown(cancel_futures=True)


LONG = ("fold", "join in event time")  # much as others that are here


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_outputs_of_each_key_equal_those_of_spark(
    name: str, spark: SparkSession, oracle: Oracle, tmp_path: Path
) -> None:
    case, expected, counts = oracle(name)
    kills = ("op@edge#1", "cloud" if name in ROUTERS_TOO else "op@cloud#1")
    found = under_tiercel(spark, case, tmp_path, counts, kills)
    assert case.examples >= EXAMPLES_LEAST
    assert sum(map(len, expected.values())) == counts[-1] > 100
    assert not differences(found, expected)[:3]
