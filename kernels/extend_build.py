"""Ahead-of-time compilation of the fast extend kernel, with or without a GPU; `build.py` adds it to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from radixpool.kernels.build import FLOATS, POINTERS
from radixpool.kernels.extend_device import extend_tiles
from radixpool.kernels.extend_device_fp8 import extend_tiles_fp8
from radixpool.kernels.extend_device_load import UNSPECIALISED
from radixpool.kernels.extend_device_turn import TURN_UNSPECIALISED, turn_values
from radixpool.kernels.extend_device_widen import widen_blocks
from radixpool.kernels.extend_launch import (
    BOX_LAYOUT,
    FP8_VALUE_LAYOUT,
    LAUNCH_OPTIONS,
    boxes,
    extend_constants,
    key_layout,
)
from radixpool.kernels.extend_plan import ExtendConfig, extend_config, fp8_config, wide_tiles
from radixpool.kernels.extend_turn import TURN_OPTIONS, turn_constants
from radixpool.kernels.extend_widen import WIDEN_OPTIONS, widen_constants
from radixpool.kernels.spec import AttentionSpec, Precision

INTEGER_TABLES = ("TABLES", "ENTRIES", "STARTS", "ORDER", "LIMITS", "RUNS", "PLACES")


def box_types(spec: AttentionSpec, config: ExtendConfig, precision: Precision) -> dict[str, str]:
    """Return the Triton types of the copy descriptors."""
    dtype = "fp8e4nv" if precision == "fp8" else POINTERS[spec.q_dtype][1:]
    k_box, v_box = (str(list(box)) for box in boxes(config, precision))
    v_layout = FP8_VALUE_LAYOUT if precision == "fp8" else BOX_LAYOUT
    return {
        "k_desc": f"tensordesc<{dtype}{k_box},{key_layout(config, precision)!r}>",
        "v_desc": f"tensordesc<{dtype}{v_box},{v_layout!r}>",
    }


def argument_type(name: str, spec: AttentionSpec, descriptors: dict[str, str], constants: dict[str, Any]) -> str:
    """Return the Triton type of one argument of a fast kernel."""
    if name in constants:
        return "constexpr"
    if name in descriptors:
        return descriptors[name]
    if name in FLOATS:
        return "fp32"
    if name.isupper():
        return POINTERS[spec.q_dtype] if name in ("Q", "OUT") else "*i32" if name in INTEGER_TABLES else "*fp32"
    return "i32"


def extend_source(
    spec: AttentionSpec, config: ExtendConfig, precision: Precision = "full", **features: bool
) -> tuple[GluonASTSource, dict[str, Any]]:  # fmt: skip
    """Return source and compiler options of a fast kernel as a server with these shapes would compile it."""
    function = extend_tiles_fp8 if precision == "fp8" else extend_tiles
    constants = extend_constants(spec, config, **features)
    descriptors = box_types(spec, config, precision)
    signature = {n: argument_type(n, spec, descriptors, constants) for n in function.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name not in UNSPECIALISED)
    }
    return GluonASTSource(function, signature=signature, constexprs=constants, attrs=attrs), LAUNCH_OPTIONS


def widen_source(spec: AttentionSpec) -> ASTSource:
    """Return the source of `widen_blocks` for an fp8 pool of these shapes."""
    constants = widen_constants(spec)
    kinds = {"K": POINTERS[spec.kv_dtype], "V": POINTERS[spec.kv_dtype], "BLOCKS": "*i32"}
    kinds |= {"WIDE_K": POINTERS[spec.q_dtype], "WIDE_V": POINTERS[spec.q_dtype]}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in widen_blocks.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    return ASTSource(widen_blocks, signature=signature, constexprs=constants, attrs=attrs)


def turn_source(spec: AttentionSpec) -> ASTSource:
    """Return the source of `turn_values` for an fp8 pool of these shapes."""
    constants = turn_constants(spec)
    kinds = {"V": "*i32", "TURNED": "*i32", "TABLES": "*i32", "CHUNKS": "*i32"}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in turn_values.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and name not in TURN_UNSPECIALISED
    }
    return ASTSource(turn_values, signature=signature, constexprs=constants, attrs=attrs)


def fast_sources(spec: AttentionSpec, arch: int) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Yield name, source and options of what the fast path launches for `spec`; nothing where it isn't taken."""
    config = extend_config(spec, arch)
    if config is None:
        return
    source, options = extend_source(spec, config)
    name = f"extend_{spec.q_dtype}_d{spec.head_dim}".replace("torch.", "")
    yield name, source, options
    wide = wide_tiles(config)
    if wide is not None:
        source, options = extend_source(spec, wide)
        yield f"{name}_wide", source, options
    if config.widen:
        yield f"widen_d{spec.head_dim}", widen_source(spec), WIDEN_OPTIONS
    config = fp8_config(spec, arch)
    if config is not None:
        source, options = extend_source(spec, config, "fp8")
        yield f"extend_fp8_d{spec.head_dim}", source, options
        yield f"turn_d{spec.v_head_dim}", turn_source(spec), TURN_OPTIONS
