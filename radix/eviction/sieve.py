"""SIEVE: one FIFO queue, a visited bit, and a hand that evicts the first run it finds not visited since it last passed.

A hit only sets the bit, so hits cost next to nothing, and new runs are met by the hand soon (quick demotion). The hand
moves over candidates alone: what is held or inner keeps its bit. Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler
than LRU", NSDI 2024. Cost: O(1) a hit run, O(log n) a candidate and a step of the hand; each step clears a bit.
When not to use it: for scans larger than the pool, and for chat, where a session must survive until its second turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from sortedcontainers import SortedList

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["Sieve"]


class Sieve(EvictionPolicy):
    """Evict the first unvisited candidate that the hand meets, from the oldest to the newest and around.

    `run.data` is the run's arrival number, `run.next` is True once it was visited.
    """

    name: ClassVar[str] = "sieve"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: Any = SortedList()  # candidates by arrival
        self._arrivals = 0
        self._hand = 0  # arrival number of the last victim, where the hand goes on if some of it is left
        self._after = 0  # arrival number of the candidate after it then; 0 is back to the oldest

    def inserted(self, run: Run, num_new: int) -> None:
        """Put the run at the newest end, not visited. O(1)."""
        if run.data is None:
            self._arrivals += 1
            run.data = self._arrivals
            run.next = False

    def touched(self, run: Run) -> None:
        """Set the visited bit. O(1)."""
        run.next = True

    def add(self, run: Run) -> None:
        """Make `run` a candidate. O(log n)."""
        self._queue.add((run.data, run))

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(log n)."""
        self._queue.remove((run.data, run))

    def victim(self) -> Run | None:
        """Move the hand to the next unvisited candidate and return it. O(log n + steps), a step clears a bit."""
        queue = self._queue
        if not queue:
            return None
        index = queue.bisect_left((self._hand,))
        if index == len(queue) or queue[index][0] != self._hand:
            index = queue.bisect_left((self._after,))
        while True:
            if index == len(queue):
                index = 0
            arrival, run = queue[index]
            index += 1
            if not run.next:
                self._hand, self._after = arrival, queue[index][0] if index < len(queue) else 0
                victim: Run = run
                return victim
            run.next = False

    def split(self, upper: Run, lower: Run) -> None:
        """Give `upper` the place and the bit of `lower`. O(1)."""
        upper.data, upper.next = lower.data, lower.next

    def dropped(self, run: Run) -> None:
        """Forget the run's place. O(1)."""
        run.data = run.next = None

    def candidates(self) -> Iterator[Run]:
        """Iterate over the candidates, oldest first."""
        return (run for _, run in self._queue)
