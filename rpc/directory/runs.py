"""Store the records of a run: put together in buffers of their own, then copied into the map with one scatter.

The cost of a short run is that of numpy's calls, so there are few of them, each on a view that was made before: what
all records of a run share is one broadcast, the chain of block ids gives each record its own id and its parent's, and
the numbers of the blocks within the run stand in the buffer for good.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from radixpool.rpc.directory import layout
from radixpool.rpc.directory.checksum import RowChecksum
from radixpool.rpc.directory.layout import BlockRecordState
from radixpool.rpc.failpoints import failpoint

_COMMITTED: Final = int(BlockRecordState.COMMITTED)
_PIECE_BLOCKS: Final = 256
"""Records that are put together at once; a longer run is stored in pieces, each of which is a whole prefix."""
_SHARED = struct.Struct("<IQQQIIQI")
"""Words MARK to START: mark, last use, serial, parent's serial, namespace, media, room for the checksum, start."""
_PARENT_SERIAL_QUAD: Final = layout.PARENT_SERIAL // 2
_STORE_BEGUN = failpoint("directory.store.begun")
_BODIES_STORED = failpoint("directory.store.bodies")
_STATES_STORED = failpoint("directory.store.states")


class _Views(NamedTuple):
    """The first `n` rows of the buffers, seen in the ways that a store needs."""

    shared: npt.NDArray[np.uint32]
    links: npt.NDArray[np.uint32]
    windows: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]
    given_tokens: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.uint32]
    wide_rows: npt.NDArray[np.uint64]
    sums: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    blocks: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64]
    records: npt.NDArray[np.void]


class RunWriter:
    """Stores runs into `words` [num_blocks, record_words], the records of a directory."""

    def __init__(self, words: npt.NDArray[np.uint32], checksum: RowChecksum, block_size: int) -> None:
        num_words = words.shape[1]
        self._block_size = block_size
        self._checksum = checksum
        self._records = whole_rows(words)
        self._states = words[:, layout.STATE]
        self._rows = np.zeros((_PIECE_BLOCKS, num_words), dtype=np.uint32)
        self._rows[:, layout.STATE] = BlockRecordState.PRIVATE
        self._rows[:, layout.INDEX] = np.arange(_PIECE_BLOCKS)
        self._wide_rows = np.zeros((_PIECE_BLOCKS, num_words), dtype=np.uint64)
        self._sums = np.zeros(_PIECE_BLOCKS, dtype=np.uint64)
        self._ids = np.zeros(_PIECE_BLOCKS, dtype=np.int64)
        self._chain = np.zeros(_PIECE_BLOCKS + 1, dtype=np.uint32)
        self._tokens = np.zeros((_PIECE_BLOCKS, block_size), dtype=np.uint32)
        self._shared = np.zeros(_SHARED.size // 4, dtype=np.uint32)
        self._shared_bytes = self._shared.data.cast("B")
        self._row_quads = self._rows.data.cast("B").cast("Q")
        self._chain_bytes = self._chain.data.cast("B")
        self._token_bytes = self._tokens.data.cast("B")
        self._views: dict[int, _Views] = {}

    def store(
        self,
        blocks: bytes,
        tokens: bytes,
        *,
        parent: int,
        parent_serial: int,
        position: int,
        serial: int,
        namespace: int,
        media: int,
        last_use: int,
    ) -> None:
        """Store the records of a run, then their states. A kill between any two stores leaves a prefix of the run.

        `blocks` are packed int32, `tokens` packed uint32, `parent` is -1 for the first run of a path. O(len(blocks)).
        """
        block_bytes, token_bytes = 4 * _PIECE_BLOCKS, 4 * _PIECE_BLOCKS * self._block_size
        if len(blocks) <= block_bytes:
            self._share(last_use, serial, namespace, media, position)
            self._store_piece(blocks, tokens, parent, parent_serial)
            return
        for piece in range(-(-len(blocks) // block_bytes)):
            self._share(last_use, serial, namespace, media, position + piece * _PIECE_BLOCKS)
            here = blocks[piece * block_bytes : (piece + 1) * block_bytes]
            self._store_piece(here, tokens[piece * token_bytes : (piece + 1) * token_bytes], parent, parent_serial)
            parent, parent_serial = int.from_bytes(here[-4:], "little"), serial

    def close(self) -> None:
        """Look into the map no longer."""
        self._records, self._states = self._records[:0].copy(), self._states[:0].copy()

    def _share(self, last_use: int, serial: int, namespace: int, media: int, start: int) -> None:
        """Note what the records of a piece have in common; the serial is the parent's too, but for the first record."""
        _SHARED.pack_into(self._shared_bytes, 0, layout.MARKED, last_use, serial, serial, namespace, media, 0, start)

    def _store_piece(self, blocks: bytes, tokens: bytes, parent: int, parent_serial: int) -> None:
        _STORE_BEGUN()
        size = len(blocks) >> 2
        view = self._views.get(size) or self._make_views(size)
        self._chain[0] = parent & 0xFFFF_FFFF
        self._chain_bytes[4 : 4 + len(blocks)] = blocks
        self._token_bytes[: len(tokens)] = tokens
        view.shared[...] = self._shared
        view.links[...] = view.windows
        view.tokens[...] = view.given_tokens
        self._row_quads[_PARENT_SERIAL_QUAD] = parent_serial
        view.wide_rows[...] = view.rows
        self._checksum.of_wide(view.wide_rows, view.sums)
        view.checksums[...] = view.sums
        view.ids[...] = view.blocks
        self._records[view.ids] = view.records
        _BODIES_STORED()
        self._states[view.ids] = _COMMITTED
        _STATES_STORED()

    def _make_views(self, size: int) -> _Views:
        rows = self._rows[:size]
        view = self._views[size] = _Views(
            shared=rows[:, layout.MARK : layout.START + 1],
            links=rows[:, layout.PARENT : layout.BLOCK + 1],
            windows=as_strided(self._chain, (size, 2), (4, 4)),
            tokens=rows[:, layout.TOKENS : layout.TOKENS + self._block_size],
            given_tokens=self._tokens[:size],
            rows=rows,
            wide_rows=self._wide_rows[:size],
            sums=self._sums[:size],
            checksums=wide(rows, layout.CHECKSUM),
            blocks=self._chain[1 : size + 1],
            ids=self._ids[:size],
            records=whole_rows(rows),
        )
        return view


def wide(rows: npt.NDArray[np.uint32], first_word: int) -> npt.NDArray[np.uint64]:
    """View two words of each row as one 64-bit number."""
    return rows[:, first_word : first_word + 2].view("<u8")[:, 0]


def whole_rows(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
    """View each row as one item, which numpy copies in one piece: gathers and scatters take a fifth of the time."""
    return rows.view(f"V{rows.shape[1] * 4}")[:, 0]
