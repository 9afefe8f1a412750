"""Replay a trace through the real `RadixCache`: one symbol a block, so that a node of the tree is (parent, id).

Zero duration: each request is admitted, commits and is released before the next. Timed: it holds its blocks from its
arrival for its duration, and waits, in order, for running ones to finish when the pool is short. Its blocks are
findable from its admission on, as in engines that hash blocks when they allocate them.
"""

from __future__ import annotations

import heapq
import time
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixpool.radix import PoolExhausted, RadixCache, Sequence
from radixpool.rpc.bench.cost import PrefillModel
from radixpool.rpc.bench.metrics import Run
from radixpool.rpc.bench.trace import Trace

Timing = Literal["zero", "timed"]

MS_PER_OUTPUT_TOKEN = 20.0
"""Decode time of an output token where the trace has no durations."""


def durations_ms(trace: Trace, model: PrefillModel) -> npt.NDArray[np.float64]:
    """Return how long each request runs: the trace's figure, or prefill without a cache plus decoding; O(requests)."""
    guess = trace.input_tokens / model.tokens_per_s * 1e3 + trace.output_tokens * MS_PER_OUTPUT_TOKEN
    return np.where(np.isnan(trace.duration_ms), guess, trace.duration_ms)


def replay(
    trace: Trace, policy: str, capacity: int, *, timing: Timing = "zero", model: PrefillModel | None = None
) -> Run:
    """Replay the trace on an empty cache of `capacity` blocks and return what was hit; O(references).

    A request larger than the pool is refused and hits nothing. Raises `ValueError` for an unknown policy or parameter.
    """
    cache = RadixCache(num_blocks=capacity, block_size=1, policy=policy)
    if timing == "zero":
        hits, refused, seconds = _zero_duration(trace, cache)
        delays = None
    else:
        hits, refused, seconds, delays = _timed(trace, cache, durations_ms(trace, model or PrefillModel()))
    return Run(
        trace=trace.name,
        policy=policy,
        kind="policy",
        capacity_blocks=capacity,
        hits=np.minimum(np.array(hits, dtype=np.int32), trace.prompt_blocks),
        seconds=seconds,
        evicted_blocks=cache.stats().evicted_blocks,
        refused_requests=refused,
        delays_ms=delays,
    )


def _zero_duration(trace: Trace, cache: RadixCache) -> tuple[list[int], int, float]:
    hits: list[int] = []
    refused = 0
    paths = trace.packed_paths()
    acquire, commit, release, record = cache.acquire, cache.commit, cache.release, hits.append
    start = time.thread_time()
    for path in paths:
        blocks = len(path) >> 2
        if not blocks:
            record(0)
            continue
        try:
            seq = acquire(path, max_hit=blocks)
        except PoolExhausted:
            refused += 1
            record(0)
            continue
        record(seq.cached_tokens)
        commit(seq, blocks)
        release(seq)
    return hits, refused, time.thread_time() - start


def _timed(
    trace: Trace, cache: RadixCache, durations: npt.NDArray[np.float64]
) -> tuple[list[int], int, float, npt.NDArray[np.float64]]:
    paths, capacity = trace.packed_paths(), cache.num_blocks
    hits = [0] * len(paths)
    delays = np.zeros(len(paths))
    running: list[tuple[float, int]] = []
    held: dict[int, Sequence] = {}
    refused, now = 0, 0.0
    start = time.thread_time()
    for i, (path, arrival, duration) in enumerate(
        zip(paths, trace.arrival_ms.tolist(), durations.tolist(), strict=True)
    ):
        now = max(now, arrival)
        while running and running[0][0] <= now:
            cache.release(held.pop(heapq.heappop(running)[1]))
        blocks = len(path) >> 2
        if not blocks:
            continue
        if blocks > capacity:
            refused += 1
            continue
        while True:
            try:
                seq = cache.acquire(path, max_hit=blocks)
                break
            except PoolExhausted:
                now, finished = heapq.heappop(running)
                cache.release(held.pop(finished))
        hits[i] = seq.cached_tokens
        delays[i] = now - arrival
        cache.commit(seq, blocks)
        held[i] = seq
        heapq.heappush(running, (now + duration, i))
    return hits, refused, time.thread_time() - start, delays
