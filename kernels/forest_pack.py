"""A cut as the device reads it: all tables of the forest, one section after another, in one buffer of int32.

"counts" begins with the number of rows to merge, "marks" is zero: room for programs that tell one call from the next.
`Layout` says where each section lies, `pack` writes a forest there and `unpack` reads it back. C writes the same
(forest_pack.c).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from radixpool.kernels.forest import RECORD, ROW_RECORD, Forest
from radixpool.kernels.forest_paths import Array
from radixpool.kernels.launch import TILE_ROWS

ALIGN = 16  # int32 entries: sections start on 64 bytes, which Triton's 16-byte specialisation needs
SECTIONS = (
    "counts", "marks", "lens", "rows", "merge_rows", "merge_starts", "merge_parts",
    *(f"items{h}" for h in TILE_ROWS), "tables",
)  # fmt: skip


class CutFacts(NamedTuple):
    """How much a cut batch is, and what else launches and steps need to know of it; mirrors `Sizes` of the C code."""

    num_rows: int
    num_merge_rows: int
    num_parts: int
    unique_tokens: int
    growable: int
    tall: int
    tall_sms: int
    items16: int
    items32: int
    items64: int
    items128: int
    programs16: int
    programs32: int
    programs64: int
    programs128: int

    @property
    def items(self) -> tuple[int, ...]:
        """Items of each tile height, empty first items of programs without work included."""
        return self[7:11]

    @property
    def programs(self) -> tuple[int, ...]:
        """Programs of each tile height; 0: no such tiles."""
        return self[11:]

    @classmethod
    def of(cls, forest: Forest) -> CutFacts:
        """Return the facts of a forest."""
        return cls(
            len(forest.rows), len(forest.merge_rows), forest.num_parts, forest.unique_tokens, forest.growable,
            forest.tall, forest.tall_sms, *(len(forest.items.get(h, ())) for h in TILE_ROWS),
            *(forest.programs.get(h, 0) for h in TILE_ROWS),
        )  # fmt: skip


class Layout(NamedTuple):
    """Where the sections lie: `begins` in the order of `SECTIONS`, `total` entries in all.

    `grids` are the programs launched for each tile height (0: no launch); those without work have an empty item.
    A row of the tables takes `table_stride` entries.
    """

    begins: tuple[int, ...]
    grids: tuple[int, ...]
    table_stride: int
    total: int

    @classmethod
    def of(cls, widths: tuple[int, ...], grids: tuple[int, ...], table_stride: int) -> Layout:
        """Lay out sections of the given widths; each gets an entry at least, so that it has an address."""
        *begins, total = itertools.accumulate([-(-(width or 1) // ALIGN) * ALIGN for width in widths], initial=0)
        return cls(tuple(begins), grids, table_stride, total)

    def begin(self, section: str) -> int:
        """Return where a section begins."""
        return self.begins[SECTIONS.index(section)]


def pack(forest: Forest, layout: Layout, tables: Array, lens: Array, out: Array) -> None:
    """Write a forest, its tables and its lengths to their places in `out`."""
    nothing = np.zeros((0, RECORD), np.int32)
    items = [
        fill_grid(forest.items.get(h, nothing), forest.programs.get(h, 0), grid)
        for h, grid in zip(TILE_ROWS, layout.grids, strict=True)
    ]
    counts, _, *others = layout.begins
    out[counts : others[0]] = 0
    out[counts] = len(forest.merge_rows)
    flat = (
        lens, forest.rows.reshape(-1), forest.merge_rows, forest.merge_starts, forest.merge_parts,
        *(i.reshape(-1) for i in items),
    )  # fmt: skip
    for begin, values in zip(others, flat, strict=False):
        out[begin : begin + len(values)] = values
    tables_in(out, layout, len(lens))[:, : tables.shape[1]] = tables


def tables_in(host: Array, layout: Layout, num_seqs: int) -> Array:
    """Return the block tables in a packed buffer, `[num_seqs, table_stride]`: a view."""
    begin = layout.begins[-1]
    return host[begin : begin + num_seqs * layout.table_stride].reshape(num_seqs, layout.table_stride)


def fill_grid(items: Array, programs: int, grid: int) -> Array:
    """Return the items with empty ones for the programs of the grid that the cut leaves without work."""
    if grid == programs:
        return items
    filled = np.concatenate([items[:programs], np.zeros((grid - programs, RECORD), np.int32), items[programs:]])
    filled[:programs, 7] += grid - programs
    return filled


def unpack(facts: CutFacts, layout: Layout, host: Array) -> Forest:
    """Return the forest in a packed buffer; its arrays are views where the grid is that of the cut."""
    rows, merged, parts = facts.num_rows, facts.num_merge_rows, facts.num_parts
    begins = dict(zip(SECTIONS, layout.begins, strict=True))

    def read(section: str, width: int) -> Array:
        return host[begins[section] : begins[section] + width]

    items, programs = {}, {}
    for h, grid, count, busy in zip(TILE_ROWS, layout.grids, facts.items, facts.programs, strict=True):
        if busy:
            filled = read(f"items{h}", (count + grid - busy) * RECORD).reshape(-1, RECORD)
            items[h], programs[h] = empty_grid(filled, busy, grid), busy
    return Forest(
        items=items, programs=programs, rows=read("rows", rows * ROW_RECORD).reshape(-1, ROW_RECORD),
        merge_rows=read("merge_rows", merged), merge_starts=read("merge_starts", merged + 1),
        merge_parts=read("merge_parts", parts), num_parts=parts, unique_tokens=facts.unique_tokens,
        growable=bool(facts.growable), tall=bool(facts.tall), tall_sms=facts.tall_sms,
    )  # fmt: skip


def empty_grid(filled: Array, programs: int, grid: int) -> Array:
    """Return the items without the empty ones of `fill_grid`."""
    if grid == programs:
        return filled
    items: Array = np.concatenate([filled[:programs], filled[grid:]])
    items[:programs, 7] -= grid - programs
    return items
