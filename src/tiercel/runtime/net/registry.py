"""Service discovery: one small file per process in a directory that all processes of a deployment see.

Responsible for: finding the address of a peer, heartbeats, stop requests and checkpoint requests.
Not responsible for: trust (connection.py proves who listens at an address), starting processes (spark/).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from tiercel.core.model.topology import site_of
from tiercel.runtime.files import write_whole

ELSEWHERE = "elsewhere.json"


class Address(msgspec.Struct, frozen=True):
    """Where a process listens, and which Spark task it is."""

    name: str
    host: str
    port: int
    pid: int
    incarnation: int
    local: str = ""  # a Unix socket of the same process: half the cost of TCP where both share a machine
    stage: int = -1  # -1: not a Spark task
    attempt: int = -1
    task: int = -1
    executor: str = ""
    machine: str = ""  # the same for all executors of a machine; empty: unknown


class Registry:
    """The registry directory. Files are replaced atomically."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def publish(self, address: Address) -> None:
        self._remove_socket(address.name)
        path = self._path(address.name, "address")
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(address))
        draft.replace(path)

    def find(self, name: str) -> Address | None:
        try:
            return msgspec.json.decode(self._path(name, "address").read_bytes(), type=Address)
        except (FileNotFoundError, msgspec.DecodeError):  # a power loss may leave the file empty
            site = self._elsewhere.get(site_of(name))
            return None if site is None else Address(name, *site, pid=0, incarnation=0)

    @functools.cached_property
    def _elsewhere(self) -> dict[str, tuple[str, int]]:
        """Site of another application -> host and port of its router, which relays to its instances."""
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(
                (self._directory / ELSEWHERE).read_bytes(), type=dict[str, tuple[str, int]]
            )
        return {}

    def set_elsewhere(self, routers: Mapping[str, tuple[str, int]]) -> None:
        """Store where the routers of other applications listen, for this start of the deployment."""
        write_whole(self._directory / ELSEWHERE, msgspec.json.encode(routers))

    def is_elsewhere(self, name: str) -> bool:
        """Whether a process belongs to another application."""
        return site_of(name) in self._elsewhere

    def registered_since_ns(self, name: str) -> int:
        """When the process published its address, in ns by the clock of its machine; 0: it has not."""
        try:
            return self._path(name, "address").stat().st_mtime_ns
        except OSError:
            return 0

    def names(self) -> list[str]:
        """All processes with a published address, sorted."""
        found = self._directory.glob("*.address")
        return sorted(unquote(path.name.removesuffix(".address")) for path in found)

    def deregister(self, name: str) -> None:
        self._remove_socket(name)
        self._path(name, "address").unlink(missing_ok=True)

    def _remove_socket(self, name: str) -> None:
        """Remove the Unix socket that a killed process left."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = self.find(name)
            if found is not None and found.local:
                Path(found.local).unlink(missing_ok=True)
                Path(found.local).parent.rmdir()  # made for this socket only

    def beat(self, name: str) -> None:
        """Record a heartbeat."""
        with contextlib.suppress(OSError):  # the shared disk may fail for a moment, or be full
            self._path(name, "beat").touch()

    def last_beat(self, name: str) -> int:
        """The time of the last heartbeat in ns; 0: there was none."""
        try:
            return self._path(name, "beat").stat().st_mtime_ns
        except OSError:
            return 0

    def is_current(self, name: str, incarnation: int) -> bool:
        """Whether this incarnation is the registered one; otherwise another one runs, or will soon."""
        found = self.find(name)
        return found is not None and found.incarnation == incarnation

    def deregister_if_current(self, name: str, incarnation: int) -> None:
        """Remove the address of an incarnation that ended by itself, so that it is not taken for lost."""
        if self.is_current(name, incarnation):
            self.deregister(name)

    def request_stop(self, name: str) -> None:
        """Ask a process to end. Processes poll for this a few times a second."""
        self._path(name, "stop").touch()

    def clear_stop_request(self, name: str) -> None:
        """Withdraw a stop request, and forget the address and heartbeat of an earlier incarnation."""
        self._path(name, "stop").unlink(missing_ok=True)
        self._path(name, "beat").unlink(missing_ok=True)
        self.deregister(name)

    def clear(self) -> None:
        """Forget all processes, before any of this deployment is started."""
        for name in self.names():
            self._remove_socket(name)
        for kind in ("address", "beat", "stop"):
            for path in self._directory.glob(f"*.{kind}"):
                path.unlink(missing_ok=True)

    def is_stop_requested(self, name: str) -> bool:
        return self._path(name, "stop").exists()

    def stop_reason(self, name: str, incarnation: int, parent: int = 0) -> str:
        """Why this incarnation must end; empty: it goes on."""
        if self.is_stop_requested(name):
            return "stop requested"
        if not self.is_current(name, incarnation):
            return "superseded"  # an older incarnation would only occupy its Spark task
        return "orphaned" if parent and os.getppid() != parent else ""

    def request_checkpoint(self, name: str) -> None:
        """Ask an instance for a checkpoint. Instances poll for this a few times a second."""
        self._path(name, "checkpoint").touch()

    def take_checkpoint_request(self, name: str) -> bool:
        """Whether a checkpoint was requested since the last call; the request is consumed."""
        try:
            self._path(name, "checkpoint").unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str, kind: str) -> Path:
        return self._directory / f"{quote(name, safe='')}.{kind}"


class FixedAddress(Registry):
    """For clients that know one address only: the router there relays to every process."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def find(self, name: str) -> Address | None:
        return Address(name, self._host, self._port, pid=0, incarnation=0)

    def names(self) -> list[str]:
        return []

    def is_elsewhere(self, name: str) -> bool:
        return False
