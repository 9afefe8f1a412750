"""Greedy-dual size frequency over prefill cost: cheap and rarely used blocks go first, and everything ages.

A run's key is the cache's age at its last use plus uses times the cost of its tail block; the age is the last victim's
key. Blocks have one size; their cost is the prefill FLOPs saved, which grow with depth because a deep block attends to
all before it: 1 at the root, 2 at a depth of `double_at` blocks. Cherkasova, "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", HP Labs HPL-98-69R1, 1998. Cost: O(1) a hit run, O(log n) a candidate.
When not to use it: to raise the hit ratio itself; it gives up shallow hits for deep ones, which pays only when long
prompts set the latency.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.aged import AgedPolicy
from radixpool.radix.eviction.base import Run

__all__ = ["GDSF"]


class GDSF(AgedPolicy):
    """Evict the candidate whose uses are worth the least compute. `run.data` is (uses, age at the last use).

    Args:
        double_at: depth in blocks at which a block costs twice a root block to compute: for a model of P parameters,
            L layers and query width H it is P / (2 L H) tokens, 30,500 for Llama-3-8B, over the block size.

    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, capacity: int, *, double_at: float = 1907.0) -> None:
        super().__init__(capacity)
        if not double_at > 0.0:
            raise ValueError(f"policy: gdsf:double_at must be above 0 blocks, not {double_at}")
        self._per_depth = 1.0 / double_at

    def _score(self, run: Run) -> float:
        uses, age = run.data
        return float(age + uses * (1.0 + run.end * self._per_depth))
