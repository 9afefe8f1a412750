"""Request-level: blocks go as soon as the last request that uses them completes; only running requests share.

What vLLM's block manager did under its watermark before automatic prefix caching (Kwon et al., "Efficient memory
management for large language model serving with PagedAttention", SOSP 2023). Blocks that a pin or a fence outlives go
in order of their release. Cost: O(1), as LRU.
When not to use it: whenever a prompt may come again; it is here to show what keeping blocks is worth.
"""

from __future__ import annotations

from typing import ClassVar

from radixpool.radix.eviction.lru import LRU

__all__ = ["RequestLevel"]


class RequestLevel(LRU):
    """Evict everything that no running request holds, at once."""

    name: ClassVar[str] = "request"
    merges_runs: ClassVar[bool] = True
    evicts_on_release: ClassVar[bool] = True
