"""Where the tiles of one height, laid end to end, are cut along tokens so that all programs get equal work."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Long = NDArray[np.int64]

ITEM_OVERHEAD_TOKENS = 128  # a new item refills the load pipeline: about 2 us of one program, in tokens
MIN_PIECE_TOKENS = 64
CUT_TOKENS = 64  # cuts inside a tile fall on multiples of this
WHOLE_TILE_SLACK = 1.08  # whole tiles (no merge) are kept if the longest program has at most this much more work


def cut_points(length: Long, programs: int, *, whole: bool) -> Long:
    """Return where to cut the tiles' tokens, laid end to end, so that `programs` programs get equal work. Sorted."""
    ends = np.cumsum(length + ITEM_OVERHEAD_TOKENS)
    tokens_before = np.cumsum(length) - length
    cut = np.arange(1, programs) * (ends[-1] / programs)
    tile = np.minimum(np.searchsorted(ends, cut, side="right"), len(length) - 1)
    inside = cut - (ends[tile] - length[tile])
    if whole:
        offset = np.where(inside * 2 < length[tile], 0, length[tile])
    else:
        offset = np.rint(inside / CUT_TOKENS).astype(np.int64) * CUT_TOKENS
        offset = np.where(offset < MIN_PIECE_TOKENS, 0, offset)
        offset = np.where(offset > length[tile] - MIN_PIECE_TOKENS, length[tile], offset)
    return np.sort(tokens_before[tile] + offset.astype(np.int64))


def even_piece(length: Long, programs: int) -> int:
    """Return a piece length that cuts every tile for programs of its own, if that beats equal work; else 0."""
    if len(length) > programs:
        return 0
    longest = int(length.max())
    share = -(-longest // (programs // len(length)))
    each = -(-share // CUT_TOKENS) * CUT_TOKENS
    balanced = (int(length.sum()) + len(length) * ITEM_OVERHEAD_TOKENS) / programs + ITEM_OVERHEAD_TOKENS
    return each if each + ITEM_OVERHEAD_TOKENS <= balanced else 0


def cut_tokens(length: Long, programs: int, *, merging: bool) -> tuple[Long, Long, Long, Long]:
    """Cut tiles of the given lengths along tokens for at most `programs` programs.

    Returns for each piece its tile, its first and last token within the tile, and `starts` `[programs + 1]`. Whole
    tiles are kept together if that balances well and nothing else needs merging.
    """
    before = np.cumsum(length) - length
    total = int(length.sum())
    programs = max(1, min(programs, -(-total // MIN_PIECE_TOKENS)))
    each = even_piece(length, programs)
    if each:
        points = np.concatenate([np.arange(at, at + n, each) for at, n in zip(before, length, strict=True)])[1:]
        programs = len(points) + 1
    else:
        points = cut_points(length, programs, whole=False)
    if not merging:
        rounded = cut_points(length, programs, whole=True)
        loads = np.diff(np.concatenate([[0], rounded, [total]]))
        if loads.max() <= WHOLE_TILE_SLACK * total / programs + ITEM_OVERHEAD_TOKENS:
            points = rounded
    bounds = np.sort(np.concatenate([before, points, [total]]))
    bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]
    first, last = bounds[:-1], bounds[1:]
    tile = np.searchsorted(before, first, side="right") - 1
    starts = np.searchsorted(first, np.concatenate([[0], points, [total]]))
    return tile, first - before[tile], last - before[tile], starts
