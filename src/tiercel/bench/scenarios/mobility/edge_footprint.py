"""`tiercel bench edge-footprint`: memory and CPU of a site that is an application, and of a producer.

Responsible for: the application of one site with one router and one instance; what each of its processes
    uses, idle and under a steady load; the same of a producer, which is a Python program without a JVM.
Not responsible for: that application (chaos/sites/site_program.py), how fast it can be (throughput.py).

Memory is proportional (Pss): what processes share is divided among them, so the sum is right. CPU is in
percent of one core.

    python -m tiercel.bench.scenarios.mobility.edge_footprint ADDRESS SECRET RATE SECONDS       (the producer)
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiercel
from tiercel.bench.report import Line, process_cpu_s
from tiercel.chaos.sites.run import free_ports
from tiercel.chaos.sites.site_process import SiteProcess
from tiercel.runtime.deployment import DeploymentDir

ShowProgress = Callable[[str], None]

SITE = "edge"
CARS = 100
FRAMES_PER_S = 100
WARM_S = 5.0
KB = 1024
LAST_S_MAX = 30.0  # for the last outputs


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    rate: int
    seconds: float


def measure(options: Options, show_progress: ShowProgress) -> list[Line]:
    """A row for each kind of process: at rest, and under load."""
    with tempfile.TemporaryDirectory(prefix="tiercel-footprint-") as directory:
        place = Path(directory)
        [port] = free_ports(1)
        (place / "secret").write_bytes(secrets.token_bytes(32))
        file = place / "site.toml"
        listen = f'[sites.{SITE}]\nlisten = "127.0.0.1:{port}"\n'
        file.write_text(f'name = "footprint"\nsecret_file = "secret"\n{listen}', encoding="utf-8")
        show_progress("starting the application of a site")
        site = SiteProcess(file, SITE)
        try:
            started = site.read()
            if started != "deployed":
                raise tiercel.UserError(f"the site did not start: {started}")
            return _measured(options, site, file, f"127.0.0.1:{port}", show_progress)
        finally:
            site.end()


def _measured(
    options: Options, site: SiteProcess, file: Path, address: str, show_progress: ShowProgress
) -> list[Line]:
    deployment = DeploymentDir(file.with_name(SITE))
    show_progress(f"idle for {options.seconds:g} s")
    time.sleep(WARM_S)
    rows = _used(site, deployment, "idle", options.seconds)
    show_progress(f"{options.rate:,} events/s for {options.seconds:g} s")
    subscriber = tiercel.connect(address, secret=file.with_name("secret")).subscribe("sums.out", after=0)
    more = (address, str(file.with_name("secret")), str(options.rate), str(options.seconds + 2 * WARM_S))
    producer = subprocess.Popen([sys.executable, "-m", __name__, *more], stdout=subprocess.PIPE, text=True)
    came = 0
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < WARM_S:
            came += len(subscriber.poll_values(0.2))
        loaded = f"{options.rate}/s"
        rows += _used(site, deployment, loaded, options.seconds)
        printed, _ = producer.communicate()
        answer: dict[str, Any] = json.loads(printed)
        while came < answer["sent"] and (found := subscriber.poll_values(LAST_S_MAX)):
            came += len(found)
    finally:
        if producer.poll() is None:
            producer.kill()
        subscriber.close()
    facts = {"pss_mb": answer["pss_mb"], "cpu_percent": answer["cpu_percent"], "lost": answer["sent"] - came}
    return [*rows, {"load": loaded, "process": "producer", "processes": 1, **facts}]


def _used(site: SiteProcess, deployment: DeploymentDir, load: str, seconds: float) -> list[Line]:
    """What the processes of the application use in these seconds, by kind."""
    pids = {str(pid): pid for pid in _group(site.pid)}
    before, begun = _cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    passed, after = time.monotonic() - begun, _cpu_s(pids)
    kinds: dict[str, list[int]] = {}
    for pid in _group(site.pid):
        kinds.setdefault(_kind(pid, site.pid, deployment), []).append(pid)
    rows = []
    for kind, of_kind in sorted(kinds.items()):
        used_s = sum(after.get(str(pid), 0.0) - before.get(str(pid), 0.0) for pid in of_kind)
        rows.append(_row(load, kind, of_kind, used_s / passed))
    total = round(sum(row["cpu_percent"] for row in rows), 2)
    memory = round(sum(row["pss_mb"] for row in rows), 1)
    count = sum(row["processes"] for row in rows)
    every = {"load": load, "process": "all", "processes": count, "pss_mb": memory, "cpu_percent": total}
    return [*rows, {**every, "lost": 0}]


def _row(load: str, kind: str, pids: list[int], cores: float) -> Line:
    memory = round(sum(map(pss_mb, pids)), 1)
    facts = {"processes": len(pids), "pss_mb": memory, "cpu_percent": round(100 * cores, 2)}
    return {"load": load, "process": kind, **facts, "lost": 0}


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    return {name: process_cpu_s({name: pid})[name] for name, pid in pids.items() if _alive(pid)}


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _group(driver: int) -> list[int]:
    """The processes of the application: the driver, and all below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found = {driver}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _kind(pid: int, driver: int, deployment: DeploymentDir) -> str:
    registry = deployment.registry
    for name in registry.names():
        found = registry.find(name)
        if found is not None and found.pid == pid and pid != driver:
            return "instance" if "#" in name else "router"
    if pid == driver:
        return "driver, Python"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "driver, JVM" if b"java" in command.split(b"\0")[0] else "other Python workers"


def pss_mb(pid: int) -> float:
    """Proportional memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / KB


# -- the producer ------------------------------------------------------------------------------


def produce(address: str, secret: str, rate: str, seconds: str) -> None:
    """Send rows at a steady rate; print what this process has used, without its start."""
    producer = tiercel.connect(address, secret=secret).producer("cars", name="footprint")
    each = max(1, int(rate) // FRAMES_PER_S)
    n = sent = 0
    producer.send_many([("car-0", 0)])
    producer.flush()
    sent += 1
    used_s, begun = time.process_time(), time.monotonic()
    while time.monotonic() - begun < float(seconds):
        n += 1
        producer.send_many([(f"car-{(n * each + k) % CARS}", n) for k in range(each)])
        sent += each
        time.sleep(max(0.0, begun + n / FRAMES_PER_S - time.monotonic()))
    share = (time.process_time() - used_s) / (time.monotonic() - begun)
    producer.flush()
    memory = round(pss_mb(int(Path("/proc/self/stat").read_text(encoding="utf-8").split()[0])), 1)
    producer.close()
    print(json.dumps({"sent": sent, "pss_mb": memory, "cpu_percent": round(100 * share, 2)}))


if __name__ == "__main__":
    produce(*sys.argv[1:])
