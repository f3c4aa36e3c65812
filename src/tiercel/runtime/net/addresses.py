"""The address at which others reach a process, and the machine it runs on.

Responsible for: an address that can be dialled, for a process that listens at every address; an identifier of
    the machine, which its executors share.
Not responsible for: publishing the address (registry.py), listening (peers.py).
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
}  # addresses to listen at that cannot be dialled
ANY_PORT = 9  # nothing is sent there
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_here() -> str:
    """An identifier that all processes of this machine share, also those in containers."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()


def reachable(bind: str, toward: str) -> str:
    """Return `bind` if it can be dialled, else the address of this machine on its route to `toward`."""
    if bind not in EVERY_ADDRESS:
        return bind
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(
            toward, ANY_PORT, EVERY_ADDRESS[bind], socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the route, and sends nothing
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        what = f"this machine has no route to the driver at {toward!r}, so it cannot be reached: {error}"
        hint = 'say where routers are reached: advertise={"cloud": "10.0.0.5"}, or bind to one address'
        raise UserError(what, expected="spark.driver.host that executors can resolve", hint=hint) from error
