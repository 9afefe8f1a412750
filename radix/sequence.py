"""A sequence: one request's private view of the cache. The cache writes it, callers read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixpool.radix.namespace import Namespace
from radixpool.radix.results import CopyOrder

if TYPE_CHECKING:
    from radixpool.radix.media import MediaSpan
    from radixpool.radix.node import Node

__all__ = ["Sequence"]


class Sequence:
    """One admitted request: its tokens, its block table, how much of it is committed.

    Read-only for callers. Array properties are snapshots: they never change under the reader, and a later operation
    on the sequence makes them stale.

    Attributes:
        handle: name of the sequence in this cache; never reused.
        cached_tokens: tokens that were already cached when it was admitted.
        committed_tokens: tokens whose KV is known to be written.
        copies: copy orders to run before anything is written to the sequence's blocks (a copy-on-write hit).
        in_flight: handle of a sequence that computes the same prefix just now, if `in_flight="report"` asked for it.
        invalid_from: index of the first block of its table whose data was invalidated, None while all is well.
        released: whether it was released.

    """

    __slots__ = (
        "_block_size",
        "_marks",
        "_media",
        "_namespace",
        "_node",
        "_producing",
        "_source",
        "_table",
        "_tokens",
        "cached_tokens",
        "committed_tokens",
        "copies",
        "handle",
        "in_flight",
        "invalid_from",
        "released",
    )

    handle: int
    cached_tokens: int
    committed_tokens: int
    copies: tuple[CopyOrder, ...]
    in_flight: int | None
    invalid_from: int | None
    released: bool
    _tokens: bytes | bytearray  # packed little-endian uint32, all known tokens
    _table: bytes  # packed little-endian int32 block ids
    _block_size: int
    _node: Node  # deepest tree run it holds; the tree part of the table ends where this run ends
    _namespace: Namespace
    _media: tuple[MediaSpan, ...]
    _marks: dict[int, bytes]  # encoded media spans by block index
    _source: Node | None  # run held until a copy-on-write source was copied
    _producing: tuple[Node, bytes] | None  # its entry in the in-flight index

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose ids are known. O(1)."""
        return len(self._tokens) >> 2

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the table. O(1)."""
        return len(self._table) >> 2

    @property
    def capacity_tokens(self) -> int:
        """Tokens the block table has room for, reserved ones included. O(1)."""
        return (len(self._table) >> 2) * self._block_size

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids in order, int32 `[num_blocks]`, read-only. O(1), no copy."""
        return np.frombuffer(self._table, dtype=np.int32)

    @property
    def packed_block_table(self) -> bytes:
        """The block table as packed little-endian int32, as the wire carries it. O(1), no copy."""
        return self._table

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Known token ids, uint32 `[num_tokens]`, read-only. O(num_tokens)."""
        return np.frombuffer(bytes(self._tokens), dtype=np.uint32)

    @property
    def packed_tokens(self) -> bytes:
        """Known token ids as packed little-endian uint32. O(1), O(num_tokens) after an extend."""
        return bytes(self._tokens)

    @property
    def namespace(self) -> Namespace:
        """The namespace it was admitted under."""
        return self._namespace

    @property
    def media_keys(self) -> Mapping[int, bytes]:
        """What media adds to the keys of blocks, by block index; see `radixpool.radix.media`."""
        return self._marks

    @property
    def state(self) -> str:
        """`active`, `invalid` (it holds a block that was invalidated) or `released`."""
        if self.released:
            return "released"
        return "active" if self.invalid_from is None else "invalid"

    def __repr__(self) -> str:
        return (
            f"Sequence(handle={self.handle}, num_tokens={self.num_tokens}, cached_tokens={self.cached_tokens}, "
            f"committed_tokens={self.committed_tokens}, num_blocks={self.num_blocks}, state={self.state!r})"
        )
