"""The forest plan as plain data: whatever the tables, a row's tokens are covered once, by blocks that are its own."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.kernels import AttentionSpec, PlanCapacity, plan_forest
from radixpool.kernels.forest import TO_THE_END, Forest, build_forest, find_segments
from radixpool.kernels.forest_paths import shared_intervals, sort_tables
from radixpool.kernels.launch import DeviceInfo, TileConfig, tile_config
from radixpool.kernels.token_cuts import cut_tokens, even_piece

DEVICE = DeviceInfo(arch=90, num_sms=132, pdl=True)


def spec_of(heads=(32, 8), block_size=16, dim=128):
    return AttentionSpec(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, block_size=block_size, q_dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, backend="torch",
    )  # fmt: skip


def config_of(height, *, tall):
    return TileConfig(64, 4, 3, 2 if height < 64 else 1)


def build(tables, lens, new=None, *, spec=None, device=DEVICE, config=config_of, **options) -> Forest:
    tables, lens = np.ascontiguousarray(tables, np.int32), np.asarray(lens, np.int32)
    new = np.ones_like(lens) if new is None else np.asarray(new, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return build_forest(tables, lens, new, starts, spec or spec_of(), device, config, **options)


def items_by_program(forest: Forest):
    """Yield (height, program, record) as the device walks them."""
    for height, items in forest.items.items():
        for program in range(forest.programs[height]):
            first = items[program]
            if first[1] == 0:
                continue
            yield height, program, first
            for other in items[first[7] : first[7] + first[6]]:
                yield height, program, other


def check_forest(forest: Forest, tables, lens, new, spec) -> None:
    """Prove that the plan computes attention: exact cover, own blocks, one writer a partial state, all merged."""
    num_rows = len(forest.rows)
    seen = [[] for _ in range(num_rows)]
    parts: dict[int, int] = {}
    direct = []
    walked = 0
    for height, _, record in items_by_program(forest):
        walked += 1
        row0, rows, table, begin, end, part = record[:6]
        assert 0 < rows * spec.group_size <= height and begin < end
        limits = [int(lens[seq] - back) for _, seq, back, _ in forest.rows[row0 : row0 + rows]]
        assert record[8] == forest.rows[row0 + rows - 1][2]
        assert record[9] == max(0, min(limits))
        stop = int(lens[table] - record[8]) if end == TO_THE_END else int(end)
        # A tile may read past what its own rows see, but only tokens that some sequence has written there.
        path = tables[table][: -(-stop // spec.block_size)]
        assert stop <= max(n for t, n in zip(tables, lens, strict=True) if (t[: len(path)] == path).all())
        for j, (row, seq, _, _) in enumerate(forest.rows[row0 : row0 + rows]):
            blocks = slice(begin // spec.block_size, -(-min(stop, max(limits[j], 0)) // spec.block_size))
            assert (tables[seq][blocks] == tables[table][blocks]).all()
            seen[row].append((int(begin), stop))
            if part < 0:
                direct.append(int(row))
            else:
                assert part + j not in parts
                parts[int(part + j)] = int(row)
    assert walked == sum(int((items[:, 1] > 0).sum()) for items in forest.items.values())
    assert sorted(parts) == list(range(forest.num_parts))
    starts = np.concatenate([[0], np.cumsum(new)])
    for seq, (length, count) in enumerate(zip(lens, new, strict=True)):
        for j in range(count):
            limit, at = max(0, int(length - count + j + 1)), 0
            for begin, stop in sorted(seen[starts[seq] + j]):
                assert begin <= at or at >= limit
                at = max(at, stop)
            assert at >= limit
            cuts = sorted(seen[starts[seq] + j])
            assert all(a[1] <= b[0] for a, b in pairwise(cuts))
    merged = {}
    for i, row in enumerate(forest.merge_rows):
        merged[int(row)] = forest.merge_parts[forest.merge_starts[i] : forest.merge_starts[i + 1]].tolist()
    assert all(parts[p] == row for row, mine in merged.items() for p in mine)
    assert sorted(p for mine in merged.values() for p in mine) == sorted(parts)
    assert sorted([*merged, *direct]) == list(range(num_rows))


@st.composite
def forests(draw):
    """Draw tables that branch at random, ragged lengths, some empty, some sharing a partly filled last block."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    count = draw(st.integers(1, 9))
    width = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = rng.permutation(count * width + 7)[: count * width].reshape(count, width).astype(np.int32)
    for row in range(1, count):
        if draw(st.booleans()):
            parent, depth = draw(st.integers(0, row - 1)), draw(st.integers(0, width))
            tables[row, :depth] = tables[parent, :depth]
    lens = np.array([draw(st.integers(0, width * block_size)) for _ in range(count)], np.int32)
    new = np.array([draw(st.integers(0, 4)) for _ in range(count)], np.int32)
    heads = draw(st.sampled_from([(8, 8), (8, 2), (9, 3), (48, 1)]))
    return tables, lens, new, spec_of(heads, block_size, 16)


@settings(max_examples=150, deadline=None)
@given(forests(), st.sampled_from([1.0, -1e9, np.inf]), st.sampled_from([1, 4, 132]))
def test_any_forest_is_covered_exactly_once(drawn, gain, sms):
    tables, lens, new, spec = drawn
    forest = build(tables, lens, new, spec=spec, device=DeviceInfo(90, sms, True), min_gain_bytes=gain)
    check_forest(forest, tables, lens, new, spec)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_forests_against_float64(make_batch, data):
    rows = data.draw(st.integers(1, 5))
    lens = tuple(data.draw(st.lists(st.integers(0, 60), min_size=rows, max_size=rows)))
    new = tuple(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows).filter(any)))
    depth = -(-min(lens) // 4)
    members = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
    inner = members[: data.draw(st.integers(1, len(members)))]
    shared = [(sorted(inner), depth), (sorted(members), depth // 2)]
    make_batch(lens=lens, new=new, head_dim=16, block_size=4, shared=shared, seed=data.draw(st.integers(0, 99))).check()


def unshared(batch=64, blocks=256, seed=0):
    return np.random.default_rng(seed).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)


def test_shared_blocks_are_read_once():
    tables = unshared()
    tables[:, :200] = tables[0, :200]
    forest = build(tables, [4096] * 64)
    assert forest.unique_tokens == 3200 + 64 * 896
    assert set(forest.items) == {16, 128}
    read = sum(int(r[4]) - int(r[3]) for _, _, r in items_by_program(forest) if r[1] > 1)
    assert read == 3200 * 2  # 64 rows x 4 heads fill two tiles of 128


def test_three_levels_are_found():
    tables = unshared(256, 328)
    tables[:, :128] = tables[0, :128]
    for g in range(8):
        tables[g * 32 : (g + 1) * 32, 128:256] = tables[g * 32, 128:256]
    for g in range(64):
        tables[g * 4 : (g + 1) * 4, 256:320] = tables[g * 4, 256:320]
    order = np.random.default_rng(1).permutation(256)
    forest = build(tables[order], [5248] * 256)
    assert forest.unique_tokens == 2048 + 8 * 2048 + 64 * 1024 + 256 * 128


def test_sharing_too_short_to_pay_is_left_alone():
    tables = unshared(2, 256)
    tables[:, :1] = tables[0, :1]
    assert build(tables, [4096, 4096]).unique_tokens == 8192


def test_a_partly_filled_shared_block_ends_where_its_rows_end():
    tables = unshared(32, 40)
    tables[:] = tables[0]
    lens = [633] * 32
    forest = build(tables, lens)
    check_forest(forest, tables, np.array(lens), np.ones(32, int), spec_of())
    assert not forest.growable


def test_stale_entries_past_the_length_do_not_count():
    tables = unshared(3, 8)
    tables[1, :4] = tables[0, :4]
    tables[2, :2] = tables[0, :2]
    lens = np.array([64, 64, 32])
    order, lcp = sort_tables(tables, -(-lens // 16))
    depth = dict(zip(zip(order[:-1].tolist(), order[1:].tolist(), strict=True), lcp.tolist(), strict=True))
    assert sorted(depth.values()) == [2, 4]


def test_intervals_come_parents_first():
    assert shared_intervals(np.array([1, 3, 3, 0, 2])) == [(4, 6, 2), (0, 4, 1), (1, 4, 3)]
    assert shared_intervals(np.array([0, 0])) == []
    assert shared_intervals(np.array([2])) == [(0, 2, 2)]


def test_without_sharing_the_plan_is_the_plain_one():
    tables = unshared()
    plain = build(tables, [4096] * 64, min_gain_bytes=np.inf)
    forest = build(tables, [4096] * 64)
    assert (
        all(np.array_equal(plain.items[h], forest.items[h]) for h in plain.items)
        and plain.items.keys() == forest.items.keys()
    )


def test_work_is_balanced_over_the_programs():
    lens = np.exp(np.random.default_rng(3).uniform(np.log(64), np.log(16384), 64)).astype(int)
    tables = unshared(64, 1024)
    forest = build(tables, lens)
    loads = np.zeros(forest.programs[16])
    for _, program, r in items_by_program(forest):
        loads[program] += min(int(r[4]), int(lens[r[2]])) - int(r[3])
    assert loads.max() <= 1.25 * loads.mean()


def test_a_single_long_sequence_spreads_over_the_device():
    forest = build(unshared(1, 4096), [65536])
    assert forest.programs[16] == 33 and forest.num_parts == 33


def test_even_pieces_are_whole_steps():
    assert even_piece(np.array([4096] * 64), 264) == 1024
    assert even_piece(np.array([4096] * 300), 264) == 0
    _, first, last, _ = cut_tokens(np.array([4096] * 64), 264, merging=False)
    assert set((last - first).tolist()) == {1024}


def test_empty_batches():
    forest = build(np.zeros((0, 4), np.int32), [])
    assert forest.num_parts == 0 and not forest.items
    forest = build(unshared(3, 4), [0, 0, 0])
    assert sorted(forest.merge_rows.tolist()) == [0, 1, 2]


def test_rows_without_query_tokens_cost_nothing():
    tables = unshared(4, 8)
    _, segments = find_segments(tables[[1]], np.array([100]), np.array([1]), spec_of())
    assert segments.table.tolist() == [0]
    check_forest(build(tables, [100] * 4, [0, 1, 0, 2]), tables, np.array([100] * 4), np.array([0, 1, 0, 2]), spec_of())


def test_a_small_capacity_gives_up_sharing_before_it_fails(make_batch):
    tables = unshared(8, 64)
    for depth, rows in ((60, 2), (50, 4), (40, 8)):
        for start in range(0, 8, rows):
            tables[start : start + rows, :depth] = tables[start, :depth]
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, block_size=16, backend="triton")
    roomy = plan_forest(tables, [1020] * 8, spec=spec, capacity=PlanCapacity(max_seqs=8, max_blocks=64))
    tight = plan_forest(tables, [1020] * 8, spec=spec, capacity=PlanCapacity(8, 64, max_parts=8))
    assert roomy.forest.unique_tokens < tight.forest.unique_tokens
    with pytest.raises(ValueError, match="max_seqs=8, got 9"):
        roomy.update(unshared(9, 64), [10] * 9)
    assert roomy.num_seqs == 8


@pytest.mark.parametrize(("prefix", "tall", "narrow"), [(256, 12, 42), (1024, 16, 33)])
def test_tall_tiles_with_little_to_do_leave_multiprocessors_to_narrow_ones(prefix, tall, narrow):
    """64 sequences that share 4k or 16k tokens and have 256 of their own, as one H200 runs them."""
    tables = unshared(64, prefix + 16)
    tables[:, :prefix] = tables[0, :prefix]
    forest = build(
        tables, [16 * (prefix + 16)] * 64, config=lambda rows, *, tall: tile_config(2, 128, rows, 90, tall=tall)
    )
    assert forest.programs == {16: narrow, 128: tall}
