"""Frozen results of cache operations.

The ones made on the hot path are named tuples (a third of a frozen dataclass's cost), the others slotted dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixpool.radix.namespace import Namespace

__all__ = [
    "BlockInfo",
    "BlockState",
    "CommitResult",
    "CopyOrder",
    "EvictResult",
    "ExpireResult",
    "FlushResult",
    "ForkResult",
    "InvalidateResult",
    "NodeInfo",
    "PendingPrefix",
    "PinInfo",
    "PrefixMatch",
    "ReleaseResult",
    "Remap",
    "RewindResult",
]


class BlockState(StrEnum):
    """The state of a block: exactly one at any time."""

    FREE = "free"
    CACHED = "cached"
    HELD = "held"
    QUARANTINED = "quarantined"


class PrefixMatch(NamedTuple):
    """What a read-only lookup found. A hint: it holds nothing, so the blocks may be evicted after it.

    Attributes:
        tokens: number of matched tokens, a multiple of the block size.
        blocks: ids of the matched blocks, in order, int32 `[tokens / block_size]`, read-only.

    """

    tokens: int
    blocks: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Remap:
    """One block-table entry that changed because its content was already cached.

    Attributes:
        index: position in the block table.
        old_block: the sequence's own copy, now quarantined or free.
        new_block: the block that was in the tree before.

    """

    index: int
    old_block: int
    new_block: int


class CommitResult(NamedTuple):
    """What a commit published.

    Attributes:
        committed_tokens: tokens of the sequence whose KV is known to be written.
        remaps: table entries that now name blocks committed by somebody else; a worker applies them before its next
            step. Empty almost always.

    """

    committed_tokens: int
    remaps: tuple[Remap, ...]


class CopyOrder(NamedTuple):
    """Copy the KV of the first `num_tokens` tokens of block `src` to block `dst` before the next write to either."""

    src: int
    dst: int
    num_tokens: int


class ReleaseResult(NamedTuple):
    """What became of a sequence's blocks.

    Attributes:
        freed_blocks: blocks that were only its own and are free now.
        quarantined_blocks: blocks that wait for a step fence.

    """

    freed_blocks: int
    quarantined_blocks: int


class RewindResult(NamedTuple):
    """How many blocks a rewind gave back.

    Attributes:
        num_tokens: tokens the sequence has now.
        freed_blocks: blocks that are free now.
        quarantined_blocks: blocks that wait for a step fence.

    """

    num_tokens: int
    freed_blocks: int
    quarantined_blocks: int


class EvictResult(NamedTuple):
    """What an eviction took, or would take when it was a dry run.

    Attributes:
        num_blocks: how many blocks went.
        blocks: their ids in the order they went, int32, read-only.

    """

    num_blocks: int
    blocks: npt.NDArray[np.int32]


class PendingPrefix(NamedTuple):
    """Say that somebody is computing the wanted prefix just now: repeat the acquire once it commits or releases.

    Nothing is held or allocated for the waiter.

    Attributes:
        producer: handle of the sequence that computes it.
        cached_tokens: tokens that are cached already.
        available_tokens: tokens that will be cached once the producer has committed all it shares with the request.

    """

    producer: int
    cached_tokens: int
    available_tokens: int


@dataclass(frozen=True, slots=True)
class ForkResult:
    """New sequences that share a source's committed blocks.

    Attributes:
        handles: handles of the new sequences.
        copies: copy orders to run before the next write to either side; one per fork with a partly filled tail block.

    """

    handles: tuple[int, ...]
    copies: tuple[CopyOrder, ...]


@dataclass(frozen=True, slots=True)
class InvalidateResult:
    """What an invalidation removed from the tree.

    Attributes:
        removed_blocks: blocks that are no longer findable (the bad one and everything below it).
        freed_blocks: those of them that nobody held and that are free now.
        holders: handles of live sequences that hold a removed block and have to recompute it.

    """

    removed_blocks: int
    freed_blocks: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin. `deadline` is on the cache's own clock, None without a TTL."""

    pin_id: int
    num_tokens: int
    num_blocks: int
    namespace: Namespace
    deadline: float | None


@dataclass(frozen=True, slots=True)
class ExpireResult:
    """Which pins ended, and how many retention ranges went back to the default priority."""

    pins: tuple[int, ...]
    ranges: int


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush removed. `held_blocks` are no longer findable and become free when their holders go."""

    freed_blocks: int
    held_blocks: int
    generation: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One run of blocks in a tree, as an inspector sees it.

    Attributes:
        namespace: the tree it lives in.
        level: number of runs above it.
        start: index of its first block from the root.
        tokens: its token ids, uint32 `[num_blocks * block_size]`.
        blocks: its block ids, int32 `[num_blocks]`.
        ref_count: live sequences and pins whose path goes through it.
        num_children: runs directly below it.
        state: held, cached or quarantined; all of its blocks share it.
        last_use: logical time of its last release.
        pinned: whether a pin holds it.
        priority: retention priority.
        media: whether the run is a block under media content.

    """

    namespace: Namespace
    level: int
    start: int
    tokens: npt.NDArray[np.uint32]
    blocks: npt.NDArray[np.int32]
    ref_count: int
    num_children: int
    state: BlockState
    last_use: int
    pinned: bool
    priority: int
    media: bool

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the run."""
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block, explained.

    Attributes:
        block_id: the block.
        state: its state.
        holders: handles of the live sequences whose table names it.
        namespace: the tree it is findable in (None unless committed) or its holder's.
        position: index in its prefix's block table, None when free.
        findable: whether a lookup can return it.
        tokens: its token ids, uint32, None unless committed.
        last_use: logical time of its last release, None unless committed.

    """

    block_id: int
    state: BlockState
    holders: tuple[int, ...]
    namespace: Namespace | None
    position: int | None
    findable: bool
    tokens: npt.NDArray[np.uint32] | None
    last_use: int | None
