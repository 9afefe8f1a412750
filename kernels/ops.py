"""The public operations: check the arguments, choose the backend, run.

Shapes: pools are `[num_blocks, kv_heads, block_size, D]` with any strides (last dimension contiguous); a slot is
`block * block_size + offset`. All operations are asynchronous on CUDA and safe to capture in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixpool.kernels import checks, torch_backend
from radixpool.kernels.plan import ForestPlan
from radixpool.kernels.rope import RoPE
from radixpool.kernels.spec import Backend, Precision, choose_backend
from radixpool.kernels.tree_mask import TreeMask

MAX_DECODE_QUERY_LEN = 8
MAX_KINDS = 64  # kinds of calls that a plan remembers as checked
MAX_WINDOW = 2**31 - 1  # tokens: kernels take int32, and no sequence is longer


@functools.lru_cache(maxsize=32)
def implementation(backend: Backend | None, device: torch.device) -> Any:
    """Return the module that implements the operations for `device`. Imports triton only when it is needed."""
    if choose_backend(device, backend) == "torch":
        return torch_backend
    return importlib.import_module("radixpool.kernels.triton_backend")


def write_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, *,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, rope: RoPE | None = None,
    backend: Backend | None = None, debug: bool = False,
) -> None:  # fmt: skip
    """Write the KV of `T` new tokens into their slots of the pool.

    `k` `[T, kv_heads, D]` and `v` `[T, kv_heads, Dv]` have the pool's dtype, or any float dtype if the pool is fp8
    e4m3. `slot_mapping` int `[T]`: slot of each token; -1 writes nothing. With an fp8 pool the stored value is `x /
    scale`, saturated at ±448; a scale is a number, `[1]`, `[kv_heads]`, or a float32 pool `[num_blocks, kv_heads,
    block_size]`, which is then written too (amax / 448 of each token and head). `rope` turns `k` first, rounded to its
    dtype, as `apply_rope` would.

    Slots are not checked unless `debug`. Two tokens must not share a slot. O(T * kv_heads * D).
    """
    checks.check_pools(k_pool, v_pool)
    for name, x, pool in (("k", k, k_pool), ("v", v, v_pool)):
        checks.check_rank(name, x, "tokens, kv_heads, D")
        checks.check_last_stride(name, x)
        checks.check_size(name, 1, x, pool.shape[1], "kv_heads of the pool")
        checks.check_size(name, 2, x, pool.shape[3], "D of the pool")
        checks.check_device(name, x, k_pool.device)
        fp8 = pool.dtype == torch.float8_e4m3fn
        checks.check_dtype(name, x, (torch.bfloat16, torch.float16, torch.float32) if fp8 else (pool.dtype,))
    checks.check_size("v", 0, v, k.shape[0], "tokens of k")
    checks.check_rank("slot_mapping", slot_mapping, "tokens")
    checks.check_size("slot_mapping", 0, slot_mapping, k.shape[0], "tokens of k")
    checks.check_dtype("slot_mapping", slot_mapping, checks.INT_DTYPES)
    checks.check_device("slot_mapping", slot_mapping, k_pool.device)
    checks.check_scale("k_scale", k_scale, k_pool)
    checks.check_scale("v_scale", v_scale, v_pool)
    if rope is not None:
        check_rope(rope, k)
    if debug and slot_mapping.numel() and int(slot_mapping.max()) >= k_pool.shape[0] * k_pool.shape[2]:
        limit = k_pool.shape[0] * k_pool.shape[2]
        raise ValueError(f"slot_mapping: expected slots below {limit}, got {int(slot_mapping.max())}")
    impl = implementation(backend, k_pool.device)
    impl.write_kv(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale, rope)


def check_rope(rope: RoPE, x: Tensor) -> None:
    """Check that the angles fit `x` `[T, heads, D]`."""
    checks.check_size("rope.cos", 0, rope.cos, x.shape[0], "tokens")
    if 2 * rope.cos.shape[1] > x.shape[2]:
        raise ValueError(f"rope.cos: expected at most {x.shape[2] // 2} columns, got {rope.cos.shape[1]}")
    for name, angles in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        checks.check_dtype(name, angles, (torch.float32,))
        checks.check_device(name, angles, x.device)


def apply_rope(x: Tensor, rope: RoPE, *, backend: Backend | None = None) -> Tensor:
    """Return `x` `[T, heads, D]` turned by `rope`, in the dtype of `x`. O(T * heads * D)."""
    checks.check_rank("x", x, "tokens, heads, D")
    checks.check_last_stride("x", x)
    check_rope(rope, x)
    result: Tensor = implementation(backend, x.device).apply_rope(x, rope)
    return result


def tensor_kind(x: Any) -> Any:
    """Return all that the checks and the choice of kernels look at in an argument; equal kinds need no second look."""
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def extend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan, *, scale: float | None = None, window: int = 0,
    soft_cap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, tree: TreeMask | None = None, alibi_slopes: Tensor | None = None,
    precision: Precision = "full", out: Tensor | None = None, lse: Tensor | None = None, debug: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention of a ragged batch (prefill, extend and decode rows mixed) over the paged pool.

    `q` `[num_rows, Hq, D]` in the order of the plan; returns `out` `[num_rows, Hq, Dv]` in the dtype of `q`.
    `scale` (default 1/sqrt(D)) multiplies the scores, `soft_cap` c > 0 makes them c * tanh(s / c), `window` W > 0
    lets a query see its last W tokens only, itself included. `sinks` float32 `[Hq]` are logits that take weight but
    bring no value. fp8 pools: `k_scale`, `v_scale` as in `write_kv`. `lse` float32 `[num_rows, Hq]`, if given,
    receives the natural log of the softmax denominator (a sink counts). A row that sees nothing gives 0 and -inf.
    `tree` makes the query tokens of each sequence nodes of a draft tree: they see the tokens before them all, and of
    one another only what the mask says; their place for `window` is then their depth. `alibi_slopes` float32 `[Hq]`
    add `slope * (position of the key - position of the query)` to the scores, after the cap (ALiBi; see
    `alibi_slopes`); not with a tree.

    `precision="fp8"`, for fp8 pools, lets prefill multiply e4m3 by e4m3: queries are rounded (a scale for each row and
    head), so are the weights; sums stay float32. About 4e-2 of relative error on random data where "full" has 2e-3.
    Tiles of fewer than 64 rows (decoding) are bound by memory and stay exact. Not with scales per token.

    The KV of the new tokens must already be in the pool. `debug=True` checks all block ids first.
    O(sum of query_len * seq_len * Hq * D) work; each block that several sequences share is read once for all of them.
    """
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive finite number, got {scale}")
    if window < 0 or not 0 <= soft_cap < math.inf:
        raise ValueError(f"window, soft_cap: expected no negative and no infinite value, got {window}, {soft_cap}")
    # Numbers are looked at in every call, as `kind` has their types only.
    checks.check_number("k_scale", k_scale)
    checks.check_number("v_scale", v_scale)
    kind = (tensor_kind(q), tensor_kind(k_pool), tensor_kind(v_pool), tensor_kind(sinks), tensor_kind(k_scale),
            tensor_kind(v_scale), tensor_kind(out), tensor_kind(lse), tree is None,
            tensor_kind(alibi_slopes), precision, plan.num_rows)  # fmt: skip
    if kind not in plan.checked:
        checks.check_attention(q, k_pool, v_pool, plan)
        checks.check_by_head("sinks", sinks, plan, k_pool)
        checks.check_by_head("alibi_slopes", alibi_slopes, plan, k_pool)
        checks.check_scale("k_scale", k_scale, k_pool)
        checks.check_scale("v_scale", v_scale, v_pool)
        checks.check_precision(precision, k_pool, k_scale, v_scale)
        checked_output("out", out, q, (*q.shape[:2], plan.spec.v_head_dim), q.dtype)
        if lse is not None:
            checked_output("lse", lse, q, tuple(q.shape[:2]), torch.float32)
        if tree is not None and alibi_slopes is not None:
            raise ValueError("alibi_slopes: expected None with a tree: its nodes have no distances in a line")
        if len(plan.checked) >= MAX_KINDS:
            plan.checked.clear()
        plan.checked.add(kind)
    if tree is not None:  # another one each step, so it is no part of the kind
        checks.check_tree(tree, plan, q)
    if out is None:
        out = torch.empty((*q.shape[:2], plan.spec.v_head_dim), dtype=q.dtype, device=q.device)
    if debug:
        checks.check_table_bounds(plan, k_pool.shape[0])
    impl = implementation(plan.spec.backend, q.device)
    impl.attention(
        q, k_pool, v_pool, plan, scale=1 / math.sqrt(q.shape[2]) if scale is None else scale,
        window=min(window, MAX_WINDOW), soft_cap=soft_cap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
        lse=lse, kind=kind, tree=tree, alibi_slopes=alibi_slopes, precision=precision,
    )  # fmt: skip
    return out


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan, **options: Any) -> Tensor:
    """Decode: `extend` for batches of 1 to 8 query tokens a sequence (more than 1: verification of drafts).

    Takes the same options as `extend` and gives the same result; refuses longer queries, so that a prefill can't
    slip into a decode step unseen.
    """
    if plan.num_rows > MAX_DECODE_QUERY_LEN and plan.query_lens.max() > MAX_DECODE_QUERY_LEN:
        longest = int(plan.query_lens.max())
        raise ValueError(f"query_lens: attend takes at most {MAX_DECODE_QUERY_LEN} tokens a sequence, got {longest}")
    return extend(q, k_pool, v_pool, plan, **options)


def checked_output(name: str, given: Tensor | None, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `given` after checks, or a new tensor of that shape and dtype."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if tuple(given.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {tuple(given.shape)}")
    checks.check_dtype(name, given, (dtype,))
    checks.check_device(name, given, like.device)
    if not given.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {given.stride()}")
    return given


def merge_states(outs: Tensor, lses: Tensor, *, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """Merge `n` partial attention states over disjoint keys into one.

    `outs` `[n, T, H, Dv]`, `lses` float32 `[n, T, H]` (natural log); returns `[T, H, Dv]` in the dtype of `outs` and
    float32 `[T, H]`. A state with LSE -inf is an exact identity, whatever its `out` holds; only empty states, or none,
    give 0 and -inf.
    """
    checks.check_rank("outs", outs, "n, tokens, heads, Dv")
    if tuple(lses.shape) != tuple(outs.shape[:3]):
        raise ValueError(f"lses: expected shape {list(outs.shape[:3])}, got {tuple(lses.shape)}")
    checks.check_dtype("lses", lses, (torch.float32,))
    checks.check_device("lses", lses, outs.device)
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    if outs.shape[0] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    implementation(backend, outs.device).merge_states(outs.contiguous(), lses.contiguous(), out, lse)
    return out, lse


def block_ids(name: str, ids: Sequence[int] | Tensor, num_blocks: int) -> Tensor:
    """Return block ids as an int64 CPU tensor after a range check."""
    t = torch.as_tensor(ids).detach().cpu().reshape(-1)
    if t.numel() and (t.is_floating_point() or t.dtype == torch.bool):
        raise TypeError(f"{name}: expected integers, got {t.dtype}")
    t = t.to(torch.int64)
    if t.numel() and (int(t.min()) < 0 or int(t.max()) >= num_blocks):
        raise ValueError(f"{name}: expected block ids in 0 to {num_blocks - 1}, got {int(t.min())} to {int(t.max())}")
    return t


def copy_blocks(
    pool: Tensor, src: Sequence[int] | Tensor, dst: Sequence[int] | Tensor, *, backend: Backend | None = None
) -> None:  # fmt: skip
    """Copy block `src[i]` onto block `dst[i]` of one pool tensor, as if all were read before the first is written.

    A block may be source and destination at once (chains and swaps are right); no destination twice. O(bytes copied).
    """
    checks.check_pool("pool", pool)
    s, d = block_ids("src", src, pool.shape[0]), block_ids("dst", dst, pool.shape[0])
    if len(s) != len(d):
        raise ValueError(f"dst: expected {len(s)} blocks as in src, got {len(d)}")
    if len(set(d.tolist())) != len(d):
        raise ValueError("dst: expected each destination once")
    if len(s):
        implementation(backend, pool.device).copy_blocks(pool, s, d)


def gather_blocks(
    pool: Tensor, blocks: Sequence[int] | Tensor, *, out: Tensor | None = None, backend: Backend | None = None
) -> Tensor:  # fmt: skip
    """Return the blocks `blocks` of one pool tensor, contiguous, `[n, kv_heads, block_size, D]`. O(bytes copied)."""
    checks.check_pool("pool", pool)
    ids = block_ids("blocks", blocks, pool.shape[0])
    out = checked_output("out", out, pool, (len(ids), *pool.shape[1:]), pool.dtype)
    if len(ids):
        implementation(backend, pool.device).gather_blocks(pool, ids, out)
    return out
