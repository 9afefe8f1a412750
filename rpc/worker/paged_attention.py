"""The attention that transformers calls in every layer: write the new KV to its slots, attend over the block tables.

transformers finds it by name through its `AttentionInterface`. No mask is registered with it, so none is made: the plan
says what each token sees.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from radixpool.kernels import ForestPlan, extend, write_kv
from radixpool.rpc.pool.tensors import KvPool

ATTENTION = "radixpool_paged"


class PagedStep:
    """What every layer of one forward pass needs: where new KV goes, and the plan of the attention."""

    __slots__ = ("plan", "pool", "slots")

    def __init__(self, pool: KvPool, plan: ForestPlan, slots: torch.Tensor) -> None:
        self.pool = pool
        self.plan = plan
        self.slots = slots


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_step: PagedStep,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write this layer's KV and attend; query `[1, H, T, D]`, key and value `[1, KVH, T, D]`, out `[1, T, H, D]`."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    plan = paged_step.plan
    k_pool, v_pool = paged_step.pool.k[layer], paged_step.pool.v[layer]
    k, v, q = (tensor[0].transpose(0, 1).contiguous() for tensor in (key, value, query))
    backend = plan.spec.backend
    write_kv(k.to(k_pool.dtype), v.to(v_pool.dtype), k_pool, v_pool, paged_step.slots, backend=backend)
    planned = plan.num_rows
    if planned == len(q):
        return extend(q, k_pool, v_pool, plan, scale=scaling)[None], None
    out = torch.zeros_like(q)  # rows beyond the planned ones are padding
    out[:planned] = extend(q[:planned], k_pool, v_pool, plan, scale=scaling)
    return out[None], None


AttentionInterface.register(ATTENTION, paged_attention)
