"""`RadixCache`: the whole cache in one object.

Operations by purpose (each lives in the module named):

* requests: `match`, `acquire`, `extend`, `reserve`, `commit`, `release`, `sequence`, `sequences` (lifecycle)
* GPU steps: `add_worker`, `complete_step`, `remove_worker`, `next_step_fence`, `workers` (fences)
* room: `evict`
* looking: `stats`, `nodes`, `namespaces`, `block_info`, `holders`, `check` (inspection)

One thread owns a cache: it takes no locks. Nothing in it does I/O, and its only notion of time besides the injected
clock is a logical one, so the same operations give the same victims and tables everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from radixpool.radix.inspection import Inspection
from radixpool.radix.lifecycle import _check_count
from radixpool.radix.results import EvictResult

__all__ = ["RadixCache"]


class RadixCache(Inspection):
    """A prefix cache over a pool of KV blocks: radix trees of ref-counted blocks with block-level eviction.

    Args:
        num_blocks: blocks of the pool, at least 1.
        block_size: tokens a block, at least 1.
        policy: eviction policy with parameters, such as ``"lru"`` or ``"s3fifo:small=0.1"``.
        clock: seconds on a monotonic clock, read for TTLs only.

    >>> cache = RadixCache(num_blocks=8, block_size=2)
    >>> seq = cache.acquire([1, 2, 3, 4, 5])
    >>> seq.cached_tokens, seq.block_table.tolist()
    (0, [0, 1, 2])
    >>> cache.commit(seq, 5).committed_tokens
    5
    >>> cache.release(seq)
    ReleaseResult(freed_blocks=1, quarantined_blocks=0)
    >>> cache.match([1, 2, 3, 4, 5]).tokens
    4

    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_blocks, block_size, policy)
        self._clock = clock

    def evict(self, num_blocks: int) -> EvictResult:
        """Evict up to `num_blocks` unheld blocks, the policy's first choices first. O(blocks evicted)."""
        _check_count("num_blocks", num_blocks)
        self._tick += 1
        taken: list[bytes] = []
        count = self._evict(num_blocks, taken)
        order = [np.frombuffer(blocks, dtype=np.int32)[::-1] for blocks in taken]  # each run goes from its tail
        blocks = np.concatenate(order) if order else np.empty(0, dtype=np.int32)
        blocks.setflags(write=False)
        return EvictResult(count, blocks)
