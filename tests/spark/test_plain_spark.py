"""A comparison with plain Spark goes on when Spark gave up on a worker that it had started itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_spark import TRIES, run_until_worker_connects
from pyspark.errors import PySparkException


def test_query_is_run_again_in_an_empty_directory_only_when_its_worker_did_not_connect(
    tmp_path: Path,
) -> None:
    seen: list[Path] = []

    def run(directory: Path, failures: int, text: str) -> str:
        seen.append(directory)
        if len(seen) <= failures:
            raise PySparkException(text)
        return "result"

    tried = run_until_worker_connects(run)
    assert tried(tmp_path, 2, "terminated: Python worker failed to connect back.") == "result"
    assert len(set(seen)) == 3
    seen.clear()
    with pytest.raises(PySparkException, match="connect back"):
        tried(tmp_path, TRIES, "Python worker failed to connect back")
    assert len(seen) == TRIES
    seen.clear()
    with pytest.raises(PySparkException, match="division"):
        tried(tmp_path, 1, "division by zero")
    assert len(seen) == 1
