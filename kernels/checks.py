"""Argument checks of the public operations: one clear error before any launch: tensor, limit, value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from radixpool.kernels.spec import Precision
from radixpool.kernels.tree_mask import MAX_TREE_NODES, TreeMask

if TYPE_CHECKING:
    from radixpool.kernels.plan import ForestPlan

INT_DTYPES = (torch.int32, torch.int64)


def check_rank(name: str, x: Tensor, dims: str) -> None:
    """Raise `TypeError` unless `x` is a tensor, `ValueError` unless it has a dimension per comma-separated name."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor [{dims}], got {type(x).__name__}")
    if x.ndim != dims.count(",") + 1:
        raise ValueError(f"{name}: expected [{dims}], got shape {tuple(x.shape)}")


def check_size(name: str, dim: int, x: Tensor, expected: int, why: str) -> None:
    """Raise `ValueError` unless `x.shape[dim] == expected`."""
    if x.shape[dim] != expected:
        raise ValueError(f"{name}: expected size {expected} in dimension {dim} ({why}), got shape {tuple(x.shape)}")


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    """Raise `ValueError` unless `x` lies on `device`."""
    if x.device.type != device.type or (x.device.index or 0) != (device.index or 0):
        raise ValueError(f"{name}: expected device {device}, got {x.device}")


def check_dtype(name: str, x: Tensor, expected: tuple[torch.dtype, ...]) -> None:
    """Raise `TypeError` unless the dtype of `x` is one of `expected`."""
    if x.dtype not in expected:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, expected))}, got {x.dtype}")


def check_last_stride(name: str, x: Tensor) -> None:
    """Raise `ValueError` unless the last dimension of `x` is contiguous."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {x.stride()}")


def check_pool(name: str, pool: Tensor) -> None:
    """Check one pool tensor `[num_blocks, kv_heads, block_size, D]`."""
    check_rank(name, pool, "num_blocks, kv_heads, block_size, D")
    check_last_stride(name, pool)


def check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Check that K and V pools agree in blocks, heads, block size, dtype and device."""
    check_pool("k_pool", k_pool)
    check_pool("v_pool", v_pool)
    for dim, why in enumerate(("num_blocks of k_pool", "kv_heads of k_pool", "block_size of k_pool")):
        check_size("v_pool", dim, v_pool, k_pool.shape[dim], why)
    check_dtype("v_pool", v_pool, (k_pool.dtype,))
    check_device("v_pool", v_pool, k_pool.device)


def check_number(name: str, scale: float | Tensor | None) -> None:
    """Check a scale that is a number, if it is one."""
    if not (scale is None or isinstance(scale, Tensor) or 0 < scale < math.inf):
        raise ValueError(f"{name}: expected a positive finite number, got {scale}")


def check_scale(name: str, scale: float | Tensor | None, pool: Tensor) -> None:
    """Check a quantisation scale: a number, `[kv_heads]`, or `[num_blocks, kv_heads, block_size]`."""
    if not isinstance(scale, Tensor):
        check_number(name, scale)
        return
    heads, block_size = pool.shape[1], pool.shape[2]
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (heads,), (pool.shape[0], heads, block_size))
    if tuple(scale.shape) not in shapes:
        raise ValueError(f"{name}: expected shape [], [1], [{heads}] or {list(shapes[3])}, got {tuple(scale.shape)}")
    check_dtype(name, scale, (torch.float32,))
    check_device(name, scale, pool.device)


def check_precision(
    precision: str, k_pool: Tensor, k_scale: float | Tensor | None, v_scale: float | Tensor | None
) -> None:  # fmt: skip
    """Check that fp8 products are asked for only where both pools are fp8 and scales can be taken out of the sums."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision: expected one of {get_args(Precision)}, got {precision!r}")
    if precision == "fp8":
        if k_pool.dtype != torch.float8_e4m3fn:
            raise TypeError(f"precision: 'fp8' expects pools of torch.float8_e4m3fn, got {k_pool.dtype}")
        if any(isinstance(scale, Tensor) and scale.ndim == 3 for scale in (k_scale, v_scale)):
            raise ValueError("precision: 'fp8' expects scales that are numbers or per head, got scales per token")


def check_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan) -> None:
    """Check the arguments of `attend` and `extend` against the plan they were given."""
    spec = plan.spec
    check_pools(k_pool, v_pool)
    check_rank("q", q, "tokens, num_q_heads, head_dim")
    check_last_stride("q", q)
    check_size("q", 0, q, plan.num_rows, "query tokens of the plan; was it made for another batch?")
    check_size("q", 1, q, spec.num_q_heads, "num_q_heads of the plan")
    check_size("q", 2, q, spec.head_dim, "head_dim of the plan")
    check_size("k_pool", 1, k_pool, spec.num_kv_heads, "num_kv_heads of the plan")
    check_size("k_pool", 2, k_pool, spec.block_size, "block_size of the plan")
    check_size("k_pool", 3, k_pool, spec.head_dim, "head_dim of the plan")
    check_size("v_pool", 3, v_pool, spec.v_head_dim, "v_head_dim of the plan")
    check_dtype("q", q, (spec.q_dtype,))
    check_dtype("k_pool", k_pool, (spec.kv_dtype,))
    check_device("q", q, k_pool.device)
    check_device("k_pool", k_pool, torch.device(spec.device))


def check_by_head(name: str, x: Tensor | None, plan: ForestPlan, pool: Tensor) -> None:
    """Check a number for each query head, float32 `[num_q_heads]`, if it is given."""
    if x is None:
        return
    check_rank(name, x, "num_q_heads")
    check_size(name, 0, x, plan.spec.num_q_heads, "num_q_heads of the plan")
    check_dtype(name, x, (torch.float32,))
    check_device(name, x, pool.device)
    check_last_stride(name, x)


def check_tree(tree: TreeMask, plan: ForestPlan, q: Tensor) -> None:
    """Check that a mask of draft trees has one entry a row, on the device of `q`, and that no tree is too large."""
    check_size("tree.nodes", 0, tree.nodes, plan.num_rows, "query tokens of the plan")
    check_device("tree.nodes", tree.nodes, q.device)
    check_last_stride("tree.nodes", tree.nodes)
    if plan.query_lens.size and plan.query_lens.max() > MAX_TREE_NODES:
        longest = int(plan.query_lens.max())
        raise ValueError(f"tree: expected at most {MAX_TREE_NODES} query tokens a sequence, got {longest}")


def check_table_bounds(plan: ForestPlan, num_blocks: int) -> None:
    """Raise `ValueError` if a table that a row needs names a block outside the pool. O(table entries), host only."""
    for i, (table, blocks) in enumerate(zip(plan.block_tables, plan.blocks_needed, strict=True)):
        used = table[:blocks]
        if used.size and (used.min() < 0 or used.max() >= num_blocks):
            bad = used[(used < 0) | (used >= num_blocks)][0]
            raise ValueError(f"block_tables: row {i} names block {bad}, the pool has {num_blocks} blocks")
