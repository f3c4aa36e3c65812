"""The commands of `tiercel bench` without a deployment: what they tell has the fields that are documented.

Who answers for the deployment says that one tuple was lost each time: the commands must tell that, too.
`reconfigure` and `recover` run whole in tests/spark/test_benchmarks.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from documented import EVERY_FILE, fields, named, section
from tiercel.bench.loadgen.load import Faults
from tiercel.bench.loadgen.process import spread
from tiercel.bench.metrics import Outputs
from tiercel.bench.scenarios import checkpoint, latency, memory, pipeline, recover, recover_sweep, throughput
from tiercel.bench.scenarios import idle_overhead as idle
from tiercel.bench.scenarios.recover import Steady
from tiercel.bench.scenarios.recover_systems import VICTIM, Tiercel
from tiercel.cli import main as cli

MS = 1_000_000
RECORDED_MS = 17_000
NOW_NS = 10**15  # on a clock of our own


def result_of(capsys: pytest.CaptureFixture[str], arguments: str, code: int) -> dict[str, Any]:
    """The results file that a command prints; what all have in common is checked here."""
    assert cli.run_app(["bench", *arguments.split(), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    optional = {"verdict", "events", "events_per_s", "keys", "instances_mb", "bytes_per_key", "changes"}
    optional |= {
        "repeats",
        "spark",
        "cpu_us_per_tuple",
        "machine_stalls",
        "idle_ratio",
        "measured",
        "batches",
    }
    optional |= {"scalings", "decisions", "faults", "holds", "failures", "p99_ms", "hand_overs"}
    assert fields(EVERY_FILE) - optional <= found.keys() <= fields(EVERY_FILE)
    return found


# -- with a load ---------------------------------------------------------------------------------------


class Answering:
    """A load whose tuples all take a millisecond, but for the one that is lost."""

    def open_loop(self, *how: float) -> dict[str, Any]:
        return {**spread(np.full(9, MS)), "tuples": 9, **self.fill(0)}

    def closed_loop(self, *how: float) -> dict[str, Any]:
        return {"events_per_s": 1_000, "tuples": 9, **self.fill(0)}

    def fill(self, under_way: int) -> dict[str, Any]:
        return {"faults": {"lost": 1, "doubled_or_reordered": 0, "wrong_state": 0}, "fault_count": 1}

    def favour(self, keys: int) -> None:
        pass

    focus = favour


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Answering().fill(0)["faults"].keys() == set(Faults.__struct_fields__)
    ours = SimpleNamespace(name="average@cloud#1", kind="instance", pid=os.getpid())
    seconds = count(1)  # that it has used: one more each time somebody looks
    live = SimpleNamespace(status=lambda: SimpleNamespace(processes=[ours]), deployment=None)

    @contextmanager
    def loaded(*facts: Any, **more: Any) -> Iterator[Any]:
        yield live, Answering()

    @contextmanager
    def echoing() -> Iterator[Answering]:
        yield Answering()

    for module in (checkpoint, idle, latency, memory):
        monkeypatch.setattr(module, "open_session", lambda *_, **__: SimpleNamespace(stop=lambda: None))
        monkeypatch.setattr(module, "loaded", loaded)
    for module in (checkpoint, idle, memory):
        monkeypatch.setattr(module, "process_cpu_s", lambda pids: dict.fromkeys(pids, next(seconds)))
    monkeypatch.setattr(latency, "echoing", echoing)
    monkeypatch.setattr(memory, "SETTLE_S", 0.0)
    monkeypatch.setattr(memory, "last_metrics", lambda *_: [])


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(
    ("arguments", "rows", "faults"),
    [
        ("latency --rates 1000,50000 --repeats 2", 3, "faults"),
        ("idle --pairs 2 --seconds 4", 3, "faults"),
        ("checkpoint --pairs 2 --hot 1000,10000", 6, "faults"),
        ("memory --repeats 2", 4, "lost"),
    ],
)
def test_every_row_has_the_documented_fields_and_losses_are_reported(
    capsys: pytest.CaptureFixture[str], arguments: str, rows: int, faults: str
) -> None:
    found = result_of(capsys, arguments, 1)
    assert len(found["rows"]) == rows
    for row in found["rows"]:
        assert row.keys() == fields(found["bench"])
        assert row[faults] >= 2
    for repeat in found.get("repeats", []):
        assert repeat.keys() - {"repeat"} == fields(found["bench"])


def test_pipeline_has_the_documented_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"batch_p50_ms": 1.0, "batch_max_ms": 2.0, "spark_ms": 1.0, "wrong": 0, "rows_a_batch": 100}

    def one_size(_: Any, system: str, keys: int, sink: str, *more: Any) -> dict[str, Any]:
        rates = {pipeline.PLAIN: 10, pipeline.DROP_IN: 30}
        return {"system": system, "keys": keys, "sink": sink, "rows_per_s": rates[system], **size}

    monkeypatch.setattr(pipeline.tiercel, "session", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(pipeline, "_one_size", one_size)
    found = result_of(capsys, "pipeline --keys 1,2 --rates none --sink noop", 0)
    assert [(row["system"], row["ratio"]) for row in found["rows"]] == [("spark", 1.0), ("tiercel", 3.0)] * 2
    for row in found["rows"]:
        assert row.keys() == fields("pipeline")


def test_pipeline_finds_lost_rows_and_rows_with_the_wrong_state() -> None:
    def batch(rows: int, counts: int) -> dict[str, Any]:
        return {"observedMetrics": {"rows": {"rows": rows, "counts": counts}}}

    sound = [batch(4, 6), batch(4, 14), {"observedMetrics": {}}]  # two keys, each 1, 2, 3, 4
    assert pipeline.wrong_rows(sound, [4, 4], 2) == 0
    assert pipeline.wrong_rows([*sound[:1], batch(3, 10)], [4, 4], 2) == 1
    assert pipeline.wrong_rows([*sound, batch(2, 3)], [4, 4], 2) == 2
    assert pipeline.wrong_rows([batch(4, 6), batch(4, 13)], [4, 4], 2) == 1


def test_throughput_has_the_documented_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def deployed(*facts: Any, **more: Any) -> Iterator[None]:
        yield None

    def sustained(*facts: Any) -> dict[str, Any]:
        return {"tiercel_events_per_s": 9, "backlog_s": 0.0, "tuples": 9, "faults": 1, "cpu_us": {"x": 1.0}}

    session = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(throughput, "open_session", lambda *_, **__: session)
    monkeypatch.setattr(throughput, "deployed", deployed)
    monkeypatch.setattr(throughput, "_sustained", sustained)
    monkeypatch.setattr(throughput, "own_code_us", lambda operator: 1.0)
    batch = {"rows_per_batch": 100, "batches": 3, "events_per_s": 3, "batch_p50_ms": 1.0, "batch_max_ms": 1.0}
    monkeypatch.setattr(throughput.spark_batches, "measure", lambda *_: batch)
    found = result_of(capsys, "throughput --keys 10,20 --spark-rows 100,200", 1)
    assert [row["keys"] for row in found["rows"]] == [10] * 4 + [20] * 4
    for row in found["rows"]:
        assert row.keys() == fields("throughput")
        assert (row["ratio"], row["ratio_below_2s"], row["faults"]) == (3.0, 3.0, 1)
    assert all(line.keys() - {"keys", "processor"} <= named(section("throughput")) for line in found["spark"])


# -- with a death --------------------------------------------------------------------------------------


class Dead(Tiercel):
    """An application that was dead for half a second."""

    def __init__(self) -> None:
        self._killed_ns = NOW_NS - 9_000 * MS
        due = np.arange(NOW_NS - RECORDED_MS * MS, NOW_NS, MS)
        late = np.where((due >= self._killed_ns) & (due < self._killed_ns + 500 * MS), 500 * MS, 2 * MS)
        self._record = Outputs(np.zeros_like(due), due, due + late)
        self.died: list[str] = []

    def outputs(self) -> Outputs:
        return self._record

    def kill(self, what: str) -> int:
        self.died = [VICTIM]
        return self._killed_ns


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Deaths that are judged as always; returns the settings of the deployments that were asked for."""
    asked: list[dict[str, Any]] = []
    load = SimpleNamespace(check=lambda: None, begin_again=lambda system: None)

    @contextmanager
    def running(kind: type[Tiercel], size_mb: int, rate: int, **facts: Any) -> Iterator[Any]:
        asked.append(facts)
        yield Dead(), load

    @contextmanager
    def started(kind: type[Tiercel], **facts: Any) -> Iterator[Dead]:
        yield Dead()

    def death(system: Dead, load: Any, kill: Any) -> dict[str, Any]:
        killed_ns = kill()
        steady = Steady.of(system.outputs(), 0, killed_ns)
        return recover.until_normal(system, load, killed_ns, steady)

    for name, stands_in in (("running", running), ("started", started), ("death", death)):
        monkeypatch.setattr(recover, name, stands_in)
    monkeypatch.setattr(recover, "monotonic_ns", lambda: NOW_NS)
    monkeypatch.setattr(recover_sweep, "AGED_S", 0.0)
    monkeypatch.setattr(recover_sweep, "monotonic_ns", lambda: NOW_NS - RECORDED_MS * MS)
    monkeypatch.setattr(recover_sweep, "_wait_until_late", lambda system, interval_s: 0.85 * interval_s)
    return asked


def test_recover_has_the_documented_fields(
    capsys: pytest.CaptureFixture[str], dead: list[dict[str, Any]]
) -> None:
    found = result_of(capsys, "recover --what worker,executor --sizes 1 --local-disk yes --no-spark", 0)
    assert [row["what"] for row in found["rows"]] == ["worker", "executor"]
    for row, line in zip(found["rows"], found["measured"], strict=True):
        assert row.keys() == fields("recover")
        assert (row["tiercel_s"], row["tiercel_normal_s"]) == (0.5, 0.5)
        assert line.keys() <= named(section("recover"))
        assert line["died"] == [VICTIM]
    assert [(facts["cluster"], facts["warm_workers"]) for facts in dead] == [(False, 3), (True, 2)]


def test_the_sweep_has_every_interval_the_whole_log_and_the_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dead: list[dict[str, Any]]
) -> None:
    found = result_of(capsys, f"recover --sweep --out {tmp_path}", 0)
    assert [(row["how"], row["checkpoint_s"]) for row in found["rows"]] == [
        *(("checkpoint", interval) for interval in (1, 5, 10, 30)),
        ("replay", None),
        ("source", None),
    ]
    *with_checkpoints, never, _ = [facts.get("checkpoint_ms", 0.0) for facts in dead]
    assert with_checkpoints == [1e3, 5e3, 10e3, 30e3]
    assert never > 1e8  # none in a day
    for row in found["rows"]:
        assert row.keys() == fields("recover --sweep")
        assert row["first_output_s"] == 0.5
    assert "every 1, 5, 10 and 30 s" in section("recover --sweep")
    assert (tmp_path / "recover-sweep.png").read_bytes().startswith(b"\x89PNG")
    (kept,) = tmp_path.glob("recover-sweep-*.json")
    assert json.loads(kept.read_text(encoding="utf-8")) == found
