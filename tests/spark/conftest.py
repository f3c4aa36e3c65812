"""Shared by all tests of the Spark side: one session per process, and helpers that workers can import."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
# Spark ships functions of imported modules by name: its workers must find them too
places = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(places)


@pytest.fixture(scope="session")
def connect_url() -> str:
    """Where the application that all modules share can be reached through Spark Connect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"sc://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def spark(connect_url: str) -> SparkSession:
    """The session that all modules share, made by the first; tests leave nothing running in it."""
    connect = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": connect_url.rpartition(":")[2],
    }
    return tiercel.session("tests", slots=16, ui=True, config=connect)


def pytest_sessionfinish() -> None:
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: a process that got it last would keep all others waiting."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
