"""The attention that transformers calls in every layer: write the new KV to its slots, attend over the block tables.

transformers finds it by name through its `AttentionInterface`. No mask is registered with it, so none is made: the plan
says what each token sees.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from radixpool.kernels import ForestPlan, extend, write_kv
from radixpool.kernels.spec import Backend
from radixpool.rpc.pool.tensors import KvPool

ATTENTION = "radixpool_paged"


class AttentionStep(Protocol):
    """Attends for every layer of one forward pass."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Return the attention `[T, H, D]` of q `[T, H, D]` and the new k and v `[T, KVH, D]`, of any strides."""
        ...


class PagedStep:
    """Attends over the pool: where new KV goes, and the plan of the attention."""

    __slots__ = ("plan", "pool", "slots")

    def __init__(self, pool: KvPool, plan: ForestPlan, slots: torch.Tensor) -> None:
        self.pool = pool
        self.plan = plan
        self.slots = slots

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Write this layer's new KV and attend; see `AttentionStep.attend`. The rest of q's rows, padding, give 0."""
        write_new_kv(self.pool, layer, k, v, self.slots, backend=self.plan.spec.backend)
        q, planned = q.contiguous(), self.plan.num_rows
        if planned == len(q):
            return self.read(layer, q, scale=scale)
        padded = torch.zeros_like(q)
        self.read(layer, q[:planned], scale=scale, out=padded[:planned])
        return padded

    def read(self, layer: int, q: torch.Tensor, *, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention of contiguous q `[T, H, D]` over what the pool holds by now, in `out` if it is given."""
        k_pool, v_pool = self.pool.k[layer], self.pool.v[layer]
        return extend(q, k_pool, v_pool, self.plan, scale=scale, out=out, **self.pool.scales)


def write_new_kv(
    pool: KvPool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *, backend: Backend | None
) -> None:
    """Write k and v `[T, KVH, D]`, of any strides, to their slots `[T]`."""
    k_pool, v_pool, scales = pool.k[layer], pool.v[layer], pool.scales
    k, v = k.contiguous(), v.contiguous()
    if not scales:  # else they are rounded from what they are
        k, v = k.to(k_pool.dtype), v.to(v_pool.dtype)
    write_kv(k, v, k_pool, v_pool, slots, backend=backend, **scales)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_step: AttentionStep,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through `paged_step`; query `[1, H, T, D]`, key and value `[1, KVH, T, D]`, out `[1, T, H, D]`."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged_step.attend(layer, q, k, v, scale=scaling)[None], None


AttentionInterface.register(ATTENTION, paged_attention)
