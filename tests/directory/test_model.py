"""A manager killed at any byte of any store recovers exactly what was committed (see `killing.py`).

A seeded walk goes far, hypothesis searches and shrinks. `RADIXPOOL_DIRECTORY_STEPS` sets the steps of the walk.
"""

from __future__ import annotations

import os
import random
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixpool.radix.errors import InvariantViolation
from radixpool.radix.eviction import available_policies
from radixpool.radix.media import MediaSpan
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.rpc.directory import BlockDirectory

STEPS = int(os.environ.get("RADIXPOOL_DIRECTORY_STEPS", "8000"))
NAMESPACES = (DEFAULT_NAMESPACE, Namespace(tenant="t"), Namespace(cache_salt="long " * 20))
CALLS = ("handed_out", "prepare", "stored", "touched", "returned", "removed")


def step(manager: Any, rng: random.Random) -> None:
    """Take one random step, one in six of them (of the rare ones half) with a kill within the next few calls."""
    roll = rng.random()
    rare = 0.84 <= roll < 0.9 or roll >= 0.96
    if rng.random() < (1 / 2 if rare else 1 / 6):
        manager.persistence.arm(rng.randrange(2 if rare else 4), rng.random())

    def tokens() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(1, 12))]

    if manager.fenced and rng.random() < 0.3:
        manager.end_former_life()
    if roll < 0.3 or not manager.handles:
        prompt = tokens()
        media = (MediaSpan(rng.randrange(len(prompt)), 1, b"image"),) if rng.random() < 0.2 else ()
        manager.acquire(prompt, rng.choice(NAMESPACES), reserve=rng.randrange(4), media=media)
    elif roll < 0.4:
        manager.extend(rng.choice(manager.handles), tokens())
    elif roll < 0.62:
        manager.commit(rng.choice(manager.handles), rng.choice((0.5, 1.0, rng.random())))
    elif roll < 0.8:
        manager.release(rng.choice(manager.handles), after_steps=rng.choice((0, 0, 1, 2)))
    elif roll < 0.84:
        manager.rewind(rng.choice(manager.handles), rng.random())
    elif roll < 0.9:
        manager.invalidate(rng.choice(manager.handles), rng.random() / 2)
    elif roll < 0.92:
        manager.evict(rng.randrange(1, 7))
    elif roll < 0.96:
        manager.complete_step()
    else:
        manager.flush(rng.choice((None, *NAMESPACES)))


@pytest.mark.parametrize("seed", range(4))
def test_a_manager_killed_at_any_store_recovers_what_was_committed(killing: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    seen: dict[tuple[str, bool], int] = {}
    done = 0
    while done < STEPS // 4:
        manager = killing.KilledManager(rng.randrange(6, 21))
        for _ in range(200):
            step(manager, rng)
            manager.check()
            done += 1
        manager.check_eviction_order()
        manager.close()
        for key, count in manager.seen.items():
            seen[key] = seen.get(key, 0) + count
    for call in CALLS:
        assert seen.get((call, True)), f"no kill within {call}: the walk proves nothing about it"


@pytest.mark.parametrize("call", ["handed_out", "touched", "removed", "returned"])
def test_the_walk_notices_a_directory_that_forgets_to_write(
    killing: ModuleType, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(BlockDirectory, call, lambda *_: None)
    rng = random.Random(call)
    with pytest.raises((AssertionError, InvariantViolation)):
        for _ in range(20):
            manager = killing.KilledManager(rng.randrange(6, 21))
            try:
                for _ in range(8):
                    for _ in range(25):
                        step(manager, rng)
                        manager.check()
                    manager.check_eviction_order()
            finally:
                manager.close()


@pytest.mark.parametrize("policy", sorted(available_policies()))
def test_every_policy_goes_on_after_a_recovery(killing: ModuleType, policy: str) -> None:
    rng = random.Random(policy)
    manager = killing.KilledManager(rng.randrange(6, 21), policy=policy)
    for _ in range(150):
        step(manager, rng)
        manager.check()
    assert manager.recoveries
    manager.close()


class KilledManagerMachine(RuleBasedStateMachine):
    killing: ModuleType

    @initialize(num_blocks=st.integers(6, 20))
    def begin(self, num_blocks: int) -> None:
        self.manager = self.killing.KilledManager(num_blocks)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()

    @rule(calls=st.integers(0, 3), fraction=st.floats(0, 1))
    def arm(self, calls: int, fraction: float) -> None:
        self.manager.persistence.arm(calls, fraction)

    @rule(seeds=st.lists(st.integers(0, 2**16), min_size=1, max_size=8))
    def walk(self, seeds: list[int]) -> None:
        for seed in seeds:
            step(self.manager, random.Random(seed))

    @precondition(lambda self: self.manager.handles)
    @rule(choice=st.integers(0, 99), commit_upto=st.floats(0, 1))
    def commit_and_release(self, choice: int, commit_upto: float) -> None:
        handle = self.manager.handles[choice % len(self.manager.handles)]
        self.manager.commit(handle, commit_upto)
        if handle in self.manager.handles:
            self.manager.release(handle, after_steps=0)

    @rule()
    def kill_between_operations(self) -> None:
        self.manager.kill_between_operations()

    @rule()
    def check_eviction_order(self) -> None:
        self.manager.check_eviction_order()

    @invariant()
    def both_caches_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()


def test_hypothesis_finds_no_kill_that_loses_or_invents_anything(killing: ModuleType) -> None:
    KilledManagerMachine.killing = killing
    unhurried = [HealthCheck.too_slow]
    budget = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=unhurried)
    run_state_machine_as_test(KilledManagerMachine, settings=budget)
