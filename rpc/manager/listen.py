"""Taking an address for oneself alone, and giving it back.

gRPC would let a second server share a TCP port (SO_REUSEPORT) and would silently replace a unix socket that another
server listens on. So the port option is off, and a unix socket is guarded by a lock on a file beside it, which the
kernel gives back when the process ends in whatever way.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from radixpool.rpc import limits
from radixpool.rpc.address import Address, TcpAddress, UnixAddress, parse_address
from radixpool.rpc.errors import AddressInUse, AddressUnavailable

_log = logging.getLogger(__name__)
_PRIVATE_UMASK: Final = 0o177
"""Sockets and lock files are for the owner alone: mode 0600."""


def room_for_connections(wanted: int) -> int:
    """Allow this process the open files for `wanted` connections and return for how many there is room."""
    needed = wanted + limits.RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, min(wanted, soft - limits.RESERVED_FILES))
    if room < wanted:
        _log.warning("there is room for %d connections, not %d: only %d files may be open", room, wanted, soft)
    return room


class Listener:
    """An address that a gRPC server listens on. `address` has the port that the system chose."""

    def __init__(self, requested: str) -> None:
        self._requested = parse_address(requested)
        self._lock_fd: int | None = None
        self.address = requested

    def bind(self, server: grpc.Server, credentials: grpc.ServerCredentials | None = None) -> None:
        """Make `server` listen. Raises AddressInUse, AddressUnavailable."""
        if isinstance(self._requested, UnixAddress):
            _require_room(Path(self._requested.path))
            self._lock_fd = _lock(Path(f"{self._requested.path}.lock"))
        else:
            _probe(self._requested)
        try:
            with _private_files():
                port = _add_port(server, self._requested, credentials)
        except RuntimeError as error:
            self._unlock()
            raise AddressUnavailable(f"cannot listen on {self._requested.target}: {error}") from None
        if isinstance(self._requested, TcpAddress):
            self.address = TcpAddress(self._requested.host, port).target

    def close(self) -> None:
        """Remove the socket and its lock file. A second close does nothing."""
        if self._lock_fd is not None and isinstance(self._requested, UnixAddress):
            Path(self._requested.path).unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is None or not isinstance(self._requested, UnixAddress):
            return
        # Removed while still locked: whoever waits for this very file notices and takes the new one.
        Path(f"{self._requested.path}.lock").unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = None


def _add_port(server: grpc.Server, address: Address, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address.target)
    return server.add_secure_port(address.target, credentials)


def _require_room(path: Path) -> None:
    """Raise AddressUnavailable where something else than a socket lies: gRPC would only say that it cannot bind."""
    if path.exists() and not path.is_socket():
        raise AddressUnavailable(f"cannot listen on unix:{path}: it exists and is not a socket")


def _lock(path: Path) -> int:
    """Return the descriptor of the locked file. Raises AddressInUse, AddressUnavailable."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressUnavailable(f"cannot listen beside {path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise AddressInUse(f"another manager serves unix:{str(path).removesuffix('.lock')}") from None
        if _names(path, fd):
            return fd
        os.close(fd)  # its last owner removed the file just now


def _names(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _probe(address: TcpAddress) -> None:
    """Raise what a plain bind says, because gRPC's own error does not."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"another process serves {address.target}") from None
        raise AddressUnavailable(f"cannot listen on {address.target}: {error.strerror}") from None


@contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(_PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)
