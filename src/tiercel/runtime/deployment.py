"""The deployment directory: the files that all processes of a deployment share.

Responsible for: the manifest (streams, operators, settings), the secret, the driver lock, all paths.
Not responsible for: the storage of processes (storage/store.py), their addresses (net/registry.py).

    storage/
      deployment.json    the manifest: what runs here
      instances.json     the instances that should run now
      secret             proves membership; readable by its owner only
      lock               held by the driver that runs the deployment
      registry/          the addresses of processes
      incarnations/NAME/ the incarnations of a process whose own disk is not the only copy
      processes/NAME/    one RocksDB per router, instance and controller
      metrics/NAME.jsonl a line per second and process
      feeds/             checkpoints of DataFrame feeds, and the site of each
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from tiercel.core.model.topology import Topology
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.files import force, write_whole
from tiercel.runtime.net.addresses import reachable
from tiercel.runtime.net.emulated_link import Link
from tiercel.runtime.net.registry import Registry
from tiercel.runtime.net.tls import TlsFiles

FORMAT = 2  # of everything below this directory
SECRET_BYTES = 32

Durability = Literal["os", "disk", "replica"]


@functools.cache
def installed_version() -> str:
    """The version of this package, which must be the same at every site; empty: it is not installed."""
    try:
        return metadata.version("tiercel")
    except metadata.PackageNotFoundError:
        return ""


class StreamFacts(msgspec.Struct, frozen=True):
    """A stream as clients and operators need it; the core needs none of this."""

    schema: str  # PySpark's JSON of the StructType
    key: tuple[str, ...]  # columns; empty: rows keep the key of the operator that emitted them
    event_time: str = ""  # column, empty: none
    sites: tuple[str, ...] = ()  # where producers may connect
    written_by: str = ""  # the operator that writes it; empty: producers and feeds
    images: bool = False  # an operator's initial state as it was stored elsewhere
    dead_letters_of: str = ""  # the declared stream whose feeds rejected the rows in this one
    sequence: str = ""  # column in which devices number their rows, empty: none

    @property
    def writer(self) -> str:
        """The only writer, for error messages; empty: producers and feeds."""
        if self.dead_letters_of:
            return f"the feeds of {self.dead_letters_of!r}"
        return f"the operator {self.written_by!r}" if self.written_by else ""


def dead_letter_stream(stream: str) -> str:
    """The stream with the rows that the feeds of a stream rejected. Users cannot declare this name."""
    return f"{stream}/dead"


class VariableFacts(msgspec.Struct, frozen=True):
    """How the values of one state variable are stored; the core needs none of this."""

    kind: Literal["value", "list", "map"]
    schema: str  # PySpark's JSON of the StructType, of a value or element
    key_schema: str = ""  # the same of a map's keys
    ttl: bool = False  # each value is stored with its expiry
    version: int = 1  # of the schema; part of the name that values are stored under
    earlier: dict[int, str] = {}  # version -> schema, of values that may still be stored
    deleted: bool = False  # values of versions up to this one are ignored


class BackupPlan(msgspec.Struct, frozen=True):
    """The backup of a deployment."""

    location: str  # a directory, or a URL of fsspec
    every_s: float = 1.0  # how much a lost disk may lose, unless `strict`
    keep: int = 2  # bases, each with the increments behind it
    strict: bool = False  # nothing is acknowledged or published before the backup has it
    read_mb_s: float = 0.0  # read limit of each process during a restore; 0: none


class ReplicaPlan(msgspec.Struct, frozen=True):
    """The replicas of a deployment with durability `replica`."""

    per_site: int = 1  # replicas at each site; with two, each process has one on another executor
    apart: bool = False  # only a replica on another executor counts
    at: dict[str, str] = {}  # site -> the site of its replicas; default: the site itself


class Manifest(msgspec.Struct, frozen=True):
    """What runs in this directory."""

    id: str
    topology: Topology
    streams: dict[str, StreamFacts]
    settings: Settings = Settings()
    durability: Durability = "os"
    bind: str = "127.0.0.1"
    ports: dict[str, int] = {}  # site -> the port of its router; default: any free one
    advertise: dict[str, str] = {}  # site -> the address of its router, if not where it listens
    driver: str = "127.0.0.1"  # the host of the driver, as Spark knows it
    links: dict[str, Link] = {}  # "a b" -> the emulated link between two sites
    hosts: tuple[str, ...] = ()  # sites of this application; empty: all, no other application has any
    tls: TlsFiles | None = None  # for all connections; every machine has its files at these paths
    backup: BackupPlan | None = None
    local: str = ""  # where routers and instances store; empty: in this directory
    replicas: ReplicaPlan | None = None
    given: tuple[str, ...] = ()  # operators that have received all of their initial state
    state: dict[str, dict[str, VariableFacts]] = {}  # operator -> variable -> how it is stored
    code: dict[str, str] = {}  # operator -> digest of the source of its user code; empty: it has none
    format: int = FORMAT

    @property
    def sites_here(self) -> tuple[str, ...]:
        """The sites whose processes this application runs."""
        return self.hosts or tuple(self.topology.sites)

    @property
    def is_root(self) -> bool:
        """Whether the driver of this application runs the controller."""
        return any(self.topology.sites[site] is None for site in self.sites_here)

    def address_of(self, process: str) -> str:
        """The address at which others reach a process of this machine."""
        return self.advertise.get(process) or reachable(self.bind, self.driver)


class DeploymentDir:
    """The directory of one deployment. Everything is read when it is asked for."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()

    def __repr__(self) -> str:
        return f"DeploymentDir({str(self.directory)!r})"

    @property
    def registry(self) -> Registry:
        return Registry(self.directory / "registry")

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics"

    @property
    def incarnations(self) -> Path:
        return self.directory / "incarnations"

    @property
    def feeds(self) -> Path:
        return self.directory / "feeds"

    def process(self, name: str) -> Path:
        return self.directory / "processes" / name

    @property
    def secret(self) -> bytes:
        try:
            return (self.directory / "secret").read_bytes()
        except OSError as error:
            what = f"no secret of a deployment can be read in {self.directory}: {error.strerror}"
            raise UserError(what, expected="the storage directory of a deployment", hint=_HINT) from error

    def manifest(self) -> Manifest:
        """The manifest; a clear error if this is not the directory of a deployment."""
        path = self.directory / "deployment.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            what = f"{self.directory} holds no deployment"
            raise UserError(what, expected="the storage directory of a deployment", hint=_HINT) from error
        except (OSError, msgspec.DecodeError) as error:
            what = f"{path} cannot be read: {error}"
            hint = "it is damaged, or not ours: restore it from a backup, or choose another directory"
            raise UserError(what, expected="the manifest of a deployment", hint=hint) from error
        if found.format != FORMAT:
            what = f"{path} has format {found.format}"
            raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
        return found

    @property
    def exists(self) -> bool:
        """Whether a deployment was ever written here."""
        return (self.directory / "deployment.json").exists()

    def desired_instances(self) -> list[str]:
        """The instances that should run, also under the next driver."""
        try:
            found = msgspec.json.decode((self.directory / "instances.json").read_bytes(), type=list[str])
            return list(dict.fromkeys(found))
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            what = f"{self.directory / 'instances.json'} cannot be read: {error}"
            hint = 'it was damaged: restore it from a backup; or name them there, as ["count@cloud#1"]'
            raise UserError(what, expected="the instances that should run", hint=hint) from error

    def set_desired_instances(self, instances: Iterable[str]) -> None:
        """Store the instances that should run. Not for several threads at once."""
        write_whole(self.directory / "instances.json", msgspec.json.encode(sorted(set(instances))))

    def write(self, manifest: Manifest) -> None:
        """Write the manifest, and on the first time the secret and the directories."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._make_secret()
            for directory in (self.metrics, self.feeds, self.directory / "processes"):
                directory.mkdir(exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            write_whole(self.directory / "deployment.json", text)
        except OSError as error:
            what = f"{self.directory} cannot be written: {error.strerror}"
            raise UserError(
                what, expected="a directory that the driver and every executor can write", hint=_STORAGE_HINT
            ) from error

    def use_secret(self, secret: bytes) -> None:
        """Store a secret that other applications of this deployment have too."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "secret"
        if not path.exists() or path.read_bytes() != secret:
            draft = self.directory / f".secret.{os.getpid()}"
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret)
                force(file)
            draft.replace(path)

    def _make_secret(self) -> None:
        """Create the secret atomically. An empty one is left of a driver that was killed meanwhile."""
        secret, draft = self.directory / "secret", self.directory / f".secret.{os.getpid()}"
        if secret.exists():
            if secret.stat().st_size:
                return
            secret.unlink()
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            force(file)
        with contextlib.suppress(FileExistsError):
            os.link(draft, secret)
        draft.unlink()


# -- files ------------------------------------------------------------------------------------


_HINT = "it is what was given as storage= to tiercel.start"
_STORAGE_HINT = "choose another with storage="


class DriverLock:
    """Lets one driver at a time run a deployment; held from its start to its end.

    The operating system releases the lock of a killed driver. Processes of that driver may run on for a
    moment; incarnations and epochs fence them.
    """

    def __init__(self, deployment: DeploymentDir) -> None:
        path = deployment.directory / "lock"
        try:
            deployment.directory.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="ascii")
        except OSError as error:
            raise UserError(
                f"{deployment.directory} cannot be written: {error.strerror}",
                expected="a directory that the driver and every executor can write",
                hint="choose another with storage=",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(
                f"{deployment.directory} is in use by the driver with pid {holder}",
                expected="one driver at a time",
                hint="stop that one, or choose another storage=",
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
