"""Drive a real cache and the oracle with the same operations and compare everything after each."""

from __future__ import annotations

import numpy as np

from radixpool.radix import Namespace, PoolExhausted, RadixCache

NAMESPACES = (Namespace(), Namespace(tenant="t"), Namespace(cache_salt="t"))


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
        findable = {}
        for info in self.cache.nodes():
            assert info.blocks.tolist() == [b for b in info.blocks.tolist() if b not in states["free"]]
            for i, block in enumerate(info.blocks.tolist()):
                findable[block] = (info.namespace, info.start + i, info.ref_count, info.state.value)
        expected = {
            entry.block: (prefix[0], (len(prefix) - 1) // self.oracle.block_size - 1, self.oracle.holders(prefix))
            for prefix, entry in self.oracle.tree.items()
        }
        assert {block: info[:3] for block, info in findable.items()} == expected
        for block, info in findable.items():
            assert block in states[info[3]]
        for handle, seq in self.oracle.sequences.items():
            real = self.cache.sequence(handle)
            assert real.block_table.tolist() == seq.table
            assert real.tokens.tolist() == seq.tokens
            assert real.committed_tokens == seq.committed
            assert real.cached_tokens == seq.cached

    def match(self, tokens: list[int], namespace: Namespace) -> None:
        found = self.cache.match(tokens, namespace=namespace)
        assert found.blocks.tolist() == self.oracle.match(tokens, namespace)
        assert found.tokens == len(found.blocks) * self.oracle.block_size

    def acquire(self, tokens: list[int], namespace: Namespace, reserve: int, max_hit: int | None) -> None:
        try:
            hit, needed = self.oracle.acquire(tokens, namespace, reserve, max_hit)
        except self.refused as refused:
            self.expect_refusal(
                refused,
                lambda: self.cache.acquire(tokens, namespace=namespace, reserve=reserve, max_hit=max_hit),
            )
            return
        seq = self.cache.acquire(
            np.array(tokens, dtype=np.uint32), namespace=namespace, reserve=reserve, max_hit=max_hit
        )
        assert seq.num_blocks == len(hit) + needed
        self.oracle.admitted(seq.handle, tokens, namespace, hit, seq.block_table.tolist())

    def expect_refusal(self, refused, call) -> None:
        before = self.cache.stats()
        try:
            call()
        except PoolExhausted as error:
            assert (error.needed_blocks, error.allocatable_blocks) == (refused.needed, refused.allocatable)
            assert error.short_blocks == refused.needed - refused.allocatable
        else:
            raise AssertionError("the cache admitted what does not fit")
        after = self.cache.stats()
        assert after.refused_requests == before.refused_requests + 1
        assert after.num_nodes == before.num_nodes

    def extend(self, handle: int, tokens: list[int]) -> None:
        self.grow(handle, tokens, len(tokens))

    def reserve(self, handle: int, count: int) -> None:
        self.grow(handle, [], count)

    def grow(self, handle: int, tokens: list[int], count: int) -> None:
        seq = self.cache.sequence(handle)
        call = (lambda: self.cache.extend(seq, tokens)) if tokens else (lambda: self.cache.reserve(seq, count))
        known = self.oracle.sequences[handle]
        try:
            self.oracle.grow(handle, len(known.tokens) + count)
        except self.refused as refused:
            self.expect_refusal(refused, call)
            return
        call()
        known.tokens += tokens
        self.oracle.grown(handle, seq.block_table.tolist())

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

    def evict(self, count: int) -> None:
        expected = self.oracle.evict(count)
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
        for worker in list(self.oracle.workers):
            self.remove_worker(worker)
        self.compare()
        self.evict(self.oracle.num_blocks)
        self.compare()
        stats = self.cache.stats()
        assert stats.free_blocks == stats.num_blocks
        assert (stats.num_nodes, stats.num_sequences, stats.num_namespaces) == (0, 0, 0)
