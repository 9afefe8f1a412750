"""Capabilities: 16 random bytes on the wire, a sequence of the cache inside.

A handle works while its owner's lease is alive, within its tenant; who knows it may use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from radixpool.radix import Sequence
from radixpool.radix.errors import UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc.errors import Draining, LimitExceeded
from radixpool.rpc.manager.leases import Lease
from radixpool.rpc.security.identity import current_tenant

_DRAW_BYTES: Final = 64 * limits.HANDLE_BYTES


class Held:
    """A live sequence, its handle, the lease it lives under, and the workers whose steps may use its blocks."""

    __slots__ = ("handle", "lease", "sequence", "workers")

    def __init__(self, handle: bytes, sequence: Sequence, lease: Lease) -> None:
        self.handle = handle
        self.sequence = sequence
        self.lease = lease
        self.workers: tuple[Lease, ...] = ()

    def used_by(self, worker: Lease) -> None:
        """Note that the steps of `worker` may use the sequence's blocks from now on."""
        if worker not in self.workers:
            self.workers = (*self.workers, worker)


class RandomBytes:
    """`os.urandom` in large draws: one system call for many handles. For one thread at a time."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0

    def __call__(self, size: int) -> bytes:
        """Return random bytes that were never returned before."""
        start = self._used
        self._used = end = start + size
        if end > len(self._drawn):
            self._drawn, start = os.urandom(max(size, _DRAW_BYTES)), 0
            self._used = end = size
        return self._drawn[start:end]


class HandleTable:
    """Every live handle, findable by the capability and by the cache's own number; no new ones while draining."""

    def __init__(self, random_bytes: Callable[[int], bytes], *, is_draining: bool = False) -> None:
        self._random_bytes = random_bytes
        self._by_handle: dict[bytes, Held] = {}
        self._by_sequence: dict[int, Held] = {}
        self.is_draining = is_draining

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._by_handle.values())

    def check_room(self, lease: Lease, count: int = 1) -> None:
        """Raise LimitExceeded when the client may not hold so many more sequences, Draining when nobody may."""
        if self.is_draining:
            raise Draining("the manager is shutting down and takes no new sequences")
        if len(lease.handles) + count > limits.MAX_SEQUENCES_PER_CLIENT:
            raise LimitExceeded(f"sequences of client {lease.name!r}: the limit is {limits.MAX_SEQUENCES_PER_CLIENT}")

    def add(self, sequence: Sequence, lease: Lease) -> Held:
        """Give a new sequence a handle. O(1)."""
        handle = self._random_bytes(limits.HANDLE_BYTES)
        held = Held(handle, sequence, lease)
        self._by_handle[handle] = self._by_sequence[sequence.handle] = held
        lease.handles[handle] = None
        return held

    def get(self, handle: bytes) -> Held:
        """Return a live sequence. Raises ValueError for a malformed handle, UnknownSequence. O(1)."""
        held = self._by_handle.get(handle)
        if held is None:
            if len(handle) != limits.HANDLE_BYTES:
                raise ValueError(f"handle must be {limits.HANDLE_BYTES} bytes, got {len(handle)}")
            raise UnknownSequence(fingerprint(handle))
        if not _is_open(held, current_tenant()):
            raise UnknownSequence(fingerprint(handle))
        return held

    def get_all(self, handles: Iterable[bytes]) -> list[Held | UnknownSequence]:
        """Return each live sequence, or the error for it. O(handles), the caller is looked at once."""
        tenant, find = current_tenant(), self._by_handle.get
        found: list[Held | UnknownSequence] = []
        for handle in handles:
            held = find(handle)
            if held is not None and _is_open(held, tenant):
                found.append(held)
            else:
                found.append(UnknownSequence(fingerprint(handle)))
        return found

    def get_by_id(self, sequence_id: int) -> Held:
        """Return a live sequence by the cache's own number. Raises UnknownSequence. O(1)."""
        held = self._by_sequence.get(sequence_id)
        if held is None:
            raise UnknownSequence(sequence_id)
        return held

    def remove(self, held: Held) -> None:
        """Forget a handle. O(1)."""
        del self._by_handle[held.handle]
        del self._by_sequence[held.sequence.handle]
        held.lease.handles.pop(held.handle, None)

    def take_one(self, lease: Lease) -> Held | None:
        """Forget the oldest handle of a lease and return what it named, None when there is none left. O(1)."""
        handle = next(iter(lease.handles), None)
        if handle is None:
            return None
        held = self._by_handle[handle]
        self.remove(held)
        return held


def _is_open(held: Held, tenant: str | None) -> bool:
    """Whether a caller of `tenant` may use it: a handle of another tenant is answered like one that never was."""
    return held.lease.alive and (tenant is None or held.sequence.namespace.tenant == tenant)


def fingerprint(handle: bytes) -> str:
    """Return the part of a handle that may be shown: enough to tell two apart, not enough to use one."""
    return f"{handle[:4].hex()}…"
