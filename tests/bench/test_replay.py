"""The replay through the real cache: known figures, the naive simulator, determinism, durations, speed's conditions."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixpool.rpc.bench import grid
from radixpool.rpc.bench.offline import optimal_hits
from radixpool.rpc.bench.replay import durations_ms, replay

CONVERSATION, SYNTHETIC, CODING = "mooncake_conversation_trace", "mooncake_synthetic_trace", "cc_64conv"
paths = st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("name", "capacity", "hits"),
    [
        (CONVERSATION, 5_000, 32_260),
        (CONVERSATION, 10_000, 61_046),
        (SYNTHETIC, 5_000, 34_043),
        (CODING, 5_000, 765_827),
    ],
)
def test_lru_has_the_figures_of_an_independent_simulator(real_trace, name, capacity, hits):
    run = replay(real_trace(name), "lru", capacity)
    assert run.hits.sum() == hits
    assert run.refused_requests == 0


@pytest.mark.parametrize(("policy", "ratio"), [("fifo", 0.2109), ("lfu", 0.1317), ("sieve", 0.1317)])
def test_other_policies_are_within_half_a_thousandth_of_it(real_trace, policy, ratio):
    trace = real_trace(CONVERSATION)
    assert replay(trace, policy, 10_000).hits.sum() / trace.num_refs == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@settings(max_examples=80, deadline=None)
@given(paths=paths, capacity=st.integers(1, 12))
def test_the_cache_hits_what_a_naive_simulator_hits(make_trace, naive_cache, policy, paths, capacity):
    naive = naive_cache(capacity, policy)
    expected = [naive.request(path) for path in paths]
    run = replay(make_trace(paths), policy, capacity)
    assert run.hits.tolist() == expected
    assert run.evicted_blocks == naive.evicted
    assert run.refused_requests == sum(len(path) > capacity for path in paths)


@pytest.mark.parametrize("policy", grid.DEFAULT_POLICIES)
@settings(max_examples=25, deadline=None)
@given(paths=paths, capacity=st.integers(1, 12))
@example(paths=[list("bb"), list("a"), list("ba"), list("bbaa"), list("a")], capacity=3)  # bbaa is refused
def test_no_policy_beats_the_optimum_and_all_are_deterministic(make_trace, policy, paths, capacity):
    trace = make_trace(paths)
    first, second = replay(trace, policy, capacity), replay(trace, policy, capacity)
    assert first.hits.tolist() == second.hits.tolist()
    assert first.evicted_blocks == second.evicted_blocks
    assert first.hits.sum() <= optimal_hits(trace, capacity).sum()


@pytest.mark.parametrize("policy", grid.DEFAULT_POLICIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), paths=paths, capacity=st.integers(1, 12))
def test_no_policy_beats_the_optimum_after_a_warm_up_and_with_outputs(make_trace, policy, data, paths, capacity):
    prompts = [data.draw(st.integers(0, len(path)), label="prompt blocks") for path in paths]
    first = data.draw(st.integers(0, len(paths)), label="first request")
    trace = make_trace(paths, prompts=prompts)
    hits = replay(trace, policy, capacity).hits[first:].sum()
    assert hits <= optimal_hits(trace, capacity, first_request=first).sum()
    assert hits <= optimal_hits(trace, capacity, admission="bypass", first_request=first).sum()


@pytest.mark.parametrize("policy", grid.DEFAULT_POLICIES)
def test_every_policy_replays_a_real_trace_within_the_optimum(real_trace, policy):
    trace = real_trace(CONVERSATION, 3_000)
    run = replay(trace, policy, 2_000)
    assert 0 <= run.hits.sum() <= optimal_hits(trace, 2_000).sum()
    assert run.refused_requests == 0


def test_a_pool_that_holds_everything_hits_what_an_infinite_cache_hits(make_trace):
    trace = make_trace([list("abc"), list("abd"), list("abc")])
    assert replay(trace, "lru", trace.num_nodes).hits.tolist() == [0, 2, 3]


def test_a_request_larger_than_the_pool_is_refused_and_disturbs_nothing(make_trace):
    trace = make_trace([list("ab"), list("abcdef"), list("ab")])
    run = replay(trace, "lru", 3)
    assert run.hits.tolist() == [0, 0, 2]
    assert run.refused_requests == 1


def test_running_requests_hold_their_blocks_and_later_ones_wait(make_trace):
    trace = make_trace([list("ab"), list("cd"), list("ab")], arrivals=[0, 10, 15], durations=[100, 100, 100])
    run = replay(trace, "lru", 3, timing="timed")
    # cd waits for ab to end at 100 and takes two of the three blocks: a stays, b goes
    assert run.delays_ms.tolist() == [0.0, 90.0, 185.0]
    assert run.hits.tolist() == [0, 0, 1]


def test_timed_replay_without_pressure_hits_what_zero_duration_hits(make_trace):
    trace = make_trace([list("abc"), list("abd"), list("abc")], arrivals=[0, 1, 2], durations=[50, 50, 50])
    timed = replay(trace, "lru", 10, timing="timed")
    assert timed.hits.tolist() == replay(trace, "lru", 10).hits.tolist() == [0, 2, 3]
    assert timed.delays_ms.tolist() == [0.0, 0.0, 0.0]


def test_durations_come_from_the_trace_or_from_the_model(make_trace):
    from radixpool.rpc.bench.cost import PrefillModel

    trace = make_trace([list("ab"), list("ab")], durations=[None, 7.0])
    assert durations_ms(trace, PrefillModel(tokens_per_s=1_000.0)).tolist() == [2.0, 7.0]


def test_an_unknown_policy_is_named(make_trace):
    with pytest.raises(ValueError, match="nosuch"):
        replay(make_trace([["a"]]), "nosuch", 4)
