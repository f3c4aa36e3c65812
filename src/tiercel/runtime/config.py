"""Configuration of a deployment, as users write it: where it stores, listens, and which sites it has.

Responsible for: parsing `backup=`, `local=`, `replicas_at=`, `sites=`, `ports=`, `advertise=` and `tls=`;
    refusing configurations that cannot work or could lose state.
Not responsible for: using it (recovery/, backup/, net/).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.deployment import (
    BackupPlan,
    Manifest,
    ReplicaPlan,
)
from tiercel.runtime.net.addresses import EVERY_ADDRESS
from tiercel.runtime.net.emulated_link import Link, parse_links
from tiercel.runtime.net.tls import TlsFiles, TlsOption, parse_tls

EVERY_S = (0.01, 3_600.0)
KEEP = (1, 1_000)
READ_MB_S_MAX = 1e6


class DurabilityConfig(NamedTuple):
    """Where a deployment stores durable data, apart from its storage directory."""

    backup: BackupPlan | None = None
    local: str = ""
    replicas: ReplicaPlan | None = None
    replicas_at: dict[str, str] | None = None  # site -> the site of its replicas; None: unchanged

    @classmethod
    def of(
        cls,
        backup: str | Mapping[str, Any] | None,
        local: str | Path | None,
        durability: str = "os",
        replicas_at: Mapping[str, str] | None = None,
        sites: Collection[str] = (),
    ) -> DurabilityConfig:
        plan = parse_backup(backup)
        path = "" if local is None else str(local)
        if local is not None and not Path(path).is_absolute():
            raise UserError(f"local = {path!r}", expected="an absolute path, as /mnt/disk/tiercel")
        if path and plan is None and durability != "replica":
            raise UserError(
                "local= without backup=: the state of a lost executor would be lost",
                expected="a backup that processes are restored from elsewhere, or durability 'replica'",
                hint='tiercel.start(..., local="/mnt/disk", backup="file:///backups/app")',
            )
        return cls(plan, path, None, parse_replicas_at(replicas_at, durability, sites))

    def applied(self, manifest: Manifest, found: Manifest | None) -> Manifest:
        """The manifest with this configuration. With `local`, processes find their state in the backup.

        The sites of replicas may change from start to start: replicas always start empty.
        """
        if found is not None and (found.local or self.local):
            locations = [plan.location if plan is not None else None for plan in (found.backup, self.backup)]
            if locations[0] != locations[1]:
                raise UserError(
                    f"the deployment has its backup in {locations[0]}, and is to have it in {locations[1]}",
                    expected="the same location while local= is used: processes are restored from there",
                    hint="let it run once without local= where both can be seen",
                )
            if self.backup is None and found.local != self.local:
                raise UserError(
                    f"local = {self.local!r}, but its state is in {found.local or 'the storage'!r}",
                    expected="the same local= as before: replicas hold copies only while it runs",
                    hint="let it run once with backup= and the old local=, then with backup= and the new one",
                )
        replicas, at = self.replicas, self.replicas_at
        if replicas is not None:
            if at is None:
                at = found.replicas.at if found is not None and found.replicas is not None else {}
            replicas = msgspec.structs.replace(replicas, at=at)
        return msgspec.structs.replace(manifest, backup=self.backup, local=self.local, replicas=replicas)


def parse_replicas_at(
    replicas_at: Mapping[Any, Any] | None, durability: str, sites: Collection[str]
) -> dict[str, str] | None:
    """`{"edge-1": "cloud"}`, without sites that use their own replicas; None: unchanged."""
    if replicas_at is None:
        return None
    example = 'a site and the site of its replicas, as in {"edge-1": "cloud"}'
    if not isinstance(replicas_at, Mapping):
        raise UserError(f"replicas_at = {replicas_at!r}", expected=example)
    for site in itertools.chain.from_iterable(replicas_at.items()):
        if not isinstance(site, str) or site not in sites:
            raise UserError(
                f"replicas_at = {dict(replicas_at)!r}: unknown site {site!r}",
                expected=f"sites of this deployment: {', '.join(sites)}",
            )
    if replicas_at and durability != "replica":
        raise UserError(
            f"replicas_at = {dict(replicas_at)!r} with durability {durability!r}",
            expected="durability 'replica': only then does a deployment have replicas",
            hint='tiercel.start(..., durability="replica", replicas_at=...)',
        )
    return {site: at for site, at in replicas_at.items() if at != site}


def parse_backup(backup: str | Mapping[str, Any] | None) -> BackupPlan | None:
    """`"file:///backups/app"`, or a mapping with `location` and what differs from the defaults."""
    if backup is None:
        return None
    facts: dict[str, Any] = {"location": backup} if isinstance(backup, str) else dict(backup)
    allowed = BackupPlan.__struct_fields__
    for name in facts:
        if name not in allowed:
            raise UserError(f"backup: unknown {name!r}", expected=f"some of: {', '.join(allowed)}")
    try:
        plan = msgspec.convert(facts, BackupPlan)
    except msgspec.ValidationError as error:
        raise UserError(
            f"backup = {backup!r}: {error}", expected="a location, or a mapping with one"
        ) from error
    if not plan.location:
        raise UserError("backup: the location is empty", expected="a directory or a URL of fsspec")
    if not EVERY_S[0] <= plan.every_s <= EVERY_S[1]:
        raise UserError(
            f"backup: every_s = {plan.every_s:g}", expected=f"{EVERY_S[0]:g} to {EVERY_S[1]:g} seconds"
        )
    if not KEEP[0] <= plan.keep <= KEEP[1]:
        raise UserError(f"backup: keep = {plan.keep}", expected=f"{KEEP[0]} to {KEEP[1]} bases")
    if not 0 <= plan.read_mb_s <= READ_MB_S_MAX:
        raise UserError(
            f"backup: read_mb_s = {plan.read_mb_s:g}", expected=f"0 (no limit) to {READ_MB_S_MAX:g}"
        )
    location = plan.location
    if "://" not in location and not location.startswith("/"):
        location = str(Path(location).absolute())  # executors have other working directories
    Location(location)
    return msgspec.structs.replace(plan, location=location)


PORT_MAX = 65_535


class Listening(NamedTuple):
    """The address of every process; fixed ports and known addresses of routers."""

    bind: str
    ports: dict[str, int]
    advertise: dict[str, str]
    tls: TlsFiles | Literal[False] | None = None  # None: unchanged
    links: dict[str, Link] = {}  # noqa: RUF012 - emulated, between sites
    driver: str = ""  # its host; processes are reached at their address on the route to it

    @classmethod
    def of(
        cls,
        bind: str,
        ports: Mapping[str, int] | None,
        advertise: Mapping[str, str] | None,
        tls: TlsOption,
        sites: Mapping[str, str | None],
        links: Mapping[str, Link] | None = None,
    ) -> Listening:
        by_site = parse_ports(ports or {}, sites), parse_advertise(advertise or {}, sites)
        try:
            emulated = parse_links(links, sites)
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal
        return cls(bind, *by_site, parse_tls(tls), emulated)

    def applied(self, driver: str, found: Manifest | None) -> Listening:
        """The configuration for this driver. A deployment with TLS stays with it by default."""
        tls = self.tls
        if tls is None and found is not None and found.tls is not None:
            tls = found.tls.check()
        return self._replace(driver=driver, tls=tls or None)


def _unknown_site(where: str, site: str, sites: Mapping[str, str | None]) -> UserError:
    hint = "sites are named once, where a deployment starts: tiercel.start(spark, sites=[...])"
    return UserError(f"{where}unknown site {site!r}", expected=f"one of: {', '.join(sites)}", hint=hint)


def parse_sites(sites: Sequence[str] | Mapping[str, str | None]) -> dict[str, str | None]:
    """`["cloud", "edge-1"]`: the first is the parent of the others; or a map from site to parent."""
    if isinstance(sites, str):
        sites = [sites]
    found: dict[str, str | None] = {}
    if isinstance(sites, Mapping):
        found.update(sites)
    else:
        found.update({site: None if n == 0 else sites[0] for n, site in enumerate(sites)})
    if not found:
        raise UserError("no site was named", expected='at least one, as in sites=["cloud"]')
    for site, parent in found.items():
        if type(site) is not str or not site or set(site) & set("|@#>~/"):
            raise UserError(f"site name {site!r}", expected="a name without any of | @ # > ~ /")
        if parent is not None and parent not in found:
            raise UserError(f"the parent {parent!r} of site {site!r} is no site", expected=", ".join(found))
    if circle := circle_of(found):
        what = f"the parents of {circle[0]!r} lead in a circle: {' -> '.join(circle)}"
        raise UserError(what, expected="parents that lead to a site without one")
    return found


def circle_of(sites: Mapping[str, str | None]) -> list[str]:
    """Sites whose parents lead in a circle, the first one twice; empty: there is none."""
    for site in sites:
        seen, above = [site], sites[site]
        while above is not None:
            if above in seen:
                return [*seen[seen.index(above) :], above]
            seen.append(above)
            above = sites[above]
    return []


def parse_ports(ports: Mapping[str, int], sites: Mapping[str, str | None]) -> dict[str, int]:
    """Site -> the port where its router listens."""
    if not isinstance(ports, Mapping):
        raise UserError(f"ports = {ports!r}", expected='a port for each site, as in ports={"cloud": 7400}')
    for site, port in ports.items():
        if site not in sites:
            raise _unknown_site("ports: ", site, sites)
        if type(port) is not int or not 0 <= port <= PORT_MAX:
            raise UserError(f"port {port!r} of site {site!r}", expected=f"0 (any that is free) to {PORT_MAX}")
    return dict(ports)


def parse_advertise(addresses: Mapping[str, str], sites: Mapping[str, str | None]) -> dict[str, str]:
    """Site -> the address at which its router is reached."""
    if not isinstance(addresses, Mapping):
        raise UserError(f"advertise = {addresses!r}", expected='addresses by site: {"cloud": "10.0.0.5"}')
    for site, address in addresses.items():
        if site not in sites:
            raise _unknown_site("advertise: ", site, sites)
        if type(address) is not str or address in EVERY_ADDRESS:
            what = f"advertise: {address!r} for site {site!r}"
            raise UserError(what, expected="an address or host name that others can dial")
    return dict(addresses)
