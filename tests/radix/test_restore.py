"""Restore: loose blocks in any order become the tree they came from, and what cannot be placed is named."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.radix.cache import RadixCache
from radixpool.radix.errors import EventsLost, PoolExhausted
from radixpool.radix.events import EventLog
from radixpool.radix.eviction import available_policies
from radixpool.radix.media import MediaSpan, mark_blocks
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.rebuild import FORMER_INCARNATION, lift_fence, restore_blocks
from radixpool.radix.restore import ORPHAN, ROOT, LooseBlocks, RestorePlan, plan_restore

BLOCK_SIZE = 2
OTHER = Namespace(tenant="other")
NAMESPACES = {1: DEFAULT_NAMESPACE, 2: OTHER}
NONE = np.empty(0, dtype=np.int32)


def loose_blocks(
    parents: list[int],
    *,
    last_uses: list[int] | None = None,
    tokens: list[int] | None = None,
    namespaces: list[int] | None = None,
    media: list[int] | None = None,
) -> LooseBlocks:
    """Make block 10 + i from entry i; `tokens` gives the first token of each block, different by default."""
    n = len(parents)
    positions: list[int] = []
    for i in range(n):
        depth, at = 0, i
        while parents[at] >= 0:
            depth, at = depth + 1, parents[at]
        positions.append(depth)
    first = np.array(tokens if tokens is not None else range(n), dtype=np.uint32)
    return LooseBlocks(
        blocks=np.arange(10, 10 + n, dtype=np.int32),
        parents=np.array(parents, dtype=np.int64),
        positions=np.array(positions, dtype=np.uint32),
        namespaces=np.array(namespaces or [1] * n, dtype=np.uint32),
        media=np.array(media or [0] * n, dtype=np.uint32),
        last_uses=np.array(last_uses or [1] * n, dtype=np.uint64),
        tokens=np.stack((first, np.zeros(n, dtype=np.uint32)), axis=1),
    )


class Run(NamedTuple):
    parent: int
    namespace: int
    media: int
    end: int
    last_use: int
    tokens: bytes
    blocks: bytes


def runs_of(plan: RestorePlan) -> list[Run]:
    return [Run(*run) for run in zip(*plan.runs(), strict=True)]


def shape(plan: RestorePlan) -> list[tuple[list[int], int, int]]:
    """The runs as (block ids, number of the parent run, last use)."""
    return [(np.frombuffer(run.blocks, "<i4").tolist(), run.parent, run.last_use) for run in runs_of(plan)]


def test_nothing_gives_an_empty_plan() -> None:
    plan = plan_restore(loose_blocks([]))
    assert (shape(plan), plan.num_runs, plan.dropped.size) == ([], 0, 0)


def test_a_chain_in_any_order_is_one_run() -> None:
    assert shape(plan_restore(loose_blocks([2, ROOT, 1]))) == [([11, 12, 10], ROOT, 1)]


def test_runs_end_at_forks_and_at_media() -> None:
    plan = plan_restore(loose_blocks([ROOT, 0, 1, 1, 3, 4], media=[0, 0, 0, 0, 7, 0]))
    assert shape(plan) == [([10, 11], ROOT, 1), ([12], 0, 1), ([13], 0, 1), ([14], 2, 1), ([15], 3, 1)]


def test_an_ancestor_is_as_recent_as_its_most_recent_descendant() -> None:
    """Row 38: of abcd, ab was used again at 9 and cd stayed cold."""
    assert shape(plan_restore(loose_blocks([ROOT, 0, 1, 2], last_uses=[1, 9, 1, 5]))) == [
        ([10, 11], ROOT, 9),
        ([12, 13], 0, 5),
    ]
    assert shape(plan_restore(loose_blocks([ROOT, 0, 1, 1], last_uses=[1, 1, 3, 8]))) == [
        ([10, 11], ROOT, 8),
        ([12], 0, 3),
        ([13], 0, 8),
    ]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_times_of_any_size_give_the_same_plan(data: st.DataObject) -> None:
    """A damaged last use is only a wrong hint, as large as it may be."""
    loose = data.draw(forests())
    huge = replace(loose, last_uses=loose.last_uses * np.uint64(2**60))
    assert shape(plan_restore(huge)) == [(blocks, up, use * 2**60) for blocks, up, use in shape(plan_restore(loose))]


def test_namespaces_are_separate_trees_with_equal_content() -> None:
    plan = plan_restore(loose_blocks([ROOT, ROOT, 0], tokens=[5, 5, 6], namespaces=[1, 2, 1]))
    assert [(run.namespace, run.parent) for run in runs_of(plan)] == [(1, ROOT), (2, ROOT)]
    assert plan.dropped.size == 0


def test_orphans_go_with_their_descendants() -> None:
    plan = plan_restore(loose_blocks([ROOT, ORPHAN, 1, 2, 0]))
    assert shape(plan) == [([10, 14], ROOT, 1)]
    assert plan.dropped.tolist() == [11, 12, 13]


def test_second_copies_go_with_their_descendants() -> None:
    plan = plan_restore(loose_blocks([ROOT, ROOT, ROOT, 1, 0, 0], tokens=[5, 5, 5, 6, 7, 7]))
    assert sorted(plan.loose.blocks.tolist()) == [10, 14]
    assert plan.dropped.tolist() == [11, 12, 13, 15]


def test_equal_tokens_under_different_media_are_no_copies() -> None:
    assert plan_restore(loose_blocks([ROOT, ROOT, ROOT], tokens=[5, 5, 5], media=[0, 1, 2])).num_runs == 3


@st.composite
def forests(draw: st.DrawFn) -> LooseBlocks:
    n = draw(st.integers(1, 40))
    parents = [draw(st.sampled_from([ROOT, ORPHAN, *range(max(0, i - 6), i)])) for i in range(n)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    last_uses = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    loose = loose_blocks(parents, tokens=tokens, last_uses=last_uses)
    return loose.take(np.array(draw(st.permutations(range(n)))))


def naive(loose: LooseBlocks) -> dict[tuple[int, ...], tuple[int, int]]:
    """Map each placeable prefix to its block and its true last use, one block after the other."""
    paths: dict[int, tuple[int, ...]] = {}
    found: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(loose.blocks.size), key=lambda i: int(loose.positions[i])):
        parent = int(loose.parents[i])
        if parent == ORPHAN or (parent >= 0 and parent not in paths):
            continue
        path = (*paths.get(parent, ()), int(loose.tokens[i, 0]))
        if path not in found:
            paths[i] = path
            found[path] = [int(loose.blocks[i]), int(loose.last_uses[i])]
    for path, (_, last_use) in found.items():
        for length in range(1, len(path)):
            found[path[:length]][1] = max(found[path[:length]][1], last_use)
    return {path: (block, last_use) for path, (block, last_use) in found.items()}


@settings(deadline=None, max_examples=300)
@given(forests())
def test_the_plan_is_what_a_naive_reader_finds(loose: LooseBlocks) -> None:
    plan = plan_restore(loose)
    expected = naive(loose)
    paths: list[tuple[int, ...]] = []
    found = {}
    for run in runs_of(plan):
        path = paths[run.parent] if run.parent >= 0 else ()
        for token, block in zip(
            np.frombuffer(run.tokens, "<u4")[::BLOCK_SIZE], np.frombuffer(run.blocks, "<i4"), strict=True
        ):
            path = (*path, int(token))
            found[path] = (int(block), run.last_use)
        assert run.end == len(path)
        paths.append(path)
    first_of = {path: block for path, (block, _) in expected.items()}
    assert {path: last_use for path, (_, last_use) in found.items()} == {p: u for p, (_, u) in expected.items()}
    assert {path: block for path, (block, _) in found.items()} == first_of
    kept = [block for block, _ in found.values()]
    assert sorted([*kept, *plan.dropped.tolist()]) == sorted(loose.blocks.tolist())


# --- the builder


def restored(loose: LooseBlocks, *, quarantined=NONE, media=None, num_blocks: int = 32, **options) -> RadixCache:
    cache = RadixCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, **options)
    restore_blocks(cache, plan_restore(loose), namespaces=NAMESPACES, media=media or {}, quarantined=quarantined)
    cache.check()
    return cache


def test_restored_prefixes_are_found_at_once_and_evicted_only_after_the_fence() -> None:
    cache = restored(loose_blocks([ROOT, 0, 1, ROOT], tokens=[1, 2, 3, 4], namespaces=[1, 1, 1, 2]))
    assert cache.match([1, 0, 2, 0, 3, 0]).blocks.tolist() == [10, 11, 12]
    assert cache.match([4, 0]).tokens == 0
    assert cache.match([4, 0], namespace=OTHER).blocks.tolist() == [13]
    stats = cache.stats()
    assert (stats.free_blocks, stats.quarantined_blocks, stats.cached_blocks) == (28, 4, 0)
    assert cache.evict(4).num_blocks == 0
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    assert cache.stats().cached_blocks == 4
    assert cache.evict(4).num_blocks == 4
    cache.check()


def test_a_restored_block_under_media_is_found_with_its_content_only() -> None:
    """In the middle of a path, and as its beginning."""
    keys = {7: mark_blocks([MediaSpan(2, 2, b"cat")], 4, BLOCK_SIZE)[1]}
    keys[8] = mark_blocks([MediaSpan(0, 2, b"dog")], 2, BLOCK_SIZE)[0]
    cache = restored(loose_blocks([ROOT, 0, 1, ROOT], tokens=[5, 6, 7, 5], media=[0, 7, 0, 8]), media=keys)
    tokens = [5, 0, 6, 0, 7, 0]
    assert cache.match(tokens, media=[MediaSpan(2, 2, b"cat")]).blocks.tolist() == [10, 11, 12]
    assert cache.match(tokens, media=[MediaSpan(0, 2, b"dog")]).blocks.tolist() == [13]
    assert cache.match(tokens).blocks.tolist() == [10]


def test_uncommitted_blocks_stay_out_until_the_fence() -> None:
    cache = restored(loose_blocks([ROOT]), quarantined=np.array([0, 1], dtype=np.int32), num_blocks=11)
    assert cache.stats().quarantined_blocks == 3
    seq = cache.acquire(range(100, 116))
    assert sorted(seq.block_table.tolist()) == [2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(PoolExhausted) as refusal:
        cache.acquire([7, 7])
    assert refusal.value.retry_after_step is None, "no step of any worker that the caller knows"
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    assert cache.acquire([7, 7, 7]).num_blocks == 2


def test_the_cache_works_on_while_the_former_incarnation_lasts() -> None:
    cache = restored(loose_blocks([ROOT, 0, 1]))
    one = cache.acquire([0, 0, 1, 0, 9, 9])
    assert one.cached_tokens == 4
    cache.commit(one, 6)
    cache.release(one)
    cache.check()
    two = cache.acquire([0, 0, 1, 0, 2, 0, 3, 3])
    assert two.cached_tokens == 6
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    cache.release(two)
    cache.check()
    assert cache.evict(32).num_blocks == 4
    assert cache.stats().free_blocks == 32


@settings(deadline=None, max_examples=100)
@given(forests())
def test_eviction_takes_blocks_in_the_order_of_last_use(loose: LooseBlocks) -> None:
    loose = replace(loose, last_uses=np.arange(1, loose.blocks.size + 1, dtype=np.uint64))
    cache = restored(loose, num_blocks=64)
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    by_block = {block: (last_use, len(path)) for path, (block, last_use) in naive(loose).items()}
    order = [by_block[block] for block in cache.evict(64).blocks.tolist()]
    assert order == sorted(order, key=lambda use: (use[0], -use[1]))
    assert len(order) == len(by_block)


def test_the_fence_is_lifted_in_slices_the_least_recently_used_first() -> None:
    """No slice takes longer than its limit, and what it lets go can be evicted at once."""
    n = 3000
    loose = loose_blocks([ROOT] * n, last_uses=list(range(n, 0, -1)))
    unwritten = np.arange(4000, 4000 + 40_000, dtype=np.int32)
    cache = restored(loose, quarantined=unwritten, num_blocks=44_000)
    free, seen = cache.stats().free_blocks, []
    while lift_fence(cache):
        cache.check()
        seen.append((cache.stats().cached_blocks, cache.stats().free_blocks - free))
        assert cache.evict(1).blocks.tolist() == [10 + n - len(seen)], "the oldest that is left"
        free += 1
        assert not cache.workers(), "nothing new waits for it"
    assert seen == [(1024, 0), (2047, 0), (2998, 0)]
    cache.check()
    stats = cache.stats()
    assert (stats.quarantined_blocks, stats.cached_blocks, stats.free_blocks) == (0, n - 3, 44_000 - n + 3)


def test_a_slice_counts_the_ancestors_that_go_with_a_leaf() -> None:
    """Long paths with few leaves are let go in as small slices as a bush: 600 paths of 10 runs, each of its own use."""
    parents = [i - 1 if i % 10 else ROOT for i in range(6000)]
    cache = restored(loose_blocks(parents, last_uses=list(range(6000, 0, -1))), num_blocks=6100)
    cached = [0]
    while lift_fence(cache):
        cached.append(cache.stats().cached_blocks)
    cache.check()
    assert len(cached) == 6
    assert max(np.diff(cached)) <= 4 * (256 + 10)
    assert cache.stats().cached_blocks == 6000


def test_a_path_in_use_while_the_fence_is_lifted_stays_whole() -> None:
    cache = restored(loose_blocks([ROOT, 0, 0, 2]))
    one = cache.acquire([0, 0, 1, 0, 9])
    assert not lift_fence(cache)
    cache.check()
    assert (cache.stats().held_blocks, cache.stats().cached_blocks) == (3, 2)
    cache.release(one)
    cache.check()
    assert cache.evict(32).num_blocks == 4


def test_the_clock_goes_on_after_the_latest_use() -> None:
    cache = restored(loose_blocks([ROOT, ROOT], last_uses=[40, 7]))
    assert cache.stats().tick == 40
    cache.remove_worker(FORMER_INCARNATION)
    cache.release(cache.acquire([1, 0, 5]))
    assert cache.evict(1).blocks.tolist() == [10], "the restored block used at 40 is older than one used now"


@pytest.mark.parametrize(
    ("quarantined", "message"),
    [
        ([10], "name each block once"),
        ([3, 3], "name each block once"),
        ([32], "must be 0 to 31"),
        ([-1], "must be 0 to 31"),
    ],
)
def test_impossible_blocks_are_refused(quarantined: list[int], message: str) -> None:
    cache = RadixCache(num_blocks=32, block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match=message):
        restore_blocks(
            cache,
            plan_restore(loose_blocks([ROOT])),
            namespaces=NAMESPACES,
            media={},
            quarantined=np.array(quarantined, dtype=np.int32),
        )
    cache.check()
    assert cache.stats().free_blocks == 32


def test_only_a_new_cache_of_the_same_block_size_is_restored() -> None:
    plan = plan_restore(loose_blocks([ROOT]))
    used = RadixCache(num_blocks=32, block_size=BLOCK_SIZE)
    used.acquire([1])
    for cache, message in (
        (used, "new and empty"),
        (RadixCache(num_blocks=32, block_size=4), "block_size must be 4, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            restore_blocks(cache, plan, namespaces=NAMESPACES, media={}, quarantined=NONE)
        cache.check()


def test_restored_runs_are_told_as_events() -> None:
    """A follower from the beginning finds what the tree finds."""
    cache = restored(loose_blocks([ROOT, 0, 1, 1, ROOT], namespaces=[1, 1, 1, 1, 2]), events=EventLog())
    events = cache.events.since(0)
    told = [(event.namespace, event.parent, event.start, event.tokens, event.blocks) for event in events]
    snapshot = [(run.namespace, run.parent, run.start, run.tokens, run.blocks) for run in cache.snapshot().stored]
    assert sorted(told, key=repr) == sorted(snapshot, key=repr)
    assert len(told) == 4


def test_more_restored_runs_than_the_log_keeps_are_lost_like_any_events() -> None:
    cache = restored(loose_blocks([ROOT] * 5), events=EventLog(capacity=2))
    assert cache.events.last_seq == 5
    assert [(event.seq, event.blocks[0]) for event in cache.events.since(3)] == [(4, 13), (5, 14)]
    with pytest.raises(EventsLost):
        cache.events.since(2)


@pytest.mark.parametrize("policy", sorted(available_policies()))
def test_every_policy_takes_over_what_is_restored(policy: str) -> None:
    cache = restored(loose_blocks([ROOT, 0, 1, 1, ROOT], last_uses=[1, 1, 2, 4, 3]), policy=policy)
    assert not lift_fence(cache)
    cache.check()
    cache.release(cache.acquire([0, 0, 1, 0, 3, 0, 7]))
    cache.check()
    cache.evict(32)
    assert (cache.stats().evicted_blocks, cache.stats().free_blocks) == (5, 32)
    cache.check()


def test_restored_blocks_count_against_their_tenants_quota() -> None:
    cache = RadixCache(num_blocks=32, block_size=BLOCK_SIZE)
    cache.set_quota("other", max_blocks=3)
    loose = loose_blocks([ROOT, 0, ROOT], namespaces=[2, 2, 1])
    restore_blocks(cache, plan_restore(loose), namespaces=NAMESPACES, media={}, quarantined=NONE)
    cache.check()
    (usage,) = cache.quotas()
    assert (usage.used_blocks, usage.cached_blocks) == (2, 0), "fenced blocks are used, and may not be evicted yet"
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    (usage,) = cache.quotas()
    assert (usage.used_blocks, usage.cached_blocks) == (2, 2)


def test_a_life_that_committed_nothing_leaves_only_its_unfinished_blocks() -> None:
    cache = restored(loose_blocks([]), quarantined=np.array([3, 4], dtype=np.int32))
    assert (cache.stats().free_blocks, cache.stats().quarantined_blocks) == (30, 2)
    cache.remove_worker(FORMER_INCARNATION)
    cache.check()
    assert cache.stats().free_blocks == 32
