"""Read the records that a former life of the manager left, vectorised: 1,000,000 of them in a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from radixpool.radix.namespace import Namespace
from radixpool.radix.restore import ORPHAN, ROOT, LooseBlocks
from radixpool.rpc.directory import layout
from radixpool.rpc.directory.checksum import RowChecksum
from radixpool.rpc.directory.errors import DirectoryDamaged
from radixpool.rpc.directory.interned import NO_KEY
from radixpool.rpc.directory.layout import NO_PARENT, BlockRecordState, Geometry
from radixpool.rpc.directory.runs import whole_rows, wide

_CHUNK_BLOCKS: Final = 16_384
"""Rows looked at together: a chunk and what is computed from it fit into the processor's cache."""
_FIELDS: Final = (
    layout.PARENT,
    layout.NAMESPACE,
    layout.START,
    layout.INDEX,
    layout.MEDIA,
)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What the records say.

    Attributes:
        loose: the blocks with valid records, in order of block id. A block whose parent's record is missing, invalid or
            of another store is an orphan.
        keys: the namespaces (encoded) and media keys behind the numbers.
        private: blocks that a sequence of the former life may have been writing to, int32.
        torn: blocks whose record is neither valid nor says that the block was free or private, int32.
        last_serial: the highest serial of a valid record, 0 without any. A record that names a parent's serial has
            itself one at least as high, so that the numbers after this one are named by nobody.

    """

    loose: LooseBlocks
    keys: Mapping[int, bytes]
    private: npt.NDArray[np.int32]
    torn: npt.NDArray[np.int32]
    last_serial: int

    def namespaces(self) -> dict[int, Namespace]:
        """Return the namespaces of the valid records by number. O(n)."""
        return {number: decode_namespace(self.keys[number]) for number in np.unique(self.loose.namespaces).tolist()}


def decode_namespace(encoded: bytes) -> Namespace:
    """Return the namespace of `Namespace.encode`.

    >>> decode_namespace(Namespace(tenant="a", adapter_generation=3).encode()).tenant
    'a'
    """
    values: list[str] = []
    at = 0
    while at < len(encoded):
        end = at + 4 + int.from_bytes(encoded[at : at + 4], "little")
        values.append(encoded[at + 4 : end].decode())
        at = end
    model, revision, adapter, adapter_generation, tenant, cache_salt = values
    return Namespace(model, revision, adapter, int(adapter_generation), tenant, cache_salt)


def scan_records(
    words: npt.NDArray[np.uint32], checksum: RowChecksum, keys: Mapping[int, bytes], geometry: Geometry
) -> ScanResult:
    """Check every record and link the valid ones. O(num_blocks), vectorised.

    Raises DirectoryDamaged when valid records name a namespace or media key that the log beside them does not have.
    """
    states = words[:, layout.STATE]
    committed = np.flatnonzero(states == BlockRecordState.COMMITTED)
    fields = np.empty((len(_FIELDS), committed.size), dtype=np.uint32)
    serials, parent_serials, last_uses = np.empty((3, committed.size), dtype=np.uint64)
    tokens = np.empty((committed.size, geometry.block_size), dtype=np.uint32)
    whole = np.empty(committed.size, dtype=bool)
    records = whole_rows(words)
    for start in range(0, committed.size, _CHUNK_BLOCKS):
        here = slice(start, start + _CHUNK_BLOCKS)
        rows = records[committed[here]].view(np.uint32).reshape(-1, geometry.record_words)
        whole[here] = checksum.of(rows) == wide(rows, layout.CHECKSUM)
        whole[here] &= rows[:, layout.BLOCK] == committed[here]
        whole[here] &= rows[:, layout.MARK] == layout.MARKED
        serials[here] = wide(rows, layout.SERIAL)
        parent_serials[here] = wide(rows, layout.PARENT_SERIAL)
        last_uses[here] = wide(rows, layout.LAST_USE)
        fields[:, here] = rows[:, _FIELDS].T
        tokens[here] = rows[:, layout.TOKENS : layout.TOKENS + geometry.block_size]
    torn = committed[~whole]
    if torn.size:
        committed, fields, last_uses, tokens = committed[whole], fields[:, whole], last_uses[whole], tokens[whole]
        serials, parent_serials = serials[whole], parent_serials[whole]
    parents, namespaces, positions, indices, media = fields
    positions += indices
    _check_keys(np.unique(np.concatenate((np.unique(namespaces), np.unique(media)))), keys)
    unknown = np.flatnonzero(~np.isin(states, [int(state) for state in BlockRecordState]))
    loose = LooseBlocks(
        blocks=committed.astype(np.int32),
        parents=_link(
            committed, serials, parents, parent_serials, namespaces, positions, num_blocks=geometry.num_blocks
        ),
        positions=positions,
        namespaces=namespaces,
        media=media,
        last_uses=last_uses,
        tokens=tokens,
    )
    private = np.flatnonzero(states == BlockRecordState.PRIVATE)
    torn = np.sort(np.concatenate((torn, unknown)))
    last_serial = int(serials.max(initial=0))
    return ScanResult(loose, keys, private.astype(np.int32), torn.astype(np.int32), last_serial)


def _check_keys(numbers: npt.NDArray[np.uint32], keys: Mapping[int, bytes]) -> None:
    missing = [number for number in numbers.tolist() if number != NO_KEY and number not in keys]
    if missing:
        raise DirectoryDamaged(f"valid records name {len(missing)} keys that the log does not have: {missing[:8]}")


def _link(
    ids: npt.NDArray[np.int64],
    serials: npt.NDArray[np.uint64],
    parents: npt.NDArray[np.uint32],
    parent_serials: npt.NDArray[np.uint64],
    namespaces: npt.NDArray[np.uint32],
    positions: npt.NDArray[np.uint32],
    *,
    num_blocks: int,
) -> npt.NDArray[np.int64]:
    """Return the index of each record's parent. A link counts only if the parent agrees with it in every respect.

    Positions rise by one along a link, so that links cannot form a ring.
    """
    if not ids.size:
        return ids
    is_root = (parents == NO_PARENT) & (positions == 0)
    index_of = np.full(num_blocks, -1, dtype=np.int32)
    index_of[ids] = np.arange(ids.size)
    index = index_of[np.where(parents < num_blocks, parents, 0)]
    agrees = (
        (ids[index] == parents)
        & (serials[index] == parent_serials)
        & (namespaces[index] == namespaces)
        & (positions[index] == positions - 1)
        & (positions != 0)
    )
    links = np.where(agrees, index, ORPHAN)
    links[is_root] = ROOT
    return links
