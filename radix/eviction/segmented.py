"""What policies with several queues share: which queue a run is in, each queue's size in blocks, its oldest candidate.

Every run of the tree is in one segment and has a place in it, the number of its arrival there. Sizes count all blocks,
held and inner ones too; only candidates are kept in order, because nothing else can go. Two halves of a split run share
a place; they lie on one path, so at most one of them is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radixpool.radix.eviction.base import EvictionPolicy, Run

__all__ = ["Place", "SegmentedPolicy"]


class Place:
    """A run's segment, its arrival number there, its blocks, whether it is a candidate; `uses` and `epoch` are free."""

    __slots__ = ("arrival", "blocks", "candidate", "epoch", "segment", "uses")

    def __init__(self, segment: int, arrival: int, blocks: int) -> None:
        self.segment = segment
        self.arrival = arrival
        self.blocks = blocks
        self.uses = self.epoch = 0
        self.candidate = False


class SegmentedPolicy(EvictionPolicy):
    """Keep runs in numbered segments. `run.data` is the run's `Place`."""

    def __init__(self, capacity: int, num_segments: int) -> None:
        super().__init__(capacity)
        self._blocks = [0] * num_segments
        self._candidates: list[Any] = [SortedList() for _ in range(num_segments)]
        self._arrivals = 0

    def add(self, run: Run) -> None:
        """Make `run` a candidate of its segment. O(log n)."""
        place: Place = run.data
        place.candidate = True
        self._candidates[place.segment].add((place.arrival, run))

    def remove(self, run: Run) -> None:
        """Stop considering `run`. O(log n)."""
        place: Place = run.data
        place.candidate = False
        self._candidates[place.segment].remove((place.arrival, run))

    def split(self, upper: Run, lower: Run) -> None:
        """Give `upper` a place beside `lower`. O(1)."""
        place: Place = lower.data
        twin = upper.data = Place(place.segment, place.arrival, upper.num_blocks)
        twin.uses, twin.epoch = place.uses, place.epoch
        place.blocks -= twin.blocks

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Count the blocks out of their segment. O(1)."""
        place: Place = run.data
        place.blocks -= num_blocks
        self._blocks[place.segment] -= num_blocks

    def dropped(self, run: Run) -> None:
        """Count what is left of the run out of its segment. O(1)."""
        place: Place = run.data
        self._blocks[place.segment] -= place.blocks
        run.data = None

    def _enter(self, run: Run, num_new: int, segment: int) -> None:
        """Put a new run into `segment`, or count `num_new` more blocks where the run is."""
        place: Place | None = run.data
        if place is None:
            self._arrivals += 1
            place = run.data = Place(segment, self._arrivals, 0)
        place.blocks += num_new
        self._blocks[place.segment] += num_new

    def _move(self, run: Run, segment: int) -> None:
        """Move the run to the newest end of `segment`. O(1), O(log n) for a candidate."""
        place: Place = run.data
        if place.candidate:
            self._candidates[place.segment].remove((place.arrival, run))
        self._blocks[place.segment] -= place.blocks
        self._blocks[segment] += place.blocks
        self._arrivals += 1
        place.segment, place.arrival = segment, self._arrivals
        if place.candidate:
            self._candidates[segment].add((place.arrival, run))

    def _overflow(self, segment: int, limit: int, into: int) -> None:
        """Move the oldest candidates of `segment` on until it holds at most `limit` blocks. O(log n) each."""
        while self._blocks[segment] > limit:
            oldest = self._oldest(segment)
            if oldest is None:
                return  # the rest is held, or inner
            self._move(oldest, into)

    def _oldest(self, segment: int) -> Run | None:
        """Return the candidate that is in `segment` longest. O(1)."""
        ranked = self._candidates[segment]
        if not ranked:
            return None
        run: Run = ranked[0][1]
        return run

    def candidates(self) -> Iterator[Run]:
        """Iterate over the candidates by segment, oldest first."""
        return (run for ranked in self._candidates for _, run in ranked)
