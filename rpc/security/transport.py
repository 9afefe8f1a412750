"""Transport credentials: mutual TLS from files, for the gRPC server, its clients and the metrics listener.

Certificates are read again when their files change, so they can be renewed without a restart.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from radixpool.rpc.address import parse_address

_PRIVATE_UMASK: Final = 0o177

_log = structlog.get_logger("radixpool.security")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate chain, its private key, and the authorities that the other side must be signed by."""

    certificate: Path
    key: Path
    authorities: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of certificate, key and authorities. Raises ValueError naming the file."""
        return _read(self.certificate), _read(self.key), _read(self.authorities)

    def check(self) -> None:
        """Raise ValueError unless the files hold a certificate, its own key, and authorities."""
        self.read()
        self.server_context()

    def server_context(self) -> ssl.SSLContext:
        """Return a context for Python's own servers that demands a client certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"{self.certificate} and {self.key}: no usable certificate and key: {error}") from None
        try:
            context.load_verify_locations(self.authorities)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"{self.authorities}: no usable authorities: {error}") from None
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC credentials that demand a client certificate and follow the files. Raises ValueError."""
        self.check()
        follower = _Follower(self)
        return grpc.dynamic_ssl_server_credentials(
            follower.current, follower.changed, require_client_authentication=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials for a client. Raises ValueError."""
        certificate, key, authorities = self.read()
        return grpc.ssl_channel_credentials(authorities, key, certificate)


class _Follower:
    """Tells gRPC, which asks at every handshake, when the files have changed."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._stamps()
        self.current: Any = self._configuration()

    def changed(self) -> Any:
        """Return a new configuration when the files hold one, else None: the former stays in force."""
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            self._files.check()
            configuration = self._configuration()
        except (ValueError, OSError) as error:
            _log.error("certificates not read again; the former ones stay in force", error=str(error))
            return None
        _log.info("certificates read again", path=str(self._files.certificate))
        return configuration

    def _configuration(self) -> Any:
        certificate, key, authorities = self._files.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authorities)

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        found = (path.stat() for path in (self._files.certificate, self._files.key, self._files.authorities))
        return tuple((item.st_ino, item.st_mtime_ns) for item in found)


@contextmanager
def private_files() -> Iterator[None]:
    """Make files and sockets that are created meanwhile the owner's alone (mode 0600). Process-wide: for start-up."""
    before = os.umask(_PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def check_listen(address: str, *, secure: bool) -> None:
    """Raise ValueError when other machines can reach `address` and no mutual TLS guards it."""
    if not secure and not parse_address(address).is_local:
        raise ValueError(f"listen is {address!r}, which other machines can reach: that needs mutual TLS")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
