"""TLS for connections between machines: both sides show a certificate of the deployment's authority.

Responsible for: the `tls=` option, the two TLS contexts, errors that name the wrong file.
Not responsible for: the identity of a peer. The secret proves it inside TLS (connection.py), so certificates
    need no host names, which processes that move between machines could not keep.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tiercel.errors import UserError

log = logging.getLogger(__name__)

HANDSHAKE_TURNS = 4  # of a trial: hello, certificate, certificate, end

TlsOption = Mapping[str, str | Path] | Literal[False] | None  # files; False: no TLS; None: unchanged


class _LoggedHandshake(ssl.SSLObject):
    """Logs why a handshake fails, which event loops do not."""

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

    def server_options(self, handshake_s: float) -> dict[str, Any]:
        """Arguments of `create_server`."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return {"ssl": context, "ssl_handshake_timeout": handshake_s}

    def client_options(self, handshake_s: float) -> dict[str, Any]:
        """Arguments of `create_connection`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return {"ssl": self._loaded(context), "ssl_handshake_timeout": handshake_s}

    def check(self) -> TlsFiles:
        """Check that the files exist and fit together, with a handshake between two ends in memory."""
        for name, path in msgspec.structs.asdict(self).items():
            try:
                Path(path).read_bytes()
            except OSError as error:
                what = f"tls: {name} = {path!r} cannot be read: {error.strerror}"
                raise UserError(what, expected="a PEM file that every machine has", hint=_HINT) from error
        contexts = (self.server_options(0)["ssl"], self.client_options(0)["ssl"])
        ways = (ssl.MemoryBIO(), ssl.MemoryBIO())
        ends = []
        for context, incoming, outgoing in zip(contexts, ways, reversed(ways), strict=True):
            context.sslobject_class = ssl.SSLObject  # the error below gives the reason
            ends.append(context.wrap_bio(incoming, outgoing, server_side=context is contexts[0]))
        try:
            for _ in range(HANDSHAKE_TURNS):
                for end in ends:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as error:
            what = f"tls: a peer with {self.authority} would not accept {self.certificate}: "
            what += getattr(error, "verify_message", "") or error.reason or str(error)
            expected = (
                "a certificate that this authority has signed, for clients and servers, and that is valid now"
            )
            raise UserError(what, expected=expected, hint=_HINT) from error
        return self

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _LoggedHandshake
        try:
            context.load_cert_chain(
                self.certificate, self.key, password=""
            )  # there is no one to ask for a passphrase
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            what = f"TLS cannot use {self.certificate}, {self.key} and {self.authority}: {error}"
            expected = (
                "a certificate, its key without a passphrase, and the authority that signed it, as PEM files"
            )
            raise UserError(what, expected=expected, hint=_HINT) from error
        return context


_HINT = "docs/guide.md, Encrypted connections, has the commands that make all three"


def parse_tls(tls: TlsOption) -> TlsFiles | Literal[False] | None:
    """A mapping with three paths, checked; False: no TLS; None: unchanged."""
    if tls is None or tls is False:
        return tls
    names = TlsFiles.__struct_fields__
    expected = f"a mapping with {', '.join(names)}"
    if not isinstance(tls, Mapping):
        raise UserError(f"tls = {tls!r}", expected=f"{expected}; or False", hint=_HINT)
    for name in tls:
        if name not in names:
            raise UserError(f"tls: unknown {name!r}", expected=expected, hint=_HINT)
    for name in names:
        if name not in tls:
            raise UserError(f"tls: there is no {name!r}", expected=expected, hint=_HINT)
        if type(tls[name]) is not str and not isinstance(tls[name], Path):
            raise UserError(f"tls: {name} = {tls[name]!r}", expected="the path of a PEM file", hint=_HINT)
    paths = {
        name: str(Path(path).absolute()) for name, path in tls.items()
    }  # tasks have other working directories
    return TlsFiles(**paths).check()
