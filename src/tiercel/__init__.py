"""Live reconfiguration of stateful stream processing on PySpark.

    import tiercel
    with tiercel.start(spark, sites=["cloud", "edge-1"], storage="/data/tiercel") as live: ...

Names that need PySpark are imported at their first use, so that the simulator runs without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.control.mobility import Threshold
    from tiercel.core.settings import Settings
    from tiercel.errors import UserError
    from tiercel.runtime.net.emulated_link import Link
    from tiercel.spark.api.clients import RowProducer as Producer
    from tiercel.spark.api.clients import RowSubscriber as Subscriber
    from tiercel.spark.api.connect import connect
    from tiercel.spark.api.deployment import Live, start
    from tiercel.spark.api.drop_in import deployments, stop_all, transform_with_state
    from tiercel.spark.api.export_import import export_state
    from tiercel.spark.api.moves import MoveUndone
    from tiercel.spark.api.status import ProcessStatus
    from tiercel.spark.api.streams import LiveStream
    from tiercel.spark.cluster.session import open_session as session
    from tiercel.spark.listener import Listener
    from tiercel.spark.move_history import MoveReport
    from tiercel.spark.operators.folds import Fold
    from tiercel.spark.sources.stream_source import register
    from tiercel.spark.state.external_state import read_exported_state
    from tiercel.spark.state.spark_checkpoint import read_spark_state

_HOMES = {
    "Fold": ("tiercel.spark.operators.folds", "Fold"),
    "Link": ("tiercel.runtime.net.emulated_link", "Link"),
    "Listener": ("tiercel.spark.listener", "Listener"),
    "Live": ("tiercel.spark.api.deployment", "Live"),
    "LiveStream": ("tiercel.spark.api.streams", "LiveStream"),
    "MoveReport": ("tiercel.spark.move_history", "MoveReport"),
    "MoveUndone": ("tiercel.spark.api.moves", "MoveUndone"),
    "ProcessStatus": ("tiercel.spark.api.status", "ProcessStatus"),
    "Producer": ("tiercel.spark.api.clients", "RowProducer"),
    "Settings": ("tiercel.core.settings", "Settings"),
    "Subscriber": ("tiercel.spark.api.clients", "RowSubscriber"),
    "Threshold": ("tiercel.control.mobility", "Threshold"),
    "UserError": ("tiercel.errors", "UserError"),
    "connect": ("tiercel.spark.api.connect", "connect"),
    "deployments": ("tiercel.spark.api.drop_in", "deployments"),
    "export_state": ("tiercel.spark.api.export_import", "export_state"),
    "read_exported_state": ("tiercel.spark.state.external_state", "read_exported_state"),
    "read_spark_state": ("tiercel.spark.state.spark_checkpoint", "read_spark_state"),
    "register": ("tiercel.spark.sources.stream_source", "register"),
    "session": ("tiercel.spark.cluster.session", "open_session"),
    "start": ("tiercel.spark.api.deployment", "start"),
    "stop_all": ("tiercel.spark.api.drop_in", "stop_all"),
    "transform_with_state": ("tiercel.spark.api.drop_in", "transform_with_state"),
}

__all__ = [
    "Fold",
    "Link",
    "Listener",
    "Live",
    "LiveStream",
    "MoveReport",
    "MoveUndone",
    "ProcessStatus",
    "Producer",
    "Settings",
    "Subscriber",
    "Threshold",
    "UserError",
    "connect",
    "deployments",
    "export_state",
    "read_exported_state",
    "read_spark_state",
    "register",
    "session",
    "start",
    "stop_all",
    "transform_with_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module 'tiercel' has no attribute {name!r}"
        raise AttributeError(message)
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
