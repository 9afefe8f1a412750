"""New tokens over cached prefixes against the float64 reference: causal ends, windows, physical order, chunks.

Without a GPU the plain kernel runs in Triton's interpreter. On a Hopper GPU the wide cases take the fast kernel.
"""

import math

import pytest
import torch

from radixpool.kernels import extend

CUDA = torch.cuda.is_available()
BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
HEAD_DIM = 128 if CUDA else 16


@BOTH
@pytest.mark.parametrize("cached", [0, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("new", [1, 16, 33])
def test_causal_end_at_block_and_tile_edges(make_batch, backend, cached, new):
    """The last key of each row is its own token, wherever blocks and tiles end."""
    make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(cached + new,), new=(new,)).check()


@BOTH
@pytest.mark.parametrize("window", [1, 4, 16, 17, 64])
@pytest.mark.parametrize("block_size", [8, 16])
def test_every_row_sees_exactly_its_window(make_batch, backend, window, block_size):
    """Case 35 for extend."""
    batch = make_batch(
        backend=backend, heads=(1, 1), head_dim=64, v_head_dim=64, block_size=block_size, lens=(64,), new=(50,),
        kv_dtype=torch.float16 if CUDA else torch.float32,
    )  # fmt: skip
    batch.q.zero_()
    one_hot = torch.eye(64)
    for pos in range(64):
        batch.v_pool[batch.tables[0, pos // block_size], 0, pos % block_size] = one_hot[pos].to(batch.v_pool)
    out, _ = batch.run(window=window)
    for row in range(50):
        limit = 64 - 50 + row + 1
        seen = set(out[row, 0].nonzero().flatten().tolist())
        assert seen == set(range(max(0, limit - window), limit))


@BOTH
def test_physical_order_of_blocks_changes_nothing(make_batch, backend):
    """Cases 8 and 43 for extend: no contiguity is assumed."""
    batch = make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(100,), new=(40,))
    out, _ = batch.run()
    turned = make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(100,), new=(40,))
    turned.k_pool, turned.v_pool = turned.k_pool.flip(0), turned.v_pool.flip(0)
    turned.tables = (batch.k_pool.shape[0] - 1 - batch.tables).to(torch.int32)
    assert torch.equal(turned.run()[0], out)


@BOTH
def test_scales_reach_the_cached_and_the_new_half(make_batch, backend):
    """Case 29: hit and miss give the same."""

    def batch(new):
        return make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(96,), new=(new,),
                          kv_dtype=torch.float8_e4m3fn)  # fmt: skip

    miss, hit = batch(96), batch(32)
    hit.k_pool, hit.v_pool, hit.tables, hit.q = miss.k_pool, miss.v_pool, miss.tables, miss.q[64:]
    scales = {"k_scale": 0.25, "v_scale": 0.5}
    torch.testing.assert_close(hit.run(**scales)[0], miss.run(**scales)[0][64:], atol=2e-3, rtol=2e-3)
    miss.check(**scales)


@BOTH
def test_chunks_give_what_one_call_gives(make_batch, backend):
    whole = make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(90,), new=(90,))
    out, lse = whole.run()
    for start, stop in ((0, 33), (33, 64), (64, 90)):
        part = make_batch(backend=backend, heads=(4, 2), head_dim=HEAD_DIM, lens=(stop,), new=(stop - start,))
        part.k_pool, part.v_pool = whole.k_pool, whole.v_pool
        part.tables, part.q = whole.tables[:, : -(-stop // 16)], whole.q[start:stop]
        chunk, chunk_lse = part.run()
        torch.testing.assert_close(chunk, out[start:stop], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(chunk_lse, lse[start:stop], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_query_rows_beyond_32_bit_offsets():
    """Case 3 for extend."""
    from radixpool.kernels import AttentionSpec, plan_forest

    rows, heads, dim = 270_000, 64, 128
    spec = AttentionSpec(heads, 8, dim, 16, q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device="cuda")
    pool = torch.randn(4, 8, 16, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda")
    plan = plan_forest([[1]], [16], [rows], spec=spec)
    out = torch.full_like(q, math.nan)
    extend(q, pool, pool, plan, out=out)
    assert not out[: rows - 16].any() and out[rows - 16 :].isfinite().all()
    first = out[rows - 16].view(8, 8, dim)
    torch.testing.assert_close(first, pool[1, :, :1].expand(8, 8, dim), atol=0, rtol=0)
