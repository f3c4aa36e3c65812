"""Heartbeats: a thread that touches a file in the registry.

Responsible for: heartbeats as long as the process can run at all, however busy its event loop is.
Not responsible for: detecting that heartbeats are missing (spark/cluster/liveness.py).

A process that works long on one row is not dead: a restart would do the same work again. A process that was
stopped, or whose machine is lost, sends no heartbeats.
"""

from __future__ import annotations

import threading

from tiercel.runtime.net.registry import Registry

BEATS = 8  # heartbeats within the time after which a process is suspected
BEAT_S_MAX = 1.0


class Heartbeat:
    """Sends heartbeats within its `with`: from before a process opens its storage until its end."""

    def __init__(self, registry: Registry, name: str, suspect_ms: float) -> None:
        self._registry, self._name = registry, name
        self._every_s = min(BEAT_S_MAX, suspect_ms / 1e3 / BEATS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"tiercel-heartbeat-{name}", daemon=True)

    def __enter__(self) -> None:
        self._registry.beat(self._name)
        self._thread.start()

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._registry.beat(self._name)
