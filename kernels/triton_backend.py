"""The Triton backend: turns checked arguments into launches. Device code lives in `device_attend.py`, `device_copy.py`.

Attention is up to four launches of `attend_items`, one per tile height in use, and one of `merge_partials`. Where the
device has programmatic dependent launch they overlap: each starts when the one before has started, and waits for it at
its end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from radixpool.kernels.device_attend import attend_items
from radixpool.kernels.device_copy import merge_finished, move_blocks, rotate_rows, write_slots
from radixpool.kernels.device_merge import merge_partials
from radixpool.kernels.device_plan import state_width
from radixpool.kernels.extend_path import fast_extend
from radixpool.kernels.extend_plan import FAST_ROWS, plain_only
from radixpool.kernels.launch import TALL_ROWS, MergeConfig, TileConfig, next_power_of_two, uses_pairs
from radixpool.kernels.plan import ForestPlan
from radixpool.kernels.rope import RoPE
from radixpool.kernels.spec import AttentionSpec, Precision
from radixpool.kernels.tree_mask import TreeMask
from radixpool.kernels.variant import INTERPRETED, KernelVariant, Launch, alignment_of

Scale = float | Tensor | None


def split_scales(k_scale: Scale, v_scale: Scale) -> tuple[float, float, Tensor | None, Tensor | None]:
    """Split scales into numbers, folded on the host, and tensors, read on the device (both or none)."""
    k_number = 1.0 if k_scale is None or isinstance(k_scale, Tensor) else float(k_scale)
    v_number = 1.0 if v_scale is None or isinstance(v_scale, Tensor) else float(v_scale)
    k = k_scale if isinstance(k_scale, Tensor) else None
    v = v_scale if isinstance(v_scale, Tensor) else None
    if k is None and v is not None:
        k = torch.ones_like(v)
    if v is None and k is not None:
        v = torch.ones_like(k)
    if k is not None and v is not None and (k.ndim == 3) != (v.ndim == 3):
        raise ValueError("k_scale, v_scale: expected both or none of them per token and head")
    return k_number, v_number, k, v


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Return block, head and token strides of a scale tensor; one number for all heads has stride 0."""
    if scale is None:
        return 0, 0, 0
    if scale.ndim == 3:
        return scale.stride(0), scale.stride(1), scale.stride(2)
    return 0, scale.stride(0) if scale.ndim and len(scale) > 1 else 0, 0


TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Features:
    """What a call of attention asks of its kernels, beyond the shapes."""

    head_scales: bool = False
    token_scales: bool = False
    cap: bool = False
    window: bool = False
    sinks: bool = False
    lse: bool = False
    tree: bool = False
    alibi: bool = False
    fp8: bool = False
    same_strides: bool = True
    watched: bool = False
    evict_first: bool = False
    pdl: bool = False


@functools.cache
def attend_variant(
    spec: AttentionSpec, config: TileConfig, tile_rows: int, features: Features, *, pairs: bool, chained: bool
) -> KernelVariant:  # fmt: skip
    """Return the kernel of one tile class. `chained`: launched as the dependent of the launch before."""
    fp8 = spec.kv_dtype == torch.float8_e4m3fn
    tile_dtype = torch.float32 if INTERPRETED else torch.float16 if fp8 else spec.q_dtype
    per = 2 if pairs else 1
    constants = {
        "HQ": spec.num_q_heads, "G": spec.group_size, "D": spec.head_dim, "DV": spec.v_head_dim,
        "BLOCK_D": max(16, next_power_of_two(spec.head_dim) // per),
        "BLOCK_DV": max(16, next_power_of_two(spec.v_head_dim) // per), "BLOCK_SIZE": spec.block_size,
        "BM": tile_rows, "BN": config.block_n, "STAGES": config.num_stages, "TILE_DTYPE": TRITON_DTYPES[tile_dtype],
        "PAIRS": pairs, "HEAD_SCALES": features.head_scales, "TOKEN_SCALES": features.token_scales,
        "CAP": features.cap, "ALIBI": features.alibi, "WINDOW": features.window, "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse, "TREE": features.tree, "FP8": features.fp8 and tile_rows >= TALL_ROWS,
        "SPLIT": config.split and not (features.window or features.token_scales or features.tree),
        "SAME_STRIDES": features.same_strides, "STATE": state_width(spec), "INTERPRETED": INTERPRETED,
        "PDL": features.pdl,
        "EVICT_FIRST": features.evict_first and tile_rows < TALL_ROWS,  # tall tiles share what they read
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    if chained:
        options["launch_pdl"] = True
    return KernelVariant(attend_items, constants, options)


@functools.cache
def merge_variant(spec: AttentionSpec, config: MergeConfig, features: Features, *, chained: bool) -> KernelVariant:
    """Return the kernel that merges partial states."""
    constants = {
        "HQ": spec.num_q_heads, "DV": spec.v_head_dim, "BLOCK_DV": next_power_of_two(spec.v_head_dim),
        "STATE": state_width(spec), "HEADS": min(config.heads, next_power_of_two(spec.num_q_heads)),
        "GROUPS": config.groups, "BLOCK_N": config.block_n, "HAS_SINKS": features.sinks, "HAS_LSE": features.lse,
        "WATCHED": features.watched, "INTERPRETED": INTERPRETED, "PDL": features.pdl,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if chained:
        options["launch_pdl"] = True
    return KernelVariant(merge_partials, constants, options)


def as_pairs(pool: Tensor) -> Tensor:
    """Return an fp8 pool as int16 pairs."""
    return pool.view(torch.int16)


class BoundCall:
    """The launches of one plan for one kind of call: everything but the tensors, found once and kept with the plan.

    A call that stops between them (Ctrl-C, a kernel that does not load) leaves states of the next call's phase: the
    plan then begins as after a new cut (device_merge.py).
    """

    __slots__ = ("items", "marks", "merge")

    def __init__(
        self, plan: ForestPlan, features: Features, tensors: tuple[Tensor, ...], *, fast_rows: int = 0
    ) -> None:  # fmt: skip
        spec, on_device = plan.spec, plan.device_plan
        assert on_device is not None and on_device.workspace is not None
        q, k_pool, v_pool, k_scale, v_scale = tensors[:5]
        sections, work, tables = on_device.sections, on_device.workspace, on_device.tables
        self.marks = sections["marks"]
        states = (work.part, work.part_lse, self.marks)
        assert tables is not None
        scaled = features.head_scales or features.token_scales
        scales = (*scale_strides(k_scale), *scale_strides(v_scale)) if scaled else (0,) * 6
        chained = False
        self.items: list[tuple[Launch, bool]] = []
        for height in reversed(on_device.heights):
            if height == fast_rows:  # the fast extend kernel runs these; the next one may start in its tail
                chained = features.pdl
                continue
            pairs = uses_pairs(spec, height, on_device.device.arch, interpreted=INTERPRETED)
            variant = attend_variant(
                spec, plan.config_of(height, tall=on_device.tall), height, features, pairs=pairs, chained=chained
            )
            grid = (spec.num_kv_heads, on_device.heights[height], 1)
            fixed = (*states, tables, sections["lens"], sections[f"items{height}"], sections["rows"])
            k, v = (as_pairs(k_pool), as_pairs(v_pool)) if pairs else (k_pool, v_pool)
            strides = (q.stride(0), q.stride(1), on_device.table_stride, *k.stride()[:3], *v.stride()[:3])
            self.items.append((Launch(variant, grid, fixed, (*strides, *scales)), pairs))
            chained = features.pdl
        self.merge: Launch | None = None
        if on_device.merge_grid:
            variant = merge_variant(spec, on_device.merge, features, chained=chained and features.pdl)
            lists = (sections[name] for name in ("merge_rows", "merge_starts", "merge_parts", "counts"))
            grid = (on_device.merge_grid, -(-spec.num_q_heads // variant.constants["HEADS"]), 1)
            self.merge = Launch(variant, grid, (*states, *lists), ())

    def first(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], kind: Any) -> None:
        """Launch, once all is compiled, so that what does not compile stops nothing half-way."""
        q, k_pool, v_pool, *others = tensors
        calls: list[tuple[Launch, tuple[Tensor, ...], tuple[float, ...]]] = []
        for launch, pairs in self.items:
            k, v = (as_pairs(k_pool), as_pairs(v_pool)) if pairs else (k_pool, v_pool)
            calls.append((launch, (q, k, v, *others), numbers))
        if self.merge is not None:
            calls.append((self.merge, tensors[-3:], ()))
        for launch, given, values in calls:
            launch.prepare(given, values, kind)
        try:
            for launch, given, values in calls:
                launch.first(given, values, kind)
        except BaseException:
            self.marks.zero_()
            raise

    def again(self, addresses: list[int], numbers: tuple[float, ...], stream: int) -> None:
        """Launch what `first` compiled."""
        try:
            for launch, _ in self.items:
                launch.again(addresses, numbers, stream)
            if self.merge is not None:
                self.merge.again(addresses[-3:], (), stream)
        except BaseException:
            self.marks.zero_()
            raise


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ForestPlan, *, scale: float, window: int, soft_cap: float,
    sinks: Tensor | None, k_scale: Scale, v_scale: Scale, out: Tensor, lse: Tensor | None, kind: tuple[Any, ...],
    tree: TreeMask | None = None, alibi_slopes: Tensor | None = None, precision: Precision = "full",
) -> None:  # fmt: skip
    """Launch attention for a planned batch; writes all of `out` and `lse`. Calls of one `kind` share their binding."""
    on_device = plan.device_plan
    assert on_device is not None
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            attention(
                q, k_pool, v_pool, plan, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, k_scale=k_scale,
                v_scale=v_scale, out=out, lse=lse, kind=kind, tree=tree, alibi_slopes=alibi_slopes,
                precision=precision,
            )  # fmt: skip
        return
    k_number, v_number, k_tensor, v_tensor = split_scales(k_scale, v_scale)
    token_scales = k_tensor is not None and k_tensor.ndim == 3
    plain = plain_only(token_scales=token_scales, tree=tree is not None, alibi=alibi_slopes is not None)
    fast = None if plain else fast_extend(plan, k_pool, v_pool, precision)
    if fast is not None:
        fast.launch(
            q, k_pool, v_pool, out=out, lse=lse, scale=scale * k_number, v_factor=v_number, soft_cap=soft_cap,
            window=window, sinks=sinks, k_scale=k_tensor, v_scale=v_tensor,
        )  # fmt: skip
    assert on_device.workspace is not None
    dummy = on_device.workspace.part_lse
    nodes, depths = (dummy, dummy) if tree is None else tree.within(window)
    tensors = (
        q, k_pool, v_pool, dummy if k_tensor is None else k_tensor, dummy if v_tensor is None else v_tensor, nodes,
        depths, dummy if alibi_slopes is None else alibi_slopes, out, dummy if lse is None else lse,
        dummy if sinks is None else sinks,
    )  # fmt: skip
    numbers = (scale * k_number, v_number, float(soft_cap), window)
    addresses = [t.data_ptr() for t in tensors]
    key = (kind, window > 0, soft_cap > 0, alignment_of(addresses), fast is not None)
    bound = on_device.bound.get(key)
    if bound is not None and not INTERPRETED:
        bound.again(addresses, numbers, driver.active.get_current_stream(q.device.index))
        return
    features = Features(
        head_scales=k_tensor is not None and not token_scales, token_scales=token_scales, cap=soft_cap > 0,
        window=window > 0, sinks=sinks is not None, lse=lse is not None, tree=tree is not None,
        alibi=alibi_slopes is not None, fp8=precision == "fp8",
        same_strides=k_pool.stride() == v_pool.stride(), watched=on_device.watched,
        evict_first=on_device.evict_first and on_device.device.arch >= 90, pdl=on_device.device.pdl,
    )  # fmt: skip
    bound = BoundCall(plan, features, tensors, fast_rows=FAST_ROWS if fast else 0)
    bound.first(tensors, numbers, key)
    on_device.bound[key] = bound


def rope_arguments(x: Tensor, rope: RoPE | None) -> tuple[Tensor, Tensor, int, bool]:
    """Return cos, sin, half of the rotary width (0: none) and the pairing."""
    if rope is None:
        return x, x, 0, False
    return rope.cos.contiguous(), rope.sin.contiguous(), rope.cos.shape[1], rope.interleaved


def tokens_per_program(num_tokens: int) -> int:
    """Return how many tokens one program moves: one while there are few, to spread them over the device."""
    return 1 if num_tokens <= 512 else 16


@functools.cache
def copy_variant(function: Any, num_warps: int, **constants: Any) -> KernelVariant:
    """Return a variant of one of the kernels that move data."""
    return KernelVariant(function, constants, {"num_warps": num_warps})


def write_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, k_scale: Scale, v_scale: Scale,
    rope: RoPE | None,
) -> None:  # fmt: skip
    """Launch the write of new K and V."""
    if not len(slots):
        return
    tokens = tokens_per_program(len(slots))
    for x, pool, scale, turn in ((k, k_pool, k_scale, rope), (v, v_pool, v_scale, None)):
        tensor = scale if isinstance(scale, Tensor) else None
        cos, sin, half, interleaved = rope_arguments(x, turn)
        variant = copy_variant(
            write_slots, 1 if tokens == 1 else 4, D=pool.shape[3], BLOCK_D=next_power_of_two(pool.shape[3]),
            BLOCK_SIZE=pool.shape[2], BT=tokens, HALF=half, INTERLEAVED=interleaved,
            FP8=pool.dtype == torch.float8_e4m3fn, HEAD_SCALES=tensor is not None and tensor.ndim < 3,
            TOKEN_SCALES=tensor is not None and tensor.ndim == 3,
        )  # fmt: skip
        number = 1.0 if tensor is not None or scale is None else float(scale)
        variant.launch((-(-len(slots) // tokens), pool.shape[1], 1), (
            x, pool, slots, x if tensor is None else tensor, cos, sin, number, len(slots), x.stride(0), x.stride(1),
            *pool.stride()[:3], *scale_strides(tensor),
        ))  # fmt: skip


def apply_rope(x: Tensor, rope: RoPE) -> Tensor:
    """Return `x` turned by `rope`, in a new tensor."""
    out = torch.empty_like(x)
    if x.numel():
        cos, sin, half, interleaved = rope_arguments(x, rope)
        tokens = tokens_per_program(len(x))
        variant = copy_variant(
            rotate_rows, 1 if tokens == 1 else 4, D=x.shape[2], BLOCK_D=next_power_of_two(x.shape[2]), BT=tokens,
            HALF=half, INTERLEAVED=interleaved,
        )  # fmt: skip
        variant.launch((-(-len(x) // tokens), x.shape[1], 1), (
            x, out, cos, sin, len(x), x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        ))  # fmt: skip
    return out


def move(src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None, count: int) -> None:
    """Launch the copy of `count` blocks; a side without ids counts from 0."""
    if src.dtype == torch.float8_e4m3fn:
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    block_d = next_power_of_two(src.shape[3])
    variant = copy_variant(
        move_blocks, 4, D=src.shape[3], BLOCK_D=block_d, BLOCK_SIZE=src.shape[2],
        BT=min(next_power_of_two(src.shape[2]), max(1, 4096 // block_d)), SRC_INDEXED=src_ids is not None,
        DST_INDEXED=dst_ids is not None,
    )  # fmt: skip
    variant.launch((count, src.shape[1], 1), (
        src, dst, src if src_ids is None else src_ids, dst if dst_ids is None else dst_ids, *src.stride()[:3],
        *dst.stride()[:3],
    ))  # fmt: skip


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks; through a temporary where a destination is also read."""
    src_ids, dst_ids = src.to(pool.device), dst.to(pool.device)
    if set(src.tolist()).isdisjoint(dst.tolist()):
        move(pool, pool, src_ids, dst_ids, len(src))
        return
    held = torch.empty((len(src), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    move(pool, held, src_ids, None, len(src))
    move(held, pool, None, dst_ids, len(src))


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copy blocks to contiguous memory."""
    move(pool, out, blocks.to(pool.device), None, len(blocks))


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge finished states, one program per row and head."""
    if lse.numel():
        variant = copy_variant(merge_finished, 1, D=outs.shape[3], BLOCK_D=next_power_of_two(outs.shape[3]))
        variant.launch((lse.numel(), 1, 1), (outs, lses, out, lse, outs.shape[0], lse.numel()))
