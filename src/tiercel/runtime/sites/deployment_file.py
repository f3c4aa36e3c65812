"""The deployment file: the sites of a deployment whose sites are applications of their own, in TOML.

Responsible for: reading the file, naming what is wrong in it.
Not responsible for: using it (spark/api/deployment.py, net/registry.py).

    name = "traffic"
    secret_file = "secret"             # relative to this file; the same bytes at every site

    [sites.cloud]                      # the root: it has no parent, and its driver runs the controller
    listen = "10.0.0.5:7400"

    [sites.edge-1]
    parent = "cloud"
    listen = "0.0.0.0:7400"
    advertise = "edge1.example:7400"   # where others reach it, if that is not where it listens
    direct = ["edge-2"]                # optional: sites that it reaches without a detour by its parent

    [tls]                              # optional: for every connection
    certificate = "/etc/tiercel/site.pem"
    key = "/etc/tiercel/site.key"
    authority = "/etc/tiercel/authority.pem"

The links form the tree of the sites: parent and child reach each other. What goes to another site is relayed
on that way, unless the two reach each other directly.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import msgspec

from tiercel.errors import UserError
from tiercel.runtime.config import PORT_MAX, parse_sites
from tiercel.runtime.net.addresses import EVERY_ADDRESS

SECRET_BYTES_MIN = 16
HINT = "docs/guide.md has an example under «Sites as applications»"

Endpoint = tuple[str, int]  # host and port


class _Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    listen: str
    parent: str | None = None
    advertise: str = ""
    direct: list[str] = []


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    secret_file: str
    sites: dict[str, _Site]
    tls: dict[str, str] | None = None


class DeploymentFile(msgspec.Struct, frozen=True):
    """The sites of a deployment, and where the router of each is reached."""

    name: str
    secret: bytes
    sites: dict[str, str | None]  # site -> its parent; None: the root
    listen: dict[str, Endpoint]
    reached: dict[str, Endpoint]  # site -> where others dial its router
    tls: dict[str, str] | None = None
    direct: dict[str, tuple[str, ...]] = {}  # site -> others that it reaches without a detour

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeploymentFile:
        """Read the file; UserError if it cannot be one."""
        path = Path(path)
        try:
            found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        except OSError as error:
            what = f"the deployment file {path} cannot be read: {error.strerror}"
            raise UserError(what, expected="a TOML file", hint=HINT) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            what = f"the deployment file {path}: {error}"
            raise UserError(what, expected="name, secret_file and [sites.NAME]", hint=HINT) from error
        try:
            sites = parse_sites({name: site.parent for name, site in found.sites.items()})
        except UserError as error:
            raise UserError(f"{path}: {error.what}", expected=error.expected, hint=HINT) from error
        _check_tree(path, sites)
        listen = {name: _endpoint(path, name, site.listen) for name, site in found.sites.items()}
        reached = {
            name: _endpoint(path, name, site.advertise or site.listen) for name, site in found.sites.items()
        }
        for name, (host, port) in reached.items():
            if host in EVERY_ADDRESS:
                what = f"{path}: others cannot dial {name!r} at {host or 'an empty host'}"
                raise UserError(what, expected='advertise = "host:port"', hint=HINT)
            others = [other for other in reached if other < name and reached[other] == (host, port)]
            if others:
                what = f"{path}: {name!r} and {others[0]!r} are both at {host}:{port}"
                raise UserError(what, expected="an address of its own for each site")
        direct = {name: tuple(site.direct) for name, site in found.sites.items() if site.direct}
        for name, others_of in direct.items():
            for other in others_of:
                if other not in sites or other == name:
                    what = f"{path}: site {name!r} would reach {other!r} directly"
                    raise UserError(what, expected=f"another one of: {', '.join(sites)}")
        return cls(found.name, _secret(path, found.secret_file), sites, listen, reached, found.tls, direct)

    @property
    def root(self) -> str:
        return next(site for site, parent in self.sites.items() if parent is None)

    def check_site(self, site: str) -> None:
        """UserError if the file has no such site."""
        if site not in self.sites:
            what = f"site {site!r} is not in the deployment file of {self.name!r}"
            raise UserError(what, expected=f"one of: {', '.join(self.sites)}")

    def elsewhere(self, site: str) -> dict[str, Endpoint]:
        """Where the routers of all other sites are reached, or the next one on the way to them."""
        return {other: self.reached[self.next_hop(site, other)] for other in self.reached if other != site}

    def next_hop(self, site: str, other: str) -> str:
        """The site that a connection from one site to another goes to first."""
        if other in self.direct.get(site, ()) or site in self.direct.get(other, ()):
            return other
        below = other
        while below != site:  # up from the other one: does it end below this site?
            above = self.sites[below]
            if above is None:
                return self.sites[site] or other
            if above == site:
                return below
            below = above
        return other


def _check_tree(path: Path, sites: dict[str, str | None]) -> None:
    roots = [site for site, parent in sites.items() if parent is None]
    if len(roots) != 1:
        what = f"{path}: {len(roots)} sites have no parent: {', '.join(roots) or 'none'}"
        raise UserError(what, expected="one root; every other site names its parent")


def parse_endpoint(text: str) -> Endpoint | None:
    """`host:port`; None if the text is something else."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        return None
    return host.strip("[]"), int(port)


def _endpoint(path: Path, site: str, text: str) -> Endpoint:
    found = parse_endpoint(text)
    if found is None:
        what = f"{path}: the address {text!r} of site {site!r}"
        raise UserError(what, expected=f'"host:port" with a port from 1 to {PORT_MAX}', hint=HINT)
    return found


def _secret(path: Path, name: str) -> bytes:
    return read_secret(path.parent / name)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret of a deployment; UserError if there is none, or it is too short to be one."""
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        what = f"the secret file {path} cannot be read: {error.strerror}"
        hint = "make one with: head -c 32 /dev/urandom > secret; it is the same at every site"
        raise UserError(what, expected="the secret of the deployment", hint=hint) from error
    if len(secret) < SECRET_BYTES_MIN:
        what = f"the secret file {path} has {len(secret)} bytes"
        raise UserError(what, expected=f"{SECRET_BYTES_MIN} or more", hint="head -c 32 /dev/urandom > secret")
    return secret
