"""How a pool lies in memory, derived from its `PoolSpec`. Pure functions; imports no torch."""

from __future__ import annotations

import math
from dataclasses import fields

from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.pool_types import KvDtype, PoolLayout, PoolSpec

DTYPE_BYTES = {KvDtype.FLOAT32: 4, KvDtype.BFLOAT16: 2, KvDtype.FLOAT16: 2, KvDtype.FLOAT8_E4M3: 1}
"""Element types that this version can allocate and map, with their size."""

_SIZES = ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks")


def require_complete(spec: PoolSpec) -> None:
    """Raise ValueError naming the field unless `spec` describes a pool that can be allocated."""
    for name in _SIZES:
        value = getattr(spec, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if spec.dtype not in DTYPE_BYTES:
        names, given = ", ".join(dtype.option for dtype in DTYPE_BYTES), spec.dtype and spec.dtype.option
        raise ValueError(f"dtype must be one of {names}, got {given}")
    for name in ("k_scale", "v_scale"):
        scale = getattr(spec, name)
        if spec.dtype is KvDtype.FLOAT8_E4M3 and not 0 < scale < math.inf:
            raise ValueError(f"{name} must be a positive number for fp8, got {scale}")
        if spec.dtype is not KvDtype.FLOAT8_E4M3 and scale:
            raise ValueError(f"{name} must be 0 for {spec.dtype.option}, got {scale}")
    if spec.layout is not PoolLayout.HND:
        raise ValueError(f"layout must be {PoolLayout.HND.value}, got {spec.layout.value if spec.layout else None}")


def block_bytes(spec: PoolSpec) -> int:
    """Return the bytes of one block over all layers, K and V.

    >>> block_bytes(PoolSpec(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype=KvDtype.FLOAT32))
    49152
    """
    assert spec.dtype is not None
    return spec.num_layers * 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * DTYPE_BYTES[spec.dtype]


def pool_bytes(spec: PoolSpec) -> int:
    """Return the bytes of the whole pool."""
    return spec.num_blocks * block_bytes(spec)


def pool_shape(spec: PoolSpec) -> tuple[int, int, int, int, int, int]:
    """Return the pool as one tensor: `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`."""
    return (spec.num_layers, 2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)


def require_equal(expected: PoolSpec, actual: PoolSpec) -> None:
    """Raise `PoolMismatch` naming every field in which the `actual` pool is not the `expected` one."""
    pairs = [(field.name, getattr(expected, field.name), getattr(actual, field.name)) for field in fields(PoolSpec)]
    differing = [f"{name}: expected {wanted}, pool has {found}" for name, wanted, found in pairs if wanted != found]
    if differing:
        raise PoolMismatch(f"the pool does not fit: {'; '.join(differing)}")
