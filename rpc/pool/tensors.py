"""The pool as torch tensors, without a copy. The only module of this package that imports torch."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radixpool.rpc.pool.geometry import pool_shape
from radixpool.rpc.pool.memory import PoolMemoryError
from radixpool.rpc.pool_types import KvDtype, PoolSpec


@dataclass(frozen=True, slots=True)
class KvPool:
    """Every layer's K and V, each `[num_blocks, num_kv_heads, block_size, head_dim]`, in shared memory."""

    spec: PoolSpec
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @property
    def scales(self) -> dict[str, Any]:
        """Return what the kernels are to be told of the elements of an fp8 pool; nothing of other pools."""
        scaled = self.spec.dtype is KvDtype.FLOAT8_E4M3
        return {"k_scale": self.spec.k_scale, "v_scale": self.spec.v_scale} if scaled else {}


def pool_over(memory: mmap.mmap, spec: PoolSpec) -> KvPool:
    """Return tensors over `memory`, which stays mapped as long as one of them lives. O(num_layers)."""
    elements = torch.frombuffer(memory, dtype=torch.uint8).view(torch_dtype(spec))
    return split_layers(elements.view(pool_shape(spec)), spec)


class CudaMapping:
    """Another process's GPU memory, as bytes that torch can use in place; unmapped when it is no longer referenced.

    Tensors over it refer to it. At the end of the process the driver unmaps what is left.
    """

    def __init__(self, pointer: int, size_bytes: int, unmap: Callable[[], None]) -> None:
        weakref.finalize(self, _suppressed, unmap).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


def _suppressed(unmap: Callable[[], None]) -> None:
    with contextlib.suppress(PoolMemoryError):  # a GPU that has failed maps nothing any more
        unmap()


def pool_on_device(mapping: CudaMapping, spec: PoolSpec, index: int) -> KvPool:
    """Return tensors over `mapping` on GPU number `index`. O(num_layers)."""
    storage = torch.as_tensor(mapping, device=torch.device("cuda", index))
    return split_layers(storage.view(torch_dtype(spec)).view(pool_shape(spec)), spec)


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
