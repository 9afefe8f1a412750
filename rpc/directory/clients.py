"""Who was registered when the former manager died: the clients whose GPU steps may still touch blocks.

One slot per client in the blocks file: id, role, process if it can be watched, checksum. A slot is written before the
client can hold a block and cleared after its last block came back, in whichever life of the manager that is. A slot
that is neither empty nor valid stands for a client nobody knows, which can only be waited out.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from radixpool.rpc import limits
from radixpool.rpc.directory.errors import DirectoryNoSpace
from radixpool.rpc.directory.layout import CLIENT_SLOT_BYTES
from radixpool.rpc.directory.processes import ProcessMark

_BODY = struct.Struct(f"<{limits.CLIENT_ID_BYTES}sQQ16sII")
_CRC = struct.Struct("<I")
_EMPTY = bytes(CLIENT_SLOT_BYTES)
_UNWATCHED = ProcessMark(0, 0, bytes(16), 0)


@dataclass(frozen=True, slots=True)
class KnownClient:
    """A client of the table: its role as on the wire, and its process, None for one that cannot be watched."""

    role: int
    process: ProcessMark | None


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

    def known(self) -> dict[bytes, KnownClient]:
        """Return what the table says of each client. O(clients)."""
        return {client_id: self._read(slot) for client_id, slot in self._slots.items()}

    @property
    def num_unreadable(self) -> int:
        """Slots that were torn or damaged: clients that nobody can name."""
        return len(self._unreadable)

    def add(self, client_id: bytes, client: KnownClient) -> None:
        """Record a client before it can hold anything, a known one as it is now. O(1).

        Raises DirectoryNoSpace when the table is full of others.
        """
        former = self._slots.get(client_id)
        if former is not None and self._read(former) == client:
            return
        # In a full table a known client is written over itself; torn, it is a client nobody knows.
        slot = self._free.pop() if self._free else former
        if slot is None:
            raise DirectoryNoSpace(f"client table holds at most {len(self._region) // CLIENT_SLOT_BYTES} clients")
        at = slot * CLIENT_SLOT_BYTES
        mark = client.process or _UNWATCHED
        body = _BODY.pack(client_id, mark.namespace, mark.start_ticks, mark.boot_id, mark.pid, client.role)
        self._region[at : at + len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))
        self._slots[client_id] = slot
        if former is not None and former != slot:
            self._clear(former)

    def discard(self, client_id: bytes) -> None:
        """Clear the slot of a client that holds nothing any more; an unknown one is no matter. O(1)."""
        slot = self._slots.pop(client_id, None)
        if slot is not None:
            self._clear(slot)

    def discard_unreadable(self) -> None:
        """Clear the damaged slots, once their clients were waited out."""
        while self._unreadable:
            self._clear(self._unreadable.pop())

    def _read(self, slot: int) -> KnownClient:
        _, namespace, start_ticks, boot_id, pid, role = _BODY.unpack_from(self._region, slot * CLIENT_SLOT_BYTES)
        return KnownClient(role, ProcessMark(pid, namespace, boot_id, start_ticks) if pid else None)

    def _clear(self, slot: int) -> None:
        at = slot * CLIENT_SLOT_BYTES
        self._region[at : at + CLIENT_SLOT_BYTES] = _EMPTY
        self._free.append(slot)

    def _load(self, slot: int) -> None:
        at = slot * CLIENT_SLOT_BYTES
        body = self._region[at : at + _BODY.size]
        (crc,) = _CRC.unpack_from(self._region, at + _BODY.size)
        client_id = bytes(body[: limits.CLIENT_ID_BYTES])
        if crc == zlib.crc32(body) and client_id not in self._slots:
            self._slots[client_id] = slot
        else:
            self._unreadable.append(slot)
