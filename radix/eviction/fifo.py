"""First in, first out: the run whose newest block came first goes first.

The baseline of every study, and the cheapest policy that needs no call on a hit. Here a parent always came before its
children, so the order among leaves is all that matters. Cost: O(log n) when a run becomes or stops being a candidate.
When not to use it: whenever anything is asked again, as in chat; its hits there come from the capacity alone.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ranked import RankedPolicy

__all__ = ["FIFO"]


class FIFO(RankedPolicy):
    """Evict the candidate that was inserted longest ago. `run.data` is the number of its last insertion."""

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._insertions = 0

    def inserted(self, run: Run, num_new: int) -> None:
        """Give the run the next number. O(1)."""
        self._insertions += 1
        run.data = self._insertions

    def _score(self, run: Run) -> float:
        return int(run.data)
