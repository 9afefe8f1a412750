"""ARC: one LRU for runs used once, one for runs used more, and a border between them that learns from ghosts.

Ghost lists remember what left each LRU. A ghost that comes back says its LRU was too small and moves the border
towards it. Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. The border moves when
the missing blocks are committed, one eviction later than in the paper, because an evicting cache has not yet said what
for. Cost: O(log n) a hit run or candidate, one identity per eviction and per insertion.
When not to use it: where what a policy does must be explained by its parameters (it has none), or ghosts cost too much
(about 150 bytes an entry, for up to as many blocks as the pool has).
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.ghosts import GhostList
from radixpool.radix.eviction.segmented import SegmentedPolicy

__all__ = ["ARC"]

_ONCE, _OFTEN = 0, 1


class ARC(SegmentedPolicy):
    """Evict from the LRU that is larger than its learnt share."""

    name: ClassVar[str] = "arc"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 2)
        self.ghosts = (GhostList(capacity), GhostList(2 * capacity))
        self._target = 0.0  # blocks that the runs used once should have

    def inserted(self, run: Run, num_new: int) -> None:
        """Put a run that came back among those used often and move the border. O(log n) and one identity."""
        segment = _ONCE
        if run.data is None and (len(self.ghosts[_ONCE]) or len(self.ghosts[_OFTEN])):
            segment = self._welcome(run.identity(0))
        self._enter(run, num_new, segment)
        self._trim()

    def touched(self, run: Run) -> None:
        """Move the run to the newest end of those used often. O(log n)."""
        self._move(run, _OFTEN)

    def victim(self) -> Run | None:
        """Return the oldest candidate of the list that is over its share, else of the other. O(1)."""
        once, often = self._oldest(_ONCE), self._oldest(_OFTEN)
        return once if once is not None and (often is None or self._blocks[_ONCE] > self._target) else often

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Remember what goes in the ghost list of its LRU. One identity."""
        self.ghosts[run.data.segment].add(run.identity(run.num_blocks - num_blocks), num_blocks)
        super().evicted(run, num_blocks)

    def _welcome(self, identity: bytes) -> int:
        """Return the segment for a run that starts with `identity`, having learnt from its ghost if it has one."""
        once, often = self.ghosts
        sizes = max(once.blocks, 1), max(often.blocks, 1)
        if back := once.pop(identity):
            self._target = min(self._target + back * max(sizes[1] / sizes[0], 1.0), self.capacity)
            return _OFTEN
        if back := often.pop(identity):
            self._target = max(self._target - back * max(sizes[0] / sizes[1], 1.0), 0.0)
            return _OFTEN
        return _ONCE

    def _trim(self) -> None:
        """Keep the runs used once with their ghosts within one capacity, and everything within two."""
        once, often = self.ghosts
        once.trim(max(0, self.capacity - self._blocks[_ONCE]))
        often.trim(max(0, 2 * self.capacity - sum(self._blocks) - once.blocks))
