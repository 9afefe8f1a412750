"""Segmented LRU: a run must be hit once to be protected, so what is never asked again cannot push out what was.

New runs are on probation; a hit moves a run into the protected segment, whose oldest runs fall back to probation when
it is over its share. Victims are the oldest of probation. Karedla, Love, Wherry, "Caching strategies to improve disk
system performance", IEEE Computer 27(3), 1994. Cost: O(log n) a moved candidate, O(1) a hit run otherwise.
When not to use it: when most runs are hit exactly once more, as a chat's last turn: they leave probation for nothing.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.base import Run
from radixpool.radix.eviction.segmented import SegmentedPolicy

__all__ = ["SLRU"]

_PROBATION, _PROTECTED = 0, 1


class SLRU(SegmentedPolicy):
    """Evict the oldest candidate on probation, protected ones only when there is none.

    Args:
        protected: share of the pool for runs that were hit, in 0..1.

    """

    name: ClassVar[str] = "slru"
    observes_hits: ClassVar[bool] = True

    def __init__(self, capacity: int, *, protected: float = 0.8) -> None:
        super().__init__(capacity, 2)
        if not 0.0 <= protected <= 1.0:
            raise ValueError(f"policy: slru:protected must be in 0..1, not {protected}")
        self._limit = int(capacity * protected)

    def inserted(self, run: Run, num_new: int) -> None:
        """Put the run on probation. O(1)."""
        self._enter(run, num_new, _PROBATION)

    def touched(self, run: Run) -> None:
        """Protect the run, and let the oldest protected candidates fall back. O(log n) a candidate that falls."""
        self._move(run, _PROTECTED)
        self._overflow(_PROTECTED, self._limit, _PROBATION)

    def victim(self) -> Run | None:
        """Return the oldest candidate on probation, else the oldest protected one. O(1)."""
        return self._oldest(_PROBATION) or self._oldest(_PROTECTED)
