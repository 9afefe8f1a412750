"""From one step's plan to the next: does the batch only grow, so that its cut still fits, and what has to be sent?"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from radixpool.kernels.forest import Array, Long
from radixpool.kernels.native_cut import library

Changes = tuple[Long, Array]  # places in the tables on the device, row * stride + column, and the block of each


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Entries of block tables: (`rows[i]`, `columns[i]`) is `blocks[i]`. `width` columns hold them all."""

    rows: Array
    columns: Array
    blocks: Array
    width: int

    @classmethod
    def checked(cls, rows: Array, columns: Array, blocks: Array, *, num_seqs: int) -> TableEntries:
        """Raise `ValueError` unless the entries can be those of `num_seqs` tables."""
        if not len(rows) == len(columns) == len(blocks):
            counts = f"{len(rows)}, {len(columns)} and {len(blocks)}"
            raise ValueError(f"rows, columns, blocks: expected as many of each, got {counts}")
        if len(rows) and largest(rows) >= num_seqs:
            raise ValueError(f"rows: expected 0 to {num_seqs - 1}, got {rows.min()} to {rows.max()}")
        width = largest(columns) + 1 if len(columns) else 0
        if width > np.iinfo(np.int32).max:
            raise ValueError(f"columns: expected no negative column, got {columns.min()}")
        return cls(rows, columns, blocks, width)

    def put(self, tables: Array) -> Array:
        """Return the tables with the entries written into them, in place unless they must be wider."""
        if self.width > tables.shape[1]:
            tables = resized(tables, self.width)
        tables[self.rows, self.columns] = self.blocks
        return tables


def largest(values: Array) -> int:
    """Return the largest value, where a negative one counts as more than any other: one pass for both limits."""
    return int(values.view(np.uint32).max())


def resized(tables: Array, width: int) -> Array:
    """Return a copy of the tables with `width` columns; new ones hold -1, which no table names."""
    copy = np.full((len(tables), width), -1, np.int32)
    both = min(width, tables.shape[1])
    copy[:, :both] = tables[:, :both]
    return copy


class Step(ctypes.Structure):
    """Two steps to compare; mirrors `Step` of forest_cut.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("old_tables", "tables", "old_lens", "lens", "planned_lens")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "old_stride", "block_size", "max_growth", "stride",
                                              "most")),
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
            self.tables.strides[0] // self.tables.itemsize, self.block_size, self.max_growth, self.stride, self.most,
        )  # fmt: skip
        return step, ctypes.addressof(step), self.places.ctypes.data, self.blocks.ctypes.data

    def changes(self, tables: Array | None, lens: Array) -> Changes | None:
        """Move to the given batch; return places (row * stride + column) and blocks of the table entries it adds.

        `tables=None`: none changed. Returns None where the batch must be cut anew; this watch then ends. The arrays
        are overwritten by the next call. O(table entries); O(lengths) without tables.
        """
        if len(lens) != len(self.lens):
            return None
        if tables is not None and (len(tables) != len(lens) or not self.fit(tables.shape[1])):
            return None
        code = library()
        found = self.compare(tables, lens) if code is None else self.compare_in_c(code, tables, lens)
        if found is not None:
            self.lens[:] = lens
            if len(found[0]):
                self.tables[found[0] // self.stride, found[0] % self.stride] = found[1]
        return found

    def set(self, entries: TableEntries, lens: Array) -> Changes | None:
        """Move to the given lengths and entries; return what `changes` does. O(lengths + entries)."""
        rows, columns = entries.rows, entries.columns
        if len(rows) > self.most or (columns * self.block_size < self.lens[rows]).any():
            return None
        if not self.fit(max(self.tables.shape[1], entries.width)) or self.changes(None, lens) is None:
            return None
        entries.put(self.tables)
        return rows.astype(np.int64) * self.stride + columns, entries.blocks

    def fit(self, width: int) -> bool:
        """Give the watched tables that many columns; return False where the device has no room for them."""
        if width == self.tables.shape[1]:
            return True
        if width > self.stride:
            return False
        self.tables = resized(self.tables, width)
        self.step = self.bound_step()
        return True

    def compare_in_c(self, code: ctypes.CDLL, tables: Array | None, lens: Array) -> Changes | None:
        """Do the work of `compare` in C."""
        step, *addresses = self.step
        step.tables = None if tables is None else tables.ctypes.data
        step.lens = lens.ctypes.data
        count = code.radixpool_compare(*addresses)
        return None if count < 0 else (self.places[:count], self.blocks[:count])

    def compare(self, tables: Array | None, lens: Array) -> Changes | None:
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
