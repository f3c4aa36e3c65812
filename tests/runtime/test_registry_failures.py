"""Processes read the registry again after a read that failed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from deployment_in_process import SITE, Running, instance_host, make_place, router_host, until
from tiercel.runtime.net import peers
from tiercel.runtime.net.registry import Registry


class Moment:
    """Fails once in a thread, when it is told to; of addresses only that of the router."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, thread: threading.Thread) -> None:
        self.bad, self.failed = False, 0
        works = getattr(Registry, method)

        def call(registry: Registry, *args: Any) -> Any:
            if self.bad and threading.current_thread() is thread and args in ((), (SITE,)):
                self.failed += 1
                self.bad = False
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return works(registry, *args)

        monkeypatch.setattr(Registry, method, call)

    def happen(self) -> None:
        before, self.bad = self.failed, True
        until(lambda: self.failed > before, "nobody looked")


def test_process_obeys_a_stop_request_after_a_failed_registry_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never polled again: a stopped or superseded process held its slot."""
    place = make_place(tmp_path)
    router = Running(router_host(place))
    Moment(monkeypatch, "is_stop_requested", router._thread).happen()
    place.registry.request_stop(SITE)
    try:
        until(lambda: router.over, "it is still there")
    finally:
        router.end()


@pytest.mark.parametrize("method", ["names", "find"])
def test_peer_is_dialled_again_after_a_failed_registry_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Nobody dialled any more: an instance stayed without its router until it was killed."""
    monkeypatch.setattr(peers, "RESTART_CHECK_S", 0.05)
    place = make_place(tmp_path)
    host = instance_host(place, dials=lambda: [name for name in place.registry.names() if name == SITE])
    router, instance = Running(router_host(place)), Running(host)
    try:
        until(lambda: SITE in host._connections)
        Moment(monkeypatch, method, instance._thread).happen()
        router.end()
        router = Running(router_host(place))
        until(lambda: SITE in host._connections, "it does not dial")
    finally:
        instance.end()
        router.end()
