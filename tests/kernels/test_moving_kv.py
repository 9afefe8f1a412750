"""Writing, rotating, copying, gathering and merging: both backends against plain indexing and float64."""

import math

import pytest
import torch

from radixpool.kernels import RoPE, apply_rope, copy_blocks, gather_blocks, merge_states, reference, write_kv

BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
FP8 = torch.float8_e4m3fn
CUDA = torch.cuda.is_available()
# Triton's interpreter rounds float32 to e4m3 wrongly: writing fp8 through Triton is tested on a GPU only.
WRITES_FP8 = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN compares equal to itself."""
    return x.contiguous().view(torch.uint8)


def pool(device, dtype=torch.float32, shape=(6, 2, 16, 32)):
    return torch.full(shape, math.nan, device=device).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_slots_get_their_tokens_and_nothing_else_changes(backend, device, dtype, slot_dtype):
    k, v = torch.randn(4, 2, 32, device=device).to(dtype), torch.randn(4, 2, 48, device=device).to(dtype)
    k_pool, v_pool = pool(device, dtype), pool(device, dtype, (6, 2, 16, 48))
    want_k, want_v = k_pool.clone(), v_pool.clone()
    slots = [5, -1, 95, 40]
    for i, slot in enumerate(slots):
        if slot >= 0:
            want_k[slot // 16, :, slot % 16], want_v[slot // 16, :, slot % 16] = k[i], v[i]
    write_kv(k, v, k_pool, v_pool, torch.tensor(slots, dtype=slot_dtype, device=device), backend=backend)
    assert torch.equal(bits(k_pool), bits(want_k)) and torch.equal(bits(v_pool), bits(want_v))


@BOTH
def test_negative_slots_leave_the_last_block_alone(backend, device):
    """Case 44."""
    k_pool, v_pool = pool(device), pool(device)
    k = torch.randn(3, 2, 32, device=device)
    write_kv(k, k, k_pool, v_pool, torch.tensor([5, -1, -1], device=device), backend=backend)
    assert k_pool[-1].isnan().all() and v_pool[-1].isnan().all()


@BOTH
def test_writing_many_tokens_into_odd_blocks(backend, device):
    k_pool, v_pool = pool(device, shape=(300, 1, 3, 16)), pool(device, shape=(300, 1, 3, 16))
    slots = torch.randperm(900, device=device)[:700]
    k = torch.randn(700, 1, 16, device=device)
    write_kv(k, 2 * k, k_pool, v_pool, slots, backend=backend)
    assert torch.equal(k_pool.flatten(0, 2)[slots], k[:, 0]) and torch.equal(v_pool.flatten(0, 2)[slots], 2 * k[:, 0])


@WRITES_FP8
@pytest.mark.parametrize("scale", ["none", "number", "head"])
def test_fp8_rounds_to_nearest_and_saturates(backend, device, scale):
    k = torch.randn(20, 2, 32, device=device) * 100
    k[0, 0, :2] = torch.tensor([1e6, -1e6])
    factor = {"none": None, "number": 0.5, "head": torch.tensor([0.25, 4.0], device=device)}[scale]
    k_pool, v_pool = pool(device, FP8), pool(device, FP8)
    slots = torch.arange(20, device=device)
    write_kv(k, k, k_pool, v_pool, slots, k_scale=factor, v_scale=factor, backend=backend)
    divisor = torch.as_tensor(1.0 if factor is None else factor, device=device).reshape(-1, 1)
    want = (k / divisor).clamp(-448, 448).to(FP8)
    got = k_pool.transpose(1, 2).flatten(0, 1)[:20]
    assert torch.equal(bits(got), bits(want)) and torch.equal(bits(v_pool), bits(k_pool))


@WRITES_FP8
def test_fp8_scales_of_each_token_and_head_land_in_a_padded_pool(backend, device):
    """Case 9: the stride of a block, not its shape, says where its scales are."""
    k = torch.randn(20, 2, 32, device=device) * torch.linspace(0.1, 50, 20, device=device)[:, None, None]
    k[3] = 0
    k_pool, v_pool = pool(device, FP8), pool(device, FP8)
    padded = torch.full((6, 1000), math.nan, device=device)
    k_scale = padded[:, :32].unflatten(1, (2, 16))
    v_scale = torch.full((6, 2, 16), math.nan, device=device)
    slots = torch.arange(20, device=device) + 7
    write_kv(k, 3 * k, k_pool, v_pool, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    for values, target, scale in ((k, k_pool, k_scale), (3 * k, v_pool, v_scale)):
        got = (target.float() * scale[..., None]).transpose(1, 2).flatten(0, 1)[7:27]
        assert (got - values).abs().max() <= values.abs().max() * 2**-4
        assert ((got - values).abs() <= values.abs().amax(-1, keepdim=True) * 2**-4 + 1e-6).all()
    assert padded[:, 32:].isnan().all() and k_scale[0, :, :7].isnan().all()


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 16, 20])
def test_rope_against_float64(backend, device, interleaved, rotary_dim):
    x = torch.randn(5, 3, 32, device=device)
    angle = torch.rand(5, rotary_dim // 2, device=device) * 6
    got = apply_rope(x, RoPE(angle.cos(), angle.sin(), interleaved), backend=backend)
    want = x.double().clone()
    half = rotary_dim // 2
    first = [2 * i if interleaved else i for i in range(half)]
    second = [2 * i + 1 if interleaved else i + half for i in range(half)]
    turned = (
        torch.complex(want[..., first], want[..., second])
        * torch.polar(torch.ones(1, device=device).double(), angle.double())[:, None]
    )
    want[..., first], want[..., second] = turned.real, turned.imag
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8], ids=str)
def test_fused_rope_is_byte_equal_to_unfused(backend, device, dtype):
    """Case 49."""
    k = torch.randn(40, 2, 64, device=device).to(torch.float16 if dtype == FP8 else dtype)
    angle = torch.rand(40, 32, device=device) * 100
    rope = RoPE(angle.cos(), angle.sin())
    slots = torch.randperm(96, device=device)[:40]
    for _ in range(50 if CUDA else 2):
        fused = pool(device, dtype, (6, 2, 16, 64)), pool(device, dtype, (6, 2, 16, 64))
        apart = pool(device, dtype, (6, 2, 16, 64)), pool(device, dtype, (6, 2, 16, 64))
        write_kv(k, k, *fused, slots, rope=rope, backend=backend)
        write_kv(apply_rope(k, rope, backend=backend), k, *apart, slots, backend=backend)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(fused, apart, strict=True))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_copies_read_everything_before_they_write(backend, device, dtype):
    blocks = torch.randn(8, 2, 5, 24, device=device).to(dtype)
    before = blocks.clone()
    src, dst = [0, 1, 2, 5, 6, 7], [1, 2, 0, 6, 5, 3]
    copy_blocks(blocks, src, dst, backend=backend)
    want = before.clone()
    for s, d in zip(src, dst, strict=True):
        want.view(torch.uint8)[d] = before.view(torch.uint8)[s]
    assert torch.equal(bits(blocks), bits(want))


@BOTH
@pytest.mark.parametrize("block_size", [1, 16, 24, 544])
def test_gather_makes_scattered_blocks_contiguous(backend, device, block_size):
    blocks = torch.randn(7, block_size, 2, 24, device=device).transpose(1, 2)
    got = gather_blocks(blocks, torch.tensor([6, 0, 3, 3]), backend=backend)
    assert got.is_contiguous() and torch.equal(got, blocks[[6, 0, 3, 3]])


@BOTH
def test_merging_nothing_copies_nothing(backend, device):
    blocks = torch.randn(3, 1, 4, 16, device=device)
    before = blocks.clone()
    copy_blocks(blocks, [], [], backend=backend)
    assert torch.equal(blocks, before) and gather_blocks(blocks, [], backend=backend).shape == (0, 1, 4, 16)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_empty_state_is_an_exact_identity(backend, device, dtype):
    """Case 15."""
    x = torch.randn(3, 4, 48, device=device).to(dtype)
    lse = torch.randn(3, 4, device=device)
    empty = torch.full_like(x, math.nan), torch.full_like(lse, -math.inf)
    for order in ([empty, (x, lse)], [(x, lse), empty], [empty, (x, lse), empty]):
        out, merged = merge_states(*map(torch.stack, zip(*order, strict=True)), backend=backend)
        assert torch.equal(out, x) and torch.equal(merged, lse)


@BOTH
@pytest.mark.parametrize("count", [0, 1, 3])
def test_merging_empty_states_gives_zero_and_minus_infinity(backend, device, count):
    """Cases 15 and 16, none of them included."""
    outs, lses = (
        torch.full((count, 2, 4, 16), math.nan, device=device),
        torch.full((count, 2, 4), -math.inf, device=device),
    )
    out, lse = merge_states(outs, lses, backend=backend)
    assert not out.any() and (lse == -math.inf).all()


@BOTH
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_merge_against_float64(backend, device, count):
    outs, lses = torch.randn(count, 5, 3, 80, device=device), 20 * torch.randn(count, 5, 3, device=device)
    out, lse = merge_states(outs, lses, backend=backend)
    want, want_lse = reference.merge(outs.cpu(), lses.cpu())
    torch.testing.assert_close(out.cpu().double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=1e-5, rtol=1e-5)


@BOTH
def test_two_chunks_merge_to_one_pass(make_batch, backend):
    """Case 18: 4,096 and 16 tokens."""
    whole = make_batch(backend=backend, heads=(2, 1), head_dim=16, lens=(4112,))
    want, want_lse = whole.run()
    head = make_batch(backend=backend, heads=(2, 1), head_dim=16, lens=(4096,))
    tail = make_batch(backend=backend, heads=(2, 1), head_dim=16, lens=(16,))
    for part, blocks in ((head, slice(0, 256)), (tail, slice(256, 257))):
        part.q, part.k_pool, part.v_pool = whole.q, whole.k_pool, whole.v_pool
        part.tables = whole.tables[:, blocks]
    states = [part.run() for part in (head, tail)]
    out, lse = merge_states(*map(torch.stack, zip(*states, strict=True)), backend=backend)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


@BOTH
def test_a_cached_prefix_gives_what_computing_it_gives(make_batch, backend, device):
    """Case 29, with KV written by `write_kv`."""
    hit = make_batch(backend=backend, kv_dtype=FP8, lens=(40,), new=(4,))
    miss = make_batch(backend=backend, kv_dtype=FP8, lens=(40,), new=(40,))
    kv = torch.randn(2, 40, 2, 32, device=device)
    scales = {"k_scale": 0.25, "v_scale": 0.5}
    for batch in (hit, miss):
        pos = torch.arange(40)
        slots = (batch.tables[0, pos // 16].long() * 16 + pos % 16).to(device)
        write_kv(kv[0], kv[1], batch.k_pool, batch.v_pool, slots, backend=backend, **scales)
    miss.q[-4:] = hit.q
    torch.testing.assert_close(miss.run(**scales)[0][-4:], hit.run(**scales)[0], atol=1e-3, rtol=1e-3)
