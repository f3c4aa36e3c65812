"""Results of a benchmark: percentiles and the results file."""

from __future__ import annotations

import msgspec
import numpy as np

from tiercel.bench.report import Cpu, document, median_line, percentile


def test_percentiles_and_medians() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert np.isnan(percentile([], 0.5))
    lines = [{"a": "x", "n": n, "rare": None, "phases": {}} for n in (1.0, 9.0, 2.0)]
    lines[0]["rare"] = 7.0
    assert median_line(lines) == {"a": "x", "n": 2.0, "rare": None, "phases": None}


def test_a_results_file_has_what_makes_it_comparable() -> None:
    cpu = Cpu()
    found = document("idle", [], {"keys": 1}, seed=7, cpu=cpu.line())
    assert {"commit", "machine", "python", "settings", "seed", "cpu", "at"} <= found.keys()
    assert found["cpu"]["others_cores"] >= 0
    assert msgspec.json.decode(msgspec.json.encode(found))["seed"] == 7
