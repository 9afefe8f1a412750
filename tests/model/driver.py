"""Drive a real cache and the oracle with the same operations and compare everything after each."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
import pytest

from radixpool.radix import (
    CacheBusy,
    MediaSpan,
    Namespace,
    NotCached,
    PendingPrefix,
    PinBudgetExceeded,
    PoolExhausted,
    RadixCache,
    Sequence,
    UnknownPin,
)

NAMESPACES = (Namespace(), Namespace(tenant="t"), Namespace(cache_salt="t"))


def under(tokens: Tokens[int], media: Tokens[MediaSpan], first: int = 0) -> list[object]:
    """Return tokens `first` on as the oracle knows them: one under media is itself with its place in the content."""
    named: list[object] = list(tokens)
    for start, length, digest in media:
        for i in range(start - first, start - first + length):
            named[i] = (tokens[i], digest, i - start + first, length)
    return named


def placeholder(token: object) -> object:
    return token[0] if isinstance(token, tuple) else token


class Driver:
    """One cache, one oracle. Every method is one operation; `compare` runs after each."""

    def __init__(self, oracle_class: type, refused: type, num_blocks: int = 10, block_size: int = 2) -> None:
        self.refused = refused
        self.cache = RadixCache(num_blocks, block_size)
        self.oracle = oracle_class(num_blocks, block_size)
        self.steps = 0

    @property
    def handles(self) -> list[int]:
        return list(self.oracle.sequences)

    def compare(self) -> None:
        self.steps += 1
        self.cache.check()
        stats, states = self.cache.stats(), self.oracle.states()
        for name in ("free", "cached", "held", "quarantined"):
            assert getattr(stats, f"{name}_blocks") == len(states[name]), name
        assert set(self.cache._free) == states["free"]
        assert (stats.queried_tokens, stats.hit_tokens) == (self.oracle.queried, self.oracle.hit)
        assert stats.pinned_blocks == len(self.oracle.pinned())
        findable = {}
        for info in self.cache.nodes():
            for i, block in enumerate(info.blocks.tolist()):
                findable[block] = (info.namespace, info.start + i, info.ref_count)
                assert block in states[info.state.value]
        expected = {
            entry.block: (namespace, len(entry.path()) - 1, self.oracle.holders(entry))
            for namespace, entries in self.oracle.findable().items()
            for entry in entries
        }
        assert findable == expected
        assert set(self.cache.namespaces()) == set(self.oracle.roots)
        for handle, seq in self.oracle.sequences.items():
            real = self.cache.sequence(handle)
            assert real.block_table.tolist() == seq.table
            assert real.tokens.tolist() == [placeholder(token) for token in seq.tokens]
            assert real.committed_tokens == seq.committed
            assert real.cached_tokens == seq.cached
            assert real.invalid_from == seq.invalid_from

    def match(self, tokens: list[int], namespace: Namespace, media: Tokens[MediaSpan] = ()) -> None:
        found = self.cache.match(tokens, namespace=namespace, media=media)
        expected = self.oracle.find(under(tokens, media), namespace)
        assert found.blocks.tolist() == [entry.block for entry in expected]
        assert found.tokens == len(found.blocks) * self.oracle.block_size

    def acquire(
        self,
        tokens: list[int],
        namespace: Namespace,
        reserve: int,
        max_hit: int | None,
        partial: bool = False,
        in_flight: str = "ignore",
        media: Tokens[MediaSpan] = (),
    ) -> None:
        oracle = self.oracle
        options = {"reserve": reserve, "max_hit": max_hit, "partial": partial, "in_flight": in_flight, "media": media}
        packed = np.array(tokens, dtype=np.uint32)
        tokens = under(tokens, media)
        path, needed, (common, sources) = oracle.acquire(tokens, namespace, reserve, max_hit, partial)
        limit = len(tokens) - 1 if max_hit is None else min(max_hit, len(tokens))
        producers = oracle.producers(tokens, path, namespace, limit) if in_flight != "ignore" else {}
        if producers and in_flight == "wait":
            pending = self.cache.acquire(packed, namespace=namespace, **options)
            assert isinstance(pending, PendingPrefix)
            assert producers[pending.producer] == pending.available_tokens == max(producers.values())
            assert pending.cached_tokens == len(path) * oracle.block_size
            return
        allocatable = len(oracle.free) + oracle.cached_beside(path)
        if needed > allocatable:
            self.expect_refusal(
                self.refused(needed, allocatable),
                lambda: self.cache.acquire(packed, namespace=namespace, **options),
            )
            return
        seq = self.cache.acquire(packed, namespace=namespace, **options)
        assert isinstance(seq, Sequence)
        source = None
        if common and not seq.copies:  # sparing the source would have left too little room
            assert any(needed > len(oracle.free) + oracle.cached_beside([*path, entry]) for entry in sources)
            common = 0
        if common:
            (copy,) = seq.copies
            (source,) = [entry for entry in sources if entry.block == copy.src]
            assert (copy.dst, copy.num_tokens) == (seq.block_table[len(path)], common)
        else:
            assert seq.copies == ()
        assert seq.in_flight in (producers or {None: 0})
        oracle.victims(needed - len(oracle.free), [*path, *([source] if source else [])])
        table = seq.block_table.tolist()
        assert table[: len(path)] == [entry.block for entry in path]
        assert len(table) == len(path) + needed
        oracle.take(table[len(path) :])
        oracle.admitted(seq.handle, tokens, namespace, path, table, source, common)

    def expect_refusal(self, refused, call) -> None:
        before = self.cache.stats()
        try:
            call()
        except PoolExhausted as error:
            assert error.needed_blocks == refused.needed
            assert error.allocatable_blocks == refused.allocatable
            assert error.short_blocks == refused.needed - error.allocatable_blocks
        else:
            raise AssertionError("the cache admitted what does not fit")
        after = self.cache.stats()
        assert after.refused_requests == before.refused_requests + 1
        assert after.num_nodes == before.num_nodes

    def extend(self, handle: int, tokens: list[int], media: Tokens[MediaSpan] = ()) -> None:
        """Extend a sequence; `media` count from the first new token."""
        seq = self.cache.sequence(handle)
        known = seq.num_tokens
        media = [span._replace(start=known + span.start) for span in media]
        self.grow(handle, under(tokens, media, known), len(tokens), lambda: self.cache.extend(seq, tokens, media=media))

    def reserve(self, handle: int, count: int) -> None:
        self.grow(handle, [], count, lambda: self.cache.reserve(self.cache.sequence(handle), count))

    def grow(self, handle: int, tokens: list[object], count: int, call) -> None:
        seq = self.cache.sequence(handle)
        known = self.oracle.sequences[handle]
        try:
            self.oracle.grow(handle, len(known.tokens) + count)
        except self.refused as refused:
            self.expect_refusal(refused, call)
            return
        call()
        known.tokens += tokens
        table = seq.block_table.tolist()
        assert table[: len(known.table)] == known.table
        self.oracle.take(table[len(known.table) :])
        known.private += table[len(known.table) :]

    def commit(self, handle: int, upto: int) -> None:
        expected = self.oracle.commit(handle, upto)
        result = self.cache.commit(self.cache.sequence(handle), upto)
        assert [(remap.index, remap.old_block, remap.new_block) for remap in result.remaps] == expected
        assert result.committed_tokens == self.oracle.sequences[handle].committed

    def release(self, handle: int, steps: dict[str, int]) -> None:
        seq = self.cache.sequence(handle)
        before = {name: len(blocks) for name, blocks in self.oracle.states().items()}
        self.oracle.release(handle, steps)
        after = {name: len(blocks) for name, blocks in self.oracle.states().items()}
        result = self.cache.release(seq, after_step=steps or None)
        assert result.freed_blocks == after["free"] - before["free"]
        assert result.quarantined_blocks == after["quarantined"] - before["quarantined"]
        assert self.cache.release(seq).freed_blocks == 0

    def rewind(self, handle: int, to: int, steps: dict[str, int]) -> None:
        seq, before = self.cache.sequence(handle), len(self.oracle.sequences[handle].table)
        lowest = len(self.oracle.sequences[handle].path) * self.oracle.block_size
        if not lowest <= to <= seq.num_tokens:
            with pytest.raises(ValueError, match="to must be"):
                self.cache.rewind(seq, to)
            return
        free = len(self.oracle.free)
        self.oracle.rewind(handle, to, steps)
        result = self.cache.rewind(seq, to, after_step=steps or None)
        assert result.num_tokens == to
        assert result.freed_blocks == len(self.oracle.free) - free
        assert result.quarantined_blocks == before - seq.num_blocks - result.freed_blocks

    def fork(self, handle: int, n: int) -> None:
        seq, known = self.cache.sequence(handle), self.oracle.sequences[handle]
        if known.invalid_from is not None:
            with pytest.raises(ValueError, match="invalidated"):
                self.cache.fork(seq, n)
            return
        try:
            own = self.oracle.fork(handle, n)
        except self.refused as refused:
            self.expect_refusal(refused, lambda: self.cache.fork(seq, n))
            return
        result = self.cache.fork(seq, n)
        written = known.committed - len(known.path) * self.oracle.block_size
        assert len(result.handles) == n
        assert len(result.copies) == (n if written else 0)
        for i, fork in enumerate(result.handles):
            table = self.cache.sequence(fork).block_table.tolist()
            assert len(table) == len(known.path) + own
            self.oracle.forked(handle, fork, table)
            if written:
                assert result.copies[i] == (known.private[0], table[len(known.path)], written)

    def invalidate(self, handle: int, index: int) -> None:
        seq = self.cache.sequence(handle)
        if index >= seq.num_blocks:
            with pytest.raises(ValueError, match="block_index must be"):
                self.cache.invalidate(seq, index)
            return
        free = len(self.oracle.free)
        removed, holders = self.oracle.invalidate(handle, index)
        result = self.cache.invalidate(seq, index)
        assert (result.removed_blocks, list(result.holders)) == (removed, holders)
        assert result.freed_blocks == len(self.oracle.free) - free

    def pin(self, tokens: list[int], namespace: Namespace, media: Tokens[MediaSpan] = ()) -> None:
        path = self.oracle.find(under(tokens, media), namespace)
        if not path:
            with pytest.raises(NotCached):
                self.cache.pin(tokens, namespace=namespace, media=media)
            return
        if len(self.oracle.pinned() | set(path)) > self.oracle.num_blocks // 2:
            with pytest.raises(PinBudgetExceeded):
                self.cache.pin(tokens, namespace=namespace, media=media)
            return
        info = self.cache.pin(tokens, namespace=namespace, media=media)
        assert info.num_blocks == len(path)
        self.oracle.pin(info.pin_id, path, namespace)

    def unpin(self, pin_id: int) -> None:
        self.oracle.unpin(pin_id)
        self.cache.unpin(pin_id)
        with pytest.raises(UnknownPin):
            self.cache.unpin(pin_id)

    def flush(self, namespace: Namespace | None, mode: str) -> None:
        if mode == "idle_only" and self.oracle.busy(namespace):
            with pytest.raises(CacheBusy):
                self.cache.flush(namespace, mode=mode)
            return
        free = len(self.oracle.free)
        self.oracle.flush(namespace, mode)
        assert self.cache.flush(namespace, mode=mode).freed_blocks == len(self.oracle.free) - free

    def evict(self, count: int) -> None:
        foreseen = self.cache.evict(count, dry_run=True)
        expected = self.oracle.evict(count)
        assert foreseen.blocks.tolist() == expected
        result = self.cache.evict(count)
        assert result.blocks.tolist() == expected
        assert result.num_blocks == len(expected)

    def add_worker(self, worker: str) -> None:
        if worker not in self.oracle.workers:
            self.oracle.workers[worker] = -1
            self.cache.add_worker(worker)

    def complete(self, worker: str, step: int) -> None:
        before = len(self.oracle.states()["quarantined"])
        self.oracle.complete(worker, step)
        assert self.cache.complete_step(worker, step) == before - len(self.oracle.states()["quarantined"])

    def remove_worker(self, worker: str) -> None:
        self.oracle.remove_worker(worker)
        self.cache.remove_worker(worker)

    def drain(self) -> None:
        """End everything without faults: the pool must be whole again."""
        for handle in self.handles:
            self.release(handle, {})
        for pin_id in list(self.oracle.pins):
            self.unpin(pin_id)
        for worker in list(self.oracle.workers):
            self.remove_worker(worker)
        self.compare()
        self.evict(self.oracle.num_blocks)
        self.compare()
        stats = self.cache.stats()
        assert stats.free_blocks == stats.num_blocks
        assert (stats.num_nodes, stats.num_sequences, stats.num_namespaces) == (0, 0, 0)
