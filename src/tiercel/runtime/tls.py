"""TLS for connections between machines: both sides show a certificate of the deployment's authority.

Responsible for: the two contexts, and saying which file is wrong.
Not responsible for: who a peer is. That is proven with the secret (link.py), inside TLS; so
    certificates need no host names, which processes that move between machines could not keep.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

import msgspec

from tiercel.errors import UserError

log = logging.getLogger(__name__)


class _Telling(ssl.SSLObject):
    """Says why a handshake fails: event loops keep that to themselves."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning("a connection ends, TLS fails: %s", error.reason or error)
            raise


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: our certificate and its key, and the authority that signed everyone's."""

    certificate: str
    key: str
    authority: str

    def serving(self, handshake_s: float) -> dict[str, Any]:
        """Arguments of `create_server`."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return {"ssl": context, "ssl_handshake_timeout": handshake_s}

    def dialling(self, handshake_s: float) -> dict[str, Any]:
        """Arguments of `create_connection`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return {"ssl": self._loaded(context), "ssl_handshake_timeout": handshake_s}

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _Telling
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            what = f"TLS cannot use {self.certificate}, {self.key} and {self.authority}: {error}"
            raise UserError(
                what, expected="a certificate, its key, and the authority that signed it, as PEM files"
            ) from error
        return context
