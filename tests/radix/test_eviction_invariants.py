"""What holds for every eviction policy on any history: leaf-first, exact counts, bounded ghosts, determinism."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.radix import PoolExhausted, RadixCache
from radixpool.radix.eviction import available_policies
from radixpool.radix.eviction.segmented import SegmentedPolicy

ALL = sorted(available_policies())
GHOSTS = {"2q": "2q:kin=0.3,kout=0.7", "arc": "arc", "s3fifo": "s3fifo:small=0.3,ghost=0.7"}

steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
        st.tuples(st.just("finish"), st.integers(0, 7)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("grow"), st.integers(0, 7)),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=60,
)


class Driver:
    """Runs steps on a cache with several requests at once, and proves the invariants after each."""

    def __init__(self, policy: str, num_blocks: int = 10) -> None:
        self.cache = RadixCache(num_blocks, 1, policy=policy)
        self.running: list = []
        self.log: list = []

    def run(self, program) -> list:
        for name, argument in program:
            getattr(self, name)(argument)
            self.prove()
        return self.log

    def start(self, tokens) -> None:
        try:
            seq = self.cache.acquire(tokens, max_hit=len(tokens))
        except PoolExhausted:
            self.log.append("refused")
            return
        self.running.append(seq)
        self.log.append((seq.cached_tokens, seq.block_table.tolist()))

    def finish(self, index) -> None:
        if self.running:
            seq = self.running.pop(index % len(self.running))
            self.cache.commit(seq, seq.num_tokens)
            self.cache.release(seq)

    def abort(self, index) -> None:
        if self.running:
            seq = self.running.pop(index % len(self.running))
            self.cache.commit(seq, seq.num_tokens // 2)
            self.cache.release(seq)

    def grow(self, index) -> None:
        if self.running:
            seq = self.running[index % len(self.running)]
            try:
                self.cache.extend(seq, [index % 3])
            except PoolExhausted:
                return
            self.cache.commit(seq, seq.num_tokens)

    def evict(self, count) -> None:
        self.log.append(self.cache.evict(count).blocks.tolist())

    def prove(self) -> None:
        self.cache.check()  # candidates are exactly the unheld leaves; every block has one state
        nodes = list(self.cache.nodes())
        policy = self.cache._policy
        if isinstance(policy, SegmentedPolicy):
            assert sum(policy._blocks) == sum(len(node.blocks) for node in nodes)
            assert min(policy._blocks) >= 0
        candidates = list(policy.candidates())
        assert len({id(run) for run in candidates}) == len(candidates)


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=40, deadline=None)
@given(program=steps)
def test_any_history_keeps_every_invariant_and_replays_to_the_same_victims(policy, program):
    first, second = Driver(policy), Driver(policy)
    assert first.run(program) == second.run(program)
    for driver in (first, second):
        for seq in driver.running:
            driver.cache.release(seq)
        driver.cache.evict(10)
        driver.cache.check()
        assert driver.cache.stats().free_blocks == 10
        assert list(driver.cache._policy.candidates()) == []


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=30, deadline=None)
@given(program=steps, count=st.integers(1, 10))
def test_victims_are_leaves_at_every_step(policy, program, count):
    """Evicting one block at a time never takes a block that another cached block lies below."""
    driver = Driver(policy)
    driver.run(program)
    for _ in range(count):
        parents = _parents(driver.cache)
        gone = driver.cache.evict(1).blocks.tolist()
        driver.prove()
        assert not set(gone) & set(parents.values())
        assert set(_parents(driver.cache)) == set(parents) - set(gone)


def _parents(cache: RadixCache) -> dict[int, int | None]:
    """Return every findable block's parent block, from the inspector's runs in depth-first order."""
    parents: dict[int, int | None] = {}
    path: list[int] = []  # the last block of the run at each level
    for node in cache.nodes():
        del path[node.level :]
        parent = path[-1] if path else None
        for block in node.blocks.tolist():
            parents[block] = parent
            parent = block
        path.append(parent)
    return parents


@pytest.mark.parametrize("policy", GHOSTS)
@settings(max_examples=40, deadline=None)
@given(requests=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=60))
def test_ghosts_stay_within_their_bounds(policy, requests):
    driver = Driver(GHOSTS[policy], num_blocks=10)
    for tokens in requests:
        driver.start(tokens)
        driver.finish(0)
        driver.prove()
        state = driver.cache._policy
        if policy == "arc":
            once, often = state.ghosts
            assert state._blocks[0] + once.blocks <= 2 * 10
            assert once.blocks + often.blocks <= 2 * 10
            assert 0.0 <= state._target <= 10
        else:
            # between two insertions at most the pool's own blocks are added
            assert state.ghosts.blocks <= state.ghosts.limit + 10
