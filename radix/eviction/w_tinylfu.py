"""W-TinyLFU: a small LRU window for what is new, and a segmented LRU that admits from it only what is used more.

When room is needed, the window's oldest run meets the main segment's: the one used less goes. Uses of resident runs
are counted exactly; a count-min sketch remembers those of evicted ones, so that what returns has its history. All
counts are halved every `10 x capacity` block uses. Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache
admission policy", ACM Transactions on Storage 13(4), 2017.
Cost: O(log n) a hit run or candidate; one identity and four counters per eviction and per insertion; O(capacity) bytes
of sketch (4 a block), halved by one table look-up a byte.
When not to use it: for chat with few shared prompts: new sessions lose against old ones until their counts fade.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.segmented import Place, SegmentedPolicy

__all__ = ["WTinyLFU"]

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_MAX_COUNT = 15
_HALVED = bytes(value >> 1 for value in range(256))
_ROWS = 4


class _Sketch:
    """A count-min sketch of 4-bit counts in bytes, conservative: it never says less than what was remembered."""

    __slots__ = ("_mask", "_rows")

    def __init__(self, capacity: int) -> None:
        width = 1 << max(4, (max(capacity, 1) - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]

    def remember(self, identity: bytes, count: int) -> None:
        """Make the estimate of `identity` at least `count`. O(1)."""
        count = min(count, _MAX_COUNT)
        for row, index in zip(self._rows, self._indices(identity), strict=True):
            if row[index] < count:
                row[index] = count

    def estimate(self, identity: bytes) -> int:
        """Return the remembered count or, by collisions, more. O(1)."""
        return min(row[index] for row, index in zip(self._rows, self._indices(identity), strict=True))

    def halve(self) -> None:
        """Halve every count. O(capacity), at memory speed."""
        self._rows = [row.translate(_HALVED) for row in self._rows]

    def _indices(self, identity: bytes) -> tuple[int, int, int, int]:
        """Return an index for each row: four sums of the digest's two halves."""
        digest = int.from_bytes(identity, "little")
        low, high, mask = digest & 0xFFFFFFFF, digest >> 32 | 1, self._mask
        return low & mask, (low + high) & mask, (low + 2 * high) & mask, (low + 3 * high) & mask


class WTinyLFU(SegmentedPolicy):
    """Evict the less used of the window's oldest and the main segment's oldest candidate.

    Args:
        window: share of the pool for new runs, in 0..1.
        protected: share of the rest for runs that were hit there, in 0..1.

    """

    name: ClassVar[str] = "w-tinylfu"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int, *, window: float = 0.01, protected: float = 0.8) -> None:
        super().__init__(capacity, 3)
        if not 0.0 <= window <= 1.0 or not 0.0 <= protected <= 1.0:
            raise ValueError(
                f"policy: w-tinylfu needs window and protected in 0..1, not window={window}, protected={protected}"
            )
        self._window = int(capacity * window)
        self._limit = int((capacity - self._window) * protected)
        self._sketch = _Sketch(capacity)
        self._sample = 10 * capacity
        self._used = 0  # block uses since the counts were last halved
        self._epoch = 0  # how often they were halved
        self._pressed = False  # a victim was asked for: from now on, what leaves the window must win against one

    def inserted(self, run: Run, num_new: int) -> None:
        """Put the run into the window, with the count it had when it was last evicted. O(log n) and one identity."""
        is_new = run.data is None
        self._enter(run, num_new, _WINDOW)
        if is_new:
            self._set_count(run.data, self._sketch.estimate(run.identity(0)) + 1)
        self._count(num_new)
        if not self._pressed:
            self._overflow(_WINDOW, self._window, _PROBATION)

    def touched(self, run: Run) -> None:
        """Count the use; a hit in the main segment protects the run. O(log n)."""
        place: Place = run.data
        self._set_count(place, min(self._uses(place) + 1, _MAX_COUNT))
        self._count(place.blocks)
        if place.segment == _WINDOW:
            self._move(run, _WINDOW)
            return
        self._move(run, _PROTECTED)
        self._overflow(_PROTECTED, self._limit, _PROBATION)

    def victim(self) -> Run | None:
        """Return the next run to go; window runs that win move to the main segment. O(log n) a winner."""
        self._pressed = True
        main = self._oldest(_PROBATION) or self._oldest(_PROTECTED)
        new = self._oldest(_WINDOW)
        if new is None or (main is not None and self._blocks[_WINDOW] < self._window):
            return main
        if main is None or self._uses(new.data) <= self._uses(main.data):
            return new
        self._move(new, _PROBATION)
        return main

    def evicted(self, run: Run, num_blocks: int) -> None:
        """Remember the uses of what goes. One identity."""
        self._sketch.remember(run.identity(run.num_blocks - num_blocks), self._uses(run.data))
        super().evicted(run, num_blocks)

    def _count(self, num_blocks: int) -> None:
        self._used += num_blocks
        if self._used >= self._sample:
            self._used //= 2
            self._epoch += 1
            self._sketch.halve()

    def _uses(self, place: Place) -> int:
        """Return the run's count, halved once for each time all counts were."""
        return place.uses >> (self._epoch - place.epoch)

    def _set_count(self, place: Place, count: int) -> None:
        place.uses, place.epoch = count, self._epoch
