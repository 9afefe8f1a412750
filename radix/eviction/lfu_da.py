"""LFU with dynamic ageing: a run's key is its use count plus the cache's age when it was last used.

The age is the key of the last victim, so that what stopped being used is overtaken however often it was used before.
Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches", ACM
SIGMETRICS Performance Evaluation Review 27(4), 2000. Cost: O(1) a hit run, O(log n) a candidate.
When not to use it: on scans, where every victim's key raises the age and ages what is worth keeping; see s3fifo.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.aged import AgedPolicy
from radixpool.radix.eviction.base import Run

__all__ = ["LFUDA"]


class LFUDA(AgedPolicy):
    """Evict the candidate with the lowest key. `run.data` is (uses, age of the cache at the last use)."""

    name: ClassVar[str] = "lfu-da"

    def _score(self, run: Run) -> float:
        uses, age = run.data
        return float(age + uses)
