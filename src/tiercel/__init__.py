"""Live reconfiguration of stateful stream processing on PySpark.

    import tiercel
    with tiercel.start(spark, sites=["cloud", "edge-1"], storage="/data/tiercel") as live: ...

What needs PySpark is imported when it is first used: the simulator runs without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.core.settings import Settings
    from tiercel.errors import UserError
    from tiercel.spark.adopting import adopt
    from tiercel.spark.datasource import register
    from tiercel.spark.dropin import deployments, stop_all, transform_with_state
    from tiercel.spark.ends import RowProducer as Producer
    from tiercel.spark.ends import RowSubscriber as Subscriber
    from tiercel.spark.folds import Fold
    from tiercel.spark.kept_state import export_state, exported
    from tiercel.spark.live import Live, start
    from tiercel.spark.moves import MoveReport, MoveUndone
    from tiercel.spark.session import open_session as session

_HOMES = {
    "Fold": ("tiercel.spark.folds", "Fold"),
    "Live": ("tiercel.spark.live", "Live"),
    "MoveReport": ("tiercel.spark.moves", "MoveReport"),
    "MoveUndone": ("tiercel.spark.moves", "MoveUndone"),
    "Producer": ("tiercel.spark.ends", "RowProducer"),
    "Settings": ("tiercel.core.settings", "Settings"),
    "Subscriber": ("tiercel.spark.ends", "RowSubscriber"),
    "UserError": ("tiercel.errors", "UserError"),
    "adopt": ("tiercel.spark.adopting", "adopt"),
    "deployments": ("tiercel.spark.dropin", "deployments"),
    "export_state": ("tiercel.spark.kept_state", "export_state"),
    "exported": ("tiercel.spark.kept_state", "exported"),
    "register": ("tiercel.spark.datasource", "register"),
    "session": ("tiercel.spark.session", "open_session"),
    "start": ("tiercel.spark.live", "start"),
    "stop_all": ("tiercel.spark.dropin", "stop_all"),
    "transform_with_state": ("tiercel.spark.dropin", "transform_with_state"),
}

__all__ = [
    "Fold",
    "Live",
    "MoveReport",
    "MoveUndone",
    "Producer",
    "Settings",
    "Subscriber",
    "UserError",
    "adopt",
    "deployments",
    "export_state",
    "exported",
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
