"""A deployment's directory: what everyone who takes part must find there, and nobody else may read.

Responsible for: the manifest (streams, operators, settings), the secret, the paths of everything else.
Not responsible for: what the processes store (store.py), where they listen (registry.py).

    storage/
      deployment.json    the manifest: what runs here, and who it is
      instances.json     which instances should run now
      secret             proves membership; readable by its owner only
      lock               held by the driver that runs the deployment
      registry/          who listens where
      lives/NAME/        the lives that have begun, where a process's own disk is not the only copy
      processes/NAME/    one RocksDB per router, instance and controller
      metrics/NAME.jsonl a line per second and process
      feeds/             staged batches of DataFrame feeds
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from tiercel.core.settings import Settings
from tiercel.core.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime.addresses import reachable
from tiercel.runtime.registry import Registry
from tiercel.runtime.tls import TlsFiles

FORMAT = 1  # of everything below this directory
SECRET_BYTES = 32

Durability = Literal["os", "disk", "replica"]


class StreamFacts(msgspec.Struct, frozen=True):
    """What the ends of a stream must know; the core needs none of it."""

    schema: str  # PySpark's JSON of the StructType
    key: tuple[str, ...]  # columns; empty: rows keep the key of the operator that emitted them
    event_time: str = ""  # column, empty: none
    sites: tuple[str, ...] = ()  # where producers may connect
    written_by: str = ""  # the operator that writes it; empty: producers and feeds
    images: bool = False  # an operator's initial state as it was stored elsewhere
    letters_of: str = ""  # a declared stream: this one holds the rows that its feeds refused

    @property
    def writer(self) -> str:
        """Who alone writes it, for messages; empty: producers and feeds."""
        if self.letters_of:
            return f"the feeds of {self.letters_of!r}"
        return f"the operator {self.written_by!r}" if self.written_by else ""


def letters_of(stream: str) -> str:
    """The stream with the rows that feeds of a stream refused: a name that nobody can declare."""
    return f"{stream}/dead"


class VariableFacts(msgspec.Struct, frozen=True):
    """One state variable of an operator, as its values are stored; the core needs none of it."""

    kind: Literal["value", "list", "map"]
    schema: str  # PySpark's JSON of the StructType, of a value or element
    key_schema: str = ""  # the same of a map's keys
    ttl: bool = False  # each value is stored with its expiry
    version: int = 1  # of the schema; part of the name that values are stored under
    earlier: dict[int, str] = {}  # version -> schema, of values that may still be stored
    deleted: bool = False  # no value of any version up to this one counts


class BackupPlan(msgspec.Struct, frozen=True):
    """Where a copy of everything durable goes, and how often."""

    location: str  # a directory, or a URL of fsspec
    every_s: float = 1.0  # what a lost disk may take back, unless `strict`
    keep: int = 2  # bases, each with the increments behind it
    strict: bool = False  # nothing is acknowledged or published before the copy has it
    read_mb_s: float = 0.0  # what each process that is restored reads in a second at most; 0: no limit


class ReplicaPlan(msgspec.Struct, frozen=True):
    """Who holds a copy of everything durable, for durability `replica`."""

    per_site: int = 1  # tasks that hold copies; with two, each process has one on another executor
    apart: bool = False  # only a copy on another executor counts
    at: dict[str, str] = {}  # site -> the site whose replicas hold its copies; others keep to their own


class Manifest(msgspec.Struct, frozen=True):
    """What runs in this directory."""

    id: str
    topology: Topology
    streams: dict[str, StreamFacts]
    settings: Settings = Settings()
    durability: Durability = "os"
    bind: str = "127.0.0.1"
    ports: dict[str, int] = {}  # site -> where its router listens; others take any that is free
    advertise: dict[str, str] = {}  # site -> where its router is reached, if not where it listens
    driver: str = "127.0.0.1"  # its host, as Spark knows it
    tls: TlsFiles | None = None  # for all connections; every machine has its files at these paths
    backup: BackupPlan | None = None
    local: str = ""  # where routers and instances keep what they store; empty: in this directory
    replicas: ReplicaPlan | None = None
    given: tuple[str, ...] = ()  # operators that have got all of their initial state
    state: dict[str, dict[str, VariableFacts]] = {}  # operator -> variable -> how it is stored
    format: int = FORMAT

    def address_of(self, process: str) -> str:
        """Where others reach a process of this machine."""
        return self.advertise.get(process) or reachable(self.bind, self.driver)


class Place:
    """The directory of one deployment. Cheap to make; everything is read when it is asked for."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()

    def __repr__(self) -> str:
        return f"Place({str(self.directory)!r})"

    @property
    def registry(self) -> Registry:
        return Registry(self.directory / "registry")

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics"

    @property
    def lives(self) -> Path:
        return self.directory / "lives"

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
        """What runs here; a clear error if this is no deployment's directory."""
        path = self.directory / "deployment.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            what = f"{self.directory} holds no deployment"
            raise UserError(what, expected="the storage directory of a deployment", hint=_HINT) from error
        except (OSError, msgspec.DecodeError) as error:
            what = f"{path} cannot be read: {error}"
            hint = (
                "it was damaged, or is no deployment's: restore it from a backup, or choose another directory"
            )
            raise UserError(what, expected="the manifest of a deployment", hint=hint) from error
        if found.format != FORMAT:
            what = f"{path} has format {found.format}"
            raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
        return found

    @property
    def taken(self) -> bool:
        """Whether a deployment has ever been written here."""
        return (self.directory / "deployment.json").exists()

    def wanted(self) -> list[str]:
        """The instances that should run, whoever is the driver."""
        try:
            found = msgspec.json.decode((self.directory / "instances.json").read_bytes(), type=list[str])
            return list(dict.fromkeys(found))
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            what = f"{self.directory / 'instances.json'} cannot be read: {error}"
            hint = 'it was damaged: restore it from a backup; or name them there, as ["count@cloud#1"]'
            raise UserError(what, expected="the instances that should run", hint=hint) from error

    def want(self, instances: Iterable[str]) -> None:
        """These, each once; in one driver one thread at a time."""
        write_whole(self.directory / "instances.json", msgspec.json.encode(sorted(set(instances))))

    def write(self, manifest: Manifest) -> None:
        """Make the directory that of this deployment. The secret is made once and kept."""
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

    def _make_secret(self) -> None:
        """Whole or not at all. One that is empty is of a driver that was killed as it made it."""
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


def write_whole(path: Path, content: bytes) -> None:
    """The file has all of this or is as it was, also after a power loss."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        force(file)
    draft.replace(path)
    force_directory(path.parent)


def force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def force_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_HINT = "it is what was given as storage= to tiercel.start"
_STORAGE_HINT = "choose another with storage="
