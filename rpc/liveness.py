"""Whether a client's process is alive, for certain, by a descriptor of the process itself (pidfd).

The descriptor is taken when the client registers, so it never names a later process with the same number. It is of use
only where the client lives under this kernel and in this process namespace; elsewhere the lease has to do.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from radixpool.v1 import cache_pb2


def own_process() -> cache_pb2.ProcessIdentity:
    """Return what a client says of itself."""
    return cache_pb2.ProcessIdentity(pid=os.getpid(), namespace=_namespace(), boot_id=_boot_id())


class ProcessWatch:
    """One process, or nothing that can be watched."""

    __slots__ = ("_fd",)

    def __init__(self, process: cache_pb2.ProcessIdentity | None = None) -> None:
        self._fd: int | None = None
        if process is not None and process.pid and _is_here(process):
            try:
                self._fd = os.pidfd_open(process.pid)
            except (OSError, OverflowError):
                self._fd = None  # gone already, not ours to see, or no number of a process: the lease has to do

    @property
    def is_certain(self) -> bool:
        """Whether the process is watched; if not, `is_dead` says nothing."""
        return self._fd is not None

    @property
    def is_dead(self) -> bool:
        """Whether the watched process has ended."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching. A second close does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_here(process: cache_pb2.ProcessIdentity) -> bool:
    return process.namespace == _namespace() != 0 and process.boot_id == _boot_id() != ""


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
