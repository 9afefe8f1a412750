"""The forest plan: block tables of one batch -> work items, in numpy, on the host.

Sequences whose tables begin with the same physical blocks share a path of a forest. After sorting the tables, every
shared path is an interval of neighbours in the array of longest common prefixes; each worthwhile interval becomes one
*segment* (its rows x its run of blocks), what is left of each sequence another. Segments are cut into tiles of at most
16 to 128 packed query rows, and the tiles of one height are cut along tokens so that all programs get the same amount
of work (a wave that ends at once). Each shared block is read once per tile, each row's pieces are merged afterwards.
Without sharing this is split-KV decoding with a balanced cut (stream-K). The idea of packing sharers: Hydragen (arXiv
2402.05099), FastTree (MLSys 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from radixpool.kernels.forest_paths import Array, Long, shared_intervals, sort_tables
from radixpool.kernels.launch import TALL_ROWS, TILE_ROWS, ConfigOf, DeviceInfo, ctas_per_head
from radixpool.kernels.spec import AttentionSpec
from radixpool.kernels.token_cuts import cut_tokens

TallKernel = Literal["plain", "persistent"]

# An item is 16 int32 (one cache line serves two): row start, rows (0: nothing to do), table, begin, end, first part
# (-1: writes the output), for the first item of a program how many more it has and where they lie, query tokens after
# its last row, tokens that all its rows see, and room. A row is 4: row of q, sequence, query tokens of the sequence
# after it, all query tokens of the sequence.
RECORD, ROW_RECORD = 16, 4
TO_THE_END = np.iinfo(np.int32).max  # `end` of a sequence's last item: it grows with the length on the device
ITEM_OVERHEAD_BYTES = 32 * 1024
JOIN_SHARE = 0.1  # tiles of 32 rows that have this share of the narrow tokens make the 16-row tiles join their launch
TALL_COST = 1.6  # time of a token of a tall tile, in tokens of a narrow one
BESIDE_SHARE = 1.5  # narrow work up to this many times the tall work fills only the room that tall tiles leave
TALL_SHARE, NARROW_SHARE = 3, 2  # all programs that fit run tall tiles beside up to 3 / 2 as many narrow tokens
TALL_COST_APART, NARROW_COST_APART = 6, 5  # time of a token of each on multiprocessors of its own


@dataclass(slots=True)
class Segments:
    """Rows `row0` to `row1` (sorted) x tokens `begin` to `end` of table `table`; `leaf`: up to each row's own end."""

    row0: Long
    row1: Long
    begin: Long
    end: Long
    table: Long
    leaf: NDArray[np.bool_]


@dataclass(slots=True)
class Forest:
    """The cut batch, all int32 host arrays.

    `items[h]` `[n, RECORD]` are the items of tile height `h`: first the first item of each of `programs[h]` programs,
    then the others. `rows` `[num_rows, ROW_RECORD]` lists query rows as items use them. `merge_rows` are rows made of
    several (or no) partial states, listed in `merge_parts` by `merge_starts`. `tall_sms` multiprocessors are for tall
    tiles; `tall` is false where the others are for narrow ones alone.
    """

    items: dict[int, Array]
    programs: dict[int, int]
    rows: Array
    merge_rows: Array
    merge_starts: Array
    merge_parts: Array
    num_parts: int
    unique_tokens: int
    growable: bool
    tall: bool
    tall_sms: int

    @property
    def num_items(self) -> int:
        """Items of all tile heights, empty ones included."""
        return sum(map(len, self.items.values()))


def find_segments(
    tables: Array, lens: Long, query_lens: Long, spec: AttentionSpec, *, min_gain_bytes: float = 1.0
) -> tuple[Long, Segments]:  # fmt: skip
    """Return the sorted sequence order and the segments: worthwhile shared paths, then each sequence's rest."""
    blocks = -(-lens // spec.block_size)
    order, lcp = sort_tables(tables, blocks)
    rows_before = np.zeros(len(order) + 1, np.int64)
    np.cumsum(query_lens[order], out=rows_before[1:])
    done = np.zeros(len(order), np.int64)
    tiles_before = np.zeros(len(order) + 1, np.int64)
    np.cumsum(-(-query_lens[order] * spec.group_size // TILE_ROWS[-1]), out=tiles_before[1:])
    state_bytes = 8 * spec.group_size * spec.v_head_dim
    kept = []
    sorted_lens = lens[order]
    for lo, hi, depth in shared_intervals(lcp):
        begin, end = int(done[lo]), min(depth * spec.block_size, int(sorted_lens[lo:hi].max()))
        rows = int(rows_before[hi] - rows_before[lo])
        saved = int(tiles_before[hi] - tiles_before[lo]) - -(-rows * spec.group_size // TILE_ROWS[-1])
        gain = saved * (end - begin) * spec.kv_bytes_per_token - rows * state_bytes - ITEM_OVERHEAD_BYTES
        if gain >= min_gain_bytes:
            kept.append((int(rows_before[lo]), int(rows_before[hi]), begin, end, int(order[lo])))
            done[lo:hi] = end
    left = lens[order] > done
    shared = np.array(kept, np.int64).reshape(-1, 5).T
    leaves = np.stack([rows_before[:-1], rows_before[1:], done, lens[order], order])[:, left]
    row0, row1, begin_, end_, table = np.concatenate([shared, leaves], 1)
    leaf = np.arange(len(row0)) >= len(kept)
    return order, Segments(row0, row1, begin_, end_, table, leaf)


@dataclass(slots=True)
class Tiles:
    """Segments cut into tiles of one height class: at most `height // group_size` rows each."""

    height: Long
    row0: Long
    rows: Long
    begin: Long
    end: Long
    table: Long
    leaf: NDArray[np.bool_]


def join_heights(packed_rows: Long, tokens: Long) -> Long:
    """Return the tile height of each segment: the least that holds its rows, but few different ones (launches)."""
    classes = np.array(TILE_ROWS)
    height = classes[np.minimum(np.searchsorted(classes, packed_rows), len(classes) - 1)]
    work = {h: int(tokens[height == h].sum()) for h in TILE_ROWS}
    if work[32] and work[32] >= JOIN_SHARE * (work[16] + work[32]):
        height = np.where(height == 16, 32, height)
    if work[64] and work[128] >= work[64]:
        height = np.where(height == 64, 128, height)
    return height


def cut_rows(segments: Segments, group_size: int, row_limits: Long) -> Tiles:
    """Cut segments into tiles along rows; a leaf tile ends where its last row ends. Empty tiles are dropped."""
    rows = segments.row1 - segments.row0
    height = join_heights(rows * group_size, segments.end - segments.begin)
    per_tile = height // group_size
    counts = -(-rows // per_tile)
    seg = np.repeat(np.arange(len(rows)), counts)
    nth = np.arange(len(seg)) - np.repeat(np.cumsum(counts) - counts, counts)
    row0 = segments.row0[seg] + nth * per_tile[seg]
    row1 = np.minimum(row0 + per_tile[seg], segments.row1[seg])
    leaf = segments.leaf[seg]
    end = np.where(leaf, row_limits[row1 - 1], segments.end[seg])
    keep = end > segments.begin[seg]
    return Tiles(
        height[seg][keep], row0[keep], (row1 - row0)[keep], segments.begin[seg][keep], end[keep],
        segments.table[seg][keep], leaf[keep],
    )  # fmt: skip


def merge_lists(
    pieces_row0: Long, pieces_rows: Long, num_rows: int
) -> tuple[Long, Long, Long, Long, int]:  # fmt: skip
    """Assign numbers to the partial states and list them by row.

    Returns each piece's first part (-1: the piece alone makes all its rows and writes the output), the rows to merge,
    their `starts` and parts, and how many parts there are.
    """
    owner = np.repeat(np.arange(len(pieces_rows)), pieces_rows)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(pieces_rows) - pieces_rows, pieces_rows)
    row = pieces_row0[owner] + within
    count = np.bincount(row, minlength=num_rows)
    alone = np.ones(len(pieces_rows), bool)
    alone[owner[count[row] > 1]] = False
    width = np.where(alone, 0, pieces_rows)
    part = np.where(alone, -1, np.cumsum(width) - width)
    stays = ~alone[owner]
    row, cell = row[stays], (part[owner] + within)[stays]
    by_row = np.argsort(row, kind="stable")
    left = np.bincount(row, minlength=num_rows)
    direct = (count == 1) & (left == 0)
    rows = np.flatnonzero(~direct)
    starts = np.concatenate([[0], np.cumsum(left[rows])])
    return part, rows, starts, cell[by_row], int(width.sum())


def runs_beside(tiles: Tiles) -> bool:
    """Return whether narrow tiles run in the room that tall ones leave: while those run, more would only wait."""
    work = tiles.end - tiles.begin
    tall = tiles.height >= TALL_ROWS
    return bool(tall.any()) and int(work[~tall].sum()) <= BESIDE_SHARE * TALL_COST * int(work[tall].sum())


def sm_step(config_of: ConfigOf, spec: AttentionSpec) -> int:
    """Return the fewest multiprocessors whose narrow programs share out evenly over the KV heads."""
    narrowest = next(h for h in TILE_ROWS if h >= spec.group_size)
    return spec.num_kv_heads // math.gcd(spec.num_kv_heads, config_of(narrowest, tall=False).ctas_per_sm)


def split_sms(tiles: Tiles, num_sms: int, step: int) -> int:
    """Return how many SMs the tallest tiles get where narrower ones run on the others, whole steps of them.

    Both should end together: of the whole steps around the exact share, the narrow ones get what ends first.
    """
    work, tallest = tiles.end - tiles.begin, tiles.height == TILE_ROWS[-1]
    tall, narrow = TALL_COST_APART * int(work[tallest].sum()), NARROW_COST_APART * int(work[~tallest].sum())
    if not tall or not narrow:
        return num_sms
    few = max(step, num_sms * narrow // (tall + narrow) // step * step)
    many = few + step
    if many < num_sms and max(tall / (num_sms - many), narrow / many) < max(tall / (num_sms - few), narrow / few):
        few = many
    return max(1, num_sms - few)


def first_items_first(records: Array, starts: Long) -> Array:
    """Move each program's first item to the front, in order, and note there where its other items follow."""
    programs = len(starts) - 1
    count = np.diff(starts)
    first = np.zeros(len(records), bool)
    first[starts[:-1][count > 0]] = True
    front = np.zeros((programs, RECORD), np.int32)
    front[count > 0] = records[starts[:-1][count > 0]]
    front[:, 6] = np.maximum(count - 1, 0)
    front[:, 7] = programs + np.cumsum(front[:, 6]) - front[:, 6]
    return np.concatenate([front, records[~first]])


def table_of(fields: dict[int, Long], count: int, width: int) -> Array:
    """Return `count` records of `width` int32 with the given fields filled, the others zero."""
    records = np.zeros((count, width), np.int32)
    for field, column in fields.items():
        records[:, field] = column
    return records


def cut_height(
    tiles: Tiles, own: Long, programs: int, limits: Long, backs: Long, *, merging: bool
) -> tuple[tuple[Long, ...], Long]:  # fmt: skip
    """Cut the tiles `own`, all of one height, along tokens; return the pieces' fields and each program's range.

    Fields: row start, rows, table, begin, end, query tokens after the last row, tokens that all rows see. `limits` are
    the tokens each sorted row sees, with a sentinel at the end, `backs` the query tokens after it.
    """
    own = own[np.argsort(-(tiles.end - tiles.begin)[own], kind="stable")] if merging else own
    tile, first, last, program = cut_tokens((tiles.end - tiles.begin)[own], programs, merging=merging)
    tile = own[tile]
    to_end = tiles.leaf[tile] & (tiles.begin[tile] + last == tiles.end[tile])
    stop = np.where(to_end, TO_THE_END, tiles.begin[tile] + last)
    row0, rows = tiles.row0[tile], tiles.rows[tile]
    seen = np.minimum.reduceat(limits, np.stack([row0, row0 + rows], 1).ravel())[::2]
    return (row0, rows, tiles.table[tile], tiles.begin[tile] + first, stop, backs[row0 + rows - 1], seen), program


def programs_of(
    height: int, config_of: ConfigOf, spec: AttentionSpec, device: DeviceInfo, *, tall: bool,
    beside: bool,
) -> int:  # fmt: skip
    """Return how many programs per KV head run the tiles of one height; `beside` holds back narrow ones only."""
    return ctas_per_head(config_of(height, tall=tall), spec, device, beside=beside and height < TALL_ROWS)


def programs_apart(per_sm: int, num_kv_heads: int, num_sms: int) -> int:
    """Return how many programs per KV head fill `num_sms` multiprocessors that are theirs alone."""
    return max(1, num_sms * per_sm // num_kv_heads)


def share_out(
    tokens: dict[int, int], programs: dict[int, int], config_of: ConfigOf, spec: AttentionSpec, device: DeviceInfo
) -> dict[int, int]:
    """Return the programs where narrow tiles run beside those of one tall height, given those that fill the device.

    The fewer tokens are in tall tiles, the fewer programs run them; narrow ones fill what multiprocessors that leaves.
    """
    tall = [h for h in programs if h >= TALL_ROWS]
    narrow = sum(tokens[h] for h in programs if h < TALL_ROWS)
    if len(tall) != 1 or not narrow:
        return programs
    (height,), heads = tall, spec.num_kv_heads
    few = max(1, programs[height] * TALL_SHARE * tokens[height] // (NARROW_SHARE * narrow))
    if few >= programs[height]:
        return programs
    taken = min(device.num_sms, -(-few * heads // config_of(height, tall=True).ctas_per_sm))
    shared = {height: few}
    for h in programs.keys() - shared.keys():
        config = config_of(h, tall=True)
        shared[h] = max(1, ((device.num_sms - taken) * config.ctas_per_sm + taken * config.ctas_beside) // heads)
    return shared


def programs_by_height(
    tiles: Tiles, tall_sms: int, config_of: ConfigOf, spec: AttentionSpec, device: DeviceInfo
) -> dict[int, int]:
    """Return how many programs per KV head run the tiles of each height in use."""
    work = tiles.end - tiles.begin
    tokens = {h: int(work[tiles.height == h].sum()) for h in TILE_ROWS}
    heights = [h for h in TILE_ROWS if tokens[h]]
    if tall_sms < device.num_sms:
        sms = {h: tall_sms if h == TILE_ROWS[-1] else device.num_sms - tall_sms for h in heights}
        per_sm = {h: config_of(h, tall=h == TILE_ROWS[-1]).ctas_per_sm for h in heights}
        return {h: programs_apart(per_sm[h], spec.num_kv_heads, sms[h]) for h in heights}
    tall, beside = any(h >= TALL_ROWS for h in heights), runs_beside(tiles)
    programs = {h: programs_of(h, config_of, spec, device, tall=tall, beside=beside) for h in heights}
    return share_out(tokens, programs, config_of, spec, device) if beside else programs


def build_forest(
    tables: Array, lens: Array, query_lens: Array, query_starts: Array, spec: AttentionSpec, device: DeviceInfo,
    config_of: ConfigOf, *, min_gain_bytes: float = 1.0,
    tall_kernel: TallKernel = "plain",
) -> Forest:  # fmt: skip
    """Cut a batch into work items. Vectorised but for one loop over shared paths; O(n log n + table entries).

    `tall_kernel`: "plain" programs leave room for narrow ones on each multiprocessor, "persistent" ones fill theirs, so
    that narrow tiles run on the others.
    """
    lens64, new = lens.astype(np.int64), query_lens.astype(np.int64)
    num_rows = int(query_starts[-1])
    row_seq = np.repeat(np.arange(len(lens)), new)
    row_back = query_starts[1:].astype(np.int64)[row_seq] - 1 - np.arange(num_rows)
    active = np.flatnonzero(new > 0)
    everyone = len(active) == len(lens)
    batch = (tables, lens64, new) if everyone else (tables[active], lens64[active], new[active])
    order, segments = find_segments(*batch, spec, min_gain_bytes=min_gain_bytes)
    order, segments.table = active[order], active[segments.table]
    if len(order) == num_rows:
        sorted_rows = query_starts[order].astype(np.int64)
    else:
        sorted_rows = np.concatenate([np.arange(query_starts[i], query_starts[i + 1]) for i in order])
    limits = np.maximum(lens64[row_seq] - row_back, 0)[sorted_rows]
    guarded, backs = np.append(limits, TO_THE_END), row_back[sorted_rows]
    tiles = cut_rows(segments, spec.group_size, limits)
    merging = bool((~tiles.leaf).any())
    tall = bool((tiles.height >= TALL_ROWS).any())
    tall_sms = device.num_sms
    if tall_kernel == "persistent":
        tall_sms = split_sms(tiles, device.num_sms, sm_step(config_of, spec))
    programs = programs_by_height(tiles, tall_sms, config_of, spec, device)
    chunks, starts = [], {}
    for height in sorted(programs):
        own = np.flatnonzero(tiles.height == height)
        chunk, starts[height] = cut_height(tiles, own, programs[height], guarded, backs, merging=merging)
        chunks.append(chunk)
    columns = [np.concatenate(c) for c in zip(*chunks, strict=True)] if chunks else [np.zeros(0, np.int64)] * 7
    part, merge_rows, merge_starts, merge_parts, num_parts = merge_lists(columns[0], columns[1], num_rows)
    records = table_of(dict(zip((0, 1, 2, 3, 4, 8, 9, 5), [*columns, part], strict=True)), len(part), RECORD)
    items, done = {}, 0
    for height, program in starts.items():
        items[height] = first_items_first(records[done : done + program[-1]], program)
        done += int(program[-1])
    of_row = row_seq[sorted_rows]
    row_fields = {0: sorted_rows, 1: of_row, 2: row_back[sorted_rows], 3: new[of_row]}
    return Forest(
        items=items, programs={h: len(p) - 1 for h, p in starts.items()},
        rows=table_of(row_fields, num_rows, ROW_RECORD),
        merge_rows=sorted_rows[merge_rows].astype(np.int32), merge_starts=merge_starts.astype(np.int32),
        merge_parts=merge_parts.astype(np.int32), num_parts=num_parts,
        unique_tokens=int((segments.end - segments.begin).sum()), growable=int(segments.leaf.sum()) == len(active),
        tall=tall and tall_sms == device.num_sms, tall_sms=tall_sms,
    )  # fmt: skip
