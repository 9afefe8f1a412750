"""The fast extend path, decided and scheduled on the host: who may take it, and which program runs which tile when.

Pure functions over host arrays; nothing here needs a GPU. The tiles are the tall items of the forest plan, so that
sharing, splits along tokens and merging are the same as on the plain path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixpool.kernels.forest import RECORD, Forest
from radixpool.kernels.launch import SHARED_MEMORY_BYTES, next_power_of_two
from radixpool.kernels.spec import AttentionSpec

Array = NDArray[np.int32]
Long = NDArray[np.int64]

DECODE_QUERY_TOKENS = 8  # up to so many query tokens a sequence are decoding
FAST_ROWS = 128  # two consumers of 64 rows
ENTRY = 8  # int32 fields: row start, rows, table, begin, end, first part (-1: writes the output), KV head, shortest row
MIN_PAGE, MAX_PAGE = 8, 64  # tokens of one bulk copy: at least one swizzle atom; 64 divides where items may begin
BOX_COLUMNS = 64
FP8_BOX_COLUMNS = 128
L2_BYTES = 20 * 1024 * 1024  # KV that tiles in flight should share: less than half of Hopper's L2
TILE_OVERHEAD_TOKENS = 160  # prologue and epilogue of one tile, in tokens
SPARE_BYTES = 2 * 1024  # shared memory for barriers, and for what reductions exchange
MAX_STAGES = 4
MIN_ROUNDS = 4  # tiles a multiprocessor from which on two may run as one
MOSTLY_CACHED = 3 / 4  # tiles as long as that on average, in terms of the longest, read cached keys mostly
MAX_ALONE = 8  # one tile of so many may be left alone then
SHORT = 3 / 8  # tiles with less than so much of the longest one's work run last
MIN_TILES_PER_WIDE_BLOCK = 3  # a widened block must be read by so many tiles: two pay for the copy
MAX_WIDE_BYTES = 2**30
TURN_TOKENS = 128  # tokens of one chunk of turned values: a row of it is one swizzle row


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """How a fast kernel runs: `page` tokens a copy, `block_n` tokens a step.

    Shared memory holds the keys of `num_stages` steps and the values of `value_stages`.
    `widen`: the pool is fp8 and its blocks are first copied to the dtype of Q. `tile_rows`: 256 where two tall items
    run as one tile (`wide_tiles`).
    """

    page: int
    block_d: int
    block_dv: int
    block_n: int
    num_stages: int
    value_stages: int
    widen: bool = False
    tile_rows: int = FAST_ROWS


def padded_columns(head_dim: int) -> int:
    """Return the columns of a shared-memory tile: a power of two of at least one swizzle row.

    >>> [padded_columns(d) for d in (64, 96, 128, 192)]
    [64, 128, 128, 256]
    """
    return max(BOX_COLUMNS, next_power_of_two(head_dim))


def page_tokens(block_size: int) -> int:
    """Return the tokens of one bulk copy: the largest power of two, at most 64, that divides the block size.

    >>> [page_tokens(b) for b in (16, 64, 544, 24)]
    [16, 64, 32, 8]
    """
    return min(MAX_PAGE, block_size & -block_size)


def extend_config(spec: AttentionSpec, arch: int) -> ExtendConfig | None:
    """Return how the fast kernel runs `spec` on `arch`, or None where only the plain one can."""
    page = page_tokens(spec.block_size)
    dims = (spec.head_dim, spec.v_head_dim)
    widen = spec.kv_dtype == torch.float8_e4m3fn
    known = spec.q_dtype in (torch.bfloat16, torch.float16) and (widen or spec.kv_dtype == spec.q_dtype)
    if arch != 90 or not known or page < MIN_PAGE or min(dims) < BOX_COLUMNS or any(d % 8 for d in dims):
        return None
    block_d, block_dv = (padded_columns(d) for d in dims)
    block_n = 128 if max(block_d, block_dv) <= 128 else 64
    keys, values = block_n * block_d * 2, block_n * block_dv * 2
    room = SHARED_MEMORY_BYTES[90] - SPARE_BYTES - FAST_ROWS * block_d * 2
    if block_d != block_dv:  # outputs pass through a buffer of their own, not through that of the queries
        room -= FAST_ROWS * block_dv * 2
    stages = min(MAX_STAGES, room // (keys + values))
    more_keys = stages < MAX_STAGES and room - stages * (keys + values) >= keys
    return ExtendConfig(page, block_d, block_dv, block_n, stages + more_keys, stages, widen)


def fp8_config(spec: AttentionSpec, arch: int) -> ExtendConfig | None:
    """Return how the fast kernel multiplies `spec` in fp8 on `arch`, or None where only the plain one can.

    Wider heads than 128 would need the registers of two outputs.
    """
    page = page_tokens(spec.block_size)
    dims = (spec.head_dim, spec.v_head_dim)
    known = spec.q_dtype in (torch.bfloat16, torch.float16) and spec.kv_dtype == torch.float8_e4m3fn
    if arch != 90 or not known or page < MIN_PAGE or any(not BOX_COLUMNS <= d <= 128 or d % 16 for d in dims):
        return None
    block_d, block_dv = (padded_columns(d) for d in dims)
    return ExtendConfig(page, block_d, block_dv, block_n=128, num_stages=MAX_STAGES, value_stages=MAX_STAGES)


def plain_only(*, token_scales: bool, tree: bool, alibi: bool) -> bool:
    """Return whether a call asks for what only the plain kernel does: scales by token, draft trees, ALiBi."""
    return token_scales or tree or alibi


def copies_in_bulk(pool: Tensor) -> bool:
    """Return whether the bulk copy engine can read this pool: 16-byte aligned base and strides."""
    return pool.data_ptr() % 16 == 0 and all(s * pool.element_size() % 16 == 0 for s in pool.stride()[:-1])


def wide_tiles(config: ExtendConfig) -> ExtendConfig | None:
    """Return the configuration for tiles of 256 rows, which halve what each product reads; None for wider heads.

    128 rows a consumer leave registers for outputs of 64 columns only, and for steps of 64 keys.
    """
    if max(config.block_d, config.block_dv) > BOX_COLUMNS:
        return None
    return replace(config, block_n=64, num_stages=MAX_STAGES, value_stages=MAX_STAGES, tile_rows=2 * FAST_ROWS)


@dataclass(frozen=True, slots=True)
class ExtendSchedule:
    """What each program of the fast kernel runs: entries `starts[p]` to `starts[p + 1]`.

    `rows` lists query rows in the order of the forest, `limits` how many keys of its sequence each may see.
    """

    entries: Array
    starts: Array
    rows: Array
    limits: Array


def tall_items(forest: Forest) -> Array:
    """Return the item records of the tallest tiles that hold work."""
    items = forest.items.get(FAST_ROWS, np.zeros((0, RECORD), np.int32))
    return items[items[:, 1] > 0]


def joined_items(items: Array, heads: int, num_sms: int) -> Array | None:
    """Return items of twice the rows, each of two full neighbours that read the same keys from the same token on.

    None where that would leave multiprocessors idle, or too many items alone, which compute twice their rows.
    O(n log n).
    """
    items = items[np.lexsort((items[:, 0], items[:, 3], items[:, 2]))]
    a, b = items[:-1], items[1:]
    follows = (a[:, 2:4] == b[:, 2:4]).all(1) & (a[:, 0] + a[:, 1] == b[:, 0]) & (a[:, 5] < 0) & (b[:, 5] < 0)
    follows &= a[:, 1] == items[:, 1].max()
    place = np.arange(len(items))
    first_of_run = np.maximum.accumulate(np.where(np.concatenate([[True], ~follows]), place, 0))
    second = (place - first_of_run) % 2 == 1
    joined: Array = items[~second].copy()
    target = np.cumsum(~second)[second] - 1
    joined[target, 1] += items[second, 1]
    joined[target, 4] = np.maximum(joined[target, 4], items[second, 4])
    alone = len(joined) - len(target)
    if len(joined) * heads < MIN_ROUNDS * num_sms or alone * MAX_ALONE > len(joined):
        return None
    return joined


def span_extremes(values: Long, first: Long, count: Long) -> tuple[Long, Long]:
    """Return the smallest and largest of `values[first : first + count]` for each pair (all counts >= 1)."""
    bounds = np.stack([first, first + count], 1).ravel()
    padded = np.append(values, values[-1:])
    return np.minimum.reduceat(padded, bounds)[::2], np.maximum.reduceat(padded, bounds)[::2]


def schedule_extend(
    forest: Forest, seq_lens: Array, spec: AttentionSpec, num_sms: int, *, tile_rows: int = FAST_ROWS
) -> ExtendSchedule | None:  # fmt: skip
    """Schedule the tall items of a cut batch over `num_sms` persistent programs; None if there are none.

    With `tile_rows` 256 two items run as one tile; None then where that doesn't pay (`joined_items`).

    Tiles of (table, head) pairs whose KV fits the L2 cache together run at the same time, longest first; each round
    gives the longest tile to the program with the least work. O(n log n), vectorised but for one loop over rounds.
    """
    tall = tall_items(forest)
    if len(tall) and tile_rows > FAST_ROWS:
        joined = joined_items(tall, spec.num_kv_heads, num_sms)
        tall = tall[:0] if joined is None else joined
    if not len(tall):
        return None
    items = tall.astype(np.int64)
    rows = forest.rows.astype(np.int64)
    limits = np.maximum(seq_lens.astype(np.int64)[rows[:, 1]] - rows[:, 2], 0)
    shortest, longest = span_extremes(limits, items[:, 0], items[:, 1])
    if tile_rows > FAST_ROWS and longest.mean() > MOSTLY_CACHED * longest.max():
        return None  # most keys are cached: measured 0.96 of the speed there, 1.04 where none is
    entries = np.zeros((len(items), ENTRY), np.int64)
    entries[:, :6] = items[:, :6]
    entries[:, 4] = np.maximum(np.minimum(items[:, 4], longest), items[:, 3] + 1)
    entries[:, 7] = shortest
    heads = spec.num_kv_heads
    entries = np.repeat(entries, heads, 0)
    entries[:, 6] = np.tile(np.arange(heads), len(items))
    cost = entries[:, 4] - entries[:, 3] + TILE_OVERHEAD_TOKENS
    order = cache_order(entries, cost, spec)
    program, nth = deal(cost[order], num_sms)
    programs = int(program.max()) + 1
    by_program = np.lexsort((nth, program))
    starts = np.zeros(programs + 1, np.int64)
    np.cumsum(np.bincount(program, minlength=programs), out=starts[1:])
    return ExtendSchedule(
        entries[order][by_program].astype(np.int32), starts.astype(np.int32), forest.rows[:, 0].copy(),
        limits.astype(np.int32),
    )  # fmt: skip


def cache_order(entries: Long, cost: Long, spec: AttentionSpec) -> Long:
    """Return the order of entries: groups of (table, head) pairs that fit the L2 together, longest tiles first.

    Short tiles of all groups come last, so that every program ends at about the same time.
    """
    pair = entries[:, 2] * spec.num_kv_heads + entries[:, 6]
    pairs, of_entry = np.unique(pair, return_inverse=True)
    tokens = np.zeros(len(pairs), np.int64)
    np.maximum.at(tokens, of_entry, entries[:, 4])
    longest_first = np.argsort(-tokens, kind="stable")
    before = np.cumsum(tokens[longest_first]) - tokens[longest_first]
    group = np.empty(len(pairs), np.int64)
    group[longest_first] = before * spec.kv_bytes_per_token // L2_BYTES
    in_turn = np.where(cost < SHORT * cost.max(), group.max() + 1, group[of_entry])
    return np.lexsort((-cost, in_turn))


def deal(cost: Long, programs: int) -> tuple[Long, Long]:
    """Deal entries to programs, one each a round, the dearest to the one with the least; return program and round.

    >>> deal(np.array([4, 3, 2, 1]), 2)[0]
    array([0, 1, 1, 0])
    """
    load = np.zeros(programs, np.int64)
    program = np.empty(len(cost), np.int64)
    for first in range(0, len(cost), programs):
        here = cost[first : first + programs]
        free = np.argsort(load, kind="stable")[: len(here)]
        dearest = np.argsort(-here, kind="stable")
        program[first + dearest] = free
        load[free] += here[dearest]
    return program, np.arange(len(cost)) // programs


@dataclass(frozen=True, slots=True)
class WideBlocks:
    """The blocks that the tall tiles of an fp8 batch read, each once, and the tables in terms of their copies."""

    blocks: Array
    tables: Array


def wide_blocks(schedule: ExtendSchedule, tables: Array, spec: AttentionSpec) -> WideBlocks | None:
    """Return what to widen, or None where a copy in the dtype of Q does not pay or takes too much memory.

    Widening moves each byte once; each tile that reads it gains the fast kernel's lead over the plain one. O(tables).
    """
    entries = schedule.entries[schedule.entries[:, 6] == 0].astype(np.int64)
    used = np.zeros((tables.shape[0], tables.shape[1] + 1), np.int64)
    np.add.at(used, (entries[:, 2], entries[:, 3] // spec.block_size), 1)
    np.add.at(used, (entries[:, 2], -(-entries[:, 4] // spec.block_size)), -1)
    mask = np.cumsum(used, 1)[:, :-1] > 0
    blocks, copy = np.unique(tables[mask], return_inverse=True)
    tokens = len(blocks) * spec.block_size
    wide_bytes = tokens * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * spec.q_dtype.itemsize
    read_tokens = int((entries[:, 4] - entries[:, 3]).sum())
    if read_tokens < MIN_TILES_PER_WIDE_BLOCK * tokens or wide_bytes > MAX_WIDE_BYTES:
        return None
    local = np.zeros_like(tables)
    local[mask] = copy
    return WideBlocks(blocks.astype(np.int32), local)


@dataclass(frozen=True, slots=True)
class TurnedChunks:
    """Chunks of `TURN_TOKENS` tokens whose values are laid out anew, each once, and where entries find them.

    `chunks` `[n, 4]`: table, first token, end of its valid tokens, 0. An entry's tile `i` counted from its first token
    has the values of chunk `places[runs[entry] + i]`.
    """

    chunks: Array
    places: Array
    runs: Array


def turned_chunks(schedule: ExtendSchedule, tables: Array, spec: AttentionSpec) -> TurnedChunks | None:
    """Return which values to turn, or None where that takes too much memory; it pays even for one tile.

    Entries of one table that begin at one token share a run of chunks; equal chunks of several runs (shared prefixes
    that the plan did not pack) are turned once. O(tables + entries log entries).
    """
    entries = schedule.entries.astype(np.int64)
    runs, of_entry = np.unique(entries[:, (2, 3)], axis=0, return_inverse=True)
    of_entry = of_entry.reshape(-1)
    end = np.zeros(len(runs), np.int64)
    np.maximum.at(end, of_entry, entries[:, 4])
    count = -(-(end - runs[:, 1]) // TURN_TOKENS)
    before = np.cumsum(count) - count
    run = np.repeat(np.arange(len(runs)), count)
    first = runs[run, 1] + (np.arange(len(run)) - before[run]) * TURN_TOKENS
    table, stop = runs[run, 0], np.minimum(end[run], first + TURN_TOKENS)
    block = first[:, None] // spec.block_size + np.arange(-(-(TURN_TOKENS - 1) // spec.block_size) + 1)
    used = block * spec.block_size < stop[:, None]
    ids = np.where(used, tables[table[:, None], np.where(used, block, 0)], -1)
    content = np.column_stack([ids, first % spec.block_size, stop - first]).astype(np.int64)
    _, chosen, places = np.unique(content, axis=0, return_index=True, return_inverse=True)
    if len(chosen) * TURN_TOKENS * spec.num_kv_heads * spec.v_head_dim > MAX_WIDE_BYTES:
        return None
    chunks = np.column_stack([table, first, stop, np.zeros_like(stop)])[chosen]
    return TurnedChunks(
        chunks.astype(np.int32), places.reshape(-1).astype(np.int32), before[of_entry].astype(np.int32)
    )  # fmt: skip
