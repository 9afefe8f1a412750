"""fp8 prefill: the values that tall tiles read are laid out with their keys side by side, once a call.

wgmma reads fp8 operands along the summed dimension only. K lies so in the pool, V doesn't.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from radixpool.kernels.extend_device_turn import turn_values
from radixpool.kernels.extend_plan import TURN_TOKENS, TurnedChunks
from radixpool.kernels.launch import next_power_of_two
from radixpool.kernels.spec import AttentionSpec

TURN_OPTIONS = {"num_warps": 4}
ALIGN = 4  # int32: parts start on 16 bytes


def turn_constants(spec: AttentionSpec) -> dict[str, int]:
    """Return the compile-time arguments of `turn_values`."""
    return {
        "HEADS": spec.num_kv_heads, "DV": spec.v_head_dim, "BLOCK_DV": next_power_of_two(spec.v_head_dim),
        "BLOCK_SIZE": spec.block_size, "BT": TURN_TOKENS,
    }  # fmt: skip


class Turning:
    """The chunks to turn, and where each entry's tiles find theirs, on the device."""

    def __init__(self, turned: TurnedChunks, spec: AttentionSpec) -> None:
        self.spec, self.count = spec, len(turned.chunks)
        parts = [turned.chunks.reshape(-1), turned.places, turned.runs]
        parts = [np.pad(p, (0, -len(p) % ALIGN)) for p in parts]
        buffer = torch.from_numpy(np.concatenate(parts)).to(spec.device)
        self.chunks, self.places, self.runs = torch.split(buffer, [len(p) for p in parts])

    def values(self, v_pool: Tensor, tables: Tensor) -> Tensor:
        """Return the turned values `[chunks, kv_heads, v_head_dim, TURN_TOKENS]`."""
        spec, words = self.spec, v_pool.view(torch.int32)
        shape = (self.count, spec.num_kv_heads, spec.v_head_dim, TURN_TOKENS // 4)
        out = torch.empty(shape, dtype=torch.int32, device=v_pool.device)
        turn_values[(self.count, spec.num_kv_heads)](
            words, out, tables, self.chunks, tables.stride(0), *words.stride()[:3], **turn_constants(spec),
            **TURN_OPTIONS,
        )  # fmt: skip
        return out.view(v_pool.dtype)
