"""The outages of outages.py on a standalone cluster: one master and two workers on this machine.

Responsible for: starting Spark's master and workers from the installed package, and ending them.
Not responsible for: what happens on the cluster (outages.py).

    python -m tiercel.chaos.standalone_cluster
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tiercel.chaos.outages import ALLOCATION, run, spark_home
from tiercel.chaos.steady_traffic import TrafficFault
from tiercel.errors import UserError
from tiercel.spark.cluster.session import LOOPBACK, find_java, open_session

WORKERS = 2
CORES = 4  # of each worker
MEMORY = "1g"
START_S_MAX = 60.0


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """The address of the master, and the processes that executors will descend from."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    address = f"spark://{LOOPBACK}:{port}"
    environment = os.environ | {
        "JAVA_HOME": str(find_java()),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_DAEMON_MEMORY": "512m",
    }
    started: list[subprocess.Popen[bytes]] = []

    def launch(name: str, *arguments: str) -> int:
        command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        log = (directory / f"{len(started)}-{name}.log").open("wb")
        with log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory))
        return started[-1].pid

    try:
        launch("master.Master", "--host", LOOPBACK, "--port", str(port), "--webui-port", "0")
        wait_for(port)
        room = ["-c", str(CORES), "-m", MEMORY, "-d", str(directory / "work")]
        workers = [
            launch("worker.Worker", "--host", LOOPBACK, "--webui-port", "0", *room, address)
            for _ in range(WORKERS)
        ]
        yield address, workers
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()


def wait_for(port: int) -> None:
    give_up = time.monotonic() + START_S_MAX
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
            return
        time.sleep(0.2)
    raise UserError(f"Spark's master did not start within {START_S_MAX:g} s")


def main() -> None:
    about = "Kill workers and executors of a standalone cluster that is started for it, while rows flow."
    argparse.ArgumentParser(prog="python -m tiercel.chaos.standalone_cluster", description=about).parse_args()
    with tempfile.TemporaryDirectory(prefix="tiercel-standalone-") as name:
        directory = Path(name)
        with cluster(directory) as (address, workers):
            settings = {"spark.executor.memory": "512m", "spark.executor.cores": str(CORES)} | ALLOCATION
            spark = open_session("tiercel-standalone", master=address, config=settings)
            try:
                report = run(spark, directory / "storage", workers)
            except (UserError, TrafficFault) as error:
                sys.exit(f"error: {error}")
            finally:
                spark.stop()
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
