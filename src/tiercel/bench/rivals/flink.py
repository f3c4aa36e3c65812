"""Flink's rescaling under the same rate, keys and state: by savepoint, and by the adaptive scheduler.

Responsible for: starting the job in a Python that has `apache-flink`, the figures from its committed outputs.
Not responsible for: the job and its cluster (flink_job.py).

The rows come as files, as for Spark. The time of an output is the moment at which the row left the operator,
not that of the checkpoint that committed it: that favours Flink.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np

from tiercel.bench.metrics import Moments, Outputs
from tiercel.bench.report import Line
from tiercel.bench.rivals.file_load import FileLoad, InputFiles
from tiercel.bench.rivals.rival import RivalOptions, ShowProgress, figures
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
        (place / "inputs").mkdir(parents=True)
        facts = {
            "place": str(place),
            "state_bytes": options.state_bytes,
            "warm_s": options.warm_s,
            "steady_s": options.steady_s,
            "after_s": options.after_s,
            "way": way,
        }
        wall_ns = time.time_ns() - time.monotonic_ns()  # Flink tells the time of day
        load = FileLoad(InputFiles(place / "inputs"), options.keys, options.rate)
        load.start()
        try:
            done = subprocess.run(
                [program, str(script), json.dumps(facts)],
                capture_output=True, text=True, timeout=RUN_S_MAX, check=False,
            )  # fmt: skip
        finally:
            load.stop()
        if done.returncode:
            raise UserError(f"the Flink job ended with {done.returncode}:\n{done.stderr[-2_000:]}")
        moments = json.loads(done.stdout.splitlines()[-1])
        names = ("steady_ms", "request_ms", "end_ms", "over_ms")
        at = Moments(*(int(moments[name] * 1e6) - wall_ns for name in names))
        outputs = read_results(place / "results", wall_ns)
    return figures(outputs, at, load.sent_before(at.over_ns), options.keys)


def read_results(results: Path, wall_ns: int) -> Outputs:
    """What came out and when, by our clock; files that were not committed begin with a dot."""
    columns: tuple[array[int], array[int]] = (array("q"), array("q"))
    emitted: list[str] = []
    for path in sorted(results.rglob("part-*")):
        for line in path.read_text(encoding="ascii").splitlines():
            sensor, _, due_ns, _, _, at = line.split(",")
            columns[0].append(int(sensor))
            columns[1].append(int(due_ns))
            emitted.append(at.strip('"').replace(" ", "T"))
    times = np.array(emitted, dtype="datetime64[ms]").astype(np.int64) * 1_000_000 - wall_ns
    return Outputs(np.array(columns[0], np.int64), np.array(columns[1], np.int64), times)
