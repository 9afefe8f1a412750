"""ALiBi: a key's score falls with its distance, by each head's own slope."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.kernels import TreeMask, alibi_slopes, extend
from radixpool.kernels.extend_plan import plain_only

BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn] + ([torch.bfloat16] if CUDA else [])


@BOTH
@pytest.mark.parametrize("context", [0, 37])
@pytest.mark.parametrize("block_size", [3, 16])
def test_twelve_heads_and_exact_distances(make_batch, device, backend, context, block_size):
    """Case 39: with equal scores the weights are the softmax of slope * distance: all show an offset of one."""
    new = 9
    batch = make_batch(
        backend=backend, heads=(12, 4), head_dim=64, block_size=block_size, lens=(context + new,), new=(new,)
    )
    batch.q.zero_()
    slopes = alibi_slopes(12, device=device)
    for pos in range(context + new):
        block = batch.tables[0, pos // block_size].long()
        batch.v_pool[block, :, pos % block_size] = torch.eye(64)[pos].to(batch.v_pool)
    out, lse = batch.run(alibi_slopes=slopes)
    for row in range(new):
        distance = torch.arange(context + row, -1, -1, dtype=torch.float64)
        scores = -slopes.cpu().double()[:, None] * distance
        torch.testing.assert_close(out[row, :, : len(distance)].cpu().double(), scores.softmax(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[row].cpu().double(), torch.logsumexp(scores, 1), atol=1e-5, rtol=1e-5)
        assert not out[row, :, len(distance) :].any()


@BOTH
@given(
    batch=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 2), (3, 1), (6, 6), (12, 2)]), block_size=st.sampled_from([4, 16]),
    dtype=st.sampled_from(DTYPES), window=st.sampled_from([0, 0, 1, 20]), cap=st.sampled_from([0.0, 3.0]),
    sinks=st.booleans(), share=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10 if CUDA else 8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(make_batch, device, backend, batch, heads, block_size, dtype, window, cap, sinks, share, seed):
    lens, new = tuple(c + n for c, n in batch), tuple(n for _, n in batch)
    depth = min(lens) // block_size
    drawn = make_batch(
        backend=backend, heads=heads, head_dim=32, block_size=block_size, lens=lens, new=new if any(new) else None,
        kv_dtype=dtype, shared=[(list(range(len(lens))), depth)] if share and depth else [], seed=seed,
    )  # fmt: skip
    options = {"window": window, "soft_cap": cap, "alibi_slopes": alibi_slopes(heads[0], device=device)}
    if sinks:
        options["sinks"] = torch.linspace(-2, 2, heads[0], device=device)
    drawn.check(**options)


@BOTH
def test_partial_states_of_a_shared_prefix_know_their_rows_distances(make_batch, device, backend, monkeypatch):
    monkeypatch.setattr("radixpool.kernels.forest.ITEM_OVERHEAD_BYTES", 0)
    batch = make_batch(backend=backend, heads=(12, 4), lens=(170, 140, 133), new=(3, 1, 8), shared=[([0, 1, 2], 8)])
    batch.check(alibi_slopes=alibi_slopes(12, device=device))


@BOTH
@pytest.mark.parametrize("scales", ["head", "token"])
def test_slopes_are_not_scaled_with_the_keys(make_batch, device, backend, scales):
    batch = make_batch(backend=backend, kv_dtype=torch.float8_e4m3fn, lens=(60, 35))
    scale = torch.tensor([0.25, 2.0], device=device)
    if scales == "token":
        scale = torch.rand(batch.k_pool.shape[:3], device=device) + 0.5
    batch.check(k_scale=scale, v_scale=scale, alibi_slopes=alibi_slopes(8, device=device))


def test_slopes_fall_by_one_ratio_between_powers_of_two():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16)[1::2].tolist() == alibi_slopes(8).tolist()
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == alibi_slopes(8).tolist()
    assert twelve[8:].tolist() == alibi_slopes(16)[0:8:2].tolist()
    assert alibi_slopes(1).tolist() == [2.0**-8]
    for count in range(1, 130):
        slopes = alibi_slopes(count)
        assert len(slopes) == count and len(set(slopes.tolist())) == count
        assert slopes.dtype == torch.float32 and slopes.min() > 0 and slopes.max() < 1
    with pytest.raises(ValueError, match="num_heads: expected at least 1, got 0"):
        alibi_slopes(0)


@pytest.mark.parametrize(
    ("slopes", "error", "message"),
    [
        (torch.ones(4), ValueError, r"alibi_slopes: expected size 8 in dimension 0 \(num_q_heads of the plan\)"),
        (torch.ones(1, 8), ValueError, r"alibi_slopes: expected \[num_q_heads\], got shape \(1, 8\)"),
        (torch.ones(8).double(), TypeError, "alibi_slopes: expected dtype torch.float32, got torch.float64"),
        (torch.ones(8, device="meta"), ValueError, "alibi_slopes: expected device .*, got meta"),
        (torch.ones(16)[::2], ValueError, "alibi_slopes: expected stride 1 in the last dimension"),
    ],
)
def test_bad_slopes_are_refused_before_any_launch(make_batch, device, slopes, error, message):
    batch = make_batch(lens=(40,))
    if not slopes.is_meta:
        slopes = slopes.to(device) if slopes.is_contiguous() else torch.ones(16, device=device)[::2]
    with pytest.raises(error, match=message):
        batch.run(alibi_slopes=slopes)


def test_trees_have_no_distances(make_batch, device):
    batch = make_batch(lens=(40,), new=(2,))
    tree = TreeMask.from_parents([[-1, 0]], device=device)
    with pytest.raises(ValueError, match="alibi_slopes: expected None with a tree"):
        extend(batch.q, batch.k_pool, batch.v_pool, batch.plan(), tree=tree, alibi_slopes=alibi_slopes(8).to(device))


def test_the_fast_extend_kernel_declines_what_it_cannot_do():
    none = {"token_scales": False, "tree": False, "alibi": False}
    assert not plain_only(**none)
    assert all(plain_only(**(none | {name: True})) for name in none)
