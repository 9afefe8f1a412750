"""Host side of the fast extend path: uploads a schedule, builds copy descriptors, launches the Gluon kernels.

Imported only where the fast path is taken (Hopper, Triton with Gluon).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixpool.kernels.extend_device import extend_tiles
from radixpool.kernels.extend_device_fp8 import extend_tiles_fp8
from radixpool.kernels.extend_plan import BOX_COLUMNS, ENTRY, FP8_BOX_COLUMNS, ExtendConfig, ExtendSchedule
from radixpool.kernels.spec import AttentionSpec, Precision
from radixpool.kernels.variant import KernelVariant, alignment_of

BOX_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FP8_VALUE_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
# 65,536 registers over 3 warpgroups: the two consumers then take 240 a thread, the producers 24.
LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": 4, "maxnreg": 168}
ALIGN = 4  # int32: every view starts on 16 bytes, so that Triton compiles one kernel, not one for each alignment


@dataclass(frozen=True, slots=True)
class DeviceSchedule:
    """A schedule on the device: one buffer, four views."""

    entries: Tensor
    rows: Tensor
    limits: Tensor
    starts: Tensor
    programs: int


def upload(schedule: ExtendSchedule, device: torch.device) -> DeviceSchedule:
    """Copy a schedule to the device in one transfer."""
    parts = [schedule.entries.reshape(-1), schedule.rows, schedule.limits, schedule.starts]
    parts = [np.pad(p, (0, -len(p) % ALIGN)) for p in parts]
    buffer = torch.from_numpy(np.concatenate(parts)).to(device)
    entries, rows, limits, starts = torch.split(buffer, [len(p) for p in parts])
    return DeviceSchedule(entries.view(-1, ENTRY), rows, limits, starts, len(schedule.starts) - 1)


def describe(pool: Tensor, box: tuple[int, int, int, int], layout: NVMMASharedLayout) -> TensorDescriptor:
    """Return the copy descriptor of a four-dimensional tensor."""
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), list(box), layout)


def key_layout(config: ExtendConfig, precision: Precision) -> NVMMASharedLayout:
    """Return how the copy engine lays out keys in shared memory."""
    if precision == "full":
        return BOX_LAYOUT
    columns = min(config.block_d, FP8_BOX_COLUMNS)
    return NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=4)


def boxes(config: ExtendConfig, precision: Precision) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return what one bulk copy of keys takes, and one of values: tokens of a page by columns, or one turned chunk."""
    if precision == "full":
        return (1, 1, config.page, BOX_COLUMNS), (1, 1, config.page, BOX_COLUMNS)
    return (1, 1, config.page, min(config.block_d, FP8_BOX_COLUMNS)), (1, 1, config.block_dv, config.block_n)


def extend_constants(
    spec: AttentionSpec, config: ExtendConfig, *, head_scales: bool = False, cap: bool = False, window: bool = False,
    sinks: bool = False, lse: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of a fast kernel: its identity."""
    return {
        "ROWS": config.tile_rows // 2, "HQ": spec.num_q_heads, "G": spec.group_size, "D": spec.head_dim,
        "DV": spec.v_head_dim, "BD": config.block_d, "BDV": config.block_dv, "BLOCK_SIZE": spec.block_size,
        "PAGE": config.page, "BN": config.block_n,
        "STAGES": config.num_stages, "V_STAGES": config.value_stages, "HEAD_SCALES": head_scales, "CAP": cap,
        "WINDOW": window, "HAS_SINKS": sinks, "HAS_LSE": lse,
    }  # fmt: skip


@functools.cache
def tile_variant(
    spec: AttentionSpec, config: ExtendConfig, precision: Precision, **features: bool
) -> KernelVariant:  # fmt: skip
    """Return one of the fast kernels with its compile-time arguments."""
    function = extend_tiles_fp8 if precision == "fp8" else extend_tiles
    return KernelVariant(function, extend_constants(spec, config, **features), LAUNCH_OPTIONS)


def launch_extend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, schedule: DeviceSchedule, *, spec: AttentionSpec, config: ExtendConfig,
    precision: Precision, places: tuple[Tensor, ...], tables: Tensor, part: Tensor, part_lse: Tensor, out: Tensor,
    lse: Tensor | None, scale: float, v_factor: float, soft_cap: float, window: int, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    """Launch the tall tiles of one planned batch; `k_scale`, `v_scale` are per head (or one number, stride 0).

    With fp8 products `v_pool` holds turned chunks and `places` says where entries find them (`Turning`).
    """
    variant = tile_variant(
        spec, config, precision, head_scales=k_scale is not None, cap=soft_cap > 0, window=window > 0,
        sinks=sinks is not None, lse=lse is not None,
    )  # fmt: skip
    dummy = part_lse
    k_box, v_box = boxes(config, precision)
    descriptors = (
        describe(k_pool, k_box, key_layout(config, precision)),
        describe(v_pool, v_box, FP8_VALUE_LAYOUT if precision == "fp8" else BOX_LAYOUT),
    )
    tensors = (
        q, out, dummy if lse is None else lse, part, part_lse, tables, schedule.entries, schedule.starts,
        schedule.rows, schedule.limits, *places, dummy if k_scale is None else k_scale,
        dummy if v_scale is None else v_scale, dummy if sinks is None else sinks,
    )  # fmt: skip
    numbers = (
        scale, v_factor, float(soft_cap), window, q.stride(0), q.stride(1), tables.stride(0), head_stride(k_scale),
        head_stride(v_scale),
    )  # fmt: skip
    kind = (q.device.index, alignment_of([t.data_ptr() for t in tensors]), q.stride(0) % 16 == 0, q.stride(1) % 16 == 0)
    kernel = variant.kernel_for((*descriptors, *tensors, *numbers), kind)
    kernel[(schedule.programs, 1, 1)](*descriptors, *tensors, *numbers, *variant.values)


def head_stride(scale: Tensor | None) -> int:
    """Return the stride between heads of a scale tensor; 0 for one number."""
    return scale.stride(0) if scale is not None and scale.ndim == 1 and len(scale) > 1 else 0
