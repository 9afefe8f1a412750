"""Planning in C: `build_forest` gives the same cut, bit for bit; `StepWatch` compares steps.

See `forest_cut.c`. Both fall back to numpy where there is no C compiler.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from radixpool.kernels import forest as numpy_cut
from radixpool.kernels.forest import RECORD, ROW_RECORD, Array, Forest, Long
from radixpool.kernels.launch import TALL_ROWS, TILE_ROWS, DeviceInfo, TileConfig
from radixpool.kernels.native import load
from radixpool.kernels.spec import AttentionSpec

CONSTANTS = (
    "RECORD", "ROW_RECORD", "ITEM_OVERHEAD_TOKENS", "MIN_PIECE_TOKENS", "CUT_TOKENS", "JOIN_SHARE", "TALL_COST",
    "BESIDE_SHARE", "WHOLE_TILE_SLACK",
)  # fmt: skip


class Batch(ctypes.Structure):
    """What the C function reads; mirrors `Batch` of forest_cut.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lens", "query_lens", "query_starts")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "block_size", "group_size", "kv_bytes_per_token",
                                              "v_head_dim", "item_overhead_bytes")),
        ("min_gain_bytes", ctypes.c_double),
        ("programs", ctypes.c_int64 * 2 * 2 * len(TILE_ROWS)),
    )  # fmt: skip


class Sizes(ctypes.Structure):
    """What the C function says of its result; mirrors `Sizes` of forest_cut.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_merge_rows", "num_merge_parts", "num_parts",
                                              "unique_tokens", "growable", "tall")),
        ("items", ctypes.c_int64 * len(TILE_ROWS)),
        ("programs", ctypes.c_int64 * len(TILE_ROWS)),
    )  # fmt: skip


class Step(ctypes.Structure):
    """Two steps to compare; mirrors `Step` of forest_cut.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("old_tables", "tables", "old_lens", "lens", "planned_lens")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "block_size", "max_growth", "stride", "most")),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code with its signatures, or None."""
    constants = {name: getattr(numpy_cut, name) for name in CONSTANTS} | {"TALL_ROWS": TALL_ROWS}
    found = load("forest_cut", tuple(constants.items()))
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
    item_overhead_bytes: int,
) -> bytes:  # fmt: skip
    """Return a `Batch` without its arrays: what stays the same from step to step."""
    batch = Batch(
        block_size=spec.block_size, group_size=spec.group_size, kv_bytes_per_token=spec.kv_bytes_per_token,
        v_head_dim=spec.v_head_dim, item_overhead_bytes=item_overhead_bytes, min_gain_bytes=min_gain_bytes,
    )  # fmt: skip
    for h, height in enumerate(TILE_ROWS):
        for tall in (0, 1):
            for beside in (0, 1):
                batch.programs[h][tall][beside] = numpy_cut.programs_of(
                    height, config_of, spec, device, tall=bool(tall), beside=bool(beside)
                )
    return bytes(batch)


def build_forest(
    tables: Array, lens: Array, query_lens: Array, query_starts: Array, spec: AttentionSpec, device: DeviceInfo,
    config_of: Callable[[int, bool], TileConfig], *, min_gain_bytes: float = 1.0,
) -> Forest:  # fmt: skip
    """Cut a batch as `forest.build_forest` does; in C where there is a compiler. Arrays must be C-contiguous int32."""
    code = library()
    if code is None:
        return numpy_cut.build_forest(
            tables, lens, query_lens, query_starts, spec, device, config_of, min_gain_bytes=min_gain_bytes
        )
    fixed = fixed_fields(spec, device, config_of, min_gain_bytes, numpy_cut.ITEM_OVERHEAD_BYTES)
    batch, sizes = Batch.from_buffer_copy(fixed), Sizes()
    batch.tables, batch.lens = tables.ctypes.data, lens.ctypes.data
    batch.query_lens, batch.query_starts = query_lens.ctypes.data, query_starts.ctypes.data
    batch.num_seqs, batch.width = tables.shape
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
        tall=bool(sizes.tall),
    )  # fmt: skip


class StepWatch:
    """Compares each step's batch with the one before: does the cut still fit, and what is new?

    A sequence may be at most `max_growth` tokens longer than it was planned, and at most `most` table entries may
    change, none below the old length. It owns `tables` and writes new entries into it; `stride` is the width of the
    tables on the device.
    """

    __slots__ = ("block_size", "blocks", "lens", "max_growth", "most", "places", "planned", "step", "stride", "tables")

    def __init__(self, tables: Array, lens: Array, block_size: int, *, stride: int, max_growth: int, most: int) -> None:
        self.tables, self.lens, self.planned = tables, lens.copy(), lens.copy()
        self.block_size, self.stride, self.max_growth, self.most = block_size, stride, max_growth, most
        self.places, self.blocks = np.empty(most, np.int64), np.empty(most, np.int32)
        self.step = self.bound_step()

    def bound_step(self) -> tuple[Step, int, int, int]:
        """Return the arguments of the C function with the arrays kept here, and their addresses, found once."""
        step = Step(
            self.tables.ctypes.data, None, self.lens.ctypes.data, None, self.planned.ctypes.data, *self.tables.shape,
            self.block_size, self.max_growth, self.stride, self.most,
        )  # fmt: skip
        return step, ctypes.addressof(step), self.places.ctypes.data, self.blocks.ctypes.data

    def changes(self, tables: Array | None, lens: Array) -> tuple[Long, Array] | None:
        """Move to the given batch; return places (row * stride + column) and blocks of the table entries it adds.

        `tables=None`: none changed. Returns None where the batch must be cut anew; this watch then ends. The arrays
        are overwritten by the next call. O(table entries); O(lengths) without tables.
        """
        if len(lens) != len(self.lens) or (tables is not None and not self.fit(tables)):
            return None
        code = library()
        found = self.compare(tables, lens) if code is None else self.compare_in_c(code, tables, lens)
        if found is not None:
            self.lens[:] = lens
            if len(found[0]):
                self.tables[found[0] // self.stride, found[0] % self.stride] = found[1]
        return found

    def fit(self, tables: Array) -> bool:
        """Give the watched tables the width of the given ones; return False where the device has no room for that."""
        if tables.shape == self.tables.shape:
            return True
        if len(tables) != len(self.tables) or tables.shape[1] > self.stride:
            return False
        resized = np.full_like(tables, -1)
        both = min(tables.shape[1], self.tables.shape[1])
        resized[:, :both] = self.tables[:, :both]
        self.tables = resized
        self.step = self.bound_step()
        return True

    def compare_in_c(self, code: ctypes.CDLL, tables: Array | None, lens: Array) -> tuple[Long, Array] | None:
        """Do the work of `compare` in C."""
        step, *addresses = self.step
        step.tables = None if tables is None else tables.ctypes.data
        step.lens = lens.ctypes.data
        count = code.radixpool_compare(*addresses)
        return None if count < 0 else (self.places[:count], self.blocks[:count])

    def compare(self, tables: Array | None, lens: Array) -> tuple[Long, Array] | None:
        """Return what `changes` returns, without moving."""
        width = self.tables.shape[1]
        grown = lens.astype(np.int64) - self.planned
        if len(grown) and (grown.min() < 0 or grown.max() > self.max_growth or lens.max() > width * self.block_size):
            return None
        if tables is None:
            return self.places[:0], self.blocks[:0]
        differs = tables != self.tables
        used = -(-self.lens // self.block_size)
        if (used > width).any() or (differs & (np.arange(width) < used[:, None])).any():
            return None
        row, column = np.nonzero(differs)
        return None if len(row) > self.most else (row * self.stride + column, tables[row, column])
