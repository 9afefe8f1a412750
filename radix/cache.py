"""`RadixCache`: the whole cache in one object.

Operations by purpose, with the module each lives in. The modules are layers: each adds operations to the class below
it, from `state` (free list, counters), `tree` and `room` (eviction) up to this one.

* requests: `match`, `acquire` (admission), `extend`, `reserve`, `commit`, `release`, `sequence`, `sequences`
  (lifecycle)
* sampling and drafts: `rewind`, `fork` (variants)
* bad data: `invalidate` (variants)
* what stays: `pin`, `unpin`, `pins`, `expire` (pins), `set_retention` (retention), `set_quota`, `remove_quota`,
  `quotas` (tenants)
* what goes: `evict`, `flush` (flushing)
* GPU steps: `add_worker`, `complete_step`, `remove_worker`, `next_step_fence`, `workers` (fences)
* looking: `stats`, `nodes`, `namespaces`, `block_info`, `holders`, `check`, `snapshot` (inspection)

One thread owns a cache: it takes no locks. Nothing in it does I/O, and its only notion of time besides the injected
clock is a logical one, so the same operations give the same victims and tables everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from radixpool.radix.admission import check_count
from radixpool.radix.dryrun import shadow
from radixpool.radix.events import EventLog
from radixpool.radix.inspection import Inspection
from radixpool.radix.options import CacheOptions
from radixpool.radix.persistence import Persistence
from radixpool.radix.results import EvictResult

__all__ = ["RadixCache"]


class RadixCache(Inspection):
    """A prefix cache over a pool of KV blocks: radix trees of ref-counted blocks with block-level eviction.

    Args:
        num_blocks: blocks of the pool, at least 1.
        block_size: tokens a block, at least 1.
        policy: eviction policy with parameters, such as ``"lru"`` or ``"s3fifo:small=0.1"``.
        clock: seconds on a monotonic clock, read for TTLs only.
        pin_budget: most blocks that pins may hold; half of the pool unless given.
        persistence: hears of every block's fate before it changes.
        events: log of what becomes findable and what no longer is.

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
        pin_budget: int | None = None,
        persistence: Persistence | None = None,
        events: EventLog | None = None,
    ) -> None:
        super().__init__(CacheOptions(num_blocks, block_size, policy, clock, pin_budget, persistence, events))

    @property
    def events(self) -> EventLog | None:
        """The event log it was made with."""
        return self._events

    def evict(self, num_blocks: int, *, dry_run: bool = False) -> EvictResult:
        """Evict up to `num_blocks` unheld blocks, the policy's first choices first. O(blocks evicted).

        The operator's word counts more than a tenant's share: those blocks go last, but they go. With `dry_run` nothing
        changes and the result says what would go; that costs O(runs in the cache).
        """
        check_count("num_blocks", num_blocks)
        if dry_run:
            taken = shadow(self)._make_free(num_blocks, all_may_pay=True)
        else:
            self._tick += 1
            taken = self._make_free(num_blocks, all_may_pay=True)
        order = [np.frombuffer(blocks, dtype=np.int32)[::-1] for blocks in taken]  # each run goes from its tail
        blocks = np.concatenate(order) if order else np.empty(0, dtype=np.int32)
        blocks.setflags(write=False)
        return EvictResult(blocks.size, blocks)
