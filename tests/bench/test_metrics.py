"""Figures of a run, worked out by hand on small traces."""

from __future__ import annotations

import numpy as np
import pytest

from radixpool.rpc.bench.cost import PrefillModel, hit_tokens
from radixpool.rpc.bench.metrics import Run, Yardstick, equal_capacity, gap_closed, measure, over_time

MODEL = PrefillModel(parameters=1.0, num_layers=1, hidden_size=1, tokens_per_s=1_000.0)


@pytest.fixture
def trace(make_trace):
    return make_trace([list("ab"), list("ab"), list("abcd")], block_size=4, arrivals=[0, 60_000, 240_000])


def run_of(hits, **more):
    return Run("made", "lru", "policy", 8, np.array(hits, dtype=np.int32), seconds=0.5, **more)


def yardstick(**more):
    return Yardstick(**{"model": MODEL, "first_request": 0, "lru_curve": None, "lru_hits": {}, "opt_hits": {}, **more})


def test_ratios_by_block_token_request_and_flops(trace):
    row = measure(trace, run_of([0, 2, 1]), yardstick())
    assert (row.refs, row.hits) == (8, 3)
    assert row.hit_ratio == row.token_hit_ratio == 3 / 8
    assert row.request_hit_ratio == pytest.approx((0 + 1 + 1 / 4) / 3)
    assert row.flops_hit_ratio == pytest.approx(
        (MODEL.flops(0, 8) + MODEL.flops(0, 4)) / (2 * MODEL.flops(0, 8) + MODEL.flops(0, 16))
    )
    assert row.refs_per_s == 16.0


def test_flops_count_weights_and_attended_pairs():
    assert MODEL.flops(0, 3) == 2 * 3 + 4 * (1 + 2 + 3)
    assert MODEL.flops(2, 3) == 2 * 1 + 4 * 3
    assert MODEL.flops(0, 2) + MODEL.flops(2, 3) == MODEL.flops(0, 3)


def test_a_token_costs_twice_as_much_where_the_model_says_so():
    model = PrefillModel()
    depth = model.cost_doubles_at_tokens
    assert model.flops(depth, depth + 1) / model.flops(0, 1) == pytest.approx(2.0, rel=1e-3)


def test_time_to_first_token_is_what_is_left_to_prefill_and_the_wait(trace):
    row = measure(trace, run_of([0, 2, 1]), yardstick())
    assert row.ttft_ms_p50 == 8.0  # of 8, 0 and 12 tokens at one a millisecond
    waited = measure(trace, run_of([0, 2, 1], delays_ms=np.array([100.0, 100.0, 100.0])), yardstick())
    assert waited.ttft_ms_p50 == 108.0


def test_the_warm_up_is_not_counted(trace):
    row = measure(trace, run_of([0, 2, 1]), yardstick(first_request=1))
    assert (row.refs, row.hits) == (6, 3)


def test_the_last_block_may_be_partial(make_trace):
    trace = make_trace([list("ab")], block_size=4)
    object.__setattr__(trace, "input_tokens", np.array([6]))
    assert hit_tokens(trace, np.array([2], dtype=np.int32)).tolist() == [6]


def test_a_trace_without_references_has_zero_ratios(make_trace):
    row = measure(make_trace([[]]), run_of([0]), yardstick())
    assert (row.hit_ratio, row.token_hit_ratio, row.request_hit_ratio, row.flops_hit_ratio) == (0.0, 0.0, 0.0, 0.0)


def test_the_share_of_the_gap_closed():
    assert gap_closed(15, 10, 20, refs=100) == 0.5
    assert gap_closed(8, 10, 20, refs=100) == pytest.approx(-0.2)
    assert gap_closed(10, 10, 10, refs=100) is None
    assert gap_closed(10, None, 20, refs=100) is None
    assert gap_closed(5, 10, 20, refs=10_000) is None  # a thousandth apart: nothing to close


def test_the_lru_capacity_with_equal_hits():
    curve = np.array([0, 4, 7, 7])
    assert [equal_capacity(curve, hits) for hits in (0, 4, 5, 7, 8)] == [0, 1, 2, 2, None]
    assert equal_capacity(None, 5) is None


def test_the_hit_ratio_over_time(trace):
    curve = over_time(trace, np.array([0, 2, 4], dtype=np.int32), slices=3)
    assert curve.hit_ratio.tolist() == [0.0, 1.0, 1.0]
    assert curve.unit == "minutes"
    assert curve.ends.tolist() == [0.0, 1.0, 4.0]


def test_the_hit_ratio_over_time_begins_after_the_warm_up(trace):
    curve = over_time(trace, np.array([0, 2, 4], dtype=np.int32), slices=3, first_request=1)
    assert curve.hit_ratio.tolist() == [1.0, 1.0]
    assert curve.ends.tolist() == [1.0, 4.0]


def test_the_hit_ratio_over_requests_when_there_are_no_times(make_trace):
    curve = over_time(make_trace([["a"]] * 10), np.array([0] + [1] * 9, dtype=np.int32), slices=2)
    assert curve.unit == "requests"
    assert curve.ends.tolist() == [5.0, 10.0]
    assert curve.hit_ratio.tolist() == [0.8, 1.0]


def test_a_long_quiet_end_does_not_squeeze_the_rest(make_trace):
    trace = make_trace([["a"]] * 20, arrivals=[*range(19), 1_000])
    assert over_time(trace, np.zeros(20, dtype=np.int32), slices=20).unit == "requests"
