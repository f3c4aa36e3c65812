"""What tests of the Spark side share: one session for all of them, helpers that workers can import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
# Spark ships functions of imported modules by name: its workers must find them too
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Room for a deployment, a feed and a sink; tests leave nothing running in it."""
    session = tiercel.session("tests", slots=16)
    yield session
    session.stop()
