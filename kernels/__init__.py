"""Paged attention over the block pool: plan a batch once, then write KV and attend in every layer.

The package knows block tables and pools, never the radix tree. `AttentionSpec` chooses the backend by device:
plain torch on the CPU, Triton on CUDA; importing this package imports torch and never triton.
"""

from radixpool.kernels.alibi import alibi_slopes
from radixpool.kernels.device_plan import PlanCapacity
from radixpool.kernels.ops import (
    apply_rope,
    attend,
    copy_blocks,
    extend,
    gather_blocks,
    merge_states,
    write_kv,
)
from radixpool.kernels.plan import ForestPlan, plan_forest
from radixpool.kernels.rope import RoPE
from radixpool.kernels.spec import AttentionSpec, choose_backend
from radixpool.kernels.tree_mask import TreeMask

__all__ = [
    "AttentionSpec",
    "ForestPlan",
    "PlanCapacity",
    "plan_forest",
    "write_kv",
    "extend",
    "attend",
    "merge_states",
    "copy_blocks",
    "gather_blocks",
    "RoPE",
    "TreeMask",
    "alibi_slopes",
    "apply_rope",
    "choose_backend",
]
