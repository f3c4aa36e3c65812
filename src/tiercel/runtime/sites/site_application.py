"""A site that is a Spark application of its own, among others that run the same program.

Responsible for: what this application takes from the deployment file; comparing its program with that of the
    site above it when it joins.
Not responsible for: the file itself (runtime/sites/deployment_file.py), messages between sites (core/, net/).
"""

from __future__ import annotations

import logging
import time

import msgspec

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest, installed_version
from tiercel.runtime.sites.deployment_file import DeploymentFile
from tiercel.runtime.sites.remote import Refused, ask, differences

log = logging.getLogger(__name__)

ALONE_S_MAX = 0.5  # for an answer of another application of this site
CLOCK_S_MAX = 30.0  # between the clocks of two sites: state expires, and timers fire, by the clock of a site
JOIN_S_MAX = 3.0  # for an answer of the site above; without one this site starts on its own


class SiteApplication:
    """One site of a deployment file."""

    def __init__(self, file: DeploymentFile, site: str) -> None:
        file.check_site(site)
        self.file, self.site = file, site

    def join(self, deployment: DeploymentDir, manifest: Manifest) -> None:
        """Store how other sites are reached. UserError if the site above runs another program."""
        self._check_alone(deployment, manifest)
        deployment.use_secret(self.file.secret)
        deployment.registry.set_elsewhere(self.file.elsewhere(self.site))
        above = self.file.sites[self.site]
        if above is not None:
            self._compare(above, manifest)

    def _check_alone(self, deployment: DeploymentDir, manifest: Manifest) -> None:
        """UserError if this site runs already, with another storage."""
        host, port = self.file.reached[self.site]
        try:
            reply = ask((host, port), self.file.secret, manifest.tls, ALONE_S_MAX)
        except UserError:
            return  # nobody is there; or a stranger, whom the router names when it cannot listen
        if reply.site == self.site and msgspec.json.decode(reply.manifest, type=Manifest).id != manifest.id:
            what = f"site {self.site!r} runs already at {host}:{port}, with another storage"
            hint = f"stop that one, or start this one on its storage instead of {deployment.directory}"
            raise UserError(what, expected="one application for each site", hint=hint)

    def _compare(self, above: str, manifest: Manifest) -> None:
        asked_s = time.time()
        try:
            reply = ask(self.file.reached[above], self.file.secret, manifest.tls, JOIN_S_MAX)
        except Refused:
            raise
        except UserError as error:
            log.warning("site %s starts without its parent %s: %s", self.site, above, error.what)
            return
        if reply.site != above:
            host, port = self.file.reached[above]
            what = f"the router at {host}:{port} is that of site {reply.site!r}, not {above!r}"
            raise UserError(what, expected="the address of each site in the deployment file")
        check_version(above, reply.version)
        check_clock(above, reply.now_ms / 1e3, asked_s, time.time())
        theirs = msgspec.json.decode(reply.manifest, type=Manifest)
        unequal = differences(manifest, theirs)
        if unequal:
            raise UserError(
                f"site {self.site!r} runs another program than {above!r}: {'; '.join(unequal)}",
                expected="the same streams, operators, state and settings at every site",
                hint="start the same program at both; stop all sites to change it",
            )


def check_version(above: str, version: str) -> None:
    """UserError if the site above has another version of this package."""
    if version != installed_version():
        what = (
            f"site {above!r} has version {version or 'unknown'}, this one {installed_version() or 'unknown'}"
        )
        raise UserError(what, expected="the same version at every site", hint="install the same one at both")


def check_clock(above: str, theirs_s: float, asked_s: float, answered_s: float) -> None:
    """UserError if the clock of the site above is too far from ours: it was read between two of our times."""
    apart_s = max(asked_s - theirs_s, theirs_s - answered_s, 0.0)
    if apart_s > CLOCK_S_MAX:
        what = f"the clock of site {above!r} is {apart_s:.0f} s {'behind' if theirs_s < asked_s else 'ahead'}"
        raise UserError(
            what,
            expected=f"clocks that are at most {CLOCK_S_MAX:g} s apart",
            hint="let a time service (NTP) set the clocks of both sites",
        )
