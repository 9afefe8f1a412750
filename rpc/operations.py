"""What a client asks for and what it gets: the operations of a batch, their results, and the sizes of the service.

All frozen. Every ndarray in a result is read-only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.radix import DEFAULT_NAMESPACE, CopyOrder, Namespace
from radixpool.radix.media import MediaSpan
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
    max_step_rows: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Match:
    """Ask how long a prefix of `tokens` is cached. Result: Matched.

    media: contents that placeholder tokens stand for.
    """

    tokens: Tokens
    namespace: Namespace = DEFAULT_NAMESPACE
    media: tuple[MediaSpan, ...] = ()


class InFlight(Enum):
    """What to do when another sequence is computing more of the wanted prefix just now."""

    IGNORE = 0
    WAIT = 1


@dataclass(frozen=True, slots=True)
class Acquire:
    """Pin what is cached of `tokens` and allocate the rest, with room for `reserve` more.

    media: contents that placeholder tokens stand for. partial: also use the beginning of a block that differs later.
    Result: Acquired; Pending when `in_flight` is WAIT and another sequence computes more of it.
    """

    tokens: Tokens
    namespace: Namespace = DEFAULT_NAMESPACE
    reserve: int = 0
    max_hit: int | None = None
    media: tuple[MediaSpan, ...] = ()
    partial: bool = False
    in_flight: InFlight = InFlight.IGNORE


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
class Rewind:
    """Forget the tokens from `to` on; the calling worker's steps up to `after_step` may still touch them.

    Without `after_step` those count that the worker has launched. Result: Rewound.
    """

    handle: bytes = field(repr=False)
    to: int
    after_step: int | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Make `num_forks` sequences that go on from where this one is. Result: Forked."""

    handle: bytes = field(repr=False)
    num_forks: int = 1


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Declare that the data of one block of the table is bad. Result: Invalidated."""

    handle: bytes = field(repr=False)
    block_index: int


@dataclass(frozen=True, slots=True)
class Release:
    """End a sequence; the calling worker's steps up to `after_step` may still touch its blocks.

    Without `after_step` those count that the worker has launched. With `commit_upto` the full blocks of so many leading
    tokens are committed before, as by `Commit`; when that is refused, the sequence lives on. Result: Released.
    """

    handle: bytes = field(repr=False)
    after_step: int | None = None
    commit_upto: int | None = None


@dataclass(frozen=True, slots=True)
class GetBlockTables:
    """Read tokens and block tables of sequences. Result: BlockTables."""

    handles: tuple[bytes, ...] = field(repr=False)


Operation: TypeAlias = (
    Match | Acquire | Extend | Reserve | Commit | Rewind | Fork | Invalidate | Release | GetBlockTables
)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Which GPU steps of a worker are over, and up to which it goes on before the next report.

    A worker launches a step only after a batch that reported it as launched and named every sequence of the step.
    Steps count from 1; both numbers are equal when it is idle.
    """

    completed_step: int
    launched_step: int


@dataclass(frozen=True, slots=True)
class Matched:
    """`cached_tokens` leading tokens are cached, a whole number of blocks."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new sequence: `block_table` is int32, the reserve included.

    `copies` must run before anything is written to its blocks.
    """

    handle: bytes = field(repr=False)
    cached_tokens: int
    block_table: BlockIds
    copies: tuple[CopyOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """Another sequence is computing more of the prefix: ask again when it has committed or released.

    `cached_tokens` are cached already, `available_tokens` will be. Nothing is held for the asker.
    """

    cached_tokens: int
    available_tokens: int


@dataclass(frozen=True, slots=True)
class Extended:
    """The sequence is `num_tokens` long; `appended_blocks` go to the end of its block table.

    `invalid_from_block` is the first block of the table whose data was declared bad, None while all is well.
    """

    num_tokens: int
    appended_blocks: BlockIds
    invalid_from_block: int | None = None


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
    invalid_from_block: int | None = None


@dataclass(frozen=True, slots=True)
class Rewound:
    """The sequence is `num_tokens` long and its table has `num_blocks` entries left."""

    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """A new sequence of the caller's; its first `committed_tokens` are written or will be by the copy orders."""

    handle: bytes = field(repr=False)
    block_table: BlockIds
    committed_tokens: int


@dataclass(frozen=True, slots=True)
class Forked:
    """The new sequences; `copies` must run before the next write to the source or to one of them."""

    forks: tuple[ForkedSequence, ...]
    copies: tuple[CopyOrder, ...]


@dataclass(frozen=True, slots=True)
class Invalidated:
    """`removed_blocks` are no longer findable; `freed_blocks` of them nobody held, the rest `num_holders` sequences."""

    removed_blocks: int
    freed_blocks: int
    num_holders: int


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
    invalid_from_block: int | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class BlockTables:
    """One entry per handle asked for, in order: the sequence, or the error for this handle alone."""

    sequences: tuple[SequenceView | Exception, ...]


Result: TypeAlias = (
    Matched
    | Acquired
    | Pending
    | Extended
    | Reserved
    | Committed
    | Rewound
    | Forked
    | Invalidated
    | Released
    | BlockTables
)
