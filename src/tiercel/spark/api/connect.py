"""Clients for a deployment that is reached over the network: `tiercel.connect`.

Responsible for: producers and subscribers from an address and a secret, without a storage directory or Spark.
Not responsible for: the clients themselves (clients.py), addresses of sites (runtime/sites/).
"""

from __future__ import annotations

import os

from tiercel.errors import UserError
from tiercel.runtime.net.tls import TlsOption, parse_tls
from tiercel.runtime.sites.deployment_file import parse_endpoint, read_secret
from tiercel.runtime.sites.remote import ASK_S_MAX, RemoteDeployment
from tiercel.spark.api.clients import RowProducer, RowSubscriber


class RemoteClients:
    """Makes producers and subscribers of one deployment, through the router of one site."""

    def __init__(self, deployment: RemoteDeployment) -> None:
        self.deployment = deployment

    def __repr__(self) -> str:
        return f"<deployment {self.deployment.manifest().id[:8]} at site {self.site!r}>"

    @property
    def site(self) -> str:
        """The site whose router answers at the address."""
        return self.deployment.site

    @property
    def streams(self) -> list[str]:
        return sorted(self.deployment.manifest().streams)

    def producer(self, stream: str, *, name: str) -> RowProducer:
        """A producer that writes at this site. Its name identifies it after a restart."""
        return RowProducer(self.deployment, stream, name=name, site=self.site)

    def subscribe(
        self, stream: str, *, after: int | None = None, site: str = "", subscription: str = ""
    ) -> RowSubscriber:
        """A subscriber; the router here relays to the site that has the stream's log.

        With a `site` it reads the rows that this site makes, in the log that the site keeps of them.
        """
        return RowSubscriber(self.deployment, stream, after=after, site=site, subscription=subscription)


def connect(
    address: str, *, secret: str | os.PathLike[str], tls: TlsOption = None, timeout_s: float = ASK_S_MAX
) -> RemoteClients:
    """Reach a deployment at `host:port` of a site's router. `secret` is the path of its secret file.

    deployment = tiercel.connect("edge1.example:7400", secret="/etc/tiercel/secret")
    producer = deployment.producer("positions", name="gateway-7")
    """
    endpoint = parse_endpoint(str(address))
    if endpoint is None:
        what = f"address {address!r}"
        raise UserError(what, expected='"host:port" of a site\'s router, as in "edge1.example:7400"')
    files = parse_tls(tls) or None
    return RemoteClients(RemoteDeployment(endpoint, read_secret(secret), files, timeout_s))
