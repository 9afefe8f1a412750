"""What a client asks for and what it gets: the operations of a batch, their results, and the sizes of the service.

All frozen. Every ndarray in a result is read-only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.radix import Namespace
from radixpool.radix.tokens import TokensLike

Tokens: TypeAlias = TokensLike
"""Token ids: packed little-endian uint32 bytes, an integer array, or a sequence of ints."""
BlockIds: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The sizes and limits of a manager."""

    version: str
    num_blocks: int
    block_size: int
    policy: str
    lease_ttl_ms: int
    max_batch_operations: int
    max_message_bytes: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Match:
    """Ask how long a prefix of `tokens` is cached. Result: Matched."""

    tokens: Tokens
    namespace: Namespace = field(default_factory=Namespace)


@dataclass(frozen=True, slots=True)
class Acquire:
    """Pin what is cached of `tokens` and allocate the rest, with room for `reserve` more. Result: Acquired."""

    tokens: Tokens
    namespace: Namespace = field(default_factory=Namespace)
    reserve: int = 0
    max_hit: int | None = None


@dataclass(frozen=True, slots=True)
class Extend:
    """Append known tokens. Result: Extended."""

    handle: bytes = field(repr=False)
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room for `num_tokens` beyond the present length. Result: Reserved."""

    handle: bytes = field(repr=False)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Report that the KV of the first `upto` tokens is written. Result: Committed."""

    handle: bytes = field(repr=False)
    upto: int


@dataclass(frozen=True, slots=True)
class Release:
    """End a sequence. Result: Released."""

    handle: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GetBlockTables:
    """Read tokens and block tables of sequences. Result: BlockTables."""

    handles: tuple[bytes, ...] = field(repr=False)


Operation: TypeAlias = Match | Acquire | Extend | Reserve | Commit | Release | GetBlockTables


@dataclass(frozen=True, slots=True)
class Matched:
    """`cached_tokens` leading tokens are cached, a whole number of blocks."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new sequence: `block_table` is int32, the reserve included."""

    handle: bytes = field(repr=False)
    cached_tokens: int
    block_table: BlockIds


@dataclass(frozen=True, slots=True)
class Extended:
    """The sequence is `num_tokens` long; `appended_blocks` go to the end of its block table."""

    num_tokens: int
    appended_blocks: BlockIds


@dataclass(frozen=True, slots=True)
class Reserved:
    """`appended_blocks` go to the end of the block table."""

    appended_blocks: BlockIds


@dataclass(frozen=True, slots=True)
class Remap:
    """Entry `block_index` of the block table changes from `from_block` to `to_block`."""

    block_index: int
    from_block: int
    to_block: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The KV of `committed_tokens` leading tokens is known to be written; apply `remaps` before the next step."""

    committed_tokens: int
    remaps: tuple[Remap, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The sequence is over."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as the manager has it now. `tokens` is uint32, `block_table` int32."""

    handle: bytes = field(repr=False)
    tokens: npt.NDArray[np.uint32]
    block_table: BlockIds
    cached_tokens: int
    committed_tokens: int


@dataclass(frozen=True, slots=True)
class BlockTables:
    """One entry per handle asked for, in order: the sequence, or the error for this handle alone."""

    sequences: tuple[SequenceView | Exception, ...]


Result: TypeAlias = Matched | Acquired | Extended | Reserved | Committed | Released | BlockTables
