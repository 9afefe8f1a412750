"""Scenarios C, D, E and F of the first version: twins, splits, order, namespaces, leaks."""

from __future__ import annotations

import random

from radixpool.radix import Namespace, PoolExhausted, RadixCache, Remap


def test_two_computing_the_same_leave_one_copy(letters) -> None:
    """Row 19: the second's blocks go back once, and the free list names each block once."""
    box = letters(8)
    one, two = box.acq("abcd"), box.acq("abcd")
    for seq in (one, two):
        box.com(seq, 4)
    for seq in (one, two):
        box.rel(seq)
    assert box.counts == (6, 2, 0, 0)
    assert len(set(box.cache._free)) == 6


def test_a_twin_is_remapped_and_its_copies_wait_for_the_next_step(letters) -> None:
    """Row 20: the reply has the pairs, the tables agree, and the duplicates are not handed out before the step."""
    box = letters(8)
    box.cache.add_worker("gpu", completed_step=3)
    one, two = box.acq("abcd"), box.acq("abcd")
    own = two.block_table.tolist()
    assert box.com(one, 4).remaps == ()
    remaps = box.com(two, 4).remaps
    assert remaps == tuple(Remap(i, own[i], one.block_table[i]) for i in range(2))
    assert two.block_table.tolist() == one.block_table.tolist()
    assert box.counts == (4, 0, 2, 2)
    assert not set(box.acq("stuvwxyz").block_table.tolist()) & set(own)
    assert box.cache.complete_step("gpu", 4) == 2
    assert box.counts == (2, 0, 6, 0)


def test_a_twin_of_part_of_a_run_splits_it(letters) -> None:
    """Row 20's kind: only as much as is equal is shared, at any depth."""
    box = letters(12)
    one, two = box.acq("abcdef"), box.acq("abcdxy")
    box.com(one, 6)
    remaps = box.com(two, 6).remaps
    assert [remap.index for remap in remaps] == [0, 1]
    assert box.runs() == {"abcd": 2, "ef": 1, "xy": 1}
    for seq in (one, two):
        box.rel(seq)
    assert box.counts == (8, 4, 0, 0)


def test_a_hit_holds_the_matched_run_itself(letters) -> None:
    """Row 23: nothing of it can be evicted while it is held."""
    box = letters(8)
    box.put("ab")
    seq = box.acq("ab", max_hit=2)
    assert seq.cached_tokens == 2
    assert box.ev(8) == []
    assert box.match("ab") == 2


def test_a_split_under_a_holder_keeps_the_counts(letters) -> None:
    """Row 24: refs are ab=2, cd=1, xy=1, and all 0 after both releases, in either order."""
    for order in ((0, 1), (1, 0)):
        box = letters(8)
        one = box.acq("abcd")
        box.com(one, 4)
        two = box.acq("abxy")
        box.com(two, 4)
        assert box.runs() == {"ab": 2, "cd": 1, "xy": 1}
        for index in order:
            box.rel((one, two)[index])
        assert box.runs() == {"ab": 0, "cd": 0, "xy": 0}
        assert box.counts == (5, 3, 0, 0)


def test_a_second_release_is_harmless(letters) -> None:
    """Row 25: counts and counters stay as they were."""
    box = letters(8)
    seq, other = box.acq("abcde"), box.acq("abcde")
    box.com(seq, 5)
    box.com(other, 4)
    assert box.rel(seq).freed_blocks == 1
    before = box.cache.stats()
    assert box.rel(seq) == (0, 0)
    assert box.cache.stats() == before
    assert box.runs() == {"abcd": 1}


def test_an_inner_run_goes_only_after_everything_below_it(letters) -> None:
    """Row 28: ab has two children and is evictable after both."""
    box = letters(8)
    box.put("abcd")
    box.put("abef")
    root = box.cache.match([ord(c) for c in "ab"]).blocks.tolist()
    assert root[0] not in box.ev(2)
    assert box.match("ab") == 2
    assert box.ev(1) == root


def test_five_thousand_runs_deep_needs_no_recursion() -> None:
    """Row 31: a chain that branches at each block: match, list, evict all."""
    depth = 5000
    cache = RadixCache(3 * depth, 1)
    for i in reversed(range(1, depth + 1)):  # each splits the one run above all those before
        seq = cache.acquire(bytes(4 * i) + b"\1\0\0\0")
        cache.commit(seq, i + 1)
        cache.release(seq)
    cache.check()
    assert cache.match([0] * depth).tokens == depth
    assert sum(1 for _ in cache.nodes()) == cache.stats().num_nodes == 2 * depth - 1
    assert cache.evict(3 * depth).num_blocks == 2 * depth
    cache.check()
    assert cache.stats().num_nodes == 0


def test_the_tail_goes_first(letters) -> None:
    """Row 36: one block at a time from the end."""
    box = letters(8)
    box.put("abcdef")
    box.ev(1)
    assert box.match("abcdef") == 4
    box.ev(1)
    assert box.match("abcdef") == 2


def test_a_split_does_not_refresh_the_cold_half(letters) -> None:
    """Row 38: cd (oldest), then uv, then ab, which was used last."""
    box = letters(8)
    box.put("abcd")
    box.put("uv")
    box.rel(box.acq("ab", max_hit=2))
    for text in ("abcd", "uv", "ab"):
        assert box.match(text) == len(text)
        box.ev(1)
        assert box.match(text) == len(text) - 2


def test_a_match_alone_changes_no_order(letters) -> None:
    """Row 38's kind: only an admitted request refreshes."""
    box = letters(8)
    box.put("ab")
    box.put("uv")
    assert box.match("ab") == 2
    box.ev(1)
    assert (box.match("ab"), box.match("uv")) == (0, 2)


def test_equal_names_in_different_fields_share_nothing(letters) -> None:
    """Row 47: an adapter, a salt and another generation of the adapter are three namespaces."""
    box = letters(8)
    box.put("ab", namespace=Namespace(adapter="x", adapter_generation=1))
    assert box.match("ab", namespace=Namespace(adapter="x", adapter_generation=1)) == 2
    others = (
        Namespace(cache_salt="x"),
        Namespace(adapter="x", adapter_generation=2),
        Namespace(tenant="x"),
        Namespace(model="x"),
        Namespace(revision="x"),
        Namespace(),
    )
    for other in others:
        assert box.match("ab", namespace=other) == 0


def test_fields_cannot_be_shifted_into_each_other() -> None:
    """Row 47's kind: the encoding is injective where concatenation would not be."""
    assert Namespace(model="ab").encode() != Namespace(model="a", revision="b").encode()
    assert Namespace(model="a", revision="b") != Namespace(model="ab")


def test_ten_thousand_random_operations_leave_nothing_behind() -> None:
    """Row 53: after releasing and evicting everything the pool is whole and the trees are gone."""
    rng = random.Random(53)
    cache = RadixCache(64, 2)
    live = []
    for step in range(10_000):
        choice = rng.random()
        if choice < 0.4 or not live:
            namespace = Namespace(tenant=rng.choice("abc"))
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            try:
                live.append(cache.acquire(tokens, namespace=namespace, reserve=rng.randrange(3)))
            except PoolExhausted:
                cache.release(live.pop(rng.randrange(len(live))))
        elif choice < 0.6:
            seq = rng.choice(live)
            cache.commit(seq, rng.randint(0, seq.num_tokens))
        elif choice < 0.7:
            try:
                cache.extend(rng.choice(live), [rng.randrange(3)])
            except PoolExhausted:
                cache.release(live.pop())
        else:
            cache.release(live.pop(rng.randrange(len(live))))
        if step % 50 == 0:
            cache.check()
    for seq in live:
        cache.release(seq)
    cache.evict(64)
    cache.check()
    stats = cache.stats()
    assert (stats.free_blocks, stats.num_nodes, stats.num_sequences, stats.num_namespaces) == (64, 0, 0, 0)
