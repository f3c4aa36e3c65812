"""Task slots: whether a Spark application has room for a deployment.

Responsible for: counting task slots before anything starts.
Not responsible for: starting processes (supervisor.py), the environment of the executors (preflight.py).
"""

from __future__ import annotations

from tiercel.errors import UserError
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.waiting import wait_until

EXECUTORS_S_MAX = 30.0
ALLOCATION_S_MAX = 300.0  # dynamic allocation: executors are requested, granted and started first
RESERVED_SLOTS = 2  # for the micro-batches of feeds and sinks, which would otherwise wait forever


def _slots_soon(backend: Backend, needed: int) -> int | None:
    """The slots of the application. On a cluster, this waits for executors that are still starting."""
    slots = backend.slots()

    def enough() -> bool:
        nonlocal slots
        slots = backend.slots()
        return slots is None or slots >= needed or backend.local

    wait_until(enough, EXECUTORS_S_MAX, poll_s=0.1)
    return slots


def slots_at_most(backend: Backend) -> int | None:
    """The most slots that dynamic allocation may reach; None: no limit is set."""
    executors = backend.setting("spark.dynamicAllocation.maxExecutors")
    cores = backend.setting("spark.executor.cores")
    cpus = backend.setting("spark.task.cpus", "1")
    if not all(number.isdecimal() and int(number) > 0 for number in (executors, cores, cpus)):
        return None
    return int(executors) * (int(cores) // int(cpus))


def check_slots(backend: Backend, new: int, *, running: int, reserved: int = RESERVED_SLOTS) -> None:
    """Refuse a start without room: each process holds one slot for as long as it runs.

    `running` processes hold a slot already, in any deployment of the application. With dynamic allocation,
    only a start that can never fit is refused; ALLOCATION_S_MAX limits how long the rest may take.
    """
    needed = running + new + reserved
    slots = slots_at_most(backend) if backend.allocates else _slots_soon(backend, needed)
    if slots is not None and slots < needed:
        has = "may grow to" if backend.allocates else "has"
        what = (
            f"{new} routers, replicas and instances need a task slot each, {running} run already, and feeds "
            f"and sinks need {reserved}: {needed} in all, but this Spark application {has} {slots}"
        )
        hint = f"tiercel.session(slots={needed}), or --master 'local[{needed},4]', or more executor cores"
        if backend.allocates:
            hint = "a higher spark.dynamicAllocation.maxExecutors, or more executor cores"
        raise UserError(what, expected=f"at least {needed} task slots", hint=hint)
