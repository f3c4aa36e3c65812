"""Lets every test import the helpers that stand beside it (`playing`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent))

# JVMs of tests live for minutes: what an optimising compiler gains there it does not earn back.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).resolve().parent / "conf"))  # for executors

# How long an example takes depends on who else uses the machine; it says nothing about the code.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
