"""The start of a deployment: one thread deploys it, and the record of its instances stays true."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.runtime.config import DurabilityConfig
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.api import deployment as module
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster import bootstrap
from tiercel.spark.cluster.bootstrap import InstanceLauncher


def test_second_thread_waits_until_the_deployment_of_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let through to what was not there yet, and failed with an AssertionError."""
    backend = SimpleNamespace(check=lambda: None, is_stopped=lambda: False, lacks=(), application="paper")
    backend.local, backend.spark = True, None
    monkeypatch.setattr(module, "backend_of", lambda _: backend)
    spark: Any = SimpleNamespace(conf={})
    live = module.start(spark, ["cloud"], tmp_path)
    begun, may_go_on = threading.Event(), threading.Event()

    def stop_leftovers() -> None:
        begun.set()
        may_go_on.wait(10.0)

    supervisor: Any = SimpleNamespace(
        stop_leftovers=stop_leftovers,
        start=lambda *_: None,
        wait=lambda _: None,
        end=lambda: None,
        failures={},
        names=["cloud"],
    )
    paper: Any = SimpleNamespace(end=lambda: None, handovers={})
    manifest: Any = SimpleNamespace(
        topology=SimpleNamespace(sites={"cloud": None}), sites_here=("cloud",), is_root=True, replicas=None
    )
    monkeypatch.setattr(live.graph, "manifest", lambda *_: manifest)
    monkeypatch.setattr(live.graph, "plan_of", lambda _: None)
    monkeypatch.setattr(DurabilityConfig, "applied", lambda *_: manifest)
    live.graph.operators["average"] = SimpleNamespace(  # type: ignore[assignment]
        operator=SimpleNamespace(instances=()), initial=None, resources=None
    )
    monkeypatch.setattr(DeploymentDir, "write", lambda *_: None)
    monkeypatch.setattr(module, "register", lambda *_: None)
    for name in (
        "replica_names",
        "start_replicas",
        "check_slots",
        "probe",
        "write_backup_manifest",
        "wait_attached",
    ):
        monkeypatch.setattr(bootstrap, name, lambda *_, **__: [])
    monkeypatch.setattr(bootstrap, "Supervisor", lambda *_: supervisor)
    for name in ("ControllerThread", "DecommissionWatcher", "LivenessMonitor", "WarmWorkers"):
        monkeypatch.setattr(bootstrap, name, lambda *_, **__: paper)
    running: list[object] = []

    def use(live: Live) -> None:
        live.deploy()
        running.append(live.running)

    threads = [threading.Thread(target=use, args=(live,), daemon=True) for _ in range(2)]
    threads[0].start()
    begun.wait(10.0)
    threads[1].start()
    threads[1].join(0.3)
    may_go_on.set()
    for thread in threads:
        thread.join(10.0)
    assert running == [True, True]
    live.stop()
    assert not live.running


def test_instance_that_is_launched_several_times_is_recorded_once(tmp_path: Path) -> None:
    """Found by chaos: asked for again while it ended, an instance was recorded three times."""
    deployment = DeploymentDir(tmp_path)
    started: list[str] = []
    supervisor: Any = SimpleNamespace(names=[], start=lambda name, _: started.append(name))
    launcher = InstanceLauncher(deployment, supervisor, {"average": None})  # type: ignore[dict-item]
    for _ in range(3):
        launcher.launch("average@cloud#1")
    assert deployment.desired_instances() == ["average@cloud#1"]
    assert started == ["average@cloud#1"] * 3  # the supervisor starts a process once
