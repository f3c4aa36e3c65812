"""A site that is a Spark application of its own, among others that run the same program.

Responsible for: what this application takes from the deployment file; comparing its program with that of the
    site above it when it joins.
Not responsible for: the file itself (runtime/sites/deployment_file.py), messages between sites (core/, net/).
"""

from __future__ import annotations

import logging

import msgspec

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.sites.deployment_file import DeploymentFile
from tiercel.runtime.sites.remote import ask, differences

log = logging.getLogger(__name__)

JOIN_S_MAX = 3.0  # for an answer of the site above; without one this site starts on its own


class SiteApplication:
    """One site of a deployment file."""

    def __init__(self, file: DeploymentFile, site: str) -> None:
        file.check_site(site)
        self.file, self.site = file, site

    def join(self, deployment: DeploymentDir, manifest: Manifest) -> None:
        """Store how other sites are reached. UserError if the site above runs another program."""
        deployment.use_secret(self.file.secret)
        deployment.registry.set_elsewhere(self.file.elsewhere(self.site))
        above = self.file.sites[self.site]
        if above is not None:
            self._compare(above, manifest)

    def _compare(self, above: str, manifest: Manifest) -> None:
        try:
            reply = ask(self.file.reached[above], self.file.secret, manifest.tls, JOIN_S_MAX)
        except UserError as error:
            if "another secret" in error.what:
                raise
            log.warning("site %s starts without its parent %s: %s", self.site, above, error.what)
            return
        if reply.site != above:
            host, port = self.file.reached[above]
            what = f"the router at {host}:{port} is that of site {reply.site!r}, not {above!r}"
            raise UserError(what, expected="the address of each site in the deployment file")
        theirs = msgspec.json.decode(reply.manifest, type=Manifest)
        unequal = differences(manifest, theirs)
        if unequal:
            raise UserError(
                f"site {self.site!r} runs another program than {above!r}: {'; '.join(unequal)}",
                expected="the same streams, operators, state and settings at every site",
                hint="start the same program at both; stop all sites to change it",
            )
