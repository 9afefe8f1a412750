"""Which process a client was, so that a later life of the manager can tell for certain that it has ended."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_GONE_STATES: Final = frozenset("ZX")  # a zombie has given its memory and its GPU contexts back
_STOPPED_STATES: Final = frozenset("TtD")
_STAT_BYTES: Final = 4096
_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat, counted after the name


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process of one machine's life. `start_ticks` tells it from a later process with the same number.

    Attributes:
        pid: its number in its process namespace.
        namespace: inode of that namespace.
        boot_id: the life of the machine, 16 bytes.
        start_ticks: when it started, in clock ticks after the machine's start.

    """

    pid: int
    namespace: int
    boot_id: bytes
    start_ticks: int

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended for certain; False also where this process cannot see."""
        if self.boot_id != own_boot_id():
            return bool(own_boot_id())
        if self.namespace != own_namespace():
            return False
        started = _start_ticks(self.pid)
        return not _is_hidden(self.pid) if started is None else started != self.start_ticks

    @property
    def is_stopped(self) -> bool:
        """Whether the process is there and held up (SIGSTOP, a debugger, a device), as far as this process can see."""
        here = self.boot_id == own_boot_id() and self.namespace == own_namespace()
        fields = _stat_fields(self.pid) if here else None
        return fields is not None and fields[_STATE_FIELD] in _STOPPED_STATES and _start_of(fields) == self.start_ticks


def mark_process(pid: int, *, namespace: int, boot_id: str) -> ProcessMark | None:
    """Return the mark of a process that says this of itself, None where this process cannot watch it."""
    boot = _parse_boot_id(boot_id)
    if not pid or not boot or boot != own_boot_id() or namespace != own_namespace():
        return None
    start_ticks = _start_ticks(pid)
    return None if start_ticks is None else ProcessMark(pid, namespace, boot, start_ticks)


def _is_hidden(pid: int) -> bool:
    """Whether a process exists although its /proc entry cannot be read (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path(f"/proc/{pid}/stat").exists()


@cache
def own_namespace() -> int:
    """Return the inode of this process's own process namespace, 0 where it cannot be known."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


@cache
def own_boot_id() -> bytes:
    """Return the 16 bytes that name this life of the machine, empty where it cannot be known."""
    try:
        return _parse_boot_id(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    except OSError:
        return b""


def _parse_boot_id(text: str) -> bytes:
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        return b""


def _start_ticks(pid: int) -> int | None:
    """Return when a running process started, None when there is none."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[_STATE_FIELD] in _GONE_STATES else _start_of(fields)


def _start_of(fields: list[str]) -> int:
    return int(fields[_START_FIELD])


def _stat_fields(pid: int) -> list[str] | None:
    """Return what /proc/PID/stat says after the name, None when there is no such process."""
    try:
        # Read without a file object, in a third of the time: a restarted manager looks at many processes.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.read(descriptor, _STAT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return stat.decode("utf-8", errors="replace").rpartition(")")[2].split()
