"""Paths that the block tables of a batch share: equal prefixes side by side, and the intervals that have one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int32]
Long = NDArray[np.int64]


def sort_tables(tables: Array, blocks: Long) -> tuple[Long, Long]:
    """Return an order in which equal prefixes are neighbours, and each neighbour pair's common prefix in blocks.

    Only sequences whose first block is not unique are compared: O(n log n + shared entries).
    """
    n = len(tables)
    lcp = np.zeros(max(n - 1, 0), np.int64)
    if n < 2 or tables.shape[1] == 0:
        return np.arange(n), lcp
    first = np.where(blocks > 0, tables[:, 0], -1 - np.arange(n))
    by_first = np.argsort(first, kind="stable")
    same = first[by_first[1:]] == first[by_first[:-1]]
    if not same.any():
        return by_first, lcp
    shared = np.zeros(n, bool)
    shared[1:] |= same
    shared[:-1] |= same
    where = np.flatnonzero(shared)
    rows = by_first[where]
    width = int(blocks[rows].max())
    sub = np.where(np.arange(width) < blocks[rows, None], tables[rows, :width], np.int32(-1))
    key = np.concatenate([first[rows, None].astype(">i4").view(np.int32), sub], 1)
    inner = np.argsort(key.view(f"V{4 * (width + 1)}").ravel(), kind="stable")
    order = by_first.copy()
    order[where] = rows[inner]
    sub = sub[inner]
    differ = sub[1:] != sub[:-1]
    common = np.where(differ.any(1), differ.argmax(1), width)
    inner_blocks = blocks[order[where]]
    common = np.minimum(common, np.minimum(inner_blocks[1:], inner_blocks[:-1]))
    adjacent = np.flatnonzero(np.diff(where) == 1)
    lcp[where[adjacent]] = common[adjacent]
    return order, lcp


def shared_intervals(lcp: Long) -> list[tuple[int, int, int]]:
    """Return every maximal interval `(lo, hi, depth)` of neighbours that share `depth` blocks, parents first. O(n)."""
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = [(0, 0)]
    nonzero = np.flatnonzero(lcp)
    if not len(nonzero):
        return found
    values = lcp.tolist()
    for i in range(int(nonzero[0]), int(nonzero[-1]) + 2):
        depth = values[i] if i < len(values) else 0
        lo = i
        while stack[-1][1] > depth:
            lo, top = stack.pop()
            found.append((lo, i + 1, top))
        if stack[-1][1] < depth:
            stack.append((lo, depth))
    found.reverse()
    return found
