"""`build_forest` in C: the same cut, bit for bit; numpy's where there is no C compiler. See `forest_paths.c`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from radixpool.kernels import forest as numpy_cut
from radixpool.kernels import launch, token_cuts
from radixpool.kernels.forest import RECORD, ROW_RECORD, Array, Forest, TallKernel
from radixpool.kernels.launch import TILE_ROWS, DeviceInfo, TileConfig
from radixpool.kernels.native import load
from radixpool.kernels.spec import AttentionSpec

SOURCES = ("forest_paths", "forest_cut")
CONSTANTS = {
    numpy_cut: ("RECORD", "ROW_RECORD", "JOIN_SHARE", "TALL_COST", "BESIDE_SHARE", "TALL_COST_APART",
                "NARROW_COST_APART"),
    token_cuts: ("ITEM_OVERHEAD_TOKENS", "MIN_PIECE_TOKENS", "CUT_TOKENS", "WHOLE_TILE_SLACK"),
    launch: ("TALL_ROWS",),
}  # fmt: skip


class Batch(ctypes.Structure):
    """What the C function reads; mirrors `Batch` of forest_paths.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lens", "query_lens", "query_starts")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "stride", "block_size", "group_size",
                                              "kv_bytes_per_token", "v_head_dim", "item_overhead_bytes")),
        ("min_gain_bytes", ctypes.c_double),
        ("programs", ctypes.c_int64 * 2 * 2 * len(TILE_ROWS)),
        *((name, ctypes.c_int64) for name in ("persistent", "num_sms", "num_kv_heads", "sm_step")),
        ("per_sm", ctypes.c_int64 * len(TILE_ROWS)),
    )  # fmt: skip


class Sizes(ctypes.Structure):
    """What the C function says of its result; mirrors `Sizes` of forest_paths.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_merge_rows", "num_merge_parts", "num_parts",
                                              "unique_tokens", "growable", "tall", "tall_sms")),
        ("items", ctypes.c_int64 * len(TILE_ROWS)),
        ("programs", ctypes.c_int64 * len(TILE_ROWS)),
    )  # fmt: skip


def constants() -> tuple[tuple[str, float], ...]:
    """Return the macros that the C code is compiled with: the constants of its definition in numpy."""
    return tuple((name, getattr(module, name)) for module, names in CONSTANTS.items() for name in names)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code with its signatures, or None."""
    found = load(SOURCES, constants())
    if found is not None:
        found.radixpool_cut.restype = ctypes.c_void_p
        found.radixpool_cut.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        found.radixpool_take.restype = None
        found.radixpool_take.argtypes = (ctypes.c_void_p,) * 4
        found.radixpool_compare.restype = ctypes.c_int64
        found.radixpool_compare.argtypes = (ctypes.c_void_p,) * 3
    return found


@functools.lru_cache(maxsize=64)
def fixed_fields(
    spec: AttentionSpec, device: DeviceInfo, config_of: Callable[[int, bool], TileConfig], min_gain_bytes: float,
    item_overhead_bytes: int, tall_kernel: TallKernel,
) -> bytes:  # fmt: skip
    """Return a `Batch` without its arrays: what stays the same from step to step."""
    batch = Batch(
        block_size=spec.block_size, group_size=spec.group_size, kv_bytes_per_token=spec.kv_bytes_per_token,
        v_head_dim=spec.v_head_dim, item_overhead_bytes=item_overhead_bytes, min_gain_bytes=min_gain_bytes,
        persistent=tall_kernel == "persistent", num_sms=device.num_sms, num_kv_heads=spec.num_kv_heads,
        sm_step=numpy_cut.sm_step(config_of, spec),
    )  # fmt: skip
    for h, height in enumerate(TILE_ROWS):
        batch.per_sm[h] = config_of(height, height == TILE_ROWS[-1]).ctas_per_sm
        for tall in (0, 1):
            for beside in (0, 1):
                batch.programs[h][tall][beside] = numpy_cut.programs_of(
                    height, config_of, spec, device, tall=bool(tall), beside=bool(beside)
                )
    return bytes(batch)


def build_forest(
    tables: Array, lens: Array, query_lens: Array, query_starts: Array, spec: AttentionSpec, device: DeviceInfo,
    config_of: Callable[[int, bool], TileConfig], *, min_gain_bytes: float = 1.0,
    tall_kernel: TallKernel = "plain",
) -> Forest:  # fmt: skip
    """Cut a batch as `forest.build_forest` does; in C where there is a compiler. int32 arrays, contiguous rows."""
    code = library()
    if code is None:
        return numpy_cut.build_forest(
            tables, lens, query_lens, query_starts, spec, device, config_of, min_gain_bytes=min_gain_bytes,
            tall_kernel=tall_kernel,
        )  # fmt: skip
    fixed = fixed_fields(spec, device, config_of, min_gain_bytes, numpy_cut.ITEM_OVERHEAD_BYTES, tall_kernel)
    batch, sizes = Batch.from_buffer_copy(fixed), Sizes()
    batch.tables, batch.lens = tables.ctypes.data, lens.ctypes.data
    batch.query_lens, batch.query_starts = query_lens.ctypes.data, query_starts.ctypes.data
    (batch.num_seqs, batch.width), batch.stride = tables.shape, tables.strides[0] // tables.itemsize
    handle = code.radixpool_cut(ctypes.addressof(batch), ctypes.addressof(sizes))
    if not handle:
        raise MemoryError("plan: no memory for the work items")
    items, merged = list(sizes.items), sizes.num_merge_rows
    widths = (sizes.num_rows * ROW_RECORD, merged, merged + 1, sizes.num_merge_parts, *(n * RECORD for n in items))
    out = np.empty(sum(widths), np.int32)
    code.radixpool_take(handle, ctypes.addressof(batch), ctypes.addressof(sizes), out.ctypes.data)
    return forest_of(out, widths, sizes)


def forest_of(out: Array, widths: tuple[int, ...], sizes: Sizes) -> Forest:
    """Return the forest whose arrays lie in `out`, one after another."""
    parts, done = [], 0
    for width in widths:
        parts.append(out[done : done + width])
        done += width
    rows, merge_rows, merge_starts, merge_parts, *items = parts
    present = [(h, i) for i, h in enumerate(TILE_ROWS) if sizes.programs[i]]
    return Forest(
        items={h: items[i].reshape(-1, RECORD) for h, i in present},
        programs={h: sizes.programs[i] for h, i in present},
        rows=rows.reshape(-1, ROW_RECORD), merge_rows=merge_rows, merge_starts=merge_starts, merge_parts=merge_parts,
        num_parts=sizes.num_parts, unique_tokens=sizes.unique_tokens, growable=bool(sizes.growable),
        tall=bool(sizes.tall), tall_sms=sizes.tall_sms,
    )  # fmt: skip
