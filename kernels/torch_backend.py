"""The CPU backend: every operation in plain torch, float32 arithmetic, one sequence at a time.

One sequence at a time is the point: a row's result can't depend on what else is in the batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from radixpool.kernels.plan import ForestPlan
from radixpool.kernels.rope import RoPE

FP8_MAX = 448.0


def scale_for(scale: float | Tensor, blocks: Tensor) -> float | Tensor:
    """Return a scale that broadcasts against `[n, kv_heads, block_size, D]` for the given blocks."""
    if not isinstance(scale, Tensor):
        return scale
    return scale[blocks][..., None] if scale.ndim == 3 else scale.reshape(1, -1, 1, 1)


def gather_kv(pool: Tensor, blocks: Tensor, num_tokens: int, scale: float | Tensor | None) -> Tensor:
    """Return `[1, kv_heads, num_tokens, D]` in float32; bytes past `num_tokens` are never looked at."""
    x = pool[blocks].float()
    if scale is not None:
        x = x * scale_for(scale, blocks)
    return x.transpose(0, 1).reshape(1, pool.shape[1], -1, pool.shape[3])[:, :, :num_tokens]


def visible_mask(query_len: int, seq_len: int, window: int) -> Tensor:
    """Return bool `[query_len, seq_len]`: which KV position each query token may see."""
    limit = torch.arange(seq_len - query_len + 1, seq_len + 1)[:, None]
    pos = torch.arange(seq_len)[None, :]
    return (pos < limit) & (pos >= limit - window) if window else pos < limit


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, soft_cap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend `q` `[Lq, Hq, D]` to one sequence; return float32 `[Lq, Hq, Dv]` and natural-log LSE `[Lq, Hq]`."""
    query_len, seq_len, kv_heads = q.shape[0], k.shape[2], k.shape[1]
    grouped = q.float().transpose(0, 1).reshape(kv_heads, -1, query_len, q.shape[2])
    scores = torch.matmul(grouped, k[0][:, None].transpose(-1, -2)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if query_len > 1 or window or seq_len < query_len:
        scores = scores.masked_fill(~visible_mask(query_len, seq_len, window), -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.reshape(kv_heads, -1, 1).expand_as(lse))
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.matmul(weights, v[0][:, None])
    return out.reshape(-1, query_len, v.shape[3]).transpose(0, 1), lse.reshape(-1, query_len).transpose(0, 1)


def attend_one_fast(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend without LSE, window, cap or sinks by torch's fused kernel; float32 `[Lq, Hq, Dv]`."""
    query_len, seq_len = q.shape[0], k.shape[2]
    mask = None if query_len == 1 else visible_mask(query_len, seq_len, 0)
    x = q.float().transpose(0, 1)[None]
    return F.scaled_dot_product_attention(x, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan, *, scale: float, window: int, soft_cap: float,
    sinks: Tensor | None, k_scale: float | Tensor | None, v_scale: float | Tensor | None, out: Tensor,
    lse: Tensor | None,
) -> None:  # fmt: skip
    """Write causal attention of the planned batch to `out` (and `lse`). O(sum of query_len * seq_len)."""
    plain = lse is None and not window and not soft_cap and sinks is None
    for i, blocks_needed in enumerate(plan.blocks_needed.tolist()):
        start, end, seq_len = int(plan.query_starts[i]), int(plan.query_starts[i + 1]), int(plan.seq_lens[i])
        if start == end:
            continue
        blocks = torch.from_numpy(plan.block_tables[i, :blocks_needed]).long().to(k_pool.device)
        k = gather_kv(k_pool, blocks, seq_len, k_scale)
        v = gather_kv(v_pool, blocks, seq_len, v_scale)
        if plain and seq_len >= end - start:
            out[start:end] = attend_one_fast(q[start:end], k, v, scale=scale).to(out.dtype)
            continue
        o, m = attend_one(q[start:end], k, v, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        out[start:end] = o.to(out.dtype)
        if lse is not None:
            lse[start:end] = m


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge partial states `[n, T, H, D]`, `[n, T, H]`; an empty state is an exact identity."""
    parts, weights = outs.float(), lses.float()
    top = weights.amax(0)
    live = top != -math.inf
    w = torch.exp(weights - torch.where(live, top, torch.zeros_like(top)))
    total = w.sum(0)
    parts = torch.where(w[..., None] > 0, parts, torch.zeros(()))
    merged = (parts * w[..., None]).sum(0) / torch.where(live, total, torch.ones_like(total))[..., None]
    out.copy_(merged.to(out.dtype))
    lse.copy_(torch.where(live, top + torch.log(total), torch.full_like(top, -math.inf)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` columns of `x` `[T, heads, D]`; float32 inside, dtype of `x` outside."""
    half = cos.shape[-1]
    head = x[..., : 2 * half].float()
    c, s = cos.float()[:, None], sin.float()[:, None]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def quantise(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return `x / scale` as e4m3, saturating at ±448."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def token_scale(x: Tensor) -> Tensor:
    """Return the scale that maps each token-head's largest magnitude to 448: float32 `[T, heads]`; 1 for all zeros."""
    top = x.float().abs().amax(-1)
    return torch.where(top > 0, top / FP8_MAX, torch.ones_like(top))


def write_one(x: Tensor, pool: Tensor, slots: Tensor, scale: float | Tensor | None) -> None:
    """Write `x` `[T, heads, D]` to the slots (all >= 0) of one pool, quantising where the pool is fp8."""
    block, offset = slots // pool.shape[2], slots % pool.shape[2]
    if pool.dtype != torch.float8_e4m3fn:
        pool[block, :, offset] = x.to(pool.dtype)
        return
    if isinstance(scale, Tensor) and scale.ndim == 3:
        per_token = token_scale(x)
        scale[block, :, offset] = per_token
        factor: Tensor | float = per_token[..., None]
    else:
        factor = 1.0 if scale is None else torch.as_tensor(scale).reshape(1, -1, 1)
    pool.view(torch.uint8)[block, :, offset] = quantise(x, factor).view(torch.uint8)


def apply_rope(x: Tensor, rope: RoPE) -> Tensor:
    """Return `x` turned by `rope`."""
    return rotate(x, rope.cos, rope.sin, interleaved=rope.interleaved)


def write_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
    k_scale: float | Tensor | None, v_scale: float | Tensor | None, rope: RoPE | None,
) -> None:  # fmt: skip
    """Write new K and V to their slots; a negative slot writes nothing."""
    k = k if rope is None else apply_rope(k, rope)
    keep = slots >= 0
    slots = slots[keep].long()
    write_one(k[keep], k_pool, slots, k_scale)
    write_one(v[keep], v_pool, slots, v_scale)


def raw(pool: Tensor) -> Tensor:
    """Return fp8 pools as bytes (torch indexes those), others unchanged."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks `src` onto blocks `dst`; all reads happen before the first write."""
    raw(pool)[dst] = raw(pool)[src]


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copy the blocks `blocks` of a pool to `out` `[n, kv_heads, block_size, D]`."""
    raw(out).copy_(raw(pool)[blocks])
