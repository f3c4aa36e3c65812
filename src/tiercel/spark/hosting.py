"""Every router and every instance is one long-lived Spark task: starting, finding and ending them.

Responsible for: one Spark job per process, in a driver thread, tagged; submitting it again when Spark
    has given up; what runs inside the task.
Not responsible for: what the process does once it runs (runtime/host.py), how many there may be (slots.py).

    driver: start(name) --> thread: spark.range(1).mapInArrow(task) --> worker: Host.run ... end
                              |  ^                                          |
                              |  +-- Spark has used up its retries <-- Spark retries
                              +-- dismissed: the job ends

Only the directory and the user's code travel in the closure that Spark ships; the secret is read from
the directory. A process is ended by dismissing it in the registry; cancelling its job is what a crash
looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvloop
from pyspark import TaskContext

from tiercel.core.faults import OperatorFailed
from tiercel.core.instance import Instance
from tiercel.core.router import Router
from tiercel.core.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.heart import Heart
from tiercel.runtime.host import Host
from tiercel.runtime.inheriting import ShareLoader
from tiercel.runtime.keeper import Keeper
from tiercel.runtime.lives import Lives
from tiercel.runtime.machine import Machine
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Address
from tiercel.runtime.replicated import open_replicated
from tiercel.runtime.replication import is_replica
from tiercel.runtime.storing import EXECUTOR, directory_of
from tiercel.spark.backend import Backend
from tiercel.spark.border import Border, OperatorPlan
from tiercel.spark.slots import ALLOCATION_S_MAX
from tiercel.spark.upgrading import StatePlan, upgrade_store, upgraded

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

_hostings: weakref.WeakSet[Hosting] = weakref.WeakSet()  # of this driver

START_S_MAX = 90.0  # a first Python worker on a busy machine
END_S_MAX = 15.0
LOOK_S = 0.02
NOBODY = 1  # the parent of processes whose parent has died
HEALTHY_S = 20.0  # a job that ran this long and then failed had been well
FAILURES_MAX = 4  # in a row, each sooner than that: the process cannot work, and is given up
REASON_CHARACTERS_MAX = 1_000
_TRACEBACK = "Traceback (most recent call last):"
_SPARK_SAYS = re.compile(r"^(.* most recent failure: .*?\): )?(: )?(org\.apache\.spark\.SparkException: )?")
PAUSE_S = 0.2  # before a job is submitted again
DISK_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
DISK_FULL_PAUSE_S = 1.0  # then as well: a full disk may stay so for long


# -- inside the task --------------------------------------------------------------------------


def build_host(
    place: Place,
    name: str,
    plan: OperatorPlan | None,
    make_router: Callable[..., Router] = Router,
    make_instance: Callable[..., Instance] = Instance,
) -> Host:
    """The machine of that name in its host: a site's router, or with a plan an instance."""
    if is_replica(name):
        return build_replica(place, name)
    manifest = place.manifest()
    topology, settings, registry = manifest.topology, manifest.settings, place.registry
    executor = executor_here() if EXECUTOR in manifest.local or manifest.replicas is not None else ""
    directory = directory_of(place, manifest, name, executor)
    state = plan.state if plan is not None else StatePlan()
    prepare = functools.partial(upgrade_store, plan=state)
    lazily = plan is not None and not state.renamed  # an upgrade goes through all of it first
    storage, replication = open_replicated(
        *(place, manifest, name, directory, executor),
        is_instance=plan is not None,
        lazily=lazily,
        prepare=prepare,
    )
    store, backup = storage
    shares = ShareLoader(
        *(place, manifest, storage),
        upgrade=functools.partial(upgraded, plan=state),
        lazily=lazily and replication is None,  # a replica would not get what comes later
    )
    machine: Machine
    peers: Callable[[], Iterable[str]]
    if plan is None:
        machine = make_router(name, topology, settings, store.life, store.items())
        sites = [site for site in topology.sites if site > name]

        def peers() -> Iterable[str]:
            return sites
    else:
        operator = topology.operator(operator_of(name))
        code = Border(plan)
        try:
            machine = make_instance(name, operator, code, settings, store.life)
        except Exception as error:  # it has called nothing but init
            what = f"init of {type(plan.processor).__name__} failed: {type(error).__name__}: {error}"
            hint = "files, models and services that it opens must be there on every executor"
            raise UserError(
                what, expected="an init that works on Spark's executors too", hint=hint
            ) from error
        router = site_of(name)

        def peers() -> Iterable[str]:
            """Its router, and its siblings: state moves between them without a detour."""
            siblings = [n for n in registry.names() if n > name and operator_of(n) == operator.name]
            return [router, *siblings]

    return Host(
        name,
        machine,
        registry,
        place.secret,
        dials=peers,
        store=store,
        backup=backup,
        replication=replication,
        bind=manifest.bind,
        advertise=manifest.address_of(name),
        port=manifest.ports.get(name, 0),
        tls=manifest.tls,
        metrics=place.metrics,
        load_share=shares.load,
        parent=os.getppid(),
    )


def build_replica(place: Place, name: str) -> Host:
    """A replica in its host: it stores nothing, and dials nobody."""
    manifest = place.manifest()
    return Host(
        name,
        Keeper(lambda process: Lives(place.lives, process).last()),
        place.registry,
        place.secret,
        life=Lives(place.lives, name).claim(0).life,
        bind=manifest.bind,
        advertise=manifest.address_of(name),
        tls=manifest.tls,
        metrics=place.metrics,
        parent=os.getppid(),
    )


Build = Callable[[Place, str, OperatorPlan | None], Host]


def executor_here() -> str:
    """The executor of this task.

    Python is not told. It stands in the command of the JVM above this worker; without /proc, on a
    standalone cluster an executor works in a directory named after it.
    """
    with contextlib.suppress(OSError, ValueError):  # no /proc, or no such argument
        pid = os.getpid()
        while pid > 1:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--executor-id" in words:
                return words[words.index(b"--executor-id") + 1].decode()
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    here = Path.cwd()
    return here.name if here.parent.name.startswith("app-") else "driver"


def task(
    directory: Path, name: str, plan: OperatorPlan | None, build: Build = build_host
) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """What Spark runs for one process; its one row comes out when the process has ended."""

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        logging.basicConfig(level=logging.WARNING)
        if os.getppid() == NOBODY:
            return  # whoever started this worker is dead: nobody would hear how it ends
        for batch in batches:
            context = TaskContext.get()
            assert context is not None
            place = Place(directory)
            if place.registry.dismissed(name):  # while it started: others may have taken over
                yield batch
                continue
            facts = (context.stageId(), context.attemptNumber(), context.taskAttemptId(), executor_here())
            with Heart(place.registry, name, place.manifest().settings.suspect_ms):
                host = build(place, name, plan)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(host.run(*facts))
            yield batch

    return run


# -- in the driver ----------------------------------------------------------------------------


def hosted(application: str) -> int:
    """How many processes of this driver's deployments hold a slot of a Spark application."""
    return sum(len(each.names) for each in _hostings if each.application == application)


class Hosting:
    """The processes of one deployment in one Spark application."""

    def __init__(self, backend: Backend, place: Place, build: Build = build_host) -> None:
        self._backend = backend
        self._build = build
        self.application = backend.application
        self._place = place
        self._registry = place.registry
        self._threads: dict[str, threading.Thread] = {}
        self._kept: dict[str, threading.Thread] = {}  # those that go on as long as a process is wanted
        self._unwanted: set[str] = set()
        self._ended = False
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}  # of processes that were given up: the reason
        self.submissions: dict[str, int] = {}
        self.suspicions: dict[str, int] = {}  # how often a process was believed dead
        self._suspected: set[str] = set()  # those whose job was cancelled for that
        _hostings.add(self)

    @property
    def names(self) -> list[str]:
        return sorted(set(self._threads) - self._unwanted)

    def tag(self, name: str) -> str:
        """Of its jobs: deployments of one application may have processes of the same name."""
        where = hashlib.sha256(os.fsencode(self._place.directory)).hexdigest()[:8]
        return f"{quote(name, safe='@# ')}:{where}"  # Spark refuses a comma

    def start(self, name: str, plan: OperatorPlan | None = None) -> None:
        """Ask Spark for a task that hosts this process: a router, or with a plan an instance.

        One that was dismissed and has not ended yet ends, and is started again by the thread that it has.
        """
        with self._lock:
            if self._ended:
                raise UserError(
                    f"{name} is not started: the deployment was stopped", expected="one that runs"
                )
            if name in self._kept:
                if name in self._unwanted:
                    self._unwanted.discard(name)
                    self._registry.welcome(name)
                return
            self._unwanted.discard(name)
            self.failures.pop(name, None)
            self._registry.welcome(name)
            work = functools.partial(self._run, name, plan)
            self._threads[name] = thread = self._backend.thread(work, f"tiercel-{name}")
            self._kept[name] = thread
            thread.start()

    def _run(self, name: str, plan: OperatorPlan | None) -> None:
        try:
            self._keep_running(name, plan)
        except Exception as error:  # Spark does not even take the job
            log.exception("the job of %s", name)
            self.failures[name] = reason_of(error)
        with self._lock:
            if self._kept.get(name) is threading.current_thread():
                del self._kept[name]

    def _goes_on(self, name: str) -> bool:
        """Whether this thread is to submit another job; if not, who is wanted again gets another thread."""
        with self._lock:
            if name in self._unwanted:
                del self._kept[name]
            return name in self._kept

    def _keep_running(self, name: str, plan: OperatorPlan | None) -> None:
        """One job after the other until the process is dismissed, or cannot work at all."""
        self._backend.enter(self.tag(name))
        job = self._backend.job(task(self._place.directory, name, plan, self._build))
        in_a_row = 0
        while self._goes_on(name):
            begun = time.monotonic()
            self.submissions[name] = self.submissions.get(name, 0) + 1
            try:
                job.collect()
                if name not in self._unwanted:
                    self._registry.welcome(name)  # it was to leave its executor, and starts on another
            except Exception as error:
                if name in self._unwanted:
                    continue
                if self._backend.is_stopped():
                    self.failures[name] = "the Spark session was stopped"
                    return
                reason = reason_of(error)
                if name in self._suspected:
                    self._suspected.discard(name)
                    in_a_row = 0  # it may have been well: whoever stopped it knows
                elif any(full in str(error) for full in DISK_FULL):
                    in_a_row = 0  # it will work as soon as there is room
                    time.sleep(DISK_FULL_PAUSE_S)
                else:
                    in_a_row = 1 if time.monotonic() - begun > HEALTHY_S else in_a_row + 1
                log.warning("the job of %s failed (%d in a row): %s", name, in_a_row, reason)
                if in_a_row >= FAILURES_MAX or self._hopeless(name, error):
                    self.failures[name] = reason
                    return
                time.sleep(PAUSE_S)

    def _hopeless(self, name: str, error: Exception) -> bool:
        """User code that is to fail has failed; or nobody ever listened here, and the reason will stay."""
        told = [OperatorFailed] if self._registry.find(name) is not None else [OperatorFailed, UserError]
        return any(f"{kind.__module__}.{kind.__name__}: " in str(error) for kind in told)

    def wait(self, name: str, after_life: int = 0) -> Address:
        """Where a process listens, as soon as it does, in a life above `after_life`."""
        limit, seconds = self.start_s_max
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            address = self._registry.find(name)
            if address is not None and address.life > after_life:
                return address
            if name in self.failures:
                raise could_not_start(name, self.failures[name])
            time.sleep(LOOK_S)
        raise UserError(
            f"{name} did not start within {seconds:g} s ({limit})",
            expected="a free task slot for it",
            hint="see Spark's UI for what holds the slots, and the log of its executors",
        )

    @property
    def start_s_max(self) -> tuple[str, float]:
        """How long a process may take to start, and the name of that limit."""
        if self._backend.allocates:
            return "ALLOCATION_S_MAX", ALLOCATION_S_MAX
        return "START_S_MAX", START_S_MAX

    @property
    def waiting(self) -> list[str]:
        """Processes that were asked for and do not listen yet."""
        return [name for name in self.names if self._registry.find(name) is None]

    def relocate(self, name: str) -> None:
        """End a process where it runs; Spark starts it again, and not on an executor that leaves."""
        self._registry.dismiss(name)

    def suspect(self, name: str, silent_s: float) -> None:
        """It gives no sign of life: end it as far as Spark can, and start another life of it.

        If it lives on all the same, the later life fences it.
        """
        log.warning("%s gave no sign of life for %.1f s: it is started again", name, silent_s)
        self.suspicions[name] = self.suspicions.get(name, 0) + 1
        self._suspected.add(name)
        self._registry.welcome(name)
        self._backend.cancel(self.tag(name))

    def evict(self) -> None:
        """End what an earlier driver has left running: behind Spark Connect, killing it ends nothing."""
        give_up = time.monotonic() + END_S_MAX
        left = [found for name in self._registry.names() if (found := self._registry.find(name))]
        for address in left:
            self._registry.dismiss(address.name)
        for address in left:
            while listens(address) and time.monotonic() < give_up:
                time.sleep(LOOK_S)

    def dismiss(self, name: str) -> None:
        """End one process for good; returns at once."""
        self._unwanted.add(name)
        self._registry.dismiss(name)

    def end(self) -> None:
        """Dismiss every process; cancel the jobs of those that do not listen."""
        with self._lock:
            self._ended = True
        for name in self._threads:
            self.dismiss(name)
        give_up = time.monotonic() + END_S_MAX
        for name, thread in self._threads.items():
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive() and not self._backend.is_stopped():
                self._backend.cancel(self.tag(name))
        for name in self._threads:
            self._registry.withdraw(name)


def listens(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def could_not_start(name: str, reason: str) -> UserError:
    what = f"{name} could not be started: {reason}"
    if "\nhint: " in reason:  # and what was expected, as the process has said it
        return UserError(what)
    return UserError(what, expected="a process that starts", hint="the executor's log has the whole story")


def reason_of(error: Exception) -> str:
    """What happened, out of Spark's long message: the end of the worker's traceback, else what Spark says."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    begins = [n for n, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if begins:
        after = itertools.dropwhile(lambda line: line[0].isspace(), lines[begins[-1] + 1 :])
        said = "\n".join(itertools.takewhile(lambda line: not line[0].isspace(), after))
        said = said.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
    else:
        told = [line for line in lines if not line.startswith("An error occurred while calling")]
        said = _SPARK_SAYS.sub("", told[0]) if told else type(error).__name__
    return said[:REASON_CHARACTERS_MAX]
