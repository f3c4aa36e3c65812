"""Flink's rescaling under the same rate, keys and state: by savepoint, and by the adaptive scheduler.

Responsible for: starting the job in a Python that has `apache-flink`, the figures from its committed outputs.
Not responsible for: the job and its cluster (flink_job.py).

Flink's source has no due times: it emits at a rate, and after a restart goes on where it was. So there is no
latency here, and the gap is what all systems have in common. Times of outputs are of the moment at which the
row left the operator, not of the checkpoint that committed it: that favours Flink.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tiercel.bench.report import Line
from tiercel.bench.rivals.rival import RivalOptions, ShowProgress, longest_gap_ms
from tiercel.errors import UserError

RUN_S_MAX = 400.0


def flink_python(given: str) -> str:
    """The Python that has PyFlink: the given one, or ours. UserError if there is none."""
    if not given:
        if importlib.util.find_spec("pyflink") is not None:
            return sys.executable
        raise UserError(
            "PyFlink is not installed",
            expected="--flink-python with a Python that has apache-flink",
            hint="install it into an environment of its own: its dependencies are not ours",
        )
    program = shutil.which(given)
    if program is None:
        raise UserError(f"--flink-python {given}: no such program", expected="the path of a Python")
    asked = subprocess.run([program, "-c", "import pyflink"], capture_output=True, check=False)
    if asked.returncode:
        raise UserError(
            f"--flink-python {given} has no PyFlink",
            expected="a Python that has apache-flink",
            hint=f"{given} -m pip install apache-flink",
        )
    return program


def measure(options: RivalOptions, way: str, show_progress: ShowProgress) -> Line:
    """One rescaling from parallelism one to two; `way` is savepoint or adaptive."""
    program = flink_python(options.flink_python)
    show_progress(f"flink-{way}: running the job")
    script = Path(__file__).with_name("flink_job.py")
    with tempfile.TemporaryDirectory(prefix="tiercel-flink-", ignore_cleanup_errors=True) as directory:
        place = Path(directory) / "job"
        facts = {
            "place": str(place),
            "keys": options.keys,
            "state_bytes": options.state_bytes,
            "rate": options.rate,
            "warm_s": options.warm_s,
            "steady_s": options.steady_s,
            "after_s": options.after_s,
            "way": way,
        }
        done = subprocess.run(
            [program, str(script), json.dumps(facts)],
            capture_output=True, text=True, timeout=RUN_S_MAX, check=False,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"the Flink job ended with {done.returncode}:\n{done.stderr[-2_000:]}")
        at = json.loads(done.stdout.splitlines()[-1])
        return figures(place / "results", at)


def figures(results: Path, at: Line) -> Line:
    """The figures of one run, from its committed files and its moments in ms since 1970."""
    numbers, emitted = read_results(results)
    expected = int(numbers.max()) + 1 if len(numbers) else 0
    different = len(np.unique(numbers))
    return {
        "gap_ms": longest_gap_ms(emitted, at["request_ms"], at["over_ms"]),
        "gap_floor_ms": longest_gap_ms(emitted, at["steady_ms"], at["request_ms"]),
        "duration_ms": round(at["end_ms"] - at["request_ms"], 1),
        "lost": expected - different,
        "doubled": len(numbers) - different,
        "reordered": 0,
    }


def read_results(results: Path) -> tuple[np.ndarray, np.ndarray]:
    """The number of each tuple that came out, and when; files that were not committed begin with a dot."""
    numbers: list[int] = []
    emitted: list[str] = []
    for path in sorted(results.rglob("part-*")):
        if path.name.startswith("."):
            continue
        for line in path.read_text(encoding="ascii").splitlines():
            _, number, _, _, at = line.split(",")
            numbers.append(int(number))
            emitted.append(at.strip('"').replace(" ", "T"))
    times = np.array(emitted, dtype="datetime64[ms]").astype(np.int64) if emitted else np.array([], np.int64)
    return np.array(numbers, np.int64), times
