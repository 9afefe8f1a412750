"""The schedule and the choice of the fast extend path: pure functions, no GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.kernels import AttentionSpec, extend_plan
from radixpool.kernels.extend_plan import (
    FAST_ROWS,
    TURN_TOKENS,
    copies_in_bulk,
    deal,
    extend_config,
    fp8_config,
    page_tokens,
    schedule_extend,
    turned_chunks,
    wide_blocks,
    wide_tiles,
)
from radixpool.kernels.forest import build_forest
from radixpool.kernels.launch import DeviceInfo, tile_config

H200 = DeviceInfo(arch=90, num_sms=132, pdl=True)


def spec_of(**changes):
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    shape |= {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return AttentionSpec(**(shape | changes))


def cut(spec, lens, new, *, shared_blocks=0, seed=0):
    lens, new = np.array(lens, np.int32), np.array(new, np.int32)
    width = max(1, int(-(-lens.max() // spec.block_size)))
    ids = np.random.default_rng(seed).permutation(len(lens) * width).astype(np.int32)
    tables = ids.reshape(len(lens), width)
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    plan_config = lambda height, tall: tile_config(2, 128, height, 90, tall=tall)  # noqa: E731 - the plan's own seam
    return build_forest(tables, lens, new, starts, spec, H200, plan_config), lens


def work(schedule):
    """Work of each program, in tokens."""
    tokens = schedule.entries[:, 4] - schedule.entries[:, 3]
    return np.add.reduceat(np.append(tokens, 0), schedule.starts[:-1])


LENGTHS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 500)), min_size=1, max_size=6)


@given(batch=LENGTHS, shared=st.integers(0, 3), heads=st.sampled_from([(32, 8), (8, 1), (9, 3), (6, 1)]))
@settings(max_examples=60, deadline=None)
def test_every_tall_item_runs_once_for_every_head(batch, shared, heads):
    spec = spec_of(num_q_heads=heads[0], num_kv_heads=heads[1])
    new = [n for _, n in batch]
    lens = [cached + n for cached, n in batch]
    shared = min(shared, min(lens) // spec.block_size)
    forest, lens = cut(spec, lens, new, shared_blocks=shared)
    schedule = schedule_extend(forest, lens, spec, 132)
    items = forest.items.get(FAST_ROWS, np.zeros((0, 8), np.int32))
    items = items[items[:, 1] > 0]
    if schedule is None:
        assert len(items) == 0
        return
    want = sorted((*item[[0, 1, 2, 3, 5]].tolist(), head) for item in items for head in range(heads[1]))
    assert sorted(tuple(e) for e in schedule.entries[:, [0, 1, 2, 3, 5, 6]].tolist()) == want
    assert schedule.starts[0] == 0 and schedule.starts[-1] == len(schedule.entries)
    assert (np.diff(schedule.starts) > 0).all()
    rows = forest.rows
    assert (schedule.limits == np.maximum(lens[rows[:, 1]] - rows[:, 2], 0)).all()
    for row0, count, _, begin, end, _, _, shortest in schedule.entries.tolist():
        limits = schedule.limits[row0 : row0 + count]
        assert shortest == limits.min()
        assert begin < end and begin % page_tokens(spec.block_size) == 0
        assert end <= max(limits.max(), begin + 1)


@pytest.mark.parametrize(
    ("lens", "new", "heads"),
    [([4096] * 4, [4096] * 4, (32, 8)), ([4608] * 4, [512] * 4, (32, 8)), ([6144] * 8, [2048] * 8, (8, 1))],
)
def test_programs_get_about_the_same_work(lens, new, heads):
    spec = spec_of(num_q_heads=heads[0], num_kv_heads=heads[1])
    forest, lens = cut(spec, lens, new)
    schedule = schedule_extend(forest, lens, spec, 132)
    load = work(schedule)
    assert len(load) == 132
    longest = (schedule.entries[:, 4] - schedule.entries[:, 3]).max()
    assert load.max() <= load.mean() + longest
    assert load.max() <= 1.06 * load.mean()


def test_longest_tiles_come_first_within_one_sequence():
    spec = spec_of(num_q_heads=4, num_kv_heads=1)
    forest, lens = cut(spec, [20000], [20000])
    schedule = schedule_extend(forest, lens, spec, 132)
    tokens = schedule.entries[:, 4] - schedule.entries[:, 3]
    for first, last in zip(schedule.starts[:-1], schedule.starts[1:], strict=True):
        assert (np.diff(tokens[first:last]) <= 0).all()


def seen_by_row(schedule):
    """How many keys of which table each row reads from where, for each head."""
    seen = {}
    for row0, count, table, begin, end, part, head, _ in schedule.entries.tolist():
        for row in range(row0, row0 + count):
            assert (row, head, begin) not in seen
            seen[row, head, begin] = (table, min(end, int(schedule.limits[row])), part)
    return seen


@given(
    batch=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 500)), min_size=2, max_size=6), sms=st.integers(1, 8)
)
@settings(max_examples=40, deadline=None)
def test_two_items_in_one_tile_read_what_they_read_alone(batch, sms):
    spec = spec_of(head_dim=64)
    forest, lens = cut(spec, [cached + n for cached, n in batch], [n for _, n in batch])
    alone, joined = (schedule_extend(forest, lens, spec, sms, tile_rows=rows) for rows in (FAST_ROWS, 2 * FAST_ROWS))
    if joined is not None:
        assert seen_by_row(joined) == seen_by_row(alone)
        assert joined.entries[:, 1].max() * spec.group_size <= 2 * FAST_ROWS
        assert 2 * len(joined.entries) <= 1.2 * len(alone.entries)


@pytest.mark.parametrize(
    ("lens", "new", "sms", "taken"),
    [
        ([4096] * 4, [4096] * 4, 132, True),
        ([8320] * 64, [128] * 64, 132, False),  # nearly all is cached
        ([512] * 2, [512] * 2, 132, False),  # too few tiles for all multiprocessors
        ([600] * 90, [31] * 90, 132, False),  # every tile would be alone, half of it idle
    ],
)
def test_two_items_run_as_one_tile_where_that_pays(lens, new, sms, taken):
    spec = spec_of(head_dim=64)
    forest, lens = cut(spec, lens, new)
    assert (schedule_extend(forest, lens, spec, sms, tile_rows=2 * FAST_ROWS) is not None) == taken


def test_wide_tiles_are_for_64_columns():
    config = wide_tiles(extend_config(spec_of(head_dim=64), 90))
    assert (config.tile_rows, config.block_n) == (256, 64)
    tiles = config.num_stages * config.block_d + config.value_stages * config.block_dv
    assert config.tile_rows * config.block_d * 2 + config.block_n * tiles * 2 <= 227 * 1024
    assert wide_tiles(extend_config(spec_of(head_dim=128), 90)) is None
    assert wide_tiles(extend_config(spec_of(head_dim=64, v_head_dim=128), 90)) is None


def test_deal_gives_the_dearest_to_the_idlest():
    program, nth = deal(np.array([5, 9, 1, 1, 7]), 2)
    assert program.tolist() == [1, 0, 1, 0, 1] and nth.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "arch", "taken"),
    [
        ({}, 90, True),
        ({"q_dtype": torch.float16, "kv_dtype": torch.float16}, 90, True),
        ({"head_dim": 64}, 90, True),
        ({"head_dim": 96}, 90, True),
        ({"head_dim": 256}, 90, True),
        ({"head_dim": 128, "v_head_dim": 64}, 90, True),
        ({"block_size": 8}, 90, True),
        ({"block_size": 544}, 90, True),
        ({}, 80, False),
        ({}, 100, False),
        ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, 90, False),
        ({"kv_dtype": torch.float8_e4m3fn}, 90, True),
        ({"q_dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn}, 90, False),
        ({"head_dim": 48}, 90, False),
        ({"head_dim": 100}, 90, False),
        ({"block_size": 4}, 90, False),
        ({"block_size": 20}, 90, False),
    ],
    ids=str,
)
def test_who_takes_the_fast_path(changes, arch, taken):
    assert (extend_config(spec_of(**changes), arch) is not None) == taken


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_shared_memory_fits(dims):
    config = extend_config(spec_of(head_dim=dims[0], v_head_dim=dims[1]), 90)
    tiles = config.num_stages * config.block_d + config.value_stages * config.block_dv
    used = FAST_ROWS * config.block_d * 2 + config.block_n * tiles * 2
    used += FAST_ROWS * config.block_dv * 2 if config.block_d != config.block_dv else 0
    assert config.num_stages >= config.value_stages >= 2 and used <= 227 * 1024


def test_odd_strides_are_refused_by_the_copy_engine():
    pool = torch.zeros(4, 2, 16, 128, dtype=torch.bfloat16)
    assert copies_in_bulk(pool)
    assert copies_in_bulk(pool.transpose(1, 2))
    assert not copies_in_bulk(torch.zeros(4, 2, 16, 132, dtype=torch.bfloat16)[..., :128])
    assert not copies_in_bulk(torch.zeros(4 * 2 * 16 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 2, 16, 128))


def widened(lens, new, *, shared_blocks=0):
    spec = spec_of(kv_dtype=torch.float8_e4m3fn)
    forest, lens = cut(spec, lens, new, shared_blocks=shared_blocks)
    width = -(-int(lens.max()) // spec.block_size)
    tables = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width)
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    schedule = schedule_extend(forest, lens, spec, 132)
    return wide_blocks(schedule, tables, spec), tables, lens


def test_widened_blocks_are_the_ones_in_use_each_once():
    wide, tables, lens = widened([4608, 1500], [512, 700], shared_blocks=40)
    needed = {int(b) for table, n in zip(tables, lens, strict=True) for b in table[: -(-n // 16)]}
    assert len(set(wide.blocks.tolist())) == len(wide.blocks)
    assert set(wide.blocks.tolist()) == needed
    for table, local, n in zip(tables, wide.tables, lens, strict=True):
        count = -(-n // 16)
        assert (wide.blocks[local[:count]] == table[:count]).all()


def test_widening_must_pay():
    assert widened([8192], [40])[0] is None
    assert widened([8192], [512])[0] is not None


def turned(lens, new, *, shared_blocks=0, block_size=16):
    spec = spec_of(kv_dtype=torch.float8_e4m3fn, block_size=block_size)
    forest, lens = cut(spec, lens, new, shared_blocks=shared_blocks)
    width = -(-int(lens.max()) // block_size)
    tables = np.random.default_rng(0).permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width)
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    schedule = schedule_extend(forest, lens, spec, 132)
    return turned_chunks(schedule, tables, spec), schedule, tables


@given(
    batch=st.lists(st.tuples(st.integers(0, 900), st.integers(64, 500)), min_size=1, max_size=5),
    shared=st.integers(0, 3), block_size=st.sampled_from([8, 16, 24, 64]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_tile_finds_its_own_values(batch, shared, block_size):
    lens, new = [cached + n for cached, n in batch], [n for _, n in batch]
    chunks, schedule, tables = turned(lens, new, shared_blocks=min(shared, min(lens) // block_size),
                                      block_size=block_size)  # fmt: skip
    for run, (_, _, table, begin, end, *_) in zip(chunks.runs, schedule.entries.tolist(), strict=True):
        for i, first in enumerate(range(begin, end, TURN_TOKENS)):
            source, start, stop, _ = chunks.chunks[chunks.places[run + i]].tolist()
            count = min(end, first + TURN_TOKENS) - first
            assert stop - start >= count and (start - first) % block_size == 0
            mine = [tables[table, t // block_size] for t in range(first, first + count)]
            assert mine == [tables[source, t // block_size] for t in range(start, start + count)]


def test_a_shared_prefix_is_turned_once_even_where_it_is_not_packed():
    chunks, schedule, _ = turned([8192 + 128] * 8, [128] * 8, shared_blocks=512)
    assert len(np.unique(schedule.entries[:, 2])) == 8  # packing saves no tile here
    assert len(chunks.chunks) == 8192 // TURN_TOKENS + 8


def test_turning_takes_at_most_a_gibibyte(monkeypatch):
    assert turned([8192], [512])[0] is not None
    monkeypatch.setattr(extend_plan, "MAX_WIDE_BYTES", 8192 * 8 * 128 - 1)
    assert turned([8192], [512])[0] is None


@pytest.mark.parametrize(
    ("changes", "arch", "taken"),
    [
        ({}, 90, True),
        ({"q_dtype": torch.float16}, 90, True),
        ({"head_dim": 64}, 90, True),
        ({"head_dim": 96}, 90, True),
        ({"head_dim": 128, "v_head_dim": 64}, 90, True),
        ({"block_size": 8}, 90, True),
        ({"head_dim": 256}, 90, False),
        ({"head_dim": 104}, 90, False),
        ({"block_size": 4}, 90, False),
        ({"kv_dtype": torch.bfloat16}, 90, False),
        ({"q_dtype": torch.float32}, 90, False),
        ({}, 89, False),
        ({}, 100, False),
    ],
    ids=str,
)
def test_who_multiplies_in_fp8_on_the_fast_path(changes, arch, taken):
    config = fp8_config(spec_of(**{"kv_dtype": torch.float8_e4m3fn} | changes), arch)
    assert (config is not None) == taken
    assert config is None or config.block_n == TURN_TOKENS
