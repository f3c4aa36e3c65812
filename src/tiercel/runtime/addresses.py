"""Where others reach a process that listens at every address of its machine.

Responsible for: an address to publish that is one.
Not responsible for: publishing it (registry.py), listening (peers.py).
"""

from __future__ import annotations

import socket

from tiercel.errors import UserError

EVERY_ADDRESS = {
    "": 0,
    "0.0.0.0": socket.AF_INET,
    "::": socket.AF_INET6,
}  # to listen at; nobody can dial these
ANY_PORT = 9  # nothing is sent there


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
