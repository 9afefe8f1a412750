"""Ahead-of-time compilation: every kernel that a model's shapes can ask for, for a target, with or without a GPU.

Triton caches what it compiles on disk (`TRITON_CACHE_DIR`), so that a server that starts afterwards compiles nothing.
The register and spill counts come from the `ptxas` that Triton ships.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixpool.kernels import native_cut
from radixpool.kernels.cache_hints import with_hints
from radixpool.kernels.device_attend import UNSPECIALISED, attend_items
from radixpool.kernels.device_merge import merge_partials
from radixpool.kernels.extend_path import gluon_launcher
from radixpool.kernels.extend_plan import extend_config
from radixpool.kernels.launch import (
    FEW_PARTS,
    MANY_PARTS,
    SOME_PARTS,
    TALL_ROWS,
    TILE_ROWS,
    tile_config,
    uses_pairs,
)
from radixpool.kernels.spec import AttentionSpec
from radixpool.kernels.triton_backend import Features, attend_variant, merge_variant
from radixpool.kernels.variant import KernelVariant

POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
FLOATS = ("scale", "v_factor", "soft_cap")


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """One compiled kernel: its name, how long it took, and what it takes of the chip."""

    name: str
    seconds: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: dict[str, Any]


def attend_source(spec: AttentionSpec, variant: KernelVariant) -> ASTSource:
    """Return the source of `attend_items` as a server with these shapes would compile it."""
    constants = variant.constants
    pairs = constants["PAIRS"]
    kv = "*i16" if pairs else POINTERS[spec.kv_dtype]
    pointers = {"Q": POINTERS[spec.q_dtype], "OUT": POINTERS[spec.q_dtype], "K": kv, "V": kv}
    if constants["TREE"]:
        pointers |= {"NODES": "*i64", "DEPTHS": "*i32"}
    integers = ("MARKS", "TABLES", "SEQ_LENS", "ITEMS", "ROWS")
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
        if signature[name] not in ("constexpr", "fp32") and name not in UNSPECIALISED:
            attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(attend_items, signature=signature, constexprs=constants, attrs=attrs)


def merge_source(spec: AttentionSpec, variant: KernelVariant) -> ASTSource:
    """Return the source of `merge_partials` for these shapes."""
    signature, attrs = {}, {}
    for i, name in enumerate(merge_partials.arg_names):
        kind = "*i32" if name in ("MARKS", "ROWS", "STARTS", "PARTS", "COUNTS") else "*fp32"
        signature[name] = (
            "constexpr" if name in variant.constants else POINTERS[spec.q_dtype] if name == "OUT" else kind
        )
        if signature[name] != "constexpr":
            attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(merge_partials, signature=signature, constexprs=variant.constants, attrs=attrs)


def resources_of(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers a thread and spilled bytes, as `ptxas -v` reports them."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        target = f"-arch=sm_{arch}{'a' if arch >= 90 else ''}"
        # Triton ships two assemblers; the older one refuses the newer PTX versions.
        for binary in (folder / "ptxas", folder / "ptxas-blackwell"):
            command = [str(binary), "-v", target, str(source), "-o", f"{scratch}/kernel.cubin"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                break
        else:
            raise RuntimeError(f"ptxas: {result.stderr[-500:]}")
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", result.stderr))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", result.stderr))
    return registers, spills


def evicts_first(source: ASTSource) -> bool:
    """Return whether the copies of a kernel ask to be evicted first (see cache_hints.py)."""
    names = source.fn.arg_names
    return "EVICT_FIRST" in names and bool(source.constants[(names.index("EVICT_FIRST"),)])


def compile_source(name: str, source: ASTSource, arch: int, options: dict[str, Any]) -> BuiltKernel:
    """Compile one kernel for `sm_<arch>`; needs no GPU."""
    start = time.perf_counter()

    def compile_with(options: dict[str, Any]) -> Any:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

    kernel = with_hints(compile_with, options) if evicts_first(source) else compile_with(options)
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
    head_dim = max(spec.head_dim, spec.v_head_dim)
    for height, tall in itertools.product(tile_heights(spec.group_size), (False, True)):
        if height >= TALL_ROWS and not tall:
            continue
        config = tile_config(spec.kv_dtype.itemsize, head_dim, height, arch, tall=tall)
        pairs = uses_pairs(spec, height, arch, interpreted=False)
        evicting = (False, True) if pdl and height < TALL_ROWS else (False,)
        for chained, evicts in itertools.product((False, True) if pdl else (False,), evicting):
            features = Features(pdl=pdl, evict_first=evicts)
            variant = attend_variant(spec, config, height, features, pairs=pairs, chained=chained)
            kind = f"{spec.q_dtype}_{spec.kv_dtype}".replace("torch.", "")
            ending = f"{'_chained' if chained else ''}{'_evicts' if evicts else ''}"
            name = f"attend_{kind}_d{spec.head_dim}_m{height}{'+' if tall else ''}{ending}"
            yield name, attend_source(spec, variant), variant.options
    for name, joined in (("few", FEW_PARTS), ("some", SOME_PARTS), ("many", MANY_PARTS)):
        for watched in (False, True) if joined.watched else (False,):
            merge = merge_variant(spec, joined, Features(pdl=pdl, watched=watched), chained=pdl)
            ending = "_watched" if watched else ""
            yield f"merge_d{spec.v_head_dim}_{name}{ending}", merge_source(spec, merge), merge.options
    yield from importlib.import_module("radixpool.kernels.copy_build").write_sources(spec)
    yield from importlib.import_module("radixpool.kernels.plan_send").step_sources()
    if extend_config(spec, arch) is not None and gluon_launcher() is not None:
        yield from importlib.import_module("radixpool.kernels.extend_build").fast_sources(spec, arch)


def kernel_names(spec: AttentionSpec, arch: int) -> list[str]:
    """Return the names of the kernels that `build_model` compiles, in order."""
    return [name for name, _, _ in model_sources(spec, arch)]


def build_named(spec: AttentionSpec, arch: int, name: str) -> BuiltKernel:
    """Compile the kernel `name` of `kernel_names` into Triton's cache; the result holds no code."""
    source, options = next((s, o) for n, s, o in model_sources(spec, arch) if n == name)
    return dataclasses.replace(compile_source(name, source, arch, options), asm={})


def build_model(spec: AttentionSpec, arch: int, *, jobs: int = 1) -> Iterator[BuiltKernel]:
    """Compile every kernel of a model's shapes into Triton's cache, `jobs` at a time; yield them as they are done.

    The planner's C code, where there is a compiler for it, is built with them. Needs no GPU. A few seconds of CPU for
    each kernel that the cache does not hold yet.
    """
    native_cut.library()
    names = kernel_names(spec, arch)
    if jobs == 1:
        yield from (build_named(spec, arch, name) for name in names)
        return
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(build_named, spec, arch, name) for name in names]):
            yield done.result()
