"""Uniformly random candidates, from a seed: the yardstick that any idea must beat.

Cost: O(1) throughout. Belady's study already measured it (IBM Systems Journal 5(2), 1966).
When not to use it: in production, unless nothing about the traffic repeats; it is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random as _Random
from typing import ClassVar

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["RandomPolicy"]


class RandomPolicy(EvictionPolicy):
    """Evict a random candidate. `run.data` is its index in the list of candidates.

    Args:
        seed: of the draw; the same operations with the same seed choose the same victims.

    """

    name: ClassVar[str] = "random"

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        super().__init__(capacity)
        self._draw = _Random(seed)
        self._runs: list[Run] = []

    def add(self, run: Run) -> None:
        """Make `run` a candidate. O(1)."""
        run.data = len(self._runs)
        self._runs.append(run)

    def remove(self, run: Run) -> None:
        """Stop considering `run`; the last candidate takes its index. O(1)."""
        last = self._runs.pop()
        if last is not run:
            self._runs[run.data] = last
            last.data = run.data
        run.data = None

    def victim(self) -> Run | None:
        """Return a random candidate. O(1)."""
        return self._runs[int(self._draw.random() * len(self._runs))] if self._runs else None

    def candidates(self) -> Iterator[Run]:
        """Iterate over the candidates in the list's order."""
        return iter(self._runs)
