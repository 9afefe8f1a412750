"""The fast extend kernels on a GPU: random ragged batches of every shape, dtype and mask against float64.

Every slot that no length covers is NaN. The float64 oracle here works on whole sequences, on the device; it is checked
against `radixpool.kernels.reference` without a GPU too.
"""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from radixpool.kernels import TreeMask, alibi_slopes, reference

CUDA = torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
gpu = pytest.mark.gpu
many = settings(  # an example takes a second, so a failing one is shown as it was found
    max_examples=int(os.environ.get("EXTEND_EXAMPLES", "25")), deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip

SEQUENCE = st.tuples(st.integers(0, 1500), st.one_of(st.integers(0, 600), st.integers(0, 3)))
BF16, FP16 = torch.bfloat16, torch.float16
# Each is compiled once: heads, head dim, block size, layout, dtype of Q, masks. Values of masks are drawn.
SHAPES = [
    ((32, 8), 128, 16, "HND", BF16, ()),
    ((8, 1), 128, 24, "NHD", FP16, ("window",)),
    ((9, 3), 64, 16, "half", BF16, ("soft_cap", "sinks")),
    ((4, 4), 96, 8, "HND", FP16, ("window", "soft_cap", "sinks")),
    ((32, 8), 256, 64, "NHD", BF16, ("window", "sinks")),
    ((32, 8), 256, 16, "HND", FP16, ("soft_cap",)),
    ((16, 2), 128, 64, "half", BF16, ("soft_cap", "window")),
    ((6, 1), 64, 32, "HND", FP16, ("sinks",)),
]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0][0]}x{s[0][1]}-d{s[1]}-b{s[2]}")


def sequence_scores(batch, i, options):
    """Return masked float64 scores `[Hq, new, len]` of sequence `i`."""
    new, length, device = batch.new[i], batch.lens[i], batch.q.device
    start = sum(batch.new[:i])
    q = batch.q[start : start + new].double().transpose(0, 1)
    k = gathered(batch, batch.k_pool, i, options.get("k_scale")).repeat_interleave(batch.spec.group_size, 0)
    scores = q @ k.transpose(1, 2) * options.get("scale", batch.head_dim**-0.5)
    if options.get("soft_cap"):
        scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
    limit = torch.arange(length - new + 1, length + 1, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    if "alibi_slopes" in options:
        scores = scores + options["alibi_slopes"].double()[:, None, None] * (key - limit + 1)
    distance = limit - key  # 1 for the row's own token
    if "tree" in options:
        bits = options["tree"].bits()[start : start + new, :new].long()
        from_here = bits.flip(1).cumsum(1).flip(1)  # nodes of the path from this one to the row's own
        before = from_here[:, :1] + length - new - key[:, : length - new]
        distance = torch.cat([before, from_here * bits], 1)
    seen = distance > 0
    if options.get("window"):
        seen &= distance <= options["window"]
    return scores.masked_fill(~seen, -math.inf)


def gathered(batch, pool, i, scale):
    """Return K or V of sequence `i`, `[kv_heads, len, D]` float64."""
    blocks = batch.tables[i, : -(-batch.lens[i] // batch.block_size)].long().to(pool.device)
    raw = pool.view(torch.uint8)[blocks].view(FP8) if pool.dtype == FP8 else pool[blocks]
    x = raw.double().transpose(0, 1).flatten(1, 2)[:, : batch.lens[i]]
    return x if scale is None else x * torch.as_tensor(scale, device=x.device).double().reshape(-1, 1, 1)


def oracle(batch, **options):
    """Return float64 output `[rows, Hq, Dv]` and LSE `[rows, Hq]`."""
    outs, lses = [], []
    for i, new in enumerate(batch.new):
        if not new:
            continue
        scores = sequence_scores(batch, i, options)
        sink = options.get("sinks")
        column = torch.full((*scores.shape[:2], 1), -math.inf, dtype=torch.float64, device=scores.device)
        if sink is not None:
            column[:] = sink.double()[:, None, None]
        lse = torch.logsumexp(torch.cat([scores, column], 2), 2)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
        v = gathered(batch, batch.v_pool, i, options.get("v_scale")).repeat_interleave(batch.spec.group_size, 0)
        outs.append((weights @ v).transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def check(batch, *, limit, lse_limit=5e-3, **options):
    """Run into NaN and compare by row: error over the norm of the largest rows, LSE absolutely."""
    plan = batch.plan()
    out, lse = batch.run(plan, **options)
    want, want_lse = oracle(batch, **{k: v for k, v in options.items() if k != "precision"})
    assert out.isfinite().all()
    error = (out.double() - want).norm(dim=2) / want.norm(dim=2).clamp_min(0.05 * math.sqrt(want.shape[2]))
    assert error.max() < limit
    torch.testing.assert_close(lse.double(), want_lse, atol=lse_limit, rtol=lse_limit)
    return plan


def test_the_oracle_is_the_reference(make_batch):
    batch = make_batch(heads=(4, 2), lens=(70, 9, 5), new=(20, 9, 0), backend="torch")
    options = {"window": 30, "soft_cap": 4.0, "sinks": torch.linspace(-1, 1, 4, device=batch.q.device), "scale": 0.3}
    for chosen in ({}, options):
        got, want = oracle(batch, **chosen), batch.reference(**chosen)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-9, rtol=1e-9)
    slopes = {"alibi_slopes": torch.linspace(0.1, 1, 4, device=batch.q.device), "window": 30}
    torch.testing.assert_close(oracle(batch, **slopes)[0].cpu(), batch.reference(**slopes)[0], atol=1e-9, rtol=1e-9)
    trees = make_batch(heads=(4, 2), lens=(40, 21), new=(6, 3), backend="torch")
    tree = TreeMask.from_parents([[-1, 0, 0, 1, -1, 4], [-1, 0, 0]], device=trees.q.device)
    for window in (0, 2, 9):
        got = oracle(trees, tree=tree, window=window)[0].cpu()
        host = reference.attention(
            trees.q.cpu(), trees.k_pool.cpu(), trees.v_pool.cpu(), trees.tables, torch.tensor(trees.lens),
            trees.query_lens, scale=trees.head_dim**-0.5, tree=TreeMask(tree.nodes.cpu()), window=window,
        )  # fmt: skip
        torch.testing.assert_close(got, host[0], atol=1e-9, rtol=1e-9)


def make(make_batch, shape, sequences, share, seed, **changes):
    heads, head_dim, block_size, layout, q_dtype, _ = shape
    lens, new = tuple(c + n for c, n in sequences), tuple(n for _, n in sequences)
    assume(max(new) * heads[0] // heads[1] > 64)  # otherwise no tall tile
    return make_batch(
        heads=heads, head_dim=head_dim, block_size=block_size, layout=layout, q_dtype=q_dtype, lens=lens, new=new,
        shared=sharers(lens, block_size) if share else [], seed=seed, **changes,
    )  # fmt: skip


def sharers(lens, block_size):
    """Let all sequences begin with the same blocks, as far as the shortest reaches."""
    shared = min(lens) // block_size
    return [(list(range(len(lens))), shared)] if shared and len(lens) > 1 else []


def masks_of(names, heads, data):
    """Draw values for masks."""
    values = {"window": st.integers(1, 900), "soft_cap": st.floats(0.5, 30.0)}
    masks = {name: data.draw(values[name]) for name in names if name in values}
    if "sinks" in names:
        masks["sinks"] = torch.linspace(-2, 2, heads, device="cuda")
    return masks


def took_fast_path(plan, precision="full"):
    return bool(plan.fast) and plan.fast[precision] is not None


@gpu
@by_shape
@given(st.lists(SEQUENCE, min_size=1, max_size=5), st.booleans(), st.integers(0, 99), st.data())
@many
def test_ragged_batches(make_batch, shape, sequences, share, seed, data):
    batch = make(make_batch, shape, sequences, share, seed, kv_dtype=shape[4])
    plan = check(batch, limit=2e-2, scale=data.draw(st.floats(0.02, 0.3)), **masks_of(shape[5], shape[0][0], data))
    tall = 128 in plan.device_plan.heights and max(batch.new) > 8
    assert took_fast_path(plan) == tall


@gpu
@by_shape
@pytest.mark.parametrize("precision", ["full", "fp8"])
@given(st.lists(SEQUENCE, min_size=1, max_size=4), st.booleans(), st.integers(0, 99), st.data())
@many
def test_fp8_pools(make_batch, shape, precision, sequences, share, seed, data):
    batch = make(make_batch, shape, sequences, share, seed, kv_dtype=FP8)
    by_head = torch.linspace(0.5, 1, batch.heads[1], device="cuda")
    options = masks_of(shape[5], shape[0][0], data) | {"k_scale": by_head, "v_scale": by_head.flip(0).contiguous()}
    rounded = precision == "fp8"
    check(batch, limit=0.3 if rounded else 2e-2, lse_limit=0.2 if rounded else 5e-3, precision=precision, **options)


@gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_fp8_products_take_the_fast_kernel(make_batch, head_dim, block_size):
    batch = make_batch(heads=(32, 8), head_dim=head_dim, block_size=block_size, lens=(1700, 2100), new=(600, 900),
                       kv_dtype=FP8, q_dtype=torch.bfloat16)  # fmt: skip
    plan = check(batch, limit=0.3, lse_limit=0.2, precision="fp8")
    assert took_fast_path(plan, "fp8")
    want = oracle(batch)[0]
    out = batch.run(plan, precision="fp8")[0]
    assert (out.double() - want).norm() / want.norm() < 4.5e-2


# dtypes of Q and of the pool, and masks beside the one under test
PLAIN = [
    (BF16, BF16, ()),
    (FP16, FP16, ("window", "soft_cap")),
    (BF16, FP8, ("window", "sinks")),
    (FP16, FP8, ("sinks",)),
]
by_dtype = pytest.mark.parametrize(("q_dtype", "kv_dtype", "masks"), PLAIN, ids=str)


@gpu
@by_dtype
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 64)), min_size=1, max_size=12), st.booleans(),
       st.randoms(use_true_random=False), st.data())  # fmt: skip
@many
def test_draft_trees(make_batch, q_dtype, kv_dtype, masks, sequences, share, random, data):
    lens, new = tuple(c + n for c, n in sequences), tuple(n for _, n in sequences)
    context = [c for c, _ in sequences]
    batch = make_batch(heads=(8, 2), head_dim=128, lens=lens, new=new, q_dtype=q_dtype, kv_dtype=kv_dtype,
                       shared=sharers(context, 16) if share else [])  # fmt: skip
    parents = [[random.randint(-1, j - 1) for j in range(n)] for n in new]
    check(batch, limit=2e-2, tree=TreeMask.from_parents(parents, device="cuda"), **masks_of(masks, 8, data))


@gpu
@by_dtype
@given(st.lists(SEQUENCE, min_size=1, max_size=5), st.booleans(), st.integers(0, 99), st.data())
@many
def test_alibi(make_batch, q_dtype, kv_dtype, masks, sequences, share, seed, data):
    shape = ((12, 4), 128, 16, "HND", q_dtype, masks)
    batch = make(make_batch, shape, sequences, share, seed, kv_dtype=kv_dtype)
    check(batch, limit=2e-2, alibi_slopes=alibi_slopes(12, device="cuda"), **masks_of(masks, 12, data))


@gpu
@pytest.mark.parametrize("precision", ["full", "fp8"])
def test_the_same_call_gives_the_same_bits(make_batch, precision):
    batch = make_batch(heads=(32, 8), head_dim=128, lens=(3000, 1111), new=(900, 1111), kv_dtype=FP8,
                       q_dtype=torch.bfloat16)  # fmt: skip
    plan = batch.plan()
    first = batch.run(plan, precision=precision)
    for _ in range(20):
        again = batch.run(plan, precision=precision)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
