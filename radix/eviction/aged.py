"""What policies that age by their victims share: uses, and the age of the cache when they were last counted.

The age is the key of the last victim, so that what stopped being used is overtaken however often it was used before.
`run.data` is (uses, age of the cache at the last use); a subclass makes the key of it.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ranked import RankedPolicy

__all__ = ["AgedPolicy"]


class AgedPolicy(RankedPolicy):
    """Evict the candidate with the lowest key, and age the cache to it."""

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
        self._age = run.prev[0]
