"""Least recently used, in O(1), and O(log n) for a run that becomes a leaf late.

A run is released at the newest time there is, so appending keeps the list sorted. The exception is a run whose
children were evicted: it becomes a candidate with an old time. Those wait in a heap beside the list; entries of runs
that were used again meanwhile are skipped when they surface. The victim is the older of the two heads.

Times are distinct among candidates: two runs stamped by one release lie on one path, and only the lower is a leaf.
When not to use it: scans longer than the pool push everything out; see s3fifo and w-tinylfu.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import ClassVar

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["LRU"]

_LATE = "late"  # Run.data of a run that waits in the heap


class LRU(EvictionPolicy):
    """Evict the candidate that was released longest ago."""

    name: ClassVar[str] = "lru"
    merges_runs: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        head = self._head = Run()
        head.prev = head.next = head
        head.last_use = -1
        self._late: list[tuple[int, int, Run]] = []  # (time, tie-break, run)
        self._pushed = 0

    def add(self, run: Run) -> None:
        """Make `run` a candidate. O(1), O(log n) when its time is not the newest."""
        head = self._head
        newest = head.prev
        time = run.last_use
        if time < newest.last_use:
            run.data = _LATE
            self._pushed += 1
            heappush(self._late, (time, self._pushed, run))
            return
        run.prev = newest
        run.next = head
        newest.next = head.prev = run

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(1); its heap entry, if any, is skipped later."""
        if run.data is not None:
            run.data = None
            return
        before, after = run.prev, run.next
        before.next = after
        after.prev = before
        run.prev = run.next = None

    def victim(self) -> Run | None:
        """Return the candidate with the oldest last use. O(1) amortised, O(log n) with late leaves."""
        head = self._head
        oldest: Run = head.next
        late = self._late
        while late:
            time, _, run = late[0]
            if run.data is None or run.last_use != time:
                heappop(late)
                continue
            if oldest is head or time < oldest.last_use:
                return run
            break
        return None if oldest is head else oldest

    def candidates(self) -> Iterator[Run]:
        """Iterate over the list, then over the late leaves."""
        run = self._head.next
        while run is not self._head:
            yield run
            run = run.next
        seen = set()
        for time, _, late in self._late:
            if late.data is not None and late.last_use == time and id(late) not in seen:
                seen.add(id(late))
                yield late
