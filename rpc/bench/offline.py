"""The offline optima over a trace: what a policy that knows the future would hit.

Every access is a root path, so a block is used whenever any of its descendants is: its next use is never later than
theirs. Evicting the block with the farthest next use (Belady, IBM Systems Journal 5(2), 1966), ties deepest first,
therefore always evicts a leaf, and the tree costs the optimum nothing.

A use is an access that could be a counted hit. A refused request uses nothing, nor does the output of a request (it is
inserted, not looked up) or a request of the warm-up: to keep a block for one of these gains nothing.

`opt` keeps the rule of the real cache that all blocks of the request being served are resident. It is exact for unit
blocks, zero duration, prompts alone and no warm-up. With outputs or a warm-up a block may be used later than one below
it, the farthest use need not be a leaf's, and `opt` is an upper bound: what could be hit if there were no tree.
`opt_bypass` need not store what it serves, and so bounds every leaf-first policy from above.
Neither bound holds with durations (blocks pinned while running) or with blocks of unequal cost.
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixpool.rpc.bench.trace import Trace

Admission = Literal["resident", "bypass"]


def next_uses(paths: list[list[int]], num_nodes: int, counted: list[int]) -> list[list[int]]:
    """Return, for each block of each path, the index of the next request that uses it (`len(paths)`: never).

    An access is a use if it is one of the first `counted[request]` blocks of its path; a block whose next access is
    none is never used again: that access inserts it anew. O(references) time and space.
    """
    never = len(paths)
    seen = [never] * num_nodes
    uses: list[list[int]] = [[]] * never
    for time in range(never - 1, -1, -1):
        path, looked_up = paths[time], counted[time]
        uses[time] = [seen[node] for node in path]
        for node in path[:looked_up]:
            seen[node] = time
        for node in path[looked_up:]:
            seen[node] = never
    return uses


def optimal_hits(
    trace: Trace, capacity: int, *, admission: Admission = "resident", first_request: int = 0
) -> npt.NDArray[np.int32]:
    """Return the blocks hit by each request under the offline optimum with `capacity` blocks.

    A request longer than the capacity is refused under "resident", as the real cache refuses it: it hits nothing and
    changes nothing. Requests before `first_request` (warm-up) fill the cache and are given no hits.
    O(references + evictions log references).
    """
    paths = trace.paths()
    counted = [0] * first_request + trace.prompt_blocks[first_request:].tolist()
    if admission == "resident":
        paths = [path if len(path) <= capacity else [] for path in paths]
    cache = _Belady(never=len(paths))
    hits = np.zeros(len(paths), dtype=np.int32)
    for time, (path, uses) in enumerate(zip(paths, next_uses(paths, trace.num_nodes, counted), strict=True)):
        hits[time] = cache.take(time)
        if admission == "resident":
            cache.shrink(capacity - len(path))
        cache.store(path, uses)
        cache.shrink(capacity)
    return hits


class _Belady:
    """The resident blocks that will be used again, in one bucket for each next use: what that request will hit.

    A heap holds the buckets, farthest first. All blocks used next by one request lie on its path, so a bucket sorted by
    node number pops the deepest first. Blocks never used again are not kept: they go first, and which of them goes
    changes no hit.
    """

    def __init__(self, *, never: int) -> None:
        self.never = never
        self.size = 0
        self.buckets: dict[int, list[int]] = {}
        self.farthest: list[int] = []

    def take(self, time: int) -> int:
        """Take out what the request hits, which is pinned while it is served, and count it."""
        hit = len(self.buckets.pop(time, ()))
        self.size -= hit
        return hit

    def store(self, path: list[int], uses: list[int]) -> None:
        for node, use in zip(path, uses, strict=True):
            if use == self.never:
                continue
            self.size += 1
            bucket = self.buckets.get(use)
            if bucket is None:
                self.buckets[use] = [node]
                heapq.heappush(self.farthest, -use)
            else:
                bucket.append(node)

    def shrink(self, size: int) -> None:
        """Evict, farthest next use first, until at most `size` blocks stay."""
        while self.size > size:
            use = -self.farthest[0]
            bucket = self.buckets.get(use)
            if not bucket:
                heapq.heappop(self.farthest)
                self.buckets.pop(use, None)
                continue
            bucket.sort()
            excess = self.size - size
            self.size -= min(excess, len(bucket))
            del bucket[-excess:]


def working_set(trace: Trace) -> int:
    """Return the smallest capacity at which `opt` hits as much as an infinite cache; O(references).

    At each request that is its own path plus every other block seen before and used again later.
    """
    paths = trace.paths()
    waiting = bytearray(trace.num_nodes)
    live = peak = 0
    for path, uses in zip(paths, next_uses(paths, trace.num_nodes, trace.prompt_blocks.tolist()), strict=True):
        live -= sum(waiting[node] for node in path)
        peak = max(peak, live + len(path))
        for node, use in zip(path, uses, strict=True):
            waiting[node] = use < len(paths)
        live += sum(waiting[node] for node in path)
    return peak
