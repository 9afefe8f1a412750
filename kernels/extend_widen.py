"""fp8 KV on the fast extend path: the blocks that tall tiles read are copied once to the dtype of Q, exactly.

The copies live for one call. `wide_blocks` in extend_plan.py decides when this pays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixpool.kernels.extend_device_widen import widen_blocks
from radixpool.kernels.extend_plan import WideBlocks
from radixpool.kernels.launch import next_power_of_two
from radixpool.kernels.spec import AttentionSpec

ELEMENTS_PER_STEP = 4096
WIDEN_OPTIONS = {"num_warps": 4}


def widen_constants(spec: AttentionSpec) -> dict[str, int]:
    """Return the compile-time arguments of `widen_blocks`."""
    block_d, block_dv = next_power_of_two(spec.head_dim), next_power_of_two(spec.v_head_dim)
    rows = max(1, min(next_power_of_two(spec.block_size), ELEMENTS_PER_STEP // max(block_d, block_dv)))
    return {
        "HEADS": spec.num_kv_heads, "D": spec.head_dim, "DV": spec.v_head_dim, "BLOCK_D": block_d,
        "BLOCK_DV": block_dv, "BLOCK_SIZE": spec.block_size, "BT": rows,
    }  # fmt: skip


class Widening:
    """The blocks to copy and the tables that name the copies, on the device."""

    def __init__(self, wide: WideBlocks, spec: AttentionSpec) -> None:
        self.spec = spec
        self.blocks = torch.from_numpy(wide.blocks).to(spec.device)
        self.tables = torch.from_numpy(wide.tables).to(spec.device)

    def copy(self, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the blocks of both pools in the dtype of Q, `[blocks, kv_heads, block_size, D]`."""
        spec, count = self.spec, len(self.blocks)
        shape = (count, spec.num_kv_heads, spec.block_size)
        wide_k = torch.empty((*shape, spec.head_dim), dtype=spec.q_dtype, device=k_pool.device)
        wide_v = torch.empty((*shape, spec.v_head_dim), dtype=spec.q_dtype, device=k_pool.device)
        widen_blocks[(count, spec.num_kv_heads)](
            k_pool, v_pool, wide_k, wide_v, self.blocks, *k_pool.stride()[:3], *v_pool.stride()[:3],
            **widen_constants(spec), **WIDEN_OPTIONS,
        )  # fmt: skip
        return wide_k, wide_v
