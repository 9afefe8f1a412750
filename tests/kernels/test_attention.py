"""Attention of both backends against the float64 reference: shapes, masks, forests, failures reported in public."""

import math

import pytest
import torch

from radixpool.kernels import PlanCapacity, merge_states, write_kv

BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn] + ([torch.bfloat16] if CUDA else [])


@BOTH
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_tails_never_leak(make_batch, backend, block_size, poison):
    """Case 11: what lies behind the end of a sequence is NaN or infinite, in K and in V."""
    batch = make_batch(backend=backend, lens=(1, 13, 16, 17, 255), new=(1, 2, 1, 5, 3), block_size=block_size)
    for pool in (batch.k_pool, batch.v_pool):
        pool.copy_(torch.where(pool.isnan(), torch.full_like(pool, poison), pool))
    batch.check()


@BOTH
@pytest.mark.parametrize(
    "heads", [(3, 3), (12, 2), (28, 4), (9, 3), (5, 1), (40, 8), (9, 1), (16, 1), (20, 1), (48, 1)]
)
def test_any_group_size(make_batch, backend, heads):
    """Case 24."""
    make_batch(backend=backend, heads=heads, head_dim=16, lens=(21, 40), shared=[([0, 1], 1)]).check()


@BOTH
@pytest.mark.parametrize("dims", [(d, d) for d in (16, 48, 64, 80, 96, 112, 120, 128, 192, 256)] + [(96, 64), (32, 48)])
@pytest.mark.parametrize("new", [(1, 1), (20, 5)], ids=["decode", "extend"])
def test_any_head_dim(make_batch, backend, dims, new):
    """Case 26."""
    shape = {"heads": (4, 2), "head_dim": dims[0], "v_head_dim": dims[1]}
    make_batch(backend=backend, lens=(37, 5), new=new, **shape).check()


@BOTH
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 24, 32, 64, 100, 128, 256, 544, 2048])
@pytest.mark.parametrize("new", [(1, 1), (20, 5)], ids=["decode", "extend"])
def test_any_block_size(make_batch, backend, block_size, new):
    """Case 27."""
    make_batch(backend=backend, heads=(4, 1), head_dim=16, block_size=block_size, lens=(130, 31), new=new).check()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(make_batch, backend, dtype):
    make_batch(backend=backend, kv_dtype=dtype, head_dim=64, lens=(100, 33, 64), shared=[([0, 2], 2)]).check()


@BOTH
@pytest.mark.parametrize("layout", ["NHD", "half", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_strides_change_nothing(make_batch, backend, layout, dtype):
    """Case 8: views of a pool that holds K and V, or all layers, give the same bits."""
    shape = {"backend": backend, "kv_dtype": dtype, "lens": (40, 7, 64), "new": (1, 7, 1), "shared": [([0, 2], 2)]}
    plain, plain_lse = make_batch(**shape).run()
    out, lse = make_batch(**shape, layout=layout).run()
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)


@BOTH
def test_reversed_block_ids(make_batch, backend):
    """Case 43."""
    batch = make_batch(backend=backend, lens=(64, 64), new=(20, 1))
    batch.tables = batch.tables.sort(1, descending=True).values
    batch.check()


@BOTH
def test_rows_of_length_zero_give_zero_and_minus_infinity(make_batch, backend):
    batch = make_batch(backend=backend, lens=(40, 0, 17, 0))
    """Case 16: the LSE of nothing is minus infinity, and such a state changes no other."""
    out, lse = batch.run()
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    assert (lse[[1, 3]] == -math.inf).all()
    batch.check()
    merged, merged_lse = merge_states(out[[1, 0]].unsqueeze(1), lse[[1, 0]].unsqueeze(1), backend=backend)
    assert torch.equal(merged[0], out[0]) and torch.equal(merged_lse[0], lse[0])


@BOTH
def test_padded_rows_change_no_real_row(make_batch, backend, device):
    """Cases 12 and 13: five padded rows, their queries and new KV NaN, name block 0, which belongs to a real row."""
    real = make_batch(backend=backend, lens=(40, 21, 16))
    real.tables = torch.where(real.tables == 0, real.tables[0, 0], real.tables)
    real.tables[0, 0] = 0
    for pool in (real.k_pool, real.v_pool):
        pool[real.tables.unique().long()] = torch.randn(pool[real.tables.unique().long()].shape, device=device)
    want, _ = real.run()
    padded = make_batch(backend=backend, lens=(40, 21, 16, 0, 0, 0, 0, 0))
    padded.k_pool, padded.v_pool = real.k_pool.clone(), real.v_pool.clone()
    padded.tables = torch.cat([real.tables, torch.zeros_like(real.tables)[[0] * 5]])
    padded.q[:3], padded.q[3:] = real.q, math.nan
    new = torch.full((5, 2, 32), math.nan, device=device)
    slots = torch.full((5,), -1, device=device)
    write_kv(new, new, padded.k_pool, padded.v_pool, slots, backend=backend)
    out, lse = padded.run()
    torch.testing.assert_close(out[:3], want, atol=1e-6, rtol=1e-6)
    assert not out[3:].any() and (lse[3:] == -math.inf).all()
    for before, after in ((real.k_pool, padded.k_pool), (real.v_pool, padded.v_pool)):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@BOTH
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 40}, {"soft_cap": 3.0}, {"sinks": True}], ids=str)
def test_mixed_prefill_extend_and_decode(make_batch, backend, options, device):
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, 8, device=device)
    batch = make_batch(backend=backend, lens=(50, 33, 1, 90), new=(50, 1, 1, 7), shared=[([0, 3], 2)])
    batch.check(**options)


@BOTH
@pytest.mark.parametrize("new", [1, 2, 5, 8])
def test_draft_verification_rows_over_a_shared_prefix(make_batch, backend, new):
    make_batch(backend=backend, lens=(170, 140, 133), new=(new, 1, new), shared=[([0, 1, 2], 8)]).check()


@BOTH
def test_more_new_tokens_than_kv_sees_nothing(make_batch, backend):
    make_batch(backend=backend, lens=(3,), new=(5,)).check()


@BOTH
@pytest.mark.parametrize("block_size", [3, 4, 16])
def test_window_sees_exactly_its_last_tokens(make_batch, backend, block_size):
    """Case 35, at block edges too."""
    batch = make_batch(
        backend=backend, heads=(1, 1), head_dim=16, v_head_dim=16, block_size=block_size, lens=(10,), new=(1,)
    )
    batch.q.zero_()
    for pos in range(10):
        block = int(batch.tables[0, pos // block_size])
        batch.v_pool[block, 0, pos % block_size] = torch.nn.functional.one_hot(torch.tensor(pos), 16)
    out, _ = batch.run(window=4)
    assert out[0, 0].nonzero().flatten().tolist() == [6, 7, 8, 9]


@BOTH
def test_soft_cap_acts_and_comes_before_the_mask(make_batch, backend):
    """Case 40."""
    batch = make_batch(backend=backend, lens=(20,), new=(5,))
    batch.q.mul_(20)
    assert not torch.allclose(batch.run(soft_cap=5.0)[0], batch.run()[0])
    batch.check(soft_cap=5.0)


@BOTH
def test_sinks_count_once_and_alone_give_zero(make_batch, backend, device):
    """Case 41: rows of any length; one that sees nothing is 0."""
    sinks = torch.linspace(-1, 3, 8, device=device)
    for tokens in (40, 300):
        batch = make_batch(backend=backend, lens=(tokens, 0, tokens))
        batch.check(sinks=sinks)
        assert not batch.run(sinks=sinks)[0][1].any()


def test_one_to_eight_pieces_give_one_result(make_batch, device, programs_per_head):
    """Cases 41 and 19: sinks, cap and window count once, however a row is cut."""
    options = {"sinks": torch.linspace(-1, 3, 2, device=device), "soft_cap": 4.0, "window": 490}
    parts = set()
    for programs in range(1, 9):
        programs_per_head(programs)
        batch = make_batch(heads=(2, 1), lens=(512,))
        plan = batch.plan()
        parts.add(plan.forest.num_parts)
        batch.check(plan, **options)
    assert {0, 2, 4, 8} <= parts and len(parts) >= 6


@BOTH
def test_lse_is_natural_log(make_batch, backend):
    """Case 18."""
    batch = make_batch(backend=backend, heads=(1, 1), lens=(100,))
    batch.q.zero_()
    _, lse = batch.run()
    assert lse.item() == pytest.approx(math.log(100), abs=1e-5)


@BOTH
def test_softmax_scale(make_batch, backend):
    make_batch(backend=backend, lens=(50, 20)).check(scale=0.7)


@BOTH
@pytest.mark.parametrize("scales", ["number", "head", "token"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("new", [(1, 1), (9, 30)], ids=["attend", "extend"])
def test_fp8_scales_reach_every_head_and_token(make_batch, backend, scales, layout, new, device):
    """Cases 30 and 34: in both layouts, in `attend` and `extend`."""
    batch = make_batch(
        backend=backend, kv_dtype=torch.float8_e4m3fn, layout=layout, lens=(60, 35), new=new, shared=[([0, 1], 2)]
    )
    if scales == "number":
        k_scale, v_scale = 0.25, 0.5
    elif scales == "head":
        k_scale, v_scale = torch.tensor([0.25, 2.0], device=device), torch.tensor([3.0, 0.5], device=device)
    else:
        shape = batch.k_pool.shape[:3]
        padded = torch.rand(shape[0], 1000, device=device) + 0.5
        k_scale = padded[:, : shape[1] * shape[2]].unflatten(1, shape[1:])
        v_scale = torch.rand(shape, device=device) + 0.5
    batch.check(k_scale=k_scale, v_scale=v_scale)
    out, _ = batch.run(k_scale=k_scale, v_scale=v_scale)
    twice, _ = batch.run(k_scale=k_scale, v_scale=2 * v_scale)
    torch.testing.assert_close(twice.float(), 2 * out.float(), atol=1e-3, rtol=1e-3)


@BOTH
def test_small_probabilities_survive_fp8_kv(make_batch, backend):
    """Case 31."""
    batch = make_batch(backend=backend, heads=(1, 1), head_dim=32, kv_dtype=torch.float8_e4m3fn, lens=(2048,))
    keys = torch.zeros(2048, 32)
    keys[1:, 0] = -7.0
    for pos in range(0, 2048, 16):
        block = int(batch.tables[0, pos // 16])
        batch.k_pool[block, 0] = keys[pos : pos + 16].to(batch.k_pool)
        batch.v_pool[block, 0] = torch.ones(16, 32).to(batch.v_pool)
    batch.q.zero_()
    batch.q[0, 0, 0] = 1.0
    out, _ = batch.run(scale=1.0)
    assert (out - 1).abs().max() < 0.01


LEVELS = {
    "none": [],
    "one for all": [(list(range(6)), 3)],
    "two roots": [([0, 1, 2], 4), ([3, 4, 5], 3)],
    "three levels": [([0, 1, 2], 4), ([3, 4], 5), (list(range(6)), 2)],
    "four levels": [([0, 1], 5), ([0, 1, 2], 4), (list(range(4)), 3), (list(range(6)), 1)],
    "ends inside another path": [([0, 1, 2, 3], 5), ([0, 4], 3), ([0, 5], 1)],
}


@BOTH
@pytest.mark.parametrize("name", LEVELS)
def test_forests(make_batch, backend, name, monkeypatch):
    monkeypatch.setattr("radixpool.kernels.forest.ITEM_OVERHEAD_BYTES", 0)
    batch = make_batch(backend=backend, lens=(90, 81, 80, 95, 110, 70), shared=LEVELS[name])
    batch.check()


@pytest.mark.parametrize("name", ["one for all", "two roots", "three levels", "four levels"])
def test_sharing_changes_only_rounding(make_batch, name, monkeypatch):
    """Case 19: one to four levels against a plan that shares nothing."""
    batch = make_batch(lens=(90, 81, 80, 95, 110, 70), shared=LEVELS[name])
    plain, plain_lse = batch.run(batch.plan(sharing="none"))
    monkeypatch.setattr("radixpool.kernels.forest.ITEM_OVERHEAD_BYTES", 0)
    plan = batch.plan()
    assert plan.forest.unique_tokens < sum(batch.lens)
    out, lse = batch.run(plan)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, plain_lse, atol=1e-5, rtol=1e-5)


def test_split_rows_are_all_written(make_batch, programs_per_head):
    """Case 21: pages of 256 tokens, two rows, each in two pieces."""
    programs_per_head(4)
    batch = make_batch(heads=(4, 4), head_dim=64, block_size=256, lens=(1024, 1024))
    plan = batch.plan()
    assert plan.forest.num_parts == 4
    batch.check(plan)


def test_a_plan_with_capacity_serves_other_batches_in_place(make_batch):
    batch = make_batch(lens=(90, 33, 64), shared=[([0, 2], 2)])
    capacity = PlanCapacity(max_seqs=8, max_blocks=16, max_rows=20)
    plan = batch.plan(capacity=capacity)
    batch.check(plan)
    addresses = {name: s.data_ptr() for name, s in plan.device_plan.sections.items()}
    other = make_batch(lens=(200, 17, 1, 0, 60), new=(1, 3, 1, 1, 2), seed=3)
    plan.update(other.tables, torch.tensor(other.lens), other.query_lens)
    other.check(plan)
    assert addresses == {name: s.data_ptr() for name, s in plan.device_plan.sections.items()}


@BOTH
def test_update_keeps_the_cut_while_rows_only_grow(make_batch, backend):
    batch = make_batch(backend=backend, lens=(60, 31, 64), shared=[([0, 2], 3)])
    short = [n - 20 for n in batch.lens]
    batch.lens, full = tuple(short), batch.lens
    plan = batch.plan()
    for step in range(0, 21, 5):
        batch.lens = tuple(n + step for n in short)
        kept = plan.update(batch.tables, torch.tensor(batch.lens), batch.query_lens)
        assert kept == (backend == "triton")
        batch.check(plan)
    assert batch.lens == full
    tables = batch.tables.clone()
    tables[0, 0] = tables[1, 0]
    assert not plan.update(tables, torch.tensor(batch.lens), batch.query_lens)


@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_a_row_of_the_cpu_has_the_same_bits_in_any_batch_and_chunk(make_batch, options):
    whole = make_batch(backend="torch", heads=(9, 3), head_dim=64, lens=(1100, 700), new=(1100, 1))
    want, _ = whole.run(**options)
    for first, last in ((0, 1), (1, 3), (3, 512), (512, 1000), (1000, 1099), (1099, 1100)):
        part = make_batch(backend="torch", heads=(9, 3), head_dim=64, lens=(last, 40), new=(last - first, 3))
        part.q[: last - first] = whole.q[first:last]
        part.k_pool, part.v_pool = whole.k_pool, whole.v_pool
        part.tables = whole.tables.clone()
        assert torch.equal(part.run(**options)[0][: last - first], want[first:last])
