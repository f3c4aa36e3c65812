"""Where others reach a process that listens at every address of its machine, and which machine that is.

Responsible for: an address to publish that is one; a name of the machine that its executors have in common.
Not responsible for: publishing it (registry.py), listening (peers.py).
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from tiercel.errors import UserError

EVERY_ADDRESS = {
    "": 0,
    "0.0.0.0": socket.AF_INET,
    "::": socket.AF_INET6,
}  # to listen at; nobody can dial these
ANY_PORT = 9  # nothing is sent there
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_here() -> str:
    """The same for all that die together with this machine: containers have addresses of their own."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()


def reachable(bind: str, toward: str) -> str:
    """`bind`, if it can be dialled; else the address of this machine on its route to the host `toward`."""
    if bind not in EVERY_ADDRESS:
        return bind
    try:
        [(family, kind, _, _, place), *_] = socket.getaddrinfo(
            toward, ANY_PORT, EVERY_ADDRESS[bind], socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # chooses the route, and sends nothing
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        what = f"this machine has no route to the driver at {toward!r}, so it cannot be reached: {error}"
        hint = 'say where routers are reached: advertise={"cloud": "10.0.0.5"}, or bind to one address'
        raise UserError(what, expected="spark.driver.host that executors can resolve", hint=hint) from error
