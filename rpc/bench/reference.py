"""Reference lines beside the policies: infinite cache, no cache, running-only sharing, whole-sequence LRU, LRU curve.

Exact simulators over node numbers, independent of `radixpool.radix`. Each returns the blocks hit by each request.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from radixpool.rpc.bench.trace import Trace

Hits = npt.NDArray[np.int32]


def infinite_hits(trace: Trace) -> Hits:
    """Return the hits of a cache that never evicts; O(nodes)."""
    seen = bytearray(trace.num_nodes)
    hits = np.zeros(trace.num_requests, dtype=np.int32)
    for i, path in enumerate(trace.paths()):
        hits[i] = _resident_prefix(path, seen)
        for node in path:
            seen[node] = 1
    return np.minimum(hits, trace.prompt_blocks)


def no_cache_hits(trace: Trace) -> Hits:
    """Return the hits without a cache: none."""
    return np.zeros(trace.num_requests, dtype=np.int32)


def running_only_hits(trace: Trace, durations_ms: npt.NDArray[np.float64]) -> Hits:
    """Return the hits when blocks are shared only while some holder runs; O(nodes + n log n).

    A request runs from its arrival for its duration; at zero duration nothing is ever shared.
    """
    holders = [0] * trace.num_nodes
    hits = np.zeros(trace.num_requests, dtype=np.int32)
    paths = trace.paths()
    running: list[tuple[float, int]] = []
    for i, (path, start, duration) in enumerate(
        zip(paths, trace.arrival_ms.tolist(), durations_ms.tolist(), strict=True)
    ):
        for done in _finished(running, start):
            for node in paths[done]:
                holders[node] -= 1
        hits[i] = _resident_prefix(path, holders)
        for node in path:
            holders[node] += 1
        heapq.heappush(running, (start + duration, i))
    return np.minimum(hits, trace.prompt_blocks)


def live_set(trace: Trace, durations_ms: npt.NDArray[np.float64]) -> int:
    """Return the most distinct blocks that running requests hold at once; O(nodes + n log n).

    A smaller pool makes requests wait. At zero duration this is the largest request.
    """
    holders = [0] * trace.num_nodes
    paths = trace.paths()
    running: list[tuple[float, int]] = []
    live = peak = 0
    for i, (path, start, duration) in enumerate(
        zip(paths, trace.arrival_ms.tolist(), durations_ms.tolist(), strict=True)
    ):
        for done in _finished(running, start):
            for node in paths[done]:
                holders[node] -= 1
                live -= not holders[node]
        for node in path:
            live += not holders[node]
            holders[node] += 1
        peak = max(peak, live)
        heapq.heappush(running, (start + duration, i))
    return peak


def whole_sequence_hits(trace: Trace, capacity: int) -> Hits:
    """Return the hits of LRU over whole sequences, blocks shared; O(nodes + evicted nodes).

    Each request leaves one sequence (its path), which replaces the one that it extends or repeats. The least recently
    left sequence goes whole, with every block that no other sequence has: what servers did before block-level eviction.
    """
    owners = [0] * trace.num_nodes
    sequences: OrderedDict[int, list[int]] = OrderedDict()
    hits = np.zeros(trace.num_requests, dtype=np.int32)
    size = 0
    for i, path in enumerate(trace.paths()):
        if len(path) > capacity:
            continue  # refused, as by the real cache
        hits[i] = _resident_prefix(path, owners)
        for node in path:
            size += not owners[node]
            owners[node] += 1
        for tail in path:
            extended = sequences.pop(tail, None)
            if extended is not None:
                size -= _disown(extended, owners)
        while size > capacity:
            _, oldest = sequences.popitem(last=False)
            size -= _disown(oldest, owners)
        if path:
            sequences[path[-1]] = path
    return np.minimum(hits, trace.prompt_blocks)


def _disown(path: list[int], owners: list[int]) -> int:
    freed = 0
    for node in path:
        owners[node] -= 1
        freed += not owners[node]
    return freed


def _finished(running: list[tuple[float, int]], now: float) -> Iterator[int]:
    while running and running[0][0] <= now:
        yield heapq.heappop(running)[1]


def _resident_prefix(path: list[int], resident: bytearray | list[int]) -> int:
    for depth, node in enumerate(path):
        if not resident[node]:
            return depth
    return len(path)


def lru_curve(trace: Trace, *, first_request: int = 0) -> npt.NDArray[np.int64]:
    """Return LRU's hits at every capacity 0..num_nodes, in one pass; O(nodes + groups log requests).

    Hits of requests before `first_request` are not counted (warm-up).

    LRU over root paths, touched deepest first, is a stack algorithm (Mattson et al., IBM Systems Journal 9(2), 1970):
    after each request a cache of c blocks holds the top c of one recency stack, so a block is hit exactly if its
    stack depth is at most c. Exact for zero duration and capacities from the largest request up.
    """
    last = [-1] * trace.num_nodes
    counts = _Fenwick(trace.num_requests)
    depths = np.zeros(trace.num_nodes + 2, dtype=np.int64)
    for time, (path, looked_up) in enumerate(zip(trace.paths(), trace.prompt_blocks.tolist(), strict=True)):
        start = 0
        while start < len(path) and last[path[start]] >= 0:
            then = last[path[start]]
            end = start
            while end < len(path) and last[path[end]] == then:
                end += 1
            newer = counts.total_after(then) + start  # the path's own shallower blocks are newer too
            if start < looked_up and time >= first_request:
                depths[newer + 1 : newer + 1 + min(end, looked_up) - start] += 1
            counts.add(then, start - end)
            start = end
        _touch(path, time, last)
        counts.add(time, len(path))
    return np.cumsum(depths[: trace.num_nodes + 1])


def _touch(path: list[int], time: int, last: list[int]) -> None:
    for node in path:
        last[node] = time


class _Fenwick:
    """Counts of blocks by the request that touched them last, with sums of a suffix in O(log n)."""

    def __init__(self, size: int) -> None:
        self.tree = [0] * (size + 1)
        self.total = 0

    def add(self, index: int, amount: int) -> None:
        self.total += amount
        index += 1
        while index < len(self.tree):
            self.tree[index] += amount
            index += index & -index

    def total_after(self, index: int) -> int:
        before = 0
        index += 1
        while index > 0:
            before += self.tree[index]
            index -= index & -index
        return self.total - before
