"""LFU with dynamic ageing: a run's key is its use count plus the cache's age when it was last used.

The age is the key of the last victim, so that what stopped being used is overtaken however often it was used before.
Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches", ACM
SIGMETRICS Performance Evaluation Review 27(4), 2000. Cost: O(1) a hit run, O(log n) a candidate.
When not to use it: on scans, where every victim's key raises the age and ages what is worth keeping; see s3fifo.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ranked import RankedPolicy

__all__ = ["LFUDA"]


class LFUDA(RankedPolicy):
    """Evict the candidate with the lowest key. `run.data` is (uses, age of the cache at the last use)."""

    name: ClassVar[str] = "lfu-da"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._age = 0.0

    def inserted(self, run: Run, num_new: int) -> None:
        """Count the first use, at the present age. O(1)."""
        if run.data is None:
            run.data = (1, self._age)

    def touched(self, run: Run) -> None:
        """Count one more use, at the present age. O(1)."""
        run.data = (run.data[0] + 1, self._age)

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Age the cache to the victim's key. O(1)."""
        self._age = self._score(run)

    def _score(self, run: Run) -> float:
        uses, age = run.data
        return float(age + uses)
