"""Tail-optimised LRU: first drop the ends of paths whose loss cannot make a next request slow, then fall back to LRU.

A request is slow if more than `limit` blocks of its prompt must be computed. If its next turn brings `turn` new blocks,
then up to `limit - turn` blocks at the end of a cached path can go and the turn is still fast. Those go first, least
recent first; the rest goes by LRU. Zhang, Li, Moallemi, Peng, "Tail-optimized caching for LLM inference", 2025
(arXiv:2510.15152), T-LRU. Cost: O(log n) a candidate.
When not to use it: to maximise hits; it gives up cheap hits of short prompts to cut the 90th and 99th percentiles of
the time to first token. Worthless when nearly every prompt is shorter than `limit`: then it is LRU by another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from sortedcontainers import SortedList

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["TailLRU"]


class TailLRU(EvictionPolicy):
    """Evict blocks that the next request can afford to recompute, then the least recently used.

    `run.data` counts the blocks already lost below the run since its last use; `run.next` is the list that holds the
    candidate, `run.prev` its entry.

    Args:
        limit: blocks a request may compute and still be fast, e.g. time limit x prefill tokens/s / block size.
        turn: new blocks that a next request is expected to bring.

    """

    name: ClassVar[str] = "tail-lru"

    def __init__(self, capacity: int, *, limit: int = 256, turn: int = 32) -> None:
        super().__init__(capacity)
        if turn < 0 or limit < turn:
            raise ValueError(f"policy: tail-lru needs 0 <= turn <= limit, not turn={turn}, limit={limit}")
        self._spare = limit - turn
        self._cheap: SortedList = SortedList()
        self._dear: SortedList = SortedList()
        self._serial = 0
        self._orphaned: tuple[int, int, int] | None = None  # end, last use and losses for the parent of what just went

    def add(self, run: Run) -> None:
        """Make `run` a candidate; it inherits the losses of a child that just went. O(log n)."""
        lost, below = 0, self._orphaned
        if below is not None and below[0] == run.end and below[1] >= run.last_use:
            lost = below[2]
        self._orphaned = None
        run.data = lost
        self._serial += 1
        run.prev = (run.last_use, self._serial, run)
        run.next = self._cheap if lost < self._spare else self._dear
        run.next.add(run.prev)

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(log n)."""
        run.next.remove(run.prev)
        run.prev = run.next = None

    def victim(self) -> Run | None:
        """Return the oldest candidate whose end is cheap to lose, else the oldest. O(1).

        Of a cheap one only what it can spare may go before the next question.
        """
        self._orphaned = None
        for ranked in (self._cheap, self._dear):
            if ranked:
                run: Run = ranked[0][2]
                self.allowance = self._spare - run.data if ranked is self._cheap else run.num_blocks
                return run
        return None

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Count the loss, and rank the run by LRU once it has lost all it can spare. O(log n)."""
        run.data += num_blocks
        if run.next is self._cheap and run.data >= self._spare:
            self._cheap.remove(run.prev)
            run.next = self._dear
            self._dear.add(run.prev)

    def dropped(self, run: Run) -> None:
        """Remember the losses for the parent, which becomes a candidate next if this was its last child. O(1)."""
        self._orphaned = (run.start, run.last_use, run.data or 0)
        run.data = None

    def candidates(self) -> Iterator[Run]:
        """Iterate over the candidates that are cheap to lose, then over the others."""
        return (entry[2] for ranked in (self._cheap, self._dear) for entry in ranked)
