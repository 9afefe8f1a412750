"""S3-FIFO: three FIFO queues. A small one that most new runs leave soon, a main one, and a ghost queue.

A run that was hit often enough while it was in the small queue goes on to the main one; the others are evicted and
remembered, and if they come back they enter the main queue at once. The main queue gives a run one more round for each
hit (at most three). Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
Cost: O(1) a hit run; O(log n) a candidate and a step; one identity per eviction from the small queue and per insertion.
When not to use it: when second uses come later than the small queue lasts, as chat turns do; raise `small` then.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ghosts import GhostList
from radixpool.radix.eviction.segmented import Place, SegmentedPolicy

__all__ = ["S3FIFO"]

_SMALL, _MAIN = 0, 1
_MAX_USES = 3


class S3FIFO(SegmentedPolicy):
    """Evict from the small queue while it is at its share, else from the main queue.

    Args:
        small: share of the pool for the small queue, in 0..1.
        ghost: blocks that the ghost queue remembers, as a share of the pool.
        promote: hits in the small queue that take a run to the main one, at least 1.

    """

    name: ClassVar[str] = "s3fifo"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int, *, small: float = 0.1, ghost: float = 0.9, promote: int = 2) -> None:
        super().__init__(capacity, 2)
        if not 0.0 <= small <= 1.0 or ghost < 0.0 or not 1 <= promote <= _MAX_USES:
            raise ValueError(
                f"policy: s3fifo needs small in 0..1, ghost >= 0 and promote in 1..{_MAX_USES}, "
                f"not small={small}, ghost={ghost}, promote={promote}"
            )
        self._small = int(capacity * small)
        self._promote = promote
        self.ghosts = GhostList(int(capacity * ghost))

    def inserted(self, run: Run, num_new: int) -> None:
        """Put a run that came back into the main queue, any other into the small one. O(log n) and one identity."""
        known = run.data is None and len(self.ghosts) and self.ghosts.pop(run.identity(0))
        self._enter(run, num_new, _MAIN if known else _SMALL)
        self.ghosts.trim()

    def touched(self, run: Run) -> None:
        """Count the hit, up to three. O(1)."""
        place: Place = run.data
        if place.uses < _MAX_USES:
            place.uses += 1

    def victim(self) -> Run | None:
        """Return the next run to go; moves runs that earned it to the main queue or around it. O(log n) a step."""
        while True:
            small, main = self._oldest(_SMALL), self._oldest(_MAIN)
            if small is not None and (main is None or self._blocks[_SMALL] >= self._small):
                if small.data.uses < self._promote:
                    return small
                small.data.uses = 0
                self._move(small, _MAIN)
            elif main is not None and main.data.uses:
                main.data.uses -= 1
                self._move(main, _MAIN)
            else:
                return main

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Remember what leaves the small queue. One identity."""
        if run.data.segment == _SMALL:
            self.ghosts.add(run.identity(run.num_blocks - num_blocks), num_blocks)
        super().evicted(run, num_blocks)
