"""The cache tells its persistence before it changes anything, and a refusal changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from radixpool.radix import RadixCache
from radixpool.radix.errors import PoolExhausted, RadixPoolError
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace

BLOCK_SIZE = 2
NAMESPACES = (DEFAULT_NAMESPACE, Namespace(tenant="t"))


def ids(blocks: Any) -> list[int]:
    return np.frombuffer(blocks, dtype="<i4").tolist() if isinstance(blocks, bytes) else list(blocks)


class Full(RadixPoolError):
    """The disk is full."""


class Watchful:
    """A `Persistence` that looks at the cache within every call and keeps the states that a directory would."""

    def __init__(self, num_blocks: int) -> None:
        self.cache: RadixCache
        self.states = ["free"] * num_blocks
        self.refuse = False
        self.calls: list[str] = []

    def _move(self, name: str, blocks: Any, allowed: tuple[str, ...], to: str) -> None:
        self.calls.append(name)
        for block in ids(blocks):
            assert self.states[block] in allowed, f"{name}: block {block} was {self.states[block]}"
            self.states[block] = to

    def _is_free(self, block: int) -> bool:
        return block in set(self.cache._free)

    def _findable(self) -> set[int]:
        return {block for node in self.cache.nodes() for block in node.blocks.tolist()}

    def prepare(self, namespace: Namespace, media: bytes = b"") -> None:
        self.calls.append("prepare")
        if self.refuse:
            raise Full("no room")

    def handed_out(self, blocks: Any) -> None:
        assert all(self._is_free(block) for block in ids(blocks)), "told before they leave the free list"
        assert not self._findable() & set(ids(blocks)), "told after they were evicted for it"
        self._move("handed_out", blocks, ("free", "committed"), "private")

    def stored(self, blocks: Any, tokens: bytes, *, parent: int, namespace: Namespace, **_rest: Any) -> None:
        assert not self._findable() & set(ids(blocks)), "told before they become findable"
        assert len(tokens) == len(ids(blocks)) * BLOCK_SIZE * 4
        assert parent == -1 or self.states[parent] == "committed", "parents are stored before children"
        self._move("stored", blocks, ("private",), "committed")

    def touched(self, block: int, last_use: int) -> None:
        self.calls.append("touched")
        assert self.states[block] == "committed"
        assert last_use <= self.cache.stats().tick

    def removed(self, blocks: Any) -> None:
        self._move("removed", blocks, ("committed",), "private")

    def returned(self, blocks: Any) -> None:
        given = {block for block in ids(blocks) if self.states[block] == "private"}
        assert not any(self._is_free(block) for block in given), "told before they are free"
        self._move("returned", blocks, ("private", "committed"), "free")


@pytest.fixture
def watched() -> tuple[RadixCache, Watchful]:
    watchful = Watchful(12)
    watchful.cache = RadixCache(12, BLOCK_SIZE, persistence=watchful)
    return watchful.cache, watchful


def agree(cache: RadixCache, watchful: Watchful) -> None:
    cache.check()
    findable = watchful._findable()
    free = set(cache._free)
    for block, state in enumerate(watchful.states):
        assert (state == "committed") == (block in findable)
        assert (state == "free") == (block in free)


@pytest.mark.parametrize("seed", range(4))
def test_every_change_is_told_before_it_happens(watched: tuple[RadixCache, Watchful], seed: int) -> None:
    cache, watchful = watched
    rng = random.Random(seed)
    live: list[Any] = []
    cache.add_worker("w")
    step = 0
    for _ in range(1000):
        roll = rng.random()
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 11))]
        watchful.refuse = rng.random() < 0.1
        try:
            if roll < 0.3 or not live:
                live.append(cache.acquire(tokens, namespace=rng.choice(NAMESPACES), reserve=rng.randrange(3)))
            elif roll < 0.5:
                seq = rng.choice(live)
                cache.commit(seq, rng.randrange(seq.num_tokens + 1), after_step=rng.choice((None, step)))
            elif roll < 0.55:
                cache.extend(rng.choice(live), tokens)
            elif roll < 0.75:
                cache.release(live.pop(rng.randrange(len(live))), after_step=rng.choice((None, step + 1)))
            elif roll < 0.78:
                cache.evict(rng.randrange(4))
            elif roll < 0.85 and rng.choice(live).num_blocks:
                seq = rng.choice([seq for seq in live if seq.num_blocks])
                cache.invalidate(seq, rng.randrange(seq.num_blocks))
            elif roll < 0.88:
                cache.flush(rng.choice((None, *NAMESPACES)), mode="new_generation")
            else:
                step += 1
                cache.complete_step("w", step)
        except (PoolExhausted, Full):
            pass
        agree(cache, watchful)
    assert {"handed_out", "stored", "touched", "returned", "removed", "prepare"} <= set(watchful.calls)


def test_a_refused_commit_changes_nothing(watched: tuple[RadixCache, Watchful]) -> None:
    """NO_SPACE: also where twins would have been remapped first."""
    cache, watchful = watched
    first = cache.acquire([1, 1, 2, 2])
    second = cache.acquire([1, 1, 2, 2, 3, 3])
    cache.commit(first, 4)
    before = (second.block_table.tolist(), second.committed_tokens, cache.stats())
    watchful.refuse = True
    with pytest.raises(Full):
        cache.commit(second, 6)
    assert (second.block_table.tolist(), second.committed_tokens, cache.stats()) == before
    agree(cache, watchful)
    watchful.refuse = False
    assert cache.commit(second, 6).committed_tokens == 6
    agree(cache, watchful)
    assert cache.match([1, 1, 2, 2, 3, 3]).tokens == 6


def test_a_cache_without_persistence_needs_none() -> None:
    cache = RadixCache(4, BLOCK_SIZE)
    seq = cache.acquire([1, 2, 3])
    cache.commit(seq, 3)
    cache.release(seq)
    cache.check()
