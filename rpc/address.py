"""Addresses: `unix:/absolute/path` or `HOST:PORT`.

>>> parse_address("127.0.0.1:7300")
TcpAddress(host='127.0.0.1', port=7300)
>>> parse_address("unix:/run/radixpool.sock").target
'unix:/run/radixpool.sock'
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

MAX_UNIX_PATH_BYTES = 107
"""What the kernel's sockaddr_un holds, the closing zero apart."""
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket at an absolute path."""

    path: str

    @property
    def target(self) -> str:
        """The address as gRPC wants it."""
        return f"unix:{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return True


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port on a host. Port 0 lets the system choose one."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """The address as gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect; a name other than localhost counts as not."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


Address: TypeAlias = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Return the address that `text` names. Raises ValueError that says what is wrong with it."""
    if text.startswith("unix:"):
        return _parse_unix(text)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise ValueError(f"address must be unix:/path or HOST:PORT, got {text!r}")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise ValueError(f"address port must be a number from 0 to {MAX_PORT}, got {port!r}")
    return TcpAddress(host, int(port))


def _parse_unix(text: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not Path(path).is_absolute():
        raise ValueError(f"address path must be absolute, got {text!r}")
    if len(path.encode()) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"address path must be at most {MAX_UNIX_PATH_BYTES} bytes, got {len(path.encode())}")
    return UnixAddress(path)
