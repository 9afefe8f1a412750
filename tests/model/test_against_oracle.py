"""The cache against the oracle: hypothesis searches, a seeded walk goes far.

`STEPS` (default 6,000) sets how many steps all tests of this file take together.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radixpool.radix import MediaSpan, Namespace

STEPS = int(os.environ.get("STEPS", "6000"))
NAMESPACES = st.sampled_from((Namespace(), Namespace(tenant="t"), Namespace(cache_salt="t")))
WORKERS = st.sampled_from(("w0", "w1"))


@st.composite
def prompts(draw, most: int = 12) -> tuple[list[int], list[MediaSpan]]:
    """Draw tokens and up to two contents that some of them stand for."""
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=most))
    ends = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=4)))
    digests = st.sampled_from((b"cat", b"dog"))
    return tokens, [MediaSpan(a, b - a, draw(digests)) for a, b in zip(ends[::2], ends[1::2], strict=False)]


def machine_class(make_driver) -> type[RuleBasedStateMachine]:
    """Build the state machine over fresh drivers."""

    class CacheMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.driver = make_driver()

        def pick(self, data) -> int:
            return data.draw(st.sampled_from(self.driver.handles), label="handle")

        def live(self) -> bool:
            return bool(self.driver.handles)

        @rule(
            prompt=prompts(),
            namespace=NAMESPACES,
            reserve=st.integers(0, 4),
            max_hit=st.none() | st.integers(0, 14),
            partial=st.booleans(),
            in_flight=st.sampled_from(("ignore", "report", "wait")),
        )
        def acquire(self, prompt, namespace, reserve, max_hit, partial, in_flight) -> None:
            tokens, media = prompt
            self.driver.acquire(tokens, namespace, reserve, max_hit, partial, in_flight, media)

        @rule(prompt=prompts(), namespace=NAMESPACES)
        def match(self, prompt, namespace) -> None:
            tokens, media = prompt
            self.driver.match(tokens, namespace, media)

        @precondition(live)
        @rule(data=st.data(), prompt=prompts())
        def extend(self, data, prompt) -> None:
            self.driver.extend(self.pick(data), *prompt)

        @precondition(live)
        @rule(data=st.data(), count=st.integers(0, 6))
        def reserve(self, data, count) -> None:
            self.driver.reserve(self.pick(data), count)

        @precondition(live)
        @rule(data=st.data())
        def commit(self, data) -> None:
            handle = self.pick(data)
            self.driver.commit(handle, data.draw(st.integers(0, len(self.driver.oracle.sequences[handle].tokens))))

        @precondition(live)
        @rule(data=st.data(), steps=st.dictionaries(WORKERS, st.integers(0, 4)))
        def release(self, data, steps) -> None:
            known = self.driver.oracle.workers
            self.driver.release(self.pick(data), {w: s for w, s in steps.items() if w in known})

        @precondition(live)
        @rule(data=st.data(), back=st.integers(0, 5), steps=st.dictionaries(WORKERS, st.integers(0, 4)))
        def rewind(self, data, back, steps) -> None:
            handle, known = self.pick(data), self.driver.oracle.workers
            to = len(self.driver.oracle.sequences[handle].tokens) - back
            self.driver.rewind(handle, to, {w: s for w, s in steps.items() if w in known})

        @precondition(live)
        @rule(data=st.data(), n=st.integers(1, 3))
        def fork(self, data, n) -> None:
            self.driver.fork(self.pick(data), n)

        @precondition(live)
        @rule(data=st.data(), index=st.integers(0, 6))
        def invalidate(self, data, index) -> None:
            self.driver.invalidate(self.pick(data), index)

        @rule(prompt=prompts(), namespace=NAMESPACES)
        def pin(self, prompt, namespace) -> None:
            tokens, media = prompt
            self.driver.pin(tokens, namespace, media)

        @precondition(lambda self: self.driver.oracle.pins)
        @rule(data=st.data())
        def unpin(self, data) -> None:
            self.driver.unpin(data.draw(st.sampled_from(sorted(self.driver.oracle.pins))))

        @rule(namespace=st.none() | NAMESPACES, mode=st.sampled_from(("idle_only", "drain", "new_generation")))
        def flush(self, namespace, mode) -> None:
            self.driver.flush(namespace, mode)

        @rule(count=st.integers(0, 4))
        def evict(self, count) -> None:
            self.driver.evict(count)

        @rule(worker=WORKERS)
        def add_worker(self, worker) -> None:
            self.driver.add_worker(worker)

        @precondition(lambda self: self.driver.oracle.workers)
        @rule(data=st.data(), step=st.integers(0, 5))
        def complete_step(self, data, step) -> None:
            self.driver.complete(data.draw(st.sampled_from(sorted(self.driver.oracle.workers))), step)

        @precondition(lambda self: self.driver.oracle.workers)
        @rule(data=st.data())
        def remove_worker(self, data) -> None:
            self.driver.remove_worker(data.draw(st.sampled_from(sorted(self.driver.oracle.workers))))

        @invariant()
        def everything_agrees(self) -> None:
            self.driver.compare()

        def teardown(self) -> None:
            self.driver.drain()

    return CacheMachine


@pytest.mark.timeout(0)
def test_hypothesis_finds_no_difference(make_driver) -> None:
    per_example = 50
    options = settings(
        max_examples=max(20, STEPS // 4 // per_example),
        stateful_step_count=per_example,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="STEPS" not in os.environ,
    )
    run_state_machine_as_test(machine_class(make_driver), settings=options)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("num_blocks", [4, 10, 24])
def test_random_walks_find_no_difference(make_driver, random_walk, num_blocks) -> None:
    walks = max(1, STEPS // 4 // 250)
    for seed in range(walks):
        random_walk(make_driver(num_blocks=num_blocks), seed=1000 * num_blocks + seed, steps=250)
