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
from radixpool.kernels.spec import Precision
from radixpool.kernels.tree_mask import MAX_TREE_NODES, TreeMask

FP8_MAX = 448.0
TILE_TOKENS = 512  # KV positions of one step of the CPU's attention; part of its results' bits
MIN_ROWS = 4  # rows below which the CPU's matrix product takes another path


def scale_for(scale: float | Tensor, blocks: Tensor) -> float | Tensor:
    """Return a scale that broadcasts against `[kv_heads, n, block_size, D]` for the given blocks."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.transpose(0, 1)[:, blocks][..., None] if scale.ndim == 3 else scale.reshape(-1, 1, 1, 1)


def gather_kv(pool: Tensor, blocks: Tensor, num_tokens: int, scale: float | Tensor | None) -> Tensor:
    """Return `[1, kv_heads, num_tokens, D]` in float32; bytes past `num_tokens` are never looked at."""
    x = pool.transpose(0, 1)[:, blocks].float()
    if scale is not None:
        x = x * scale_for(scale, blocks)
    return x.reshape(1, pool.shape[1], -1, pool.shape[3])[:, :, :num_tokens]


def tile_mask(query_len: int, seq_len: int, start: int, end: int, window: int, device: torch.device) -> Tensor:
    """Return bool `[query_len, end - start]`: which KV positions from `start` to `end` each query token may see."""
    limit = torch.arange(seq_len - query_len + 1, seq_len + 1, device=device)[:, None]
    pos = torch.arange(start, end, device=device)[None, :]
    return (pos < limit) & (pos >= limit - window) if window else pos < limit


def tree_tile_mask(nodes: Tensor, depths: Tensor, context: int, start: int, window: int) -> Tensor:
    """Return bool `[query_len, TILE_TOKENS]` for draft nodes: what they see of the context and of one another."""
    pos = torch.arange(start, start + TILE_TOKENS, device=nodes.device)[None, :]
    node = pos - context
    own = (nodes[:, None] >> node.clamp(0, MAX_TREE_NODES - 1)) & 1 != 0
    earlier = node <= torch.arange(len(nodes), device=nodes.device)[:, None]
    before = node < 0
    if window:
        before = before & (pos >= context + depths[:, None] - window)
    return before | (own & earlier & (node >= 0))


def alibi_bias(slopes: Tensor, num_rows: int, context: int, start: int) -> Tensor:
    """Return float32 `[Hq, num_rows, TILE_TOKENS]`: slope times each key's distance from query token `row`."""
    row = torch.arange(context, context + num_rows, device=slopes.device)[:, None]
    pos = torch.arange(start, start + TILE_TOKENS, device=slopes.device)[None, :]
    return slopes[:, None, None] * (pos - row).float()


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, soft_cap: float, sinks: Tensor | None,
    tree: tuple[Tensor, Tensor] | None = None, alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend `q` `[Lq, Hq, D]` to one sequence; return float32 `[Lq, Hq, Dv]` and natural-log LSE `[Lq, Hq]`.

    KV is walked in tiles that start at position 0 and rows are padded to at least four, because the CPU's matrix
    product gives a row the same bits among four or more. So a row's result depends on its own tokens only: not on the
    batch, nor on where a prompt was cut into chunks. A tile that a row can't see changes none of its bits.
    """
    query_len, seq_len, kv_heads = q.shape[0], k.shape[2], k.shape[1]
    rows = F.pad(q.float(), (0, 0, 0, 0, 0, max(0, MIN_ROWS - query_len)))
    grouped = rows.permute(1, 0, 2).reshape(kv_heads, -1, q.shape[2])
    group = q.shape[1] // kv_heads
    top = grouped.new_full(grouped.shape[:2], -math.inf)
    total, out = torch.zeros_like(top), grouped.new_zeros(*grouped.shape[:2], v.shape[3])
    if sinks is not None:
        top = sinks.float().reshape(kv_heads, group, 1).expand(-1, -1, len(rows)).reshape(kv_heads, -1)
        total = torch.ones_like(top)
    first = max(0, seq_len - query_len + 1 - window) // TILE_TOKENS * TILE_TOKENS if window else 0
    for start in range(first, seq_len, TILE_TOKENS):
        end = min(start + TILE_TOKENS, seq_len)
        keys, values = k[0, :, start:end], v[0, :, start:end]
        if end - start < TILE_TOKENS:
            keys, values = (F.pad(x, (0, 0, 0, TILE_TOKENS - (end - start))) for x in (keys, values))
        scores = torch.matmul(grouped, keys.transpose(1, 2)) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores + alibi_bias(alibi_slopes, len(rows), seq_len - query_len, start).reshape(scores.shape)
        if tree is not None or window or end > seq_len - query_len + 1 or end - start < TILE_TOKENS:
            if tree is None:
                mask = tile_mask(query_len, seq_len, start, start + TILE_TOKENS, window, q.device)
            else:
                mask = tree_tile_mask(*tree, seq_len - query_len, start, window)
            mask = F.pad(mask, (0, 0, 0, len(rows) - query_len))
            grouped_scores = scores.reshape(kv_heads, group, len(rows), -1)
            scores = grouped_scores.masked_fill(~mask, -math.inf).flatten(1, 2)
        new_top = torch.maximum(top, scores.amax(-1))
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        weights = torch.exp(scores - base[..., None])
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + torch.matmul(weights, values)
        top = new_top
    lse = top + torch.log(total)
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    by_row = out.reshape(kv_heads * group, len(rows), -1).transpose(0, 1)
    return by_row[:query_len], lse.reshape(kv_heads * group, len(rows)).transpose(0, 1)[:query_len]


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan, *, scale: float, window: int, soft_cap: float,
    sinks: Tensor | None, k_scale: float | Tensor | None, v_scale: float | Tensor | None, out: Tensor,
    lse: Tensor | None, kind: object = None, tree: TreeMask | None = None, alibi_slopes: Tensor | None = None,
    precision: Precision = "full",
) -> None:  # fmt: skip
    """Write causal attention of the planned batch to `out` (and `lse`). O(sum of query_len * seq_len).

    Computes in float32 whatever `precision` allows.
    """
    for i, blocks_needed in enumerate(plan.blocks_needed.tolist()):
        start, end, seq_len = int(plan.query_starts[i]), int(plan.query_starts[i + 1]), int(plan.seq_lens[i])
        if start == end:
            continue
        blocks = torch.from_numpy(plan.block_tables[i, :blocks_needed]).long().to(k_pool.device)
        k = gather_kv(k_pool, blocks, seq_len, k_scale)
        v = gather_kv(v_pool, blocks, seq_len, v_scale)
        nodes = None
        if tree is not None:
            all_nodes, depths = tree.within(window)
            nodes = all_nodes[start:end], depths[start:end]
        o, m = attend_one(
            q[start:end], k, v, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, tree=nodes,
            alibi_slopes=alibi_slopes,
        )  # fmt: skip
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
        factor = 1.0 if scale is None else torch.as_tensor(scale, device=x.device).reshape(1, -1, 1)
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
