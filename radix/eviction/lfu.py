"""Least frequently used, in-cache counts: the run with the fewest hits goes first, ties to the older last use.

Counts live as long as the blocks do and nothing ages, after the plain LFU that Matani, Shah and Mitra, "An O(1)
algorithm for implementing the LFU cache eviction scheme" (2010) describe; a sorted list takes the place of their
buckets because leaves come and go in any order. Cost: O(1) a hit run, O(log n) a candidate.
When not to use it: when popularity moves. What was hot yesterday stays for ever, and new chats go before their second
turn; see lfu-da and w-tinylfu.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ranked import RankedPolicy

__all__ = ["LFU"]


class LFU(RankedPolicy):
    """Evict the candidate with the fewest uses. `run.data` counts them, the insertion being the first."""

    name: ClassVar[str] = "lfu"
    observes_hits: ClassVar[bool] = True

    def inserted(self, run: Run, num_new: int) -> None:
        """Count the first use. O(1)."""
        if run.data is None:
            run.data = 1

    def touched(self, run: Run) -> None:
        """Count one more use. O(1)."""
        run.data += 1

    def _score(self, run: Run) -> float:
        return int(run.data)
