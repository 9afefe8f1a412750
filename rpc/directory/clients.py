"""Who was registered when the former manager died: the clients whose GPU steps may still touch blocks.

One slot per client in the blocks file: id, then a checksum. A slot is written before the client can hold a block and
cleared after its last block came back, in whichever life of the manager that is. A slot that is neither empty nor
valid stands for a client nobody knows, which can only be waited out.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from radixpool.rpc import limits
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.directory.layout import CLIENT_SLOT_BYTES

_SLOT = struct.Struct(f"<{limits.CLIENT_ID_BYTES}sI")
_EMPTY = bytes(CLIENT_SLOT_BYTES)


class ClientTable:
    """The clients that may hold blocks, kept in `region` so that the next life of the manager knows them."""

    __slots__ = ("_free", "_region", "_slots", "_unreadable")

    def __init__(self, region: memoryview) -> None:
        self._region = region
        in_use = np.frombuffer(region, dtype=np.uint8).reshape(-1, CLIENT_SLOT_BYTES).any(axis=1)
        self._slots: dict[bytes, int] = {}
        self._free: list[int] = np.flatnonzero(~in_use)[::-1].tolist()
        self._unreadable: list[int] = []
        for slot in np.flatnonzero(in_use).tolist():
            self._load(slot)

    @property
    def client_ids(self) -> frozenset[bytes]:
        """The clients in the table."""
        return frozenset(self._slots)

    @property
    def num_unreadable(self) -> int:
        """Slots that were torn or damaged: clients that nobody can name."""
        return len(self._unreadable)

    def add(self, client_id: bytes) -> None:
        """Record a client before it can hold anything; a known one stays as it is. Raises DirectoryNoSpace. O(1)."""
        if client_id in self._slots:
            return
        if not self._free:
            raise DirectoryNoSpace(f"client table holds at most {len(self._region) // CLIENT_SLOT_BYTES} clients")
        slot = self._free.pop()
        at = slot * CLIENT_SLOT_BYTES
        self._region[at : at + _SLOT.size] = _SLOT.pack(client_id, zlib.crc32(client_id))
        self._slots[client_id] = slot

    def discard(self, client_id: bytes) -> None:
        """Clear the slot of a client that holds nothing any more; an unknown one is no matter. O(1)."""
        slot = self._slots.pop(client_id, None)
        if slot is not None:
            self._clear(slot)

    def discard_unreadable(self) -> None:
        """Clear the damaged slots, once their clients were waited out."""
        while self._unreadable:
            self._clear(self._unreadable.pop())

    def _clear(self, slot: int) -> None:
        at = slot * CLIENT_SLOT_BYTES
        self._region[at : at + CLIENT_SLOT_BYTES] = _EMPTY
        self._free.append(slot)

    def _load(self, slot: int) -> None:
        client_id, crc = _SLOT.unpack_from(self._region, slot * CLIENT_SLOT_BYTES)
        if crc == zlib.crc32(client_id) and client_id not in self._slots:
            self._slots[client_id] = slot
        else:
            self._unreadable.append(slot)
