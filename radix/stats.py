"""Counters of a cache, as one frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds and did. `free + cached + held + quarantined == num_blocks`. Made in O(1).

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        free_blocks: blocks nobody uses.
        cached_blocks: committed blocks without a holder; they may be evicted.
        held_blocks: blocks with a holder, in the tree or private.
        quarantined_blocks: blocks without a holder that an unfinished GPU step may touch.
        pinned_blocks: committed blocks under at least one pin (they also count as held).
        tree_blocks: committed, findable blocks: cached, held or quarantined.
        num_sequences: live sequences.
        num_pins: live pins.
        num_nodes: runs in all trees, the roots not counted.
        num_namespaces: trees.
        queried_tokens: tokens of admitted requests; each request counts once, however often it was refused before.
        hit_tokens: tokens of admitted requests that were cached.
        admitted_requests: acquires that succeeded.
        refused_requests: acquires, extends and reserves that were refused.
        committed_blocks: blocks put into the tree.
        remapped_blocks: own copies given up because the content was already cached.
        evicted_blocks: blocks evicted.
        generation: number of flushes that started a new generation of content.
        tick: logical time.

    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    quarantined_blocks: int
    pinned_blocks: int
    tree_blocks: int
    num_sequences: int
    num_pins: int
    num_nodes: int
    num_namespaces: int
    queried_tokens: int
    hit_tokens: int
    admitted_requests: int
    refused_requests: int
    committed_blocks: int
    remapped_blocks: int
    evicted_blocks: int
    generation: int
    tick: int

    @property
    def hit_ratio(self) -> float:
        """Hit tokens over queried tokens, 0.0 before the first request."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
