"""The block directory: the cache's contents in a memory-mapped file, so that they outlive the manager's process.

Every method of the `Persistence` part is called by the cache before the change it describes, stores with a few
vectorised writes, and orders them so that a kill between any two leaves a record that is either valid and true or not
valid: a record's body goes first and its state word last, and clearing starts with the state word.

One thread owns a directory, the one that owns the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from radixpool.radix.errors import InvariantViolation
from radixpool.radix.namespace import Namespace
from radixpool.radix.persistence import BlockIds
from radixpool.radix.restore import ORPHAN
from radixpool.rpc.directory import layout
from radixpool.rpc.directory.checksum import RowChecksum
from radixpool.rpc.directory.clients import ClientTable
from radixpool.rpc.directory.file import OpenFiles, naming, open_files
from radixpool.rpc.directory.interned import NO_KEY
from radixpool.rpc.directory.layout import BlockRecordState, Geometry
from radixpool.rpc.directory.scan import ScanResult, scan_records, wide
from radixpool.rpc.failpoints import failpoint

_FREE: Final = int(BlockRecordState.FREE)
_PRIVATE: Final = int(BlockRecordState.PRIVATE)
_COMMITTED: Final = int(BlockRecordState.COMMITTED)
_ONE: Final = np.uint32(1)
_CHUNK_BLOCKS: Final = 1024
"""Rows that are put together at once; a longer run is stored in pieces, each of which is a whole prefix."""

_STORE_BEGUN = failpoint("directory.store.begun")
_BODIES_STORED = failpoint("directory.store.bodies")
_STATES_STORED = failpoint("directory.store.states")
_HANDED_OUT = failpoint("directory.handed_out")
_RETURNED = failpoint("directory.returned")
_REMOVED = failpoint("directory.removed")


class BlockDirectory:
    """Keep one record per block, as `radixpool.radix.persistence.Persistence`.

    Make one with `open`; then `scan` what the former life left, before anything is stored.

    Attributes:
        geometry: number and size of the blocks.
        clients: the clients that may hold blocks.
        started_empty_because: why nothing of a former life could be used, None when it could.

    """

    def __init__(self, files: OpenFiles, geometry: Geometry) -> None:
        self._files = files
        self.geometry = geometry
        self.started_empty_because = files.started_empty_because
        self._life = files.life
        self._life_writes = files.life_writes
        words = geometry.record_words
        self._words: npt.NDArray[np.uint32] = np.frombuffer(
            files.map, dtype="<u4", count=geometry.num_blocks * words, offset=layout.RECORDS_OFFSET
        ).reshape(geometry.num_blocks, words)
        self._states = self._words[:, layout.STATE]
        self._generations = self._words[:, layout.GENERATION]
        self._last_uses = wide(self._words, layout.LAST_USE)
        self._checksum = RowChecksum(files.seed, words, left_out=layout.UNCHECKED)
        self._clients_region = memoryview(files.map)[layout.HEADER_BYTES : layout.RECORDS_OFFSET]
        self.clients = ClientTable(self._clients_region)
        self._rows = np.zeros((min(_CHUNK_BLOCKS, geometry.num_blocks), words), dtype=np.uint32)
        self._first_row = self._rows[0]
        self._row_checksums = wide(self._rows, layout.CHECKSUM)
        self._fields = np.zeros(layout.TOKENS, dtype=np.uint32)
        self._fields[layout.STATE] = _PRIVATE
        self._fields[layout.PARENT] = layout.NO_PARENT
        self._field_last_use = self._fields[layout.LAST_USE : layout.LAST_USE + 2].view("<u8")
        self._namespace_numbers: dict[Namespace, int] = {}
        self._closed = False

    @classmethod
    def open(cls, path: Path, *, num_blocks: int, block_size: int, incarnation: int = 1) -> Self:
        """Open the directory at `path` and begin its next incarnation, whose number is at least `incarnation`.

        A missing directory is made; one of another geometry is replaced by an empty one, and says why in
        `started_empty_because`. Raises DirectoryInUse, DirectoryDamaged and DirectoryNoSpace, leaving all as it was.
        """
        geometry = Geometry(num_blocks=num_blocks, block_size=block_size)
        files = open_files(path, geometry)
        directory = cls(files, geometry)
        directory._set_life(incarnation=max(files.life.incarnation + 1, incarnation))
        return directory

    # --- lives

    @property
    def incarnation(self) -> int:
        """The number of this life of the manager, greater than that of every earlier one with this directory."""
        return self._life.incarnation

    @property
    def generation(self) -> int:
        """The generation that the contents belong to, as last told by `set_generation`."""
        return self._life.generation

    @property
    def pool_id(self) -> bytes:
        """The physical pool that the records describe, `layout.NO_POOL` when none was registered yet."""
        return self._life.pool_id

    def set_pool(self, pool_id: bytes) -> None:
        """Note the pool that is used from now on. Whatever another pool held must have been removed before."""
        self._set_life(pool_id=pool_id)

    def set_generation(self, generation: int) -> None:
        """Note the generation that begins now."""
        self._set_life(generation=generation)

    @property
    def lease_ttl_ms(self) -> int:
        """The longest lease that a client in the table may have, as last told by `set_lease_ttl_ms`."""
        return self._life.lease_ttl_ms

    def set_lease_ttl_ms(self, lease_ttl_ms: int) -> None:
        """Note how long the clients in the table may go on without a word."""
        self._set_life(lease_ttl_ms=lease_ttl_ms)

    def _set_life(self, **changes: Any) -> None:
        """Write both slots in turn: a torn one leaves the other, and a later damage brings nothing old back."""
        self._life = replace(self._life, **changes)
        for _ in range(2):
            self._life_writes += 1
            offset, slot = layout.life_slot(self._life, self._life_writes)
            self._files.map[offset : offset + len(slot)] = slot

    def scan(self) -> ScanResult:
        """Return what the records hold. O(num_blocks), vectorised. Raises DirectoryDamaged."""
        with naming(self._files.path):
            return scan_records(self._words, self._checksum, self._files.interned.by_number, self.geometry)

    def clear(self) -> None:
        """Make every block free: the bytes that the records describe are gone. O(num_blocks), one vectorised store."""
        self._states[:] = _FREE

    # --- Persistence

    def prepare(self, namespace: Namespace, media: bytes = b"") -> None:
        """Give the keys their numbers. O(1) for known ones; raises DirectoryNoSpace for new ones on a full disk."""
        self._number_of(namespace)
        if media:
            self._files.interned.number_of(media)

    def handed_out(self, blocks: BlockIds) -> None:
        """Note that free `blocks` become private. O(len(blocks)), one vectorised store.

        Writes the key log anew when it has doubled, O(num_blocks): here, because no commit is under way here whose
        keys were prepared and are not yet named by a record.
        """
        self._states[_ids(blocks)] = _PRIVATE
        _HANDED_OUT()
        if self._files.interned.wants_compaction:
            self._compact()

    def removed(self, blocks: BlockIds) -> None:
        """Clear the records of `blocks`, which leave the tree but are held. O(len(blocks)), one vectorised store."""
        self._states[_ids(blocks)] = _PRIVATE
        _REMOVED()

    def returned(self, blocks: BlockIds) -> None:
        """Clear the records of `blocks`, which become free. O(len(blocks)), one vectorised store."""
        self._states[_ids(blocks)] = _FREE
        _RETURNED()

    def touched(self, block: int, last_use: int) -> None:
        """Note the last use of a path in the record of its deepest block. O(1)."""
        self._last_uses[block] = last_use

    def stored(
        self,
        blocks: BlockIds,
        tokens: bytes,
        *,
        parent: int,
        position: int,
        namespace: Namespace,
        last_use: int,
        media: bytes = b"",
    ) -> None:
        """Record a run of blocks that is about to become findable, under prepared keys. O(len(blocks))."""
        ids = _ids(blocks)
        token_rows = np.frombuffer(tokens, dtype="<u4").reshape(len(ids), self.geometry.block_size)
        fields = self._fields
        fields[layout.NAMESPACE] = self._number_of(namespace)
        fields[layout.MEDIA] = self._files.interned.number_of(media) if media else NO_KEY
        self._field_last_use[0] = last_use
        for start in range(0, len(ids), _CHUNK_BLOCKS):
            piece = ids[start : start + _CHUNK_BLOCKS]
            self._store(piece, token_rows[start : start + _CHUNK_BLOCKS], parent=parent, position=position + start)
            parent = int(piece[-1])

    def _store(self, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.uint32], *, parent: int, position: int) -> None:
        """Put the rows of one piece together, store them, then their states: a kill between leaves private blocks."""
        n = len(ids)
        _STORE_BEGUN()
        rows = self._rows[:n]
        rows[:, : layout.TOKENS] = self._fields
        rows[:, layout.TOKENS : layout.TOKENS + self.geometry.block_size] = tokens
        rows[:, layout.BLOCK] = ids
        rows[:, layout.POSITION] = np.arange(position, position + n)
        generations = self._generations[ids]
        generations += _ONE  # wraps after 2**32 commits of one block
        rows[:, layout.GENERATION] = generations
        rows[1:, layout.PARENT] = ids[:-1]
        rows[1:, layout.PARENT_GENERATION] = generations[:-1]
        if parent >= 0:
            self._first_row[layout.PARENT] = parent
            self._first_row[layout.PARENT_GENERATION] = self._generations[parent]
        self._row_checksums[:n] = self._checksum.of(rows)
        self._words[ids] = rows
        _BODIES_STORED()
        self._states[ids] = _COMMITTED
        _STATES_STORED()

    def _number_of(self, namespace: Namespace) -> int:
        number = self._namespace_numbers.get(namespace)
        if number is None:
            number = self._namespace_numbers[namespace] = self._files.interned.number_of(namespace.encode())
        return number

    def _compact(self) -> None:
        committed = self._states == _COMMITTED
        columns = self._words[:, (layout.NAMESPACE, layout.MEDIA)][committed]
        live = set(np.unique(columns).tolist()) - {NO_KEY}
        self._files.interned.compact(live)
        self._namespace_numbers.clear()

    # --- the directory itself

    def check(self, *, findable: Sequence[int] | None = None) -> None:
        """Prove that every committed record is whole and linked to a whole parent, and is of a `findable` block.

        Raises InvariantViolation naming the first blocks that are not. O(num_blocks).
        """
        scan = self.scan()
        if scan.torn.size:
            raise InvariantViolation(f"directory: {scan.torn.size} records are torn: {scan.torn[:8].tolist()}…")
        orphans = scan.loose.blocks[scan.loose.parents == ORPHAN]
        if orphans.size:
            raise InvariantViolation(f"directory: {orphans.size} records have no parent: {orphans[:8].tolist()}…")
        if findable is not None:
            wrong = np.setxor1d(scan.loose.blocks, findable)
            if wrong.size:
                raise InvariantViolation(
                    f"directory: {wrong.size} blocks are not as in the tree: {wrong[:8].tolist()}…"
                )

    def close(self) -> None:
        """Unmap and unlock; idempotent. The records stay for the next life."""
        if self._closed:
            return
        self._closed = True
        nothing = np.empty((0, self.geometry.record_words), dtype=np.uint32)
        self._words = self._states = self._generations = nothing
        self._last_uses = np.empty(0, dtype=np.uint64)
        self._clients_region.release()
        self._files.close()


def _ids(blocks: BlockIds) -> npt.NDArray[np.int64]:
    """Return block ids as the integers that numpy indexes with fastest."""
    if isinstance(blocks, bytes):
        return np.frombuffer(blocks, dtype="<i4").astype(np.int64)
    return np.asarray(blocks, dtype=np.int64)
