"""Ahead-of-time compilation: every kernel that a model's shapes can ask for, for a target, with or without a GPU.

Triton caches what it compiles on disk (`TRITON_CACHE_DIR`), so that a server that starts afterwards compiles nothing. The
register and spill counts come from the `ptxas` that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixpool.kernels.device_attend import attend_items, merge_partials
from radixpool.kernels.launch import TILE_ROWS, TileConfig, next_power_of_two, tile_config
from radixpool.kernels.spec import AttentionSpec
from radixpool.kernels.triton_backend import MERGE_PARTS, attend_constants, attend_options

POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
FLOATS = ("scale", "v_factor", "soft_cap")
NOT_SPECIALISED = ("stride_table", "window", "stride_ks_block", "stride_ks_head", "stride_ks_token", "stride_vs_block",
                   "stride_vs_head", "stride_vs_token")  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """One compiled kernel: its name, how long it took, and what it takes of the chip."""

    name: str
    seconds: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: dict[str, Any]


def attend_source(
    spec: AttentionSpec, config: TileConfig, tile_rows: int, *, pairs: bool, **features: bool
) -> ASTSource:
    """Return the source of `attend_items` as a server with these shapes would compile it."""
    constants = attend_constants(spec, config, tile_rows, pairs=pairs, **features)
    kv = "*i16" if pairs else POINTERS[spec.kv_dtype]
    pointers = dict(Q=POINTERS[spec.q_dtype], OUT=POINTERS[spec.q_dtype], K=kv, V=kv)
    integers = ("TABLES", "SEQ_LENS", "ITEMS", "ITEM_STARTS", "ORDER", "ROW_SEQ", "ROW_BACK")
    signature, attrs = {}, {}
    for i, name in enumerate(attend_items.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name.isupper():
            signature[name] = pointers.get(name, "*i32" if name in integers else "*fp32")
        else:
            signature[name] = "i32"
        if signature[name] not in ("constexpr", "fp32") and name not in NOT_SPECIALISED:
            attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(attend_items, signature=signature, constexprs=constants, attrs=attrs)


def merge_source(spec: AttentionSpec, *, sinks: bool, lse: bool, pdl: bool) -> ASTSource:
    """Return the source of `merge_partials` for these shapes."""
    constants = dict(
        HQ=spec.num_q_heads, DV=spec.v_head_dim, BLOCK_DV=next_power_of_two(spec.v_head_dim), BLOCK_N=MERGE_PARTS,
        HAS_SINKS=sinks, HAS_LSE=lse, PDL=pdl,
    )  # fmt: skip
    signature, attrs = {}, {}
    for i, name in enumerate(merge_partials.arg_names):
        kind = "*i32" if name in ("ROWS", "STARTS", "PARTS", "COUNTS") else "*fp32"
        signature[name] = "constexpr" if name in constants else POINTERS[spec.q_dtype] if name == "OUT" else kind
        if signature[name] != "constexpr":
            attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(merge_partials, signature=signature, constexprs=constants, attrs=attrs)


def resources_of(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers a thread and spilled bytes, as `ptxas -v` reports them."""
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(binary), "-v", f"-arch=sm_{arch}{suffix}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return registers, spills


def compile_source(name: str, source: ASTSource, arch: int, options: dict[str, Any]) -> BuiltKernel:
    """Compile one kernel for `sm_<arch>`; needs no GPU."""
    start = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = resources_of(kernel.asm["ptx"], arch)
    return BuiltKernel(name, time.perf_counter() - start, registers, spills, kernel.metadata.shared, kernel.asm)


def tile_heights(group_size: int) -> tuple[int, ...]:
    """Return the tile heights that a model with this GQA group can use.

    >>> tile_heights(8), tile_heights(48)
    ((16, 32, 64, 128), (64, 128))
    """
    return tuple(h for h in TILE_ROWS if h >= group_size)


def model_sources(spec: AttentionSpec, arch: int) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Yield name, source and options of every kernel that decoding and extending with `spec` can launch."""
    pdl = arch >= 90
    size = spec.kv_dtype.itemsize
    for height in tile_heights(spec.group_size):
        config = tile_config(size, max(spec.head_dim, spec.v_head_dim), height, arch)
        pairs = spec.kv_dtype == torch.float8_e4m3fn and height < 64 and min(spec.head_dim, spec.v_head_dim) >= 32
        for chained in (False, True) if pdl else (False,):
            name = f"attend_{spec.q_dtype}_{spec.kv_dtype}_d{spec.head_dim}_m{height}{'_chained' if chained else ''}"
            source = attend_source(spec, config, height, pairs=pairs, pdl=pdl)
            yield name.replace("torch.", ""), source, attend_options(config, pdl=chained)
    options: dict[str, Any] = dict(num_warps=2, launch_pdl=True) if pdl else dict(num_warps=2)
    yield f"merge_d{spec.v_head_dim}", merge_source(spec, sinks=False, lse=False, pdl=pdl), options
