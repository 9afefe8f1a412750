"""Priority with a time to live: the first blocks of every prompt outrank the rest until they lie idle too long.

Operators give system prompts and tool definitions a retention priority with a duration, as TensorRT-LLM's
`KvCacheRetentionConfig` lets them; this policy does it by position, with no call per request: the first `protect`
blocks of a path go only when nothing else is left, or after `ttl` ticks (releases) without use.
Priorities set by `set_retention` come on top: the cache orders by them before it asks any policy.
Cost: O(log n) a candidate. When not to use it: when prompts share no fixed head, it then keeps useless heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from sortedcontainers import SortedList

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["Priority"]


class Priority(EvictionPolicy):
    """Evict by least recent use, unprotected blocks and idle protected ones first.

    `run.data` is the list that holds the candidate, `run.prev` its entry.

    Args:
        protect: depth in blocks that is protected; 0 protects nothing, which is LRU.
        ttl: ticks of the logical clock after which an idle run's protection lapses; 0 never.

    """

    name: ClassVar[str] = "priority"

    def __init__(self, capacity: int, *, protect: int = 128, ttl: int = 0) -> None:
        super().__init__(capacity)
        for parameter, value in (("protect", protect), ("ttl", ttl)):
            if value < 0:
                raise ValueError(f"policy: priority:{parameter} must be at least 0, not {value}")
        self._protect = protect
        self._ttl = ttl
        self._now = 0
        self._serial = 0
        self._common: SortedList = SortedList()
        self._protected: SortedList = SortedList()

    def add(self, run: Run) -> None:
        """Make `run` a candidate. O(log n)."""
        self._now = max(self._now, run.last_use)
        self._serial += 1
        run.prev = (run.last_use, self._serial, run)
        run.data = self._protected if run.end <= self._protect else self._common
        run.data.add(run.prev)

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(log n)."""
        run.data.remove(run.prev)
        run.data = run.prev = None

    def victim(self) -> Run | None:
        """Return the oldest of the unprotected and the lapsed, else the oldest of all. O(1).

        Of a run that reaches into the protected depth only what lies beyond may go before the next question.
        """
        common, kept = self._common, self._protected
        first = kept if kept else common
        if common and kept:
            lapsed = bool(self._ttl) and self._now - kept[0][0] > self._ttl
            first = kept if lapsed and kept[0] < common[0] else common
        oldest: Run | None = first[0][2] if first else None
        if oldest is not None:
            self.allowance = oldest.end - self._protect if first is common else oldest.num_blocks
        return oldest

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Protect what is left of a run once its unprotected end is gone. O(log n)."""
        if run.data is self._common and run.end - num_blocks <= self._protect:
            self._common.remove(run.prev)
            run.data = self._protected
            run.data.add(run.prev)

    def candidates(self) -> Iterator[Run]:
        """Iterate over the unprotected candidates, then over the protected ones."""
        return (entry[2] for ranked in (self._common, self._protected) for entry in ranked)
