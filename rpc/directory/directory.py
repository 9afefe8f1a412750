"""The block directory: the cache's contents in a memory-mapped file, so that they outlive the manager's process.

Every method of the `Persistence` part is called by the cache before the change it describes, stores with one or two
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
from radixpool.rpc.directory.runs import RunWriter
from radixpool.rpc.directory.scan import ScanResult, scan_records
from radixpool.rpc.failpoints import failpoint

_FREE: Final = int(BlockRecordState.FREE)
_PRIVATE: Final = int(BlockRecordState.PRIVATE)
_COMMITTED: Final = int(BlockRecordState.COMMITTED)
_LAST_USE_QUAD: Final = layout.LAST_USE // 2
_SERIAL_QUAD: Final = layout.SERIAL // 2
_FEW_BLOCK_BYTES: Final = 4 * 8
"""Up to so many block ids are marked one by one, which takes less time than making an array of them."""

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
        records = memoryview(files.map)[layout.RECORDS_OFFSET :]
        self._row_words, self._row_quads = words, words // 2
        self._flat_words, self._quads = records.cast("I"), records.cast("Q")
        self._checksum = RowChecksum(files.seed, words, left_out=layout.UNCHECKED)
        self._clients_region = memoryview(files.map)[layout.HEADER_BYTES : layout.RECORDS_OFFSET]
        self.clients = ClientTable(self._clients_region)
        self._runs = RunWriter(self._words, self._checksum, geometry.block_size)
        self._last_serial = 0  # not known until the first scan or store
        self._wants_compaction = False
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
            scan = scan_records(self._words, self._checksum, self._files.interned.by_number, self.geometry)
        self._last_serial = max(self._last_serial, scan.last_serial)
        return scan

    def clear(self) -> None:
        """Make every block free: the bytes that the records describe are gone. O(num_blocks), one vectorised store."""
        self._states[:] = _FREE

    # --- Persistence

    def prepare(self, namespace: Namespace, media: bytes = b"") -> None:
        """Give the keys their numbers. O(1) for known ones; raises DirectoryNoSpace for new ones on a full disk."""
        if namespace not in self._namespace_numbers:
            self._number_of(namespace)
        if media:
            self._files.interned.number_of(media)
            self._wants_compaction = self._files.interned.wants_compaction

    def handed_out(self, blocks: BlockIds) -> None:
        """Note that `blocks`, free or just evicted, become private. O(len(blocks)).

        Writes the key log anew when it has doubled, O(num_blocks): here, because no commit is under way here whose
        keys were prepared and are not yet named by a record.
        """
        self._mark(blocks, _PRIVATE)
        _HANDED_OUT()
        if self._wants_compaction:
            self._compact()

    def removed(self, blocks: BlockIds) -> None:
        """Clear the records of `blocks`, which leave the tree but are held. O(len(blocks))."""
        self._mark(blocks, _PRIVATE)
        _REMOVED()

    def returned(self, blocks: BlockIds) -> None:
        """Clear the records of `blocks`, which become free. O(len(blocks))."""
        self._mark(blocks, _FREE)
        _RETURNED()

    def touched(self, block: int, last_use: int) -> None:
        """Note the last use of a path in the record of its deepest block. O(1)."""
        self._quads[block * self._row_quads + _LAST_USE_QUAD] = last_use

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
        if blocks.__class__ is not bytes:
            blocks = np.asarray(blocks, dtype="<i4").tobytes()
        serial = self._last_serial = (self._last_serial or self.scan().last_serial) + 1
        self._runs.store(
            blocks,
            tokens,
            parent=parent,
            parent_serial=self._quads[parent * self._row_quads + _SERIAL_QUAD] if parent >= 0 else 0,
            position=position,
            serial=serial,
            namespace=self._namespace_numbers.get(namespace) or self._number_of(namespace),
            media=self._files.interned.number_of(media) if media else NO_KEY,
            last_use=last_use,
        )

    def _mark(self, blocks: BlockIds, state: int) -> None:
        """Store the state word of each block."""
        if blocks.__class__ is not bytes:
            self._states[np.asarray(blocks, dtype=np.int64)] = state
        elif len(blocks) <= _FEW_BLOCK_BYTES:
            words, row_words = self._flat_words, self._row_words
            for block in memoryview(blocks).cast("i"):
                words[block * row_words] = state
        else:  # numpy indexes with 64-bit integers several times faster than with any others
            self._states[np.frombuffer(blocks, dtype="<i4").astype(np.int64)] = state

    def _number_of(self, namespace: Namespace) -> int:
        number = self._namespace_numbers[namespace] = self._files.interned.number_of(namespace.encode())
        self._wants_compaction = self._files.interned.wants_compaction
        return number

    def _compact(self) -> None:
        committed = self._states == _COMMITTED
        columns = self._words[:, (layout.NAMESPACE, layout.MEDIA)][committed]
        live = set(np.unique(columns).tolist()) - {NO_KEY}
        self._files.interned.compact(live)
        self._wants_compaction = False
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
        self._words = self._states = nothing
        self._runs.close()
        self._flat_words.release()
        self._quads.release()
        self._clients_region.release()
        self._files.close()
