"""Ahead-of-time compilation of the kernels that write new KV; `build.py` adds them to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.compiler import ASTSource

from radixpool.kernels.build import FLOATS, POINTERS
from radixpool.kernels.device_copy import write_slots
from radixpool.kernels.launch import next_power_of_two
from radixpool.kernels.spec import AttentionSpec
from radixpool.kernels.triton_backend import copy_variant

FEW, MANY = (1, 1), (16, 4)  # tokens and warps of a program where there are few tokens, and many


def write_sources(spec: AttentionSpec) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Yield name, source and options of what `write_kv` launches for contiguous K and V and int64 slots."""
    fp8 = spec.kv_dtype == torch.float8_e4m3fn
    for dim in sorted({spec.head_dim, spec.v_head_dim}):
        for tokens, warps in (FEW, MANY):
            variant = copy_variant(
                write_slots, warps, D=dim, BLOCK_D=next_power_of_two(dim), BLOCK_SIZE=spec.block_size, BT=tokens,
                HALF=0, INTERLEAVED=False, FP8=fp8, HEAD_SCALES=False, TOKEN_SCALES=False,
            )  # fmt: skip
            kinds = dict.fromkeys(("X", "SCALE", "COS", "SIN"), POINTERS[spec.q_dtype])
            kinds |= {"POOL": POINTERS[spec.kv_dtype], "SLOTS": "*i64"} | dict.fromkeys(FLOATS, "fp32")
            names = list(enumerate(write_slots.arg_names))
            signature = {n: "constexpr" if n in variant.constants else kinds.get(n, "i32") for _, n in names}
            attrs = {
                (i,): [["tt.divisibility", 16]]
                for i, n in names
                if signature[n] not in ("constexpr", "fp32") and n != "num_tokens"
            }
            source = ASTSource(write_slots, signature=signature, constexprs=variant.constants, attrs=attrs)
            yield (
                f"write_{spec.q_dtype}_{spec.kv_dtype}_d{dim}_t{tokens}".replace("torch.", ""),
                source,
                variant.options,
            )
