"""The offline optima and the other reference lines against exhaustive search, naive simulation and known figures."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixpool.rpc.bench.offline import next_uses, optimal_hits, working_set
from radixpool.rpc.bench.reference import (
    infinite_hits,
    live_set,
    lru_curve,
    no_cache_hits,
    running_only_hits,
    whole_sequence_hits,
)

CONVERSATION, SYNTHETIC, CODING = "mooncake_conversation_trace", "mooncake_synthetic_trace", "cc_64conv"
tiny_paths = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), min_size=1, max_size=7)
small_paths = st.lists(st.lists(st.sampled_from("abc"), max_size=5), min_size=1, max_size=40)

# the fourth is refused by a pool of 3: to keep `bb` for it costs `a` its hit
REFUSED_BETWEEN = [list("bb"), list("a"), list("ba"), list("bbaa"), list("a")]


def draw_paths(rng: random.Random) -> tuple[list[list[str]], int]:
    """Draw 3 to 8 paths of few blocks and a capacity that some of them may pass."""
    capacity = rng.randint(1, 4)
    lengths = [1, 1, 2, 2, 3, capacity + 1]
    return [[rng.choice("abc") for _ in range(rng.choice(lengths))] for _ in range(rng.randint(3, 8))], capacity


@pytest.mark.parametrize(
    ("name", "capacity", "opt", "bypass"),
    [
        (CONVERSATION, 5_000, 97_995, 98_448),
        (CONVERSATION, 10_000, 105_710, 105_710),
        (SYNTHETIC, 5_000, 64_063, None),
        (CODING, 5_000, 776_253, None),
    ],
)
def test_the_optimum_has_the_figures_of_an_independent_simulator(real_trace, name, capacity, opt, bypass):
    trace = real_trace(name)
    assert optimal_hits(trace, capacity).sum() == opt
    if bypass is not None:
        assert optimal_hits(trace, capacity, admission="bypass").sum() == bypass


@pytest.mark.parametrize(
    ("name", "refs", "unique", "ratio"),
    [
        (CONVERSATION, 288_500, 182_790, 0.3664),
        (SYNTHETIC, 121_877, 43_924, 0.6396),
        (CODING, 817_342, None, 0.9572),
        ("tau_airline", 433_249, None, 0.9432),
    ],
)
def test_an_infinite_cache_hits_every_reference_but_the_first(real_trace, name, refs, unique, ratio):
    trace = real_trace(name)
    hits = infinite_hits(trace).sum()
    assert trace.num_refs == refs
    assert unique in (None, trace.num_nodes)
    assert hits == refs - trace.num_nodes
    assert hits / refs == pytest.approx(ratio, abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(paths=tiny_paths, capacity=st.integers(1, 4))
@example(paths=REFUSED_BETWEEN, capacity=3)
def test_no_choice_of_victims_beats_the_optimum_nor_does_it_promise_more(make_trace, exhaustive, paths, capacity):
    trace = make_trace(paths)
    for admission in ("resident", "bypass"):
        best = exhaustive(paths, capacity, bypass=admission == "bypass").best()
        assert optimal_hits(trace, capacity, admission=admission).sum() == best


@pytest.mark.parametrize("admission", ["resident", "bypass"])
def test_the_optimum_is_the_best_choice_on_2000_tiny_traces_with_refused_requests(make_trace, exhaustive, admission):
    rng, refused, hits = random.Random(0), 0, 0
    for _ in range(2_000):
        paths, capacity = draw_paths(rng)
        optimum = optimal_hits(make_trace(paths), capacity, admission=admission).sum()
        assert optimum == exhaustive(paths, capacity, bypass=admission == "bypass").best(), (paths, capacity)
        refused += sum(len(path) > capacity for path in paths)
        hits += optimum
    assert refused > 1_000
    assert hits > 1_000


@pytest.mark.parametrize("admission", ["resident", "bypass"])
def test_outputs_and_warm_up_are_no_uses_and_then_the_optimum_is_a_bound(make_trace, exhaustive, admission):
    """Of the tree from above, and of the same blocks without a tree what can be reached."""
    rng, totals = random.Random(1), np.zeros(2, dtype=int)
    for _ in range(1_000):
        paths, capacity = draw_paths(rng)
        prompts = [rng.randint(0, len(path)) for path in paths]
        first = rng.randint(0, len(paths) - 1)
        counted = [0] * first + prompts[first:]
        optimum = optimal_hits(make_trace(paths, prompts=prompts), capacity, admission=admission, first_request=first)
        case = (paths, capacity, prompts, first)
        search = {"bypass": admission == "bypass", "counted": counted}
        in_tree = exhaustive(paths, capacity, **search).best()
        assert in_tree <= optimum.sum() == exhaustive(paths, capacity, tree=False, **search).best(), case
        assert optimum[:first].sum() == 0
        assert np.all(optimum <= counted)
        totals += in_tree, optimum.sum()
    assert totals[1] < totals[0] * 1.01  # a tight bound


@settings(max_examples=100, deadline=None)
@given(paths=small_paths)
def test_the_working_set_is_the_least_capacity_that_loses_nothing(make_trace, paths):
    trace = make_trace(paths)
    everything = infinite_hits(trace).sum()
    size = working_set(trace)
    assert optimal_hits(trace, max(size, 1)).sum() == everything
    if size > max(trace.largest_request, 1):
        assert optimal_hits(trace, size - 1).sum() < everything


def test_the_working_set_of_a_real_trace(real_trace):
    trace = real_trace(CONVERSATION)
    size = working_set(trace)
    assert optimal_hits(trace, size).sum() == 105_710
    assert optimal_hits(trace, size - 1).sum() < 105_710


@settings(max_examples=100, deadline=None)
@given(paths=small_paths, first=st.integers(0, 5))
def test_the_lru_curve_is_lru_at_every_capacity_in_one_pass(make_trace, naive_cache, paths, first):
    trace = make_trace(paths)
    curve = lru_curve(trace, first_request=first)
    for capacity in range(max(trace.largest_request, 1), trace.num_nodes + 1):
        cache = naive_cache(capacity, "lru")
        assert curve[capacity] == sum([cache.request(path) for path in paths][first:])


@pytest.mark.parametrize(
    ("name", "hits"),
    [(CONVERSATION, {5_000: 32_260, 10_000: 61_046}), (SYNTHETIC, {5_000: 34_043}), (CODING, {5_000: 765_827})],
)
def test_the_lru_curve_has_the_figures_of_an_independent_simulator(real_trace, name, hits):
    curve = lru_curve(real_trace(name))
    assert {capacity: curve[capacity] for capacity in hits} == hits


def test_next_uses_point_at_the_next_request_with_the_block():
    assert next_uses([[0, 1], [0], [0, 1]], 2, [2, 1, 2]) == [[1, 2], [2], [3, 3]]


def test_an_output_ends_the_use_of_a_block():
    assert next_uses([[0, 1], [0, 1], [0, 1]], 2, [2, 1, 2]) == [[1, 3], [2, 2], [3, 3]]


def test_whole_sequences_go_whole(make_trace):
    trace = make_trace([["a", "b", "c"], ["x"], ["y"], ["a", "b", "c"]])
    assert whole_sequence_hits(trace, 4).tolist() == [0, 0, 0, 0]  # abc went whole to make room for y
    assert whole_sequence_hits(trace, 5).tolist() == [0, 0, 0, 3]


def test_a_sequence_that_goes_leaves_what_others_share(make_trace):
    trace = make_trace([["a", "b"], ["a", "c"], ["x", "y"], ["a", "b"], ["a", "c"]])
    # x, y push out a-b, but not the a that a-c still has; then a-b pushes out a-c's c
    assert whole_sequence_hits(trace, 4).tolist() == [0, 1, 0, 1, 1]


def test_an_extended_sequence_is_one_sequence(make_trace):
    trace = make_trace([["a"], ["a", "b"], ["a", "b", "c"], ["x"], ["a", "b", "c"]])
    assert whole_sequence_hits(trace, 4).tolist() == [0, 1, 2, 0, 3]


def test_running_requests_share_only_while_they_run(make_trace):
    trace = make_trace([["a", "b"], ["a", "c"], ["a", "b"]], arrivals=[0, 5, 20], durations=[10, 10, 10])
    assert running_only_hits(trace, trace.duration_ms).tolist() == [0, 1, 0]
    assert running_only_hits(trace, trace.duration_ms * 0.0).sum() == 0
    assert live_set(trace, trace.duration_ms) == 3
    assert live_set(trace, trace.duration_ms * 0.0) == 2


def test_no_cache_hits_nothing(make_trace):
    assert no_cache_hits(make_trace([["a"], ["a"]])).tolist() == [0, 0]


@settings(max_examples=100, deadline=None)
@given(paths=small_paths, capacity=st.integers(1, 12))
def test_the_references_are_in_order(make_trace, paths, capacity):
    trace = make_trace(paths)
    opt = optimal_hits(trace, capacity)
    bypass = optimal_hits(trace, capacity, admission="bypass")
    assert whole_sequence_hits(trace, capacity).sum() <= opt.sum() <= bypass.sum() <= infinite_hits(trace).sum()
    assert np.all(opt <= trace.prompt_blocks)
