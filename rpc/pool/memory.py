"""Anonymous shared memory (memfd) that travels between processes as a file descriptor.

A memfd has no name in any file system, so nothing can stay behind: the kernel frees the pages when the last process
that maps them is gone, killed or not. It is sealed against resizing before it is shown to anybody, so no attached
process can shrink it under another's feet (which would be a SIGBUS there).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from radixpool.radix.errors import RadixPoolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolMemoryError(RadixPoolError):
    """The memory of a pool cannot be had or is not what was promised."""


def create_memfd(size_bytes: int, available_bytes: int | None = None) -> int:
    """Return the descriptor of a new sealed memfd of `size_bytes` zero bytes; pages are taken when first touched.

    Refuses a size beyond `available_bytes` (by default what this machine and container could give now): touching such a
    pool would end in the OOM killer long after the start. Raises `PoolMemoryError`.
    """
    if available_bytes is None:
        available_bytes = available_memory_bytes()
    if size_bytes > available_bytes:
        raise PoolMemoryError(
            f"the pool needs {_gib(size_bytes)}, but only {_gib(available_bytes)} of memory are available; "
            "use fewer blocks (num_blocks) or a smaller dtype"
        )
    descriptor = os.memfd_create("radixpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise PoolMemoryError(f"cannot make a pool of {_gib(size_bytes)}: {error}") from error
    return descriptor


def map_memfd(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a sealed memfd of exactly `size_bytes`, readable and writable. The caller keeps the descriptor.

    Raises `PoolMemoryError` if it has another size or could still be resized.
    """
    actual = os.fstat(descriptor).st_size
    if actual != size_bytes:
        raise PoolMemoryError(f"the pool's memory has {actual} bytes, expected {size_bytes}")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PoolMemoryError("the pool's memory is not a memfd that can be sealed") from error
    if seals & _SEALS != _SEALS:
        raise PoolMemoryError("the pool's memory is not sealed against resizing")
    return mmap.mmap(descriptor, size_bytes)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return how much memory could be taken here: the machine's MemAvailable, or less in a limited cgroup (v2)."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise PoolMemoryError("MemAvailable is missing in /proc/meminfo")
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
