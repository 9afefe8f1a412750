"""A seed is one answer, whatever happens to the request on its way."""

from __future__ import annotations

import pytest
import torch

from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.sampling import TokenSampler

PROMPT = list(range(10))


@pytest.fixture
def make_seeded(make_harness):
    """An engine whose model likes all tokens equally, so that each one shows what was drawn."""

    def make():
        harness = make_harness()
        forward = harness.runner.forward

        def sampled(batch):
            forward(batch)
            return [sampler.sample(torch.zeros(harness.limits.vocab_size)) for sampler in batch.samplers]

        harness.runner.sampler = TokenSampler
        harness.runner.forward = sampled
        return harness

    return make


def undisturbed(n: int, **rest: int) -> list[int]:
    sampler = TokenSampler(SamplingParams(max_new_tokens=n, temperature=1.0, seed=5, **rest))
    return [sampler.sample(torch.zeros(50)) for _ in range(n)]


def lose_the_manager(harness) -> None:
    harness.engine.interrupt(CacheLost("gone"))
    harness.port.void()


def lose_the_reply_of_the_next_step(harness) -> None:
    """The token of the step was drawn, and is thrown away: the cache never confirmed it."""
    harness.port.lost_in, harness.port.reply_lost = 1, True
    harness.step()


def lose_the_lease(harness) -> None:
    (sequence,) = harness.cache.sequences()
    harness.cache.release(sequence)
    harness.port._sequences.clear()


def damage_a_block(harness) -> None:
    (sequence,) = harness.cache.sequences()
    harness.cache.invalidate(sequence, 1)


@pytest.mark.parametrize("disturb", [lose_the_manager, lose_the_reply_of_the_next_step, lose_the_lease, damage_a_block])
def test_a_disturbed_request_draws_what_it_would_have_drawn(make_seeded, answer_of, disturb):
    harness = make_seeded()
    call = harness.submit(PROMPT, 12, temperature=1.0, seed=5, skip_draws=3)
    for _ in range(4):
        harness.step()
    disturb(harness)
    harness.drain()
    assert answer_of(call).tokens == undisturbed(12, skip_draws=3)
