"""A process that listens everywhere publishes an address that can be dialled."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from deployment_in_process import INPUT, SITE, instance_host, make_place, router_host, rows, running
from tiercel.errors import UserError
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.net.addresses import reachable


def test_dialable_bind_address_is_published_unchanged() -> None:
    assert reachable("127.0.0.1", "no such host") == "127.0.0.1"
    assert reachable("10.1.2.3", "") == "10.1.2.3"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", ""])
def test_process_that_binds_every_address_publishes_its_address_toward_the_driver(everywhere: str) -> None:
    assert reachable(everywhere, "127.0.0.1") == "127.0.0.1"
    assert reachable(everywhere, "127.0.0.2") in ("127.0.0.1", "127.0.0.2")  # both ends of a loopback


def test_unresolvable_driver_host_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*question: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"no route to the driver at 'nowhere'(.|\n)*advertise="):
        reachable("0.0.0.0", "nowhere")


def test_router_that_binds_every_address_is_found_by_the_registry(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    manifest = msgspec.structs.replace(place.manifest(), bind="0.0.0.0", driver="localhost")
    place.write(manifest)
    assert manifest.address_of(SITE) == "127.0.0.1"
    manifest = msgspec.structs.replace(manifest, advertise={SITE: "127.0.0.3"})
    assert (manifest.address_of(SITE), manifest.address_of("other")) == ("127.0.0.3", "127.0.0.1")
    router = router_host(place, bind=manifest.bind, advertise=manifest.address_of(SITE))
    with running(router, instance_host(place)):
        address = place.registry.find(SITE)
        assert address is not None
        assert address.host == "127.0.0.3"
        place.registry.publish(msgspec.structs.replace(address, local=""))  # no way but by its address
        with Producer(place, INPUT, name="p") as producer:
            producer.send(rows(0, 1))
