"""Two threads that are both the first to use a deployment: one deploys it, the other one waits for that."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.runtime.place import Place
from tiercel.spark import live as module
from tiercel.spark.live import Live


def test_who_comes_second_waits_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was let through to what was not there yet, and failed with an AssertionError."""
    backend = SimpleNamespace(check=lambda: None, is_stopped=lambda: False, lacks=(), application="paper")
    backend.local = True
    monkeypatch.setattr(module, "backend_of", lambda _: backend)
    spark: Any = SimpleNamespace(conf={})
    live = module.start(spark, ["cloud"], tmp_path)
    begun, may_go_on = threading.Event(), threading.Event()

    def evict() -> None:
        begun.set()
        may_go_on.wait(10.0)

    hosting: Any = SimpleNamespace(
        evict=evict, start=lambda *_: None, wait=lambda _: None, end=lambda: None, failures={}, names=[]
    )
    paper: Any = SimpleNamespace(end=lambda: None)
    manifest: Any = SimpleNamespace(topology=SimpleNamespace(sites={"cloud": None}), replicas=None)
    monkeypatch.setattr(live.graph, "manifest", lambda *_: manifest)
    monkeypatch.setattr(type(live._keeping), "applied", lambda *_: manifest)
    live.graph.operators["average"] = SimpleNamespace(  # type: ignore[assignment]
        operator=SimpleNamespace(instances=()), initial=None
    )
    monkeypatch.setattr(Place, "write", lambda *_: None)
    for name in (
        "names_of",
        "start_replicas",
        "check_slots",
        "probe",
        "describe",
        "register",
        "wait_attached",
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: [])
    monkeypatch.setattr(module, "Hosting", lambda *_: hosting)
    for name in ("Console", "Watch", "Vigil", "Spare"):
        monkeypatch.setattr(module, name, lambda *_, **__: paper)
    seen: list[object] = []

    def use(live: Live) -> None:
        live.deploy()
        seen.append(live._console)

    threads = [threading.Thread(target=use, args=(live,), daemon=True) for _ in range(2)]
    threads[0].start()
    begun.wait(10.0)
    threads[1].start()
    threads[1].join(0.3)
    may_go_on.set()
    for thread in threads:
        thread.join(10.0)
    live.stop()
    assert seen == [paper, paper]
