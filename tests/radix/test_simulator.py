"""One seed drives a cache, 8 clients, 2 workers with steps in flight, expiring leases and failures of every kind.

`SEEDS` (default 1,000) sets how many seeds run, `FIRST_SEED` where they begin. A failure prints the seed and the
shortest log found; `FIRST_SEED=n SEEDS=1` runs it again.
"""

from __future__ import annotations

import os

import pytest

from radixpool.radix import MediaSpan, PoolExhausted, RadixCache, UnknownSequence
from radixpool.radix.eviction import available_policies
from radixpool.radix.quarantine import NO_STEP
from radixpool.radix.replay import Operation, RecordedCache, ReplayClock, ReplayMismatch, replay

SEEDS = int(os.environ.get("SEEDS", "1000"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
ACTIONS = 120
SHARDS = 4  # so that parallel runners share the work


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_seed_breaks_an_invariant(simulator, shard) -> None:
    policies = sorted(available_policies())
    for seed in range(FIRST_SEED + shard, FIRST_SEED + SEEDS, SHARDS):
        policy = "lru" if seed % 2 else policies[seed // 2 % len(policies)]
        actions = simulator.actions_of(seed, ACTIONS)
        error, _ = simulator.run(seed, actions, policy)
        if error is not None:
            pytest.fail(f"policy {policy}\n{simulator.shortest(seed, actions, policy)}", pytrace=False)


@pytest.mark.parametrize("seed", range(12))
def test_a_log_replayed_under_another_clock_gives_the_same_answers(simulator, seed) -> None:
    """Row 44: handles, tables, victims and refusals come from the log alone."""
    error, simulation = simulator.run(seed, simulator.actions_of(seed, ACTIONS), "lru")
    assert error is None
    # a commit that the directory refused changed nothing, so the replica does not need to hear of it
    log = [operation for operation in simulation.log if "DiskFull" not in str(operation.answer)]
    clock = ReplayClock()
    replica = RadixCache(simulation.num_blocks, 2, clock=clock, pin_budget=4)
    lines = [operation.to_json() for operation in log]
    assert replay(map(Operation.from_json, lines), replica, clock) == len(log) > 50
    replica.check()
    assert replica.stats() == simulation.cache.stats()


def test_a_failing_run_is_reduced_to_few_actions(simulator, monkeypatch) -> None:
    """A planted leak shows as few actions and the operations they made."""
    from radixpool.radix.fences import FencedCore

    monkeypatch.setattr(FencedCore, "_retire", lambda self, blocks, payer, steps: 0)
    for seed in range(20):
        actions = simulator.actions_of(seed, ACTIONS)
        error, _ = simulator.run(seed, actions, "lru")
        if error is not None:
            failure = simulator.shortest(seed, actions, "lru")
            assert len(failure.actions) <= 12
            assert f"seed {seed}" in str(failure)
            assert '"name":"' in str(failure)
            return
    pytest.fail("no seed noticed that private blocks leak")


def test_a_log_that_answers_differently_is_refused() -> None:
    """Replay stops at the first difference and says which it is."""
    log: list[Operation] = []
    cache = RecordedCache(8, 2, sink=log.append)
    seq = cache.acquire([1, 2, 3], media=[MediaSpan(1, 1, b"x")])
    cache.release(seq)
    cache.release(seq)
    with pytest.raises(UnknownSequence):
        cache.commit(seq, 1)
    with pytest.raises(TypeError):
        cache.acquire("text")
    cache.flush(None, mode="drain")
    clock = ReplayClock()
    assert replay(log, RadixCache(8, 2, clock=clock), clock) == len(log) == 5
    with pytest.raises(ReplayMismatch, match="operation 0, acquire, answered") as mismatch:
        replay(log, RadixCache(8, 1, clock=clock), clock)
    assert mismatch.value.index == 0


def test_a_persistence_alone_hears_of_every_block(simulator) -> None:
    """Without an event log: the directory's states are the cache's, up to the last block."""
    directory = simulator.Directory()
    cache = RadixCache(8, 2, persistence=directory)
    seq = cache.acquire([1, 2, 3, 4, 5])
    cache.commit(seq, 5)
    assert sorted(directory.state.values()) == ["private", "stored", "stored"]
    cache.release(seq)
    cache.evict(1)
    assert list(directory.state.values()) == ["stored"]
    cache.flush(mode="new_generation")
    assert directory.state == {}


def test_a_refusal_names_no_step_when_waiting_does_not_help() -> None:
    """What is quarantined is less than what is short."""
    cache = RadixCache(4, 2)
    cache.add_worker("gpu")
    cache.release(cache.acquire([1]), after_step=0)
    held = cache.acquire([1, 2, 3])
    with pytest.raises(PoolExhausted) as refusal:
        cache.acquire([1, 2, 3, 4, 5])
    assert refusal.value.retry_after_step is None
    cache.release(held, after_step={"gpu": NO_STEP})  # a life whose last step nobody knows
    with pytest.raises(PoolExhausted) as refusal:
        cache.acquire([1, 2, 3, 4, 5])
    assert refusal.value.retry_after_step is None
    assert cache.remove_worker("gpu") == 3
    assert cache.acquire([1, 2, 3, 4, 5]).num_blocks == 3
