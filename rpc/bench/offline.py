"""The offline optima over a trace: what a policy that knows the future would hit.

Every access is a root path, so a block is used whenever any of its descendants is: its next use is never later than
theirs. Evicting the block with the farthest next use (Belady, IBM Systems Journal 5(2), 1966), ties deepest first,
therefore always evicts a leaf, and the tree costs the optimum nothing.

`opt` keeps the rule of the real cache that all blocks of the request being served are resident; under unit blocks and
zero duration it is exact. `opt_bypass` need not store what it serves, and so bounds every leaf-first policy from above.
Neither bound holds with durations (blocks pinned while running) or with blocks of unequal cost.
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixpool.rpc.bench.trace import Trace

Admission = Literal["resident", "bypass"]


def next_uses(paths: list[list[int]], num_nodes: int) -> list[list[int]]:
    """Return, for each block of each path, the index of the next request that uses it (`len(paths)`: never).

    O(references) time and space.
    """
    never = len(paths)
    seen = [never] * num_nodes
    uses: list[list[int]] = [[]] * never
    for time in range(never - 1, -1, -1):
        path = paths[time]
        uses[time] = [seen[node] for node in path]
        for node in path:
            seen[node] = time
    return uses


def optimal_hits(trace: Trace, capacity: int, *, admission: Admission = "resident") -> npt.NDArray[np.int32]:
    """Return the blocks hit by each request under the offline optimum with `capacity` blocks.

    O(references + evictions log references). A request longer than the capacity is refused under "resident", as the
    real cache refuses it, and hits nothing.
    """
    paths = trace.paths()
    cache = _Belady(num_nodes=trace.num_nodes, num_requests=len(paths), capacity=capacity)
    hits = np.zeros(len(paths), dtype=np.int32)
    for time, (path, uses) in enumerate(zip(paths, next_uses(paths, trace.num_nodes), strict=True)):
        if admission == "resident" and len(path) > capacity:
            cache.refuse(time, path, uses)
            continue
        hit = cache.match(path)
        hits[time] = hit
        cache.consume(time, hit)
        if admission == "resident":
            cache.shrink(capacity - len(path))
        cache.store(path, uses)
        cache.shrink(capacity)
    return np.minimum(hits, trace.prompt_blocks)


class _Belady:
    """Resident blocks in one bucket for each next use; a heap holds the buckets, farthest first.

    All blocks used next by one request lie on its path, so a bucket sorted by node number pops the deepest first.
    Blocks never used again are only counted: which of them goes first changes no hit.
    """

    def __init__(self, *, num_nodes: int, num_requests: int, capacity: int) -> None:
        self.never = num_requests
        self.capacity = capacity
        self.size = 0
        self.dead = 0
        self.resident = bytearray(num_nodes)
        self.buckets: dict[int, list[int]] = {}
        self.farthest: list[int] = []

    def match(self, path: list[int]) -> int:
        for depth, node in enumerate(path):
            if not self.resident[node]:
                return depth
        return len(path)

    def consume(self, time: int, hit: int) -> None:
        """Take the request's own blocks out: they are pinned while it is served."""
        self.buckets.pop(time, None)
        self.size -= hit

    def refuse(self, time: int, path: list[int], uses: list[int]) -> None:
        """Move the refused request's resident blocks on to their next use."""
        held = self.match(path)
        self.consume(time, held)
        self.store(path[:held], uses[:held])

    def store(self, path: list[int], uses: list[int]) -> None:
        for node, use in zip(path, uses, strict=True):
            if use == self.never:
                self.dead += 1
                self.resident[node] = 0
                continue
            self.resident[node] = 1
            bucket = self.buckets.get(use)
            if bucket is None:
                self.buckets[use] = [node]
                heapq.heappush(self.farthest, -use)
            else:
                bucket.append(node)
        self.size += len(path)

    def shrink(self, size: int) -> None:
        """Evict, farthest next use first, until at most `size` blocks stay."""
        from_dead = min(self.dead, max(0, self.size - size))
        self.dead -= from_dead
        self.size -= from_dead
        while self.size > size:
            use = -self.farthest[0]
            bucket = self.buckets.get(use)
            if not bucket:
                heapq.heappop(self.farthest)
                self.buckets.pop(use, None)
                continue
            bucket.sort()
            excess = self.size - size
            for node in bucket[-excess:]:
                self.resident[node] = 0
            self.size -= min(excess, len(bucket))
            del bucket[-excess:]


def working_set(trace: Trace) -> int:
    """Return the smallest capacity at which `opt` hits as much as an infinite cache; O(references).

    At each request that is its own path plus every other block seen before and used again later.
    """
    paths = trace.paths()
    waiting = bytearray(trace.num_nodes)
    live = peak = 0
    for path, uses in zip(paths, next_uses(paths, trace.num_nodes), strict=True):
        live -= sum(waiting[node] for node in path)
        peak = max(peak, live + len(path))
        for node, use in zip(path, uses, strict=True):
            waiting[node] = use < len(paths)
        live += sum(waiting[node] for node in path)
    return peak
