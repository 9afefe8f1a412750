"""Ahead-of-time compilation of the fast extend kernel, with or without a GPU; `build.py` adds it to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from radixpool.kernels.build import FLOATS, POINTERS
from radixpool.kernels.extend_device import UNSPECIALISED, extend_tiles
from radixpool.kernels.extend_device_widen import widen_blocks
from radixpool.kernels.extend_launch import BOX_LAYOUT, LAUNCH_OPTIONS, extend_constants
from radixpool.kernels.extend_plan import BOX_COLUMNS, ExtendConfig, extend_config
from radixpool.kernels.extend_widen import WIDEN_OPTIONS, widen_constants
from radixpool.kernels.spec import AttentionSpec

INTEGER_TABLES = ("TABLES", "ENTRIES", "STARTS", "ORDER", "LIMITS")


def argument_type(name: str, spec: AttentionSpec, config: ExtendConfig, constants: dict[str, Any]) -> str:
    """Return the Triton type of one argument of `extend_tiles`."""
    pointer = POINTERS[spec.q_dtype]
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        return f"tensordesc<{pointer[1:]}[1, 1, {config.page}, {BOX_COLUMNS}],{BOX_LAYOUT!r}>"
    if name in FLOATS:
        return "fp32"
    if name.isupper():
        return pointer if name in ("Q", "OUT") else "*i32" if name in INTEGER_TABLES else "*fp32"
    return "i32"


def extend_source(spec: AttentionSpec, config: ExtendConfig, **features: bool) -> tuple[GluonASTSource, dict[str, Any]]:
    """Return source and compiler options of `extend_tiles` as a server with these shapes would compile it."""
    constants = extend_constants(spec, config, **features)
    signature = {n: argument_type(n, spec, config, constants) for n in extend_tiles.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name not in UNSPECIALISED)
    }
    return GluonASTSource(extend_tiles, signature=signature, constexprs=constants, attrs=attrs), LAUNCH_OPTIONS


def widen_source(spec: AttentionSpec) -> ASTSource:
    """Return the source of `widen_blocks` for an fp8 pool of these shapes."""
    constants = widen_constants(spec)
    kinds = {"K": POINTERS[spec.kv_dtype], "V": POINTERS[spec.kv_dtype], "BLOCKS": "*i32"}
    kinds |= {"WIDE_K": POINTERS[spec.q_dtype], "WIDE_V": POINTERS[spec.q_dtype]}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in widen_blocks.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    return ASTSource(widen_blocks, signature=signature, constexprs=constants, attrs=attrs)


def fast_sources(spec: AttentionSpec, arch: int) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Yield name, source and options of what the fast path launches for `spec`; nothing where it isn't taken."""
    config = extend_config(spec, arch)
    if config is None:
        return
    source, options = extend_source(spec, config)
    yield f"extend_{spec.q_dtype}_d{spec.head_dim}".replace("torch.", ""), source, options
    if config.widen:
        yield f"widen_d{spec.head_dim}", widen_source(spec), WIDEN_OPTIONS
