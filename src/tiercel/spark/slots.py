"""Whether a Spark application has room for a deployment.

Responsible for: counting task slots before anything starts.
Not responsible for: starting processes (hosting.py), what they would find there (probing.py).
"""

from __future__ import annotations

import time

from tiercel.errors import UserError
from tiercel.spark.backend import Backend

EXECUTORS_S_MAX = 30.0
ALLOCATION_S_MAX = 300.0  # dynamic allocation: executors are asked for, granted and started first
SPARE_SLOTS = 2  # for the micro-batches of feeds and sinks: with none they would wait for ever


def _slots_soon(backend: Backend, needed: int) -> int | None:
    """On a cluster, executors may still be on their way when the session is there already."""
    give_up = time.monotonic() + EXECUTORS_S_MAX
    slots = backend.slots()
    while slots is not None and slots < needed and not backend.local and time.monotonic() < give_up:
        time.sleep(0.1)
        slots = backend.slots()
    return slots


def slots_at_most(backend: Backend) -> int | None:
    """As far as dynamic allocation may go; None: nobody has set a limit."""
    executors = backend.setting("spark.dynamicAllocation.maxExecutors")
    cores = backend.setting("spark.executor.cores")
    cpus = backend.setting("spark.task.cpus", "1")
    if not all(number.isdecimal() and int(number) > 0 for number in (executors, cores, cpus)):
        return None
    return int(executors) * (int(cores) // int(cpus))


def check_slots(backend: Backend, new: int, *, running: int, spare: int = SPARE_SLOTS) -> None:
    """Refuse before anything starts: each process holds one slot for as long as it lives.

    `running` are those that hold one already, of whichever deployment. Where executors come when tasks
    wait for them, only what can never fit is refused; ALLOCATION_S_MAX says how long the rest may take.
    """
    needed = running + new + spare
    slots = slots_at_most(backend) if backend.allocates else _slots_soon(backend, needed)
    if slots is not None and slots < needed:
        has = "may grow to" if backend.allocates else "has"
        what = (
            f"{new} routers, replicas and instances need a task slot each, {running} run already, and feeds "
            f"and sinks need {spare}: {needed} in all, but this Spark application {has} {slots}"
        )
        hint = f"tiercel.session(slots={needed}), or --master 'local[{needed},4]', or more executor cores"
        if backend.allocates:
            hint = "a higher spark.dynamicAllocation.maxExecutors, or more executor cores"
        raise UserError(what, expected=f"at least {needed} task slots", hint=hint)
