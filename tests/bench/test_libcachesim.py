"""Flattened (no tree: each request is one block), the policies agree with libCacheSim's own on the same references."""

from __future__ import annotations

import random

import pytest

from radixpool.radix import RadixCache

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim has no wheel for this platform")

EXACT = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve", "2q": "TwoQ"}


def zipf(num_refs: int, num_blocks: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    weights = [1.0 / rank for rank in range(1, num_blocks + 1)]
    return draw.choices(range(num_blocks), weights, k=num_refs)


def our_hits(policy: str, refs: list[int], capacity: int) -> list[bool]:
    cache = RadixCache(capacity, 1, policy=policy)
    hits = []
    for ref in refs:
        seq = cache.acquire(ref.to_bytes(4, "little"), max_hit=1)
        hits.append(seq.cached_tokens == 1)
        cache.commit(seq, 1)
        cache.release(seq)
    return hits


def their_hits(policy: str, refs: list[int], capacity: int) -> list[bool]:
    cache = getattr(libcachesim, policy)(capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = []
    for ref in refs:
        request.obj_id = ref
        hits.append(bool(cache.get(request)))
    return hits


@pytest.mark.parametrize("capacity", [20, 100, 1_000])
@pytest.mark.parametrize("policy", EXACT)
def test_policy_hits_the_same_references(policy, capacity):
    refs = zipf(12_000, 4_000, seed=capacity)
    assert our_hits(policy, refs, capacity) == their_hits(EXACT[policy], refs, capacity)


@pytest.mark.parametrize("policy", EXACT)
def test_policy_hits_the_same_references_of_a_real_trace(real_trace, policy):
    refs = real_trace("mooncake_conversation_trace", 1_000).nodes.tolist()
    assert our_hits(policy, refs, 1_000) == their_hits(EXACT[policy], refs, 1_000)


@pytest.mark.parametrize("capacity", [20, 100, 1_000])
def test_arc_agrees_within_half_a_thousandth(capacity):
    """Ours learns from a ghost when it is committed, theirs before it evicts, so single hits differ."""
    refs = zipf(20_000, 4_000, seed=capacity)
    assert sum(our_hits("arc", refs, capacity)) == pytest.approx(sum(their_hits("ARC", refs, capacity)), abs=10)
