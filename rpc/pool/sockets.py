"""Hand a file descriptor to other processes of the same user over a unix socket.

An address that begins with "@" is in Linux's abstract namespace, which is part of no file system: nothing is left when
the process is killed. A path is for workers in another network namespace; a stale one is replaced at the next start.
Whoever connects is checked by the kernel's word for its user id, not by what it says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from pathlib import Path

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.errors import AddressInUse, AddressUnavailable
from radixpool.rpc.failpoints import failpoint

_MAX_PATH_BYTES = 107
_PEER_CREDENTIALS = struct.Struct("3i")
_REPLY_BYTES = 16
_RECEIVE_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.1

_HANDING_OUT = failpoint("holder.handing_out")


class DescriptorRefused(RadixPoolError):
    """The holder's socket is gone, belongs to another user, or answered with something else than a descriptor."""


class DescriptorServer:
    """Give one descriptor, with a 16-byte tag, to every connection of this user until closed.

    Invariant: the descriptor stays the caller's; closing the server does not close it.
    Raises AddressInUse or AddressUnavailable when it cannot listen at `address`, ValueError for one that is too long.
    """

    def __init__(self, address: str, descriptor: int, *, tag: bytes) -> None:
        if len(tag) != _REPLY_BYTES:
            raise ValueError(f"tag must have {_REPLY_BYTES} bytes, got {len(tag)}")
        self._address = address
        self._descriptor = descriptor
        self._tag = tag
        self._socket = _listen(address)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="radixpool-descriptors", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address to pass to `receive_descriptor`."""
        return self._address

    def close(self) -> None:
        """Stop serving and remove the socket's path. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        if not self._address.startswith("@"):
            Path(self._address).unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or short of descriptors for the moment
                self._closed.wait(_ACCEPT_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):  # a peer that hangs up harms only itself
                if _peer_uid(connection) in (os.geteuid(), 0):
                    _HANDING_OUT()
                    socket.send_fds(connection, [self._tag], [self._descriptor])


def receive_descriptor(address: str, *, tag: bytes) -> int:
    """Connect to a `DescriptorServer` and return the descriptor it hands out; the caller closes it.

    Raises `DescriptorRefused` when nobody serves there, the server runs as another user, or its tag is not `tag`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_RECEIVE_TIMEOUT_S)
        try:
            connection.connect(_native(address))
            if _peer_uid(connection) not in (os.geteuid(), 0):
                raise DescriptorRefused(f"the pool's socket {address} belongs to another user")
            received, descriptors, _, _ = socket.recv_fds(connection, _REPLY_BYTES, 1)
        except OSError as error:
            raise DescriptorRefused(f"cannot get the pool from {address}: {error}") from error
    if received == tag and len(descriptors) == 1:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    reason = "hands out another pool" if descriptors else "refused"
    raise DescriptorRefused(f"the pool's socket {address} {reason}")


def _listen(address: str) -> socket.socket:
    native = _native(address)
    if len(os.fsencode(address)) > _MAX_PATH_BYTES:
        raise ValueError(f"socket address has {len(os.fsencode(address))} bytes, at most {_MAX_PATH_BYTES}: {address}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not address.startswith("@"):
            remove_stale_socket(address)
            Path(address).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener.bind(native)
        if not address.startswith("@"):
            Path(address).chmod(0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        kind = AddressInUse if error.errno == errno.EADDRINUSE else AddressUnavailable
        raise kind(f"cannot hand out the pool at {address}: {error.strerror}") from None
    except BaseException:
        listener.close()
        raise
    return listener


def remove_stale_socket(path: str) -> None:
    """Remove a unix socket that a killed process left. Raises AddressInUse, AddressUnavailable for another file."""
    if not Path(path).exists():
        return
    if not Path(path).is_socket():
        raise AddressUnavailable(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise AddressInUse(f"another process serves {path}")
    Path(path).unlink(missing_ok=True)


def _native(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(credentials)[1]
    return uid
