"""Choosing tokens: what the parameters keep, and that one seed is one answer."""

from __future__ import annotations

import collections

import pytest
import torch

from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.worker.sampling import TokenSampler, candidates

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def params(**rest):
    return SamplingParams(max_new_tokens=1, **({"temperature": 1.0} | rest))


def kept(**rest):
    return candidates(LOGITS, params(**rest))[1].tolist()


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ({}, [1, 3, 2, 0, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [1, 3, 2, 0, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.7}, [1, 3]),  # 0.636 and 0.234
        ({"top_p": 0.6}, [1]),
        ({"top_k": 3, "top_p": 0.95}, [1, 3, 2]),
        ({"temperature": 0.1, "top_p": 0.99}, [1]),
        ({"temperature": 1e-30, "top_p": 0.99}, [1]),
    ],
)
def test_top_k_and_top_p_keep_the_most_likely(rest, expected):
    assert kept(**rest) == expected


def test_frequencies_follow_the_probabilities():
    sampler = TokenSampler(params(seed=1))
    counts = collections.Counter(sampler.sample(LOGITS) for _ in range(20_000))
    for token, probability in enumerate(LOGITS.softmax(0).tolist()):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.012)


def test_a_seed_repeats_and_another_differs():
    def draw(seed):
        sampler = TokenSampler(params(seed=seed))
        return [sampler.sample(torch.zeros(1000)) for _ in range(20)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)
    assert draw(2**64 - 1) == draw(2**64 - 1)


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((10,), -torch.inf)
    logits[3] = 0.0
    sampler = TokenSampler(params(seed=0))
    assert {sampler.sample(logits) for _ in range(100)} == {3}


def test_a_tiny_temperature_is_all_but_greedy():
    logits = torch.tensor([-5.0, 40.0, 39.0, 40.0 - 1e-3])
    for temperature in (1e-5, 1e-38, 1e-45):
        sampler = TokenSampler(params(temperature=temperature, seed=0))
        assert {sampler.sample(logits) for _ in range(20)} == {1}


def test_temperature_zero_is_greedy():
    assert TokenSampler(params(temperature=0.0)).greedy
    assert not TokenSampler(params(temperature=0.5)).greedy
