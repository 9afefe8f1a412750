"""What only a GPU can show: 64-bit offsets, CUDA graphs, streams, very long contexts, the compile cache."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from radixpool.kernels import (
    AttentionSpec,
    PlanCapacity,
    attend,
    copy_blocks,
    extend,
    gather_blocks,
    plan_forest,
    reference,
    write_kv,
)

pytestmark = pytest.mark.gpu
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def spec_of(heads, dim, block_size, kv_dtype=BF16):
    return AttentionSpec(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, block_size=block_size, q_dtype=BF16,
        kv_dtype=kv_dtype, device="cuda",
    )  # fmt: skip


def random_blocks(pools, ids):
    for pool in pools:
        pool[ids] = torch.randn(len(ids), *pool.shape[1:], device="cuda").to(pool.dtype)


def check(spec, k_pool, v_pool, tables, lens, new, tolerance=2e-2):
    """Run one step and compare with float64, computed on the blocks in use only."""
    tables = torch.as_tensor(tables, dtype=torch.int32)
    q = torch.randn(sum(new), spec.num_q_heads, spec.head_dim, device="cuda", dtype=BF16)
    out = torch.full_like(q, math.nan)
    extend(q, k_pool, v_pool, plan_forest(tables, lens, new, spec=spec), out=out, debug=True)
    used = tables.unique()
    local = torch.searchsorted(used, tables).to(torch.int32)
    want, _ = reference.attention(
        q.cpu(), k_pool[used].cpu(), v_pool[used].cpu(), local, torch.tensor(lens), torch.tensor(new),
        scale=spec.head_dim**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("new", [(1, 1), (40, 33)], ids=["decode", "extend"])
def test_block_offsets_past_two_to_the_31(new):
    """Case 1: ids on both sides of 2^31 elements; forty new tokens take the fast extend kernel."""
    spec = spec_of((32, 8), 128, 16)
    k_pool = torch.full((131_080, 8, 16, 128), math.nan, device="cuda", dtype=BF16)
    v_pool = torch.full_like(k_pool, math.nan)
    ids = [0, 131_071, 131_072, 131_079]
    random_blocks((k_pool, v_pool), ids)
    check(spec, k_pool, v_pool, [[131_079, 0, 131_072], [131_071, 131_072, 0]], [40, 40], new)
    got = gather_blocks(k_pool, ids)
    assert torch.equal(got, k_pool[ids])


@pytest.mark.parametrize("gigabytes", [1.9, 2.1])
def test_pools_on_both_sides_of_two_gigabytes(gigabytes):
    """Case 6."""
    spec = spec_of((8, 2), 64, 16)
    count = int(gigabytes * 2**30) // (2 * 16 * 64 * 2)
    torch.manual_seed(7)
    k_pool, v_pool = (torch.full((count, 2, 16, 64), math.nan, device="cuda", dtype=BF16) for _ in range(2))
    ids = [0, count // 2, count - 2, count - 1]
    random_blocks((k_pool, v_pool), ids)
    check(spec, k_pool, v_pool, [ids, ids[::-1]], [64, 50], [1, 1])


def test_query_row_offsets_past_two_to_the_31():
    """Case 3: 262,400 rows of 64 x 128; each sees one token, so it is that token's V."""
    rows, spec = 262_400, spec_of((64, 1), 128, 1)
    k_pool = torch.randn(rows, 1, 1, 128, device="cuda", dtype=BF16)
    v_pool = torch.randn_like(k_pool)
    q = torch.randn(rows, 64, 128, device="cuda", dtype=BF16)
    out = torch.full_like(q, math.nan)
    tables = torch.randperm(rows, dtype=torch.int32)[:, None]
    attend(q, k_pool, v_pool, plan_forest(tables, torch.ones(rows, dtype=torch.int32), spec=spec), out=out)
    want = v_pool[tables[:, 0].long().cuda(), 0]
    for start in range(0, rows, 65_536):
        part = slice(start, start + 65_536)
        assert torch.equal(out[part], want[part].expand(-1, 64, -1))


def test_write_offsets_past_two_to_the_31():
    """Case 4."""
    pool = torch.zeros(300_000, 8, 16, 64, device="cuda", dtype=BF16)
    border = 2**31 // (8 * 64)
    slots = torch.tensor([0, border - 1, border, border + 1, 300_000 * 16 - 1], device="cuda")
    k = torch.randn(5, 8, 64, device="cuda", dtype=BF16)
    write_kv(k, k, pool, pool.clone(), slots)
    assert torch.equal(pool[slots // 16, :, slots % 16], k)
    pool[slots // 16, :, slots % 16] = 0
    assert not pool.any()


@pytest.mark.parametrize("heads", [(64, 4), (8, 1), (12, 2)])
def test_a_captured_graph_serves_other_lengths(make_batch, heads):
    """Case 23: 16 query heads a KV head, replayed into NaN."""
    batch = make_batch(heads=heads, head_dim=128, kv_dtype=BF16, lens=(700, 33, 0, 64), shared=[([0, 3], 3)])
    plan = batch.plan(capacity=PlanCapacity(max_seqs=4, max_blocks=batch.tables.shape[1]))
    out, lse = batch.run(plan)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        attend(batch.q, batch.k_pool, batch.v_pool, plan, out=out, lse=lse)
    torch.cuda.synchronize()
    for lens in ((700, 33, 0, 64), (1, 1, 0, 1), (600, 33, 0, 47), (699, 20, 0, 63)):
        batch.lens = lens
        plan.update(batch.tables, torch.tensor(lens), batch.query_lens)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        want, want_lse = batch.reference()
        torch.testing.assert_close(out.cpu().double(), want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-2, rtol=1e-3)


def test_plans_of_two_steps_queued_behind_a_long_kernel(make_batch):
    """Case 47: host memory of the first plan is not written before its copy has run."""
    first, second = make_batch(kv_dtype=BF16, lens=(64, 90)), make_batch(kv_dtype=BF16, lens=(17, 64), seed=1)
    torch.cuda._sleep(100_000_000)
    plan = first.plan()
    outs = [first.run(plan)[0]]
    plan.update(second.tables, torch.tensor(second.lens), second.query_lens)
    outs.append(second.run(plan)[0])
    for batch, out in zip((first, second), outs, strict=True):
        torch.testing.assert_close(out.cpu().double(), batch.reference()[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_later_calls_of_a_plan_take_other_tensors_and_numbers(make_batch, kv_dtype):
    """The first call of a plan binds its launches; those after it pass addresses only."""
    lens, shared = (64, 90, 90), [([1, 2], 3)]
    first, second = (make_batch(kv_dtype=kv_dtype, lens=lens, shared=shared) for _ in range(2))
    second.q, second.k_pool, second.v_pool = first.q.flip(0), first.v_pool.clone(), first.k_pool.clone()
    plan = first.plan()
    for batch, scale in ((first, 0.2), (second, 0.1), (first, 0.3), (second, 0.2)):
        fresh = batch.run(first.plan(), scale=scale)
        later = batch.run(plan, scale=scale)
        assert all(torch.equal(a, b) for a, b in zip(fresh, later, strict=True))
    assert not torch.equal(first.run(plan)[0], second.run(plan)[0])


def test_steps_queued_behind_a_long_kernel_do_not_see_one_another(make_batch):
    """Case 47 for steps that grow: lengths and new blocks of three steps leave one host buffer before any has run."""
    batch = make_batch(kv_dtype=BF16, lens=(60, 90))
    steps = [(20, 40), (33, 60), (60, 90)]
    plan = plan_forest(batch.tables[:, :3], [16, 30], spec=batch.spec)
    torch.cuda._sleep(100_000_000)
    outs = []
    for lens in steps:
        assert plan.update(batch.tables[:, : -(-max(lens) // 16)], torch.tensor(lens))
        outs.append(batch.run(plan)[0])
    for lens, out in zip(steps, outs, strict=True):
        batch.lens = lens
        torch.testing.assert_close(out.cpu().double(), batch.reference()[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [57_601, 131_072, 1_048_576])
def test_very_long_contexts(tokens):
    """Case 50."""
    spec = spec_of((2, 1), 64, 16)
    count = -(-tokens // 16)
    k_pool, v_pool = (torch.randn(count, 1, 16, 64, device="cuda", dtype=BF16) for _ in range(2))
    table = torch.randperm(count, dtype=torch.int32)[None]
    q = torch.randn(1, 2, 64, device="cuda", dtype=BF16)
    out = torch.full_like(q, math.nan)
    attend(q, k_pool, v_pool, plan_forest(table, [tokens], spec=spec), out=out)
    k, v = (p[table[0].long().cuda(), 0].flatten(0, 1)[:tokens].double() for p in (k_pool, v_pool))
    want = (torch.einsum("hd,nd->hn", q[0].double(), k) / 8).softmax(-1) @ v
    torch.testing.assert_close(out[0].double(), want, atol=2e-3, rtol=2e-2)


def test_fp8_keeps_a_needle_among_131072_keys():
    """Case 33."""
    spec = spec_of((8, 1), 128, 16, FP8)
    count = 8192
    k_pool = torch.zeros(count, 1, 16, 128, device="cuda").to(FP8)
    v = torch.ones(count, 1, 16, 128, device="cuda")
    v[:, :, 1::2] = -1
    v[4000, 0, 5] = 64.0
    q = torch.zeros(1, 8, 128, device="cuda", dtype=BF16)
    out = torch.full_like(q, math.nan)
    plan = plan_forest(torch.arange(count, dtype=torch.int32)[None], [count * 16], spec=spec)
    attend(q, k_pool, v.to(FP8), plan, out=out)
    want = v.double().mean()
    assert ((out.double() - want).abs() / want).max() < 1e-2


def test_decode_on_one_stream_while_another_saves_a_shared_block_and_loads_others(make_batch):
    """Case 53: two requests over one shared block; copies run beside them and change nothing of theirs."""
    batch = make_batch(kv_dtype=BF16, lens=(64, 64), shared=[([0, 1], 2)])
    shared = int(batch.tables[0, 0])
    unused = next(b for b in range(len(batch.k_pool)) if b not in batch.tables)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copies = []
        for _ in range(20):
            copies.append(gather_blocks(batch.k_pool, [shared]))
            for pool in (batch.k_pool, batch.v_pool):
                copy_blocks(pool, [shared], [unused])
    outs = [batch.run()[0] for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(bits, copies[0]) for bits in copies)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(batch.k_pool[unused], batch.k_pool[shared])
    batch.check()


def test_a_built_model_compiles_nothing_when_it_serves(tmp_path):
    script = """
import sys, torch
from radixpool.kernels import AttentionSpec, extend, plan_forest, write_kv
from radixpool.kernels.build import build_model
spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16, q_dtype=torch.bfloat16,
                     kv_dtype=torch.bfloat16, device="cuda")
if __name__ == "__main__" and sys.argv[1] == "build":
    print(*(kernel.name for kernel in build_model(spec, 90)))
elif __name__ == "__main__":
    def step(lens, new, shared=0):
        tables = torch.arange(64 * 40, dtype=torch.int32).reshape(64, 40)[: len(lens)]
        tables[:, :shared] = tables[0, :shared]
        rows = sum(new)
        kv, q = (torch.randn(rows, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 32))
        slots = torch.arange(rows, device="cuda") % (64 * 640)
        write_kv(kv, kv, pools[0], pools[1], slots)
        plan = plan_forest(tables, lens, new, spec=spec)
        extend(q, *pools, plan)
        if max(new) == 1:
            assert plan.update(None, [n + 1 for n in lens])
        torch.cuda.synchronize()
    pools = [torch.randn(64 * 40, 8, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    step([320] * 64, [1] * 64)  # decode
    step([320] * 64, [1] * 64, 16)  # over a shared prefix
    step([17], [1])
    step([600, 320], [600, 1])  # a prefill beside a decode
    step([600, 640], [300, 200], 10)
"""
    import subprocess
    import sys

    program = tmp_path / "program.py"
    program.write_text(script)
    env = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    built = 0
    for step in ("build", "serve"):
        subprocess.run([sys.executable, str(program), step], check=True, env=env, cwd=Path(__file__).parents[2])
        kernels = set(tmp_path.rglob("*.cubin"))
        if step == "serve":
            assert len(kernels) == built, sorted(p.name for p in kernels)
        built = len(kernels)
    assert built


def test_a_plan_is_neither_made_nor_moved_in_a_graph(make_batch):
    """A replay would send the same step again, from memory that holds another by then."""
    batch = make_batch(kv_dtype=BF16, lens=(60, 90))
    plan, graph = batch.plan(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(4, device="cuda")
        for step in (lambda: plan.update(None, [61, 91]), lambda: plan.update(None, [5, 5]), batch.plan):
            with pytest.raises(RuntimeError, match="CUDA graph"):
                step()
    assert plan.seq_lens.tolist() == [60, 90]


def test_steps_outlive_the_plan_that_sent_them(make_batch):
    """Messages are no memory of the plan: one dropped behind a long kernel leaves those of the next alone."""
    batch = make_batch(kv_dtype=BF16, lens=(60, 90))
    torch.cuda._sleep(100_000_000)
    outs = []
    for _ in range(40):
        plan = plan_forest(batch.tables, [20, 30], spec=batch.spec)
        assert plan.update(None, [40, 60]) and plan.update(None, list(batch.lens))
        outs.append(batch.run(plan)[0])
        del plan
    want = batch.reference()[0]
    for out in outs:
        torch.testing.assert_close(out.cpu().double(), want, atol=2e-2, rtol=2e-2)


def test_the_second_step_goes_from_c_to_the_driver(make_batch):
    """The first compiles through Triton; what C launches has the same effect, also from a thread new to CUDA."""
    batch = make_batch(kv_dtype=BF16, lens=(60, 90))
    plan = plan_forest(batch.tables, [20, 30], spec=batch.spec)
    assert plan.update(None, [21, 31])
    assert plan.device_plan.sender.bound is not None
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(plan.update, None, list(batch.lens)).result()
    batch.check(plan, tolerance=2e-2)
