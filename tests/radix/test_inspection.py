"""Views for operators, and a proof that notices every kind of damage."""

from __future__ import annotations

import pytest

from radixpool.radix import BlockState, InvariantViolation, MediaSpan, Namespace, RadixCache
from radixpool.radix.eviction import Run


def test_every_block_is_explained(letters) -> None:
    box = letters(8)
    box.cache.add_worker("gpu")
    salted = Namespace(cache_salt="s")
    box.put("abcd", namespace=salted)
    seq = box.acq("abxyz", namespace=salted)
    box.com(seq, 4)
    box.rel(box.acq("q"), after_step=0)
    by_state: dict[BlockState, list] = {}
    for block in range(8):
        info = box.cache.block_info(block)
        by_state.setdefault(info.state, []).append(info)
    assert {state.value: len(infos) for state, infos in by_state.items()} == {
        "held": 3, "cached": 1, "quarantined": 1, "free": 3,
    }  # fmt: skip
    private = next(info for info in by_state[BlockState.HELD] if not info.findable)
    assert (private.position, private.holders, private.namespace, private.tokens) == (2, (seq.handle,), salted, None)
    cached = by_state[BlockState.CACHED][0]
    assert (cached.position, cached.holders, cached.findable) == (1, (), True)
    assert cached.tokens.tolist() == [ord("c"), ord("d")]
    assert [s.handle for s in box.cache.holders(private.block_id)] == [seq.handle]
    assert box.cache.namespaces() == (salted,)
    assert next(box.cache.nodes(Namespace()), None) is None
    assert [info.level for info in box.cache.nodes(salted)] == [0, 1, 1]
    assert "Sequence(handle=" in repr(seq)
    assert memoryview(seq.packed_block_table).cast("i").tolist() == seq.block_table.tolist()
    assert seq.tokens.tolist() == [ord(c) for c in "abxyz"]


def test_stats_count_each_admitted_request_once(letters) -> None:
    box = letters(4)
    assert box.cache.stats().hit_ratio == 0.0
    box.put("abcd")
    box.rel(box.acq("abcde"))
    stats = box.cache.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.admitted_requests) == (9, 4, 2)
    assert stats.hit_ratio == pytest.approx(4 / 9)


def damaged() -> RadixCache:
    cache = RadixCache(8, 2)
    cache.set_quota("t", guaranteed_blocks=1)
    seq = cache.acquire([1, 2, 3, 4, 5])
    cache.commit(seq, 5)
    other = cache.acquire([1, 2, 9, 9])
    cache.commit(other, 4)
    cache.release(other)
    cache.release(cache.acquire([7, 7, 7], namespace=Namespace(tenant="t")))
    cache.check()
    return cache


def _upper(cache):
    return next(iter(next(iter(cache._roots.values())).children.values()))


def _lower(cache):
    return next(node for node in _upper(cache).children.values() if not node.ref)


DAMAGES = {
    "free list: a block is named twice": lambda c: c._free.append(c._free[-1]),
    "block id out of range": lambda c: c._free.append(99),
    "and free": lambda c: c._free.append(int(c.sequence(1).block_table[0])),
    "has ref count": lambda c: setattr(_upper(c), "ref", 5),
    "has fence count": lambda c: setattr(_upper(c), "fence", 1),
    "has pin count": lambda c: setattr(_upper(c), "pins", 1),
    "wrong ref count": lambda c: setattr(next(iter(c._roots.values())), "ref", 7),
    "does not begin where its parent ends": lambda c: setattr(_lower(c), "end", 9),
    "bytes of tokens": lambda c: setattr(_lower(c), "key", _lower(c).key + b"1234"),
    "not its parent": lambda c: setattr(_lower(c), "parent", next(iter(c._roots.values()))),
    "is ranked by another group": lambda c: setattr(_lower(c), "priority", 1),
    "is dead and nobody holds it": lambda c: setattr(_lower(c), "policy", None),
    "blocks are cached, the counter says": lambda c: setattr(c, "_cached", c._cached + 1),
    "tree blocks, not": lambda c: setattr(c, "_tree_blocks", 0),
    "nodes, the counter says": lambda c: setattr(c, "_num_nodes", 9),
    "pinned blocks, the counter says": lambda c: setattr(c, "_pinned", 1),
    "dead nodes and fences, the counter says": lambda c: setattr(c, "_odd", 1),
    "blocks are nowhere": lambda c: c._free.pop(),
    "uses 0 blocks": lambda c: setattr(c._groups.accounts["t"], "used", 3),
    "has 0 cached blocks": lambda c: setattr(c._groups.accounts["t"], "cached", 3),
    "candidates, the policies know": lambda c: c._policy.remove(_lower(c)),
    "tree part is not what is committed": lambda c: setattr(c.sequence(1), "committed_tokens", 0),
    "token counts out of order": lambda c: setattr(c.sequence(1), "_tokens", c.sequence(1)._tokens[:16]),
    "its path holds other tokens": lambda c: setattr(c.sequence(1), "_tokens", b"x" * 20),
    "its table differs from its path": lambda c: setattr(c.sequence(1), "_table", b"x" * 12),
    "is listed wrongly": lambda c: setattr(c.sequence(1), "released", True),
    "listed under another namespace": lambda c: c._roots.update({Namespace(model="m"): next(iter(c._roots.values()))}),
    "charged to the wrong account": lambda c: setattr(c.sequence(1)._node, "account", c._groups.accounts["t"]),
    "is empty and unused": lambda c: c._roots.update({Namespace(model="m"): c._root(Namespace(model="m"))}),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_check_notices(message) -> None:
    cache = damaged()
    DAMAGES[message](cache)
    with pytest.raises(InvariantViolation, match=message) as violation:
        cache.check()
    assert "CacheStats(num_blocks=8" in str(violation.value)


def test_identities_do_not_depend_on_how_a_path_is_cut() -> None:
    """What ghost lists rely on: equal content has equal digests, before and after splits, and media count."""

    def digests(*splits: list[int], media=()) -> list[bytes]:
        cache = RadixCache(64, 2)
        for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], *splits):
            seq = cache.acquire(tokens, media=media)
            cache.commit(seq, len(tokens))
            cache.release(seq)
        root = next(iter(cache._roots.values()))
        found, node = [], root
        key = b"".join(t.to_bytes(4, "little") for t in range(1, 9))
        while node.end < 4:
            start = node.end * 8
            node = next(n for first, n in node.children.items() if first.startswith(key[start : start + 8]))
            found += [node.identity(i) for i in range(node.num_blocks)]
        return found

    whole = digests()
    assert len(set(whole)) == 4
    assert digests([1, 2, 3, 4, 9, 9]) == digests([1, 2, 9, 9], [1, 2, 3, 4, 9, 9]) == whole
    with pytest.raises(NotImplementedError):
        Run()._origin()
    with_media = digests(media=[MediaSpan(2, 1, b"cat")])
    assert with_media[0] == whole[0]
    assert not set(with_media[1:]) & set(whole)
