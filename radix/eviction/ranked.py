"""What policies with a score share: candidates in a sorted list, lowest score first.

A subclass says what a run's score is; ties go to the older last use. The score is taken when the run becomes a
candidate and stays until it stops being one. `run.prev` holds the run's entry in the list, `run.data` is the subclass's
history of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["RankedPolicy"]


class RankedPolicy(EvictionPolicy):
    """Evict the candidate with the lowest score."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ranked: Any = SortedList()
        self._serial = 0  # makes entries distinct, so that runs are never compared

    @abstractmethod
    def _score(self, run: Run) -> float:
        """Return the run's score: lower goes first."""

    def add(self, run: Run) -> None:
        """Make `run` a candidate. O(log n)."""
        self._serial += 1
        entry = run.prev = (self._score(run), run.last_use, self._serial, run)
        self._ranked.add(entry)

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(log n)."""
        self._ranked.remove(run.prev)
        run.prev = None

    def victim(self) -> Run | None:
        """Return the candidate with the lowest score. O(1)."""
        if not self._ranked:
            return None
        run: Run = self._ranked[0][3]
        return run

    def candidates(self) -> Iterator[Run]:
        """Iterate over the candidates, lowest score first."""
        return (entry[3] for entry in self._ranked)

    def split(self, upper: Run, lower: Run) -> None:
        """Give `upper` the history of `lower`. O(1)."""
        upper.data = lower.data

    def dropped(self, run: Run) -> None:
        """Forget the run's history. O(1)."""
        run.data = None
