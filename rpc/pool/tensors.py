"""The pool as torch tensors, without a copy. The only module of this package that imports torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from radixpool.rpc.pool.geometry import pool_shape
from radixpool.rpc.pool_types import PoolSpec


@dataclass(frozen=True, slots=True)
class KvPool:
    """Every layer's K and V, each `[num_blocks, num_kv_heads, block_size, head_dim]`, in shared memory."""

    spec: PoolSpec
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


def pool_over(memory: mmap.mmap, spec: PoolSpec) -> KvPool:
    """Return tensors over `memory`, which stays mapped as long as one of them lives. O(num_layers)."""
    return split_layers(torch.frombuffer(memory, dtype=torch_dtype(spec)).view(pool_shape(spec)), spec)


def private_pool(spec: PoolSpec, device: torch.device | str = "cpu") -> KvPool:
    """Return a pool of this process alone, filled with zeros."""
    return split_layers(torch.zeros(pool_shape(spec), dtype=torch_dtype(spec), device=device), spec)


def split_layers(storage: torch.Tensor, spec: PoolSpec) -> KvPool:
    """Return views of one tensor of `pool_shape(spec)`."""
    return KvPool(spec=spec, k=tuple(storage[:, 0].unbind(0)), v=tuple(storage[:, 1].unbind(0)))


def torch_dtype(spec: PoolSpec) -> torch.dtype:
    """Return the element type of the pool for torch."""
    assert spec.dtype is not None
    dtype: torch.dtype = getattr(torch, spec.dtype.value)
    return dtype
