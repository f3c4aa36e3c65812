"""Signs of life: a thread that touches a file in the registry, for whoever watches.

Responsible for: a beat as long as the process can run at all, however busy its loop is.
Not responsible for: noticing that beats stay away (spark/vigil.py).

A process that works long on one row is not dead: started again, it would do the same work again. One that
was stopped, or whose machine has gone, does not beat.
"""

from __future__ import annotations

import threading

from tiercel.runtime.registry import Registry

BEATS = 8  # within the time after which silence is suspicious
BEAT_S_MAX = 1.0


class Heart:
    """Beats within its `with`: from before a process looks for its storage until it has ended."""

    def __init__(self, registry: Registry, name: str, suspect_ms: float) -> None:
        self._registry, self._name = registry, name
        self._every_s = min(BEAT_S_MAX, suspect_ms / 1e3 / BEATS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"tiercel-heart-{name}", daemon=True)

    def __enter__(self) -> None:
        self._registry.beat(self._name)
        self._thread.start()

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._registry.beat(self._name)
