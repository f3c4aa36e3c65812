"""A Flink SQL job that is rescaled while it runs, in a Python that has `apache-flink` and nothing of ours.

Responsible for: a small cluster of its own, the job, the rescaling, the moments of it.
Not responsible for: figures (flink.py).

    python flink_job.py JSON        (started by `measure` of flink.py; prints one JSON object)

The job counts the tuples of each key, and holds as many bytes for each as it is told. It reads the files that
come into a directory, and runs in the JVM: SQL through PyFlink.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S_MAX = 90.0
STEP_S = 0.05
CHECKPOINT_MS = 1000
DRAIN_S = 5.0  # until the files of the measured time are read

CONFIG = """\
jobmanager.rpc.address: localhost
jobmanager.rpc.port: {rpc}
rest.address: localhost
rest.bind-address: localhost
rest.port: {rest}
jobmanager.memory.process.size: 1000m
taskmanager.memory.process.size: 1600m
taskmanager.numberOfTaskSlots: 2
taskmanager.host: localhost
jobmanager.scheduler: {scheduler}
jobmanager.adaptive-scheduler.executing.cooldown-after-rescaling: 0s
jobmanager.adaptive-scheduler.executing.resource-stabilization-timeout: 0s
jobmanager.adaptive-scheduler.submission.resource-stabilization-timeout: 0s
jobmanager.adaptive-scheduler.rescale-trigger.max-delay: 0s
execution.checkpointing.interval: {checkpoint}ms
execution.checkpointing.dir: file://{place}/checkpoints
execution.checkpointing.savepoint-dir: file://{place}/savepoints
restart-strategy.type: fixed-delay
restart-strategy.fixed-delay.attempts: 10
restart-strategy.fixed-delay.delay: 0s
state.backend.type: hashmap
io.tmp.dirs: {place}/scratch
"""

READINGS = """
CREATE TABLE readings (sensor BIGINT, n BIGINT, due_ns BIGINT, reading DOUBLE, arrived AS PROCTIME()) WITH (
  'connector' = 'filesystem', 'path' = 'file://{place}/inputs', 'format' = 'csv',
  'source.monitor-interval' = '50ms')
"""
RESULTS = """
CREATE TABLE results (
  sensor BIGINT, n BIGINT, due_ns BIGINT, counted BIGINT, held BIGINT, emitted STRING) WITH (
  'connector' = 'filesystem', 'path' = 'file://{place}/results', 'format' = 'csv',
  'sink.rolling-policy.rollover-interval' = '1s', 'sink.rolling-policy.check-interval' = '1s')
"""
COUNT = """
INSERT INTO results
SELECT sensor, n, due_ns, counted, CHAR_LENGTH(pad), CAST(CURRENT_ROW_TIMESTAMP() AS STRING) FROM (
  SELECT sensor, n, due_ns, COUNT(*) OVER w AS counted, MAX(held) OVER w AS pad
  FROM (SELECT sensor, n, due_ns, arrived,
          CONCAT(CAST(sensor AS STRING), REPEAT('x', {state_bytes})) AS held FROM readings)
  WINDOW w AS (PARTITION BY sensor ORDER BY arrived ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW))
"""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return int(opened.getsockname()[1])


class Cluster:
    """A job manager and a task manager with two slots, as processes of their own."""

    def __init__(self, place: Path, scheduler: str) -> None:
        import pyflink

        self.rest = free_port()
        home = Path(pyflink.__file__).parent
        conf = place / "conf"
        conf.mkdir(parents=True)
        for name in ("scratch", "log", "results", "inputs"):
            (place / name).mkdir(exist_ok=True)
        facts = {"rpc": free_port(), "rest": self.rest, "place": place, "scheduler": scheduler}
        (conf / "config.yaml").write_text(CONFIG.format(checkpoint=CHECKPOINT_MS, **facts), encoding="ascii")
        self.java = java = os.environ.get("JAVA_HOME", "")
        program = str(Path(java) / "bin" / "java") if java else "java"
        jars = os.pathsep.join(str(jar) for jar in sorted((home / "lib").glob("*.jar")))
        opened = ["java.base/java.util", "java.base/java.lang", "java.base/java.net", "java.base/java.time"]
        common = [*(part for name in opened for part in ("--add-opens", f"{name}=ALL-UNNAMED")), "-cp", jars]
        runtime = "org.apache.flink.runtime"
        self._processes = []
        for name, heap, entry in (
            ("jobmanager", ["-Xmx512m"], f"{runtime}.entrypoint.StandaloneSessionClusterEntrypoint"),
            (
                "taskmanager",
                ["-Xmx700m", "-XX:MaxDirectMemorySize=500m"],
                f"{runtime}.taskexecutor.TaskManagerRunner",
            ),
        ):
            extra = [] if name == "jobmanager" else _memory()
            with (place / "log" / f"{name}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [program, *heap, *common, entry, "--configDir", str(conf), *extra],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def ask(self, path: str, method: str = "GET", body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://localhost:{self.rest}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def wait_for_slots(self) -> None:
        def there() -> bool:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                return bool(self.ask("/overview")["slots-total"] >= 2)
            return False

        until(there, "the cluster has no slots")

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _memory() -> list[str]:
    """The sizes that the start scripts would compute from the configuration."""
    sizes = {
        "taskmanager.cpu.cores": "2.0",
        "taskmanager.memory.task.heap.size": "500000000b",
        "taskmanager.memory.framework.heap.size": "134217728b",
        "taskmanager.memory.network.min": "80000000b",
        "taskmanager.memory.network.max": "80000000b",
        "taskmanager.memory.managed.size": "100000000b",
        "taskmanager.memory.framework.off-heap.size": "134217728b",
        "taskmanager.memory.task.off-heap.size": "0b",
        "taskmanager.memory.jvm-metaspace.size": "268435456b",
        "taskmanager.memory.jvm-overhead.min": "200000000b",
        "taskmanager.memory.jvm-overhead.max": "200000000b",
    }
    return [part for name, value in sizes.items() for part in ("-D", f"{name}={value}")]


def until(happened: Any, what: str) -> None:
    give_up = time.monotonic() + START_S_MAX
    while not happened():
        if time.monotonic() > give_up:
            raise SystemExit(f"flink: {what} within {START_S_MAX:g} s")
        time.sleep(STEP_S)


class Job:
    """The SQL job on the cluster. The client stays, so that a restart does not wait for a new one."""

    def __init__(self, cluster: Cluster, options: dict[str, Any]) -> None:
        from pyflink.common import Configuration
        from pyflink.table import EnvironmentSettings, TableEnvironment

        self.cluster, self.options = cluster, options
        conf = Configuration()
        conf.set_string("execution.target", "remote")
        conf.set_string("rest.address", "localhost")
        conf.set_string("rest.port", str(cluster.rest))
        conf.set_string("table.local-time-zone", "UTC")
        conf.set_string("pipeline.max-parallelism", "128")
        conf.set_string("execution.checkpointing.interval", f"{CHECKPOINT_MS}ms")
        settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(conf).build()
        self.tables = TableEnvironment.create(settings)
        self.tables.execute_sql(READINGS.format(place=options["place"]))
        self.tables.execute_sql(RESULTS.format(place=options["place"]))
        # a compiled plan names its operators: state is found again with any parallelism
        self.plan = f"file://{options['place']}/plan.json"
        self.tables.execute_sql(f"COMPILE PLAN '{self.plan}' FOR {COUNT.format(**options)}")
        self.job = ""

    def start(self, parallelism: int, savepoint: str = "") -> None:
        config = self.tables.get_config()
        config.set("parallelism.default", str(parallelism))
        if savepoint:
            config.set("execution.state-recovery.path", savepoint)
        result = self.tables.execute_sql(f"EXECUTE PLAN '{self.plan}'")
        self.job = str(result.get_job_client().get_job_id())

    def vertices(self) -> list[dict[str, Any]]:
        return list(self.cluster.ask(f"/jobs/{self.job}")["vertices"])

    def wait_running(self, parallelism: int) -> None:
        def runs() -> bool:
            found = self.vertices()
            wide = max(v["parallelism"] for v in found) == parallelism  # a committer has one task only
            return wide and all(v["status"] == "RUNNING" for v in found)

        until(runs, f"the job does not run with parallelism {parallelism}")

    def stop_with_savepoint(self) -> str:
        target = {"targetDirectory": f"file://{self.options['place']}/savepoints", "drain": False}
        request = self.cluster.ask(f"/jobs/{self.job}/stop", "POST", target)["request-id"]
        found: dict[str, Any] = {}

        def saved() -> bool:
            found.update(self.cluster.ask(f"/jobs/{self.job}/savepoints/{request}"))
            return bool(found["status"]["id"] == "COMPLETED")

        until(saved, "no savepoint")
        if "location" not in found["operation"]:
            raise SystemExit(f"flink: {found['operation']}")
        return str(found["operation"]["location"])

    def rescale(self, way: str, parallelism: int) -> None:
        if way == "savepoint":
            self.start(parallelism, self.stop_with_savepoint())
        else:
            body = {
                vertex["id"]: {
                    "parallelism": {
                        "lowerBound": 1,
                        "upperBound": min(parallelism, vertex.get("maxParallelism", parallelism)),
                    }
                }
                for vertex in self.vertices()
            }
            self.cluster.ask(f"/jobs/{self.job}/resource-requirements", "PUT", body)
        self.wait_running(parallelism)


def main() -> None:
    options = json.loads(sys.argv[1])
    cluster = Cluster(Path(options["place"]), "adaptive" if options["way"] == "adaptive" else "default")
    try:
        cluster.wait_for_slots()
        job = Job(cluster, options)
        job.start(1)
        job.wait_running(1)
        time.sleep(options["warm_s"])
        steady_ms = time.time() * 1e3
        time.sleep(options["steady_s"])
        request_ms = time.time() * 1e3
        job.rescale(options["way"], 2)
        end_ms = time.time() * 1e3
        time.sleep(options["after_s"])
        over_ms = time.time() * 1e3
        time.sleep(DRAIN_S)
        job.stop_with_savepoint()  # what was counted up to here is in the results
    finally:
        cluster.close()
    facts = {"steady_ms": steady_ms, "request_ms": request_ms, "end_ms": end_ms, "over_ms": over_ms}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
