"""The oracle: every public operation in float64, one loop per row, nothing clever.

Tests check both backends against this file; nothing in the package calls it. It reads exactly the KV a row may
see, so a NaN outside of it can't reach the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from radixpool.kernels.spec import Precision
from radixpool.kernels.tree_mask import TreeMask

FP8_MAX, FP8_TINY, FP8_WEIGHT = 448.0, 1e-30, 256.0


def dequantised(x: Tensor, scale: float | Tensor | None, blocks: Tensor) -> Tensor:
    """Return the blocks `blocks` of a pool as float64 `[n, kv_heads, block_size, D]`, times their scales."""
    y = x[blocks].double()
    if scale is None:
        return y
    s = torch.as_tensor(scale, dtype=torch.float64)
    if s.ndim == 3:
        return y * s[blocks][..., None]
    return y * s.reshape(1, -1, 1, 1)


def gather_sequence(pool: Tensor, table: Tensor, num_tokens: int, scale: float | Tensor | None = None) -> Tensor:
    """Return the first `num_tokens` rows of one sequence as float64 `[num_tokens, kv_heads, D]`."""
    blocks = table[: -(-num_tokens // pool.shape[2])].long()
    y = dequantised(pool, scale, blocks).transpose(1, 2)
    return y.reshape(-1, pool.shape[1], pool.shape[3])[:num_tokens]


def rounded(x: Tensor, most: float, top: Tensor) -> Tensor:
    """Return `x` in float64 as e4m3 holds it where `top` becomes `most`; the factor is exact in float32."""
    factor = torch.full_like(top, most) / top  # a number over a tensor would be a reciprocal and a product
    return (x.float() * factor).to(torch.float8_e4m3fn).double() * (top / most)


def attend_row(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float = 0.0, sinks: Tensor | None = None,
    bias: Tensor | None = None, precision: Precision = "full",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend one query row `[Hq, D]` to `k`, `v` `[n, kv_heads, D]`; return `[Hq, Dv]` and its LSE `[Hq]`.

    `bias` `[Hq, n]` is added to the scores, after the cap. "fp8" rounds the query and 256 times the weights relative
    to the largest to e4m3. Kernels do so relative to the largest so far: the same within one tile of keys.
    """
    if precision == "fp8":
        q = rounded(q, FP8_MAX, q.float().abs().amax(1, keepdim=True).clamp_min(FP8_TINY))
    group = q.shape[0] // k.shape[1]
    kk, vv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q.double(), kk) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    extra = torch.full((q.shape[0], 1), -math.inf, dtype=torch.float64) if sinks is None else sinks.double()[:, None]
    lse = torch.logsumexp(torch.cat([scores, extra], 1), 1)
    weights = torch.exp(scores - lse[:, None]) if k.shape[0] else scores
    if precision == "fp8" and k.shape[0]:
        weights = rounded(weights, FP8_WEIGHT, weights.amax(1, keepdim=True).float())
    return torch.einsum("hn,nhd->hd", weights, vv), lse


def tree_positions(nodes: int, context: int, limit: int, window: int) -> Tensor:
    """Return the positions that a draft node sees: the context and its path in the tree; the last `window` at most."""
    path = [*range(context), *(p for p in range(context, limit) if nodes >> (p - context) & 1)]
    return torch.tensor(path[-window:] if window else path, dtype=torch.int64)


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, seq_lens: Tensor, query_lens: Tensor, *,
    scale: float, tree: TreeMask | None = None, window: int = 0, soft_cap: float = 0.0, sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, alibi_slopes: Tensor | None = None,
    precision: Precision = "full",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal ragged attention over the pool: the result of `extend` and `attend`, in float64."""
    outs, lses, row = [], [], 0
    for table, seq_len, query_len in zip(block_tables, seq_lens.tolist(), query_lens.tolist(), strict=True):
        k = gather_sequence(k_pool, table, seq_len, k_scale)
        v = gather_sequence(v_pool, table, seq_len, v_scale)
        for j in range(query_len):
            limit = max(0, seq_len - query_len + j + 1)
            first = max(0, limit - window) if window else 0
            seen = torch.arange(first, limit)
            if tree is not None:
                seen = tree_positions(int(tree.nodes[row]), seq_len - query_len, limit, window)
            bias = None if alibi_slopes is None else alibi_slopes.double()[:, None] * (seen - (limit - 1))
            o, lse = attend_row(
                q[row], k[seen], v[seen], scale=scale, soft_cap=soft_cap, sinks=sinks, bias=bias, precision=precision
            )  # fmt: skip
            outs.append(o)
            lses.append(lse)
            row += 1
    if not outs:
        return q.new_zeros(0, q.shape[1], v_pool.shape[3], dtype=torch.float64), q.new_zeros(0, q.shape[1]).double()
    return torch.stack(outs), torch.stack(lses)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `n` partial states: outs `[n, T, H, D]`, lses `[n, T, H]` in natural log."""
    lse = torch.logsumexp(lses.double(), 0)
    weights = torch.exp(lses.double() - torch.where(lse.isinf(), torch.zeros_like(lse), lse))
    parts = torch.where(weights[..., None] > 0, outs.double(), torch.zeros((), dtype=torch.float64))
    return (parts * weights[..., None]).sum(0), lse
