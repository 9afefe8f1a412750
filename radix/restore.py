"""Plan how a tree is rebuilt from loose blocks that name their parents: vectorised, so that a million take no time.

Pure: the plan says which runs there are, what each hangs on, and which blocks cannot be placed. The cache then makes
one node per run. A run never crosses a fork, a media block or a change of last use, so that eviction finds the order
it would have found before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ORPHAN", "ROOT", "LooseBlocks", "PlannedRuns", "RestorePlan", "plan_restore"]

ROOT: Final = -1
"""The parent of the first block of a path."""
ORPHAN: Final = -2
"""The parent of a block whose parent is not known any more."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LooseBlocks:
    """Committed blocks in any order, one array entry each.

    Attributes:
        blocks: block ids, int32 `[n]`.
        parents: index of the parent in these arrays, `ROOT` or `ORPHAN`, int64 `[n]`.
        positions: index of the block in its path, one more than its parent's, `[n]`.
        namespaces: number of the namespace, `[n]`.
        media: number of the media content under the block, 0 for none, `[n]`.
        last_uses: logical times; of a path only the deepest block need have the true one, `[n]`.
        tokens: token ids, uint32 `[n, block_size]`.

    """

    blocks: npt.NDArray[np.int32]
    parents: _Ints
    positions: npt.NDArray[np.uint32]
    namespaces: npt.NDArray[np.uint32]
    media: npt.NDArray[np.uint32]
    last_uses: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.uint32]

    def take(self, index: npt.NDArray[np.int64]) -> LooseBlocks:
        """Return the blocks at `index`, parents renumbered; a parent that is not taken becomes `ORPHAN`."""
        renumbered = np.full(self.blocks.size + 2, ORPHAN, dtype=np.int64)
        renumbered[index] = np.arange(index.size)
        renumbered[ROOT] = ROOT
        return LooseBlocks(
            blocks=self.blocks[index],
            parents=renumbered[self.parents[index]],
            positions=self.positions[index],
            namespaces=self.namespaces[index],
            media=self.media[index],
            last_uses=self.last_uses[index],
            tokens=_whole_rows(self.tokens)[index].view(self.tokens.dtype).reshape(-1, self.tokens.shape[1]),
        )


class PlannedRuns(NamedTuple):
    """The nodes to make, one entry of each column for each: so a million need no object of their own.

    `parents` are numbers of earlier runs, or -1 for the root of the run's namespace; `tokens` and `blocks` are packed.
    """

    parents: list[int]
    namespaces: list[int]
    media: list[int]
    ends: list[int]
    last_uses: list[int]
    tokens: list[bytes]
    blocks: list[bytes]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The runs of the tree, parents before children, and the blocks that have no place in it.

    Attributes:
        loose: the placed blocks in the order of the runs.
        starts: index of each run's first block in `loose`.
        run_parents: number of the run that each run hangs on, -1 for a root's.
        dropped: ids of blocks that cannot be placed: orphans, second copies, and what hangs on either; int32.

    """

    loose: LooseBlocks
    starts: _Ints
    run_parents: _Ints
    dropped: npt.NDArray[np.int32]

    @property
    def num_runs(self) -> int:
        """How many nodes the tree will have. O(1)."""
        return int(self.starts.size)

    def runs(self) -> PlannedRuns:
        """Return the runs, parents before children. O(runs) plus a copy of the tokens."""
        if not self.num_runs:
            return PlannedRuns([], [], [], [], [], [], [])
        loose = self.loose
        stops = np.append(self.starts[1:], loose.blocks.size)
        return PlannedRuns(
            self.run_parents.tolist(),
            loose.namespaces[self.starts].tolist(),
            loose.media[self.starts].tolist(),
            (loose.positions[stops - 1].astype(np.int64) + 1).tolist(),
            loose.last_uses[self.starts].tolist(),
            _cut(loose.tokens.astype("<u4", copy=False), self.starts, stops),
            _cut(loose.blocks.astype("<i4", copy=False), self.starts, stops),
        )


def _cut(rows: npt.NDArray[Any], starts: _Ints, stops: _Ints) -> list[bytes]:
    """Return the bytes of each stretch of `rows` from one of `starts` to one of `stops`, which follow one another."""
    whole = _whole_rows(rows)
    row_bytes, flat = whole.itemsize, whole.view(np.uint8).data
    if 2 * starts.size < whole.size:
        bounds = zip((starts * row_bytes).tolist(), (stops * row_bytes).tolist(), strict=True)
        return [bytes(flat[start:stop]) for start, stop in bounds]
    # Most are one row long: numpy cuts every row in less time than Python every stretch.
    pieces = list(map(whole.tolist().__getitem__, starts.tolist()))
    for i in np.flatnonzero(stops - starts > 1).tolist():
        pieces[i] = bytes(flat[int(starts[i]) * row_bytes : int(stops[i]) * row_bytes])
    return pieces


def _whole_rows(rows: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """View each row as one item, which numpy copies in one piece."""
    return np.ascontiguousarray(rows).view(f"V{rows.nbytes // max(1, rows.shape[0])}").reshape(-1)


def plan_restore(loose: LooseBlocks) -> RestorePlan:
    """Return how to rebuild the tree that the blocks describe. O(n log depth), vectorised."""
    kept = _placeable(loose)
    dropped = np.delete(loose.blocks, kept)
    if dropped.size:
        loose = loose.take(kept)
    order, starts = _chain(loose)
    loose = loose.take(order)
    last_uses = _spread_last_uses(loose, starts)
    loose = LooseBlocks(
        loose.blocks, loose.parents, loose.positions, loose.namespaces, loose.media, last_uses, loose.tokens
    )
    is_start = np.zeros(loose.blocks.size, dtype=bool)
    is_start[starts] = True
    is_start[1:] |= last_uses[1:] != last_uses[:-1]
    starts = np.flatnonzero(is_start)
    run_of = np.append(np.cumsum(is_start) - 1, ROOT)  # the last entry answers for ROOT, which is -1
    return RestorePlan(loose, starts, run_of[loose.parents[starts]], dropped)


def _placeable(loose: LooseBlocks) -> _Ints:
    """Return the blocks whose way up ends at a root and meets no second copy of anything."""
    parents = loose.parents.copy()
    parents[_second_copies(loose)] = ORPHAN
    if not (parents == ORPHAN).any():
        return np.arange(parents.size)
    up = np.concatenate((parents, np.array([ORPHAN, ROOT])))  # indices -2 and -1 stand for themselves
    return np.flatnonzero(_top_of(up)[: parents.size] == ROOT)


def _top_of(up: _Ints) -> _Ints:
    """Follow `up` from every entry until it stays, doubling the step each time. O(n log longest way)."""
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further


def _second_copies(loose: LooseBlocks) -> _Ints:
    """Return all but one of siblings with the same content, which a whole tree never has."""
    has_siblings = (loose.parents == ROOT) | (_num_children(loose)[loose.parents] > 1)
    candidates = np.flatnonzero(has_siblings)
    candidates = candidates[_occur_twice(_mixed(loose, candidates, loose.tokens[:, [0, -1]]))]
    mixed = _mixed(loose, candidates, loose.tokens)
    by_mixed = np.argsort(mixed, kind="stable")
    alike = np.flatnonzero(mixed[by_mixed][1:] == mixed[by_mixed][:-1])
    one, other = by_mixed[alike], by_mixed[alike + 1]
    same = np.ones(alike.size, dtype=bool)
    for column in (loose.parents, loose.namespaces, loose.media):
        same &= column[candidates[one]] == column[candidates[other]]
    same &= (loose.tokens[candidates[one]] == loose.tokens[candidates[other]]).all(axis=1)
    copies: _Ints = candidates[other[same]]
    return copies


def _mixed(loose: LooseBlocks, index: _Ints, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return a hash of place and `tokens` of the blocks at `index`: siblings with equal tokens have the same."""
    random = np.random.default_rng(0)
    odd = random.integers(0, 1 << 63, size=tokens.shape[1] + 3, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed: npt.NDArray[np.uint64] = loose.parents[index].astype(np.uint64) * odd[0]
    mixed += loose.namespaces[index] * odd[1]
    mixed += loose.media[index] * odd[2]
    mixed += tokens[index].astype(np.uint64).dot(odd[3:])
    return mixed


def _occur_twice(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Tell of each value whether it occurs more than once."""
    ordered = np.sort(values)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.isin(values, twice) if twice.size else np.zeros(values.size, dtype=bool)


def _num_children(loose: LooseBlocks) -> _Ints:
    """Count the children of every block; the last two entries answer for `ORPHAN` and `ROOT` with 0."""
    counts: _Ints = np.bincount(loose.parents[loose.parents >= 0], minlength=loose.parents.size + 2)
    return counts


def _chain(loose: LooseBlocks) -> tuple[_Ints, _Ints]:
    """Return the order that puts every unforked chain together, ancestors first, and where each chain starts."""
    parents, positions = loose.parents, loose.positions
    if not parents.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    is_head = (parents == ROOT) | (_num_children(loose)[parents] > 1)
    is_head |= (loose.media != 0) | (loose.media[parents] != 0)
    head_of = _top_of(np.where(is_head, np.arange(parents.size), parents))
    heads = np.flatnonzero(is_head)
    place = (positions[heads].astype(np.uint64) << np.uint64(32)) | (parents[heads] + 1).astype(np.uint64)
    heads = heads[np.argsort(place, kind="stable")]  # ancestors first, siblings together
    rank = np.empty(parents.size, dtype=np.int64)
    rank[heads] = np.arange(heads.size)
    chain_of = rank[head_of]
    lengths = np.bincount(chain_of, minlength=heads.size)
    starts = np.cumsum(lengths) - lengths
    order = np.empty(parents.size, dtype=np.int64)
    order[starts[chain_of] + positions - positions[head_of]] = np.arange(parents.size)
    return order, starts


def _spread_last_uses(loose: LooseBlocks, starts: _Ints) -> npt.NDArray[np.uint64]:
    """Return each block's true last use: the latest of its own and its descendants'. `loose` is in chain order."""
    if not starts.size:
        return loose.last_uses
    times = loose.last_uses
    if int(times.max()) >= 2**62 // starts.size:  # too large for the offsets below
        times, order = np.unique(times, return_inverse=True)
        return times[_spread_last_uses(replace(loose, last_uses=order.astype(np.uint64)), starts)]
    ranks = times.astype(np.int64)
    span = int(ranks.max()) + 1
    stops = np.append(starts[1:], ranks.size)
    chain_of = np.repeat(np.arange(starts.size), stops - starts)
    parents = loose.parents[starts]
    parent_chains = np.where(parents == ROOT, starts.size, chain_of[parents])
    below = latest_below(parent_chains, np.maximum.reduceat(ranks, starts))
    if starts.size == ranks.size:
        return np.maximum(ranks, below).astype(np.uint64)
    ranks[stops - 1] = np.maximum(ranks[stops - 1], below)
    # A running maximum from the tail, all chains at once: an offset per chain keeps the earlier ones out.
    offset = (starts.size - chain_of) * np.int64(span)
    spread: npt.NDArray[np.int64] = np.maximum.accumulate((ranks + offset)[::-1])[::-1] - offset
    return spread.astype(np.uint64)


def latest_below(parents: _Ints, latest: _Ints) -> _Ints:
    """Return for each chain the highest of `latest` among all chains below it, 0 without any. O(n log depth).

    `parents` are chain numbers, one more than the last for a root's. In each round a chain hears of those below it
    that are up to twice as far away as in the round before.
    """
    up = np.append(parents, parents.size)
    below = np.zeros_like(up)
    np.maximum.at(below, up[:-1], latest)
    while (up != parents.size).any():
        np.maximum.at(below, up, below.copy())
        up = up[up]
    return below[:-1]
