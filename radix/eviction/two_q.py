"""2Q: a short FIFO for what is new, an LRU for what came back after it had left the FIFO.

Hits in the FIFO change nothing: two uses close together are one. A ghost list of what left the FIFO says what came
back. Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994
(the full version, with Kin and Kout). Cost: O(log n) a candidate, one identity per eviction and per insertion.
When not to use it: when the pool holds less than the time between two turns of a chat: what returns finds its ghost
gone too. And where memory for ghosts counts (about 150 bytes an entry).
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ghosts import GhostList
from radixpool.radix.eviction.segmented import SegmentedPolicy

__all__ = ["TwoQ"]

_NEW, _MAIN = 0, 1


class TwoQ(SegmentedPolicy):
    """Evict from the FIFO of new runs while it is over its share, else the least recently used of the others.

    Args:
        kin: share of the pool for the FIFO of new runs, in 0..1.
        kout: blocks that the ghost list remembers, as a share of the pool.

    """

    name: ClassVar[str] = "2q"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int, *, kin: float = 0.25, kout: float = 0.5) -> None:
        super().__init__(capacity, 2)
        if not 0.0 <= kin <= 1.0 or kout < 0.0:
            raise ValueError(f"policy: 2q needs kin in 0..1 and kout >= 0, not kin={kin}, kout={kout}")
        self._kin = int(capacity * kin)
        self.ghosts = GhostList(int(capacity * kout))

    def inserted(self, run: Run, num_new: int) -> None:
        """Put a run that came back into the LRU, any other into the FIFO. O(log n) and one identity."""
        known = run.data is None and len(self.ghosts) and self.ghosts.pop(run.identity(0))
        self._enter(run, num_new, _MAIN if known else _NEW)
        self.ghosts.trim()

    def touched(self, run: Run) -> None:
        """Move a run of the LRU to its newest end. O(1)."""
        if run.data.segment == _MAIN:
            self._move(run, _MAIN)

    def victim(self) -> Run | None:
        """Return the FIFO's oldest candidate if the FIFO is over its share, else the LRU's. O(1)."""
        if self._blocks[_NEW] > self._kin:
            return self._oldest(_NEW) or self._oldest(_MAIN)
        return self._oldest(_MAIN) or self._oldest(_NEW)

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Remember what leaves the FIFO. One identity."""
        if run.data.segment == _NEW:
            self.ghosts.add(run.identity(run.num_blocks - num_blocks), num_blocks)
        super().evicted(run, num_blocks)
