"""Bad arguments: one error before any launch: the tensor, what was expected, what came; nothing is changed."""

import math
from types import SimpleNamespace

import pytest
import torch

from radixpool.kernels import (
    AttentionSpec,
    PlanCapacity,
    RoPE,
    attend,
    choose_backend,
    copy_blocks,
    extend,
    gather_blocks,
    merge_states,
    plan_forest,
    write_kv,
)
from radixpool.kernels.launch import (
    DeviceInfo,
    TileConfig,
    ctas_per_head,
    fit_shared_memory,
    tile_config,
    tuning_table,
    uses_pairs,
)


def spec_of(**options):
    return AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "block_size": 16, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_q_heads": 7}, ValueError, "num_q_heads: expected a multiple of num_kv_heads=2, got 7"),
        ({"num_q_heads": 258}, ValueError, "at most 128 query heads a KV head, got 129"),
        ({"head_dim": 8}, ValueError, "head_dim: expected 16 to 256, got 8"),
        ({"v_head_dim": 512}, ValueError, "v_head_dim: expected 16 to 256, got 512"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        ({"q_dtype": torch.float64}, TypeError, "q_dtype: expected one of"),
        ({"kv_dtype": torch.int8}, TypeError, "kv_dtype: expected one of"),
        ({"backend": "cuda"}, ValueError, "backend: expected 'torch' or 'triton', got 'cuda'"),
    ],
)
def test_specs(options, error, message):
    with pytest.raises(error, match=message):
        spec_of(**options)


@pytest.mark.parametrize(
    ("tables", "lens", "new", "error", "message"),
    [
        ([[1, 2]], [33], None, ValueError, r"row 0 holds 2 blocks of 16 tokens, seq_lens\[0\] is 33"),
        ([[1, 2]], [3, 4], None, ValueError, "expected 1 entries as block_tables has rows, got 2 and 2"),
        ([[1, 2]], [-1], None, ValueError, "seq_lens: expected no negative length, got -1"),
        ([[1, 2]], [5], [-2], ValueError, "query_lens: expected no negative length, got -2"),
        ([1, 2], [5], None, ValueError, r"block_tables: expected 2 dimension\(s\), got shape \(2,\)"),
        ([[1.0, 2.0]], [5], None, TypeError, "block_tables: expected integers, got float64"),
    ],
)
def test_batches(tables, lens, new, error, message):
    with pytest.raises(error, match=message):
        plan_forest(tables, lens, new, spec=spec_of())


def test_unknown_sharing():
    with pytest.raises(ValueError, match="sharing: expected 'forest' or 'none', got 'tree'"):
        plan_forest([[1]], [5], spec=spec_of(), sharing="tree")


ATTENTION = [
    ({"q": torch.zeros(2, 8, 32)}, ValueError, "q: expected size 1 in dimension 0 .*another batch"),
    ({"q": torch.zeros(1, 4, 32)}, ValueError, r"q: expected size 8 in dimension 1 \(num_q_heads of the plan\)"),
    ({"q": torch.zeros(1, 8, 64)[..., ::2]}, ValueError, "q: expected stride 1 in the last dimension"),
    ({"q": torch.zeros(8, 32)}, ValueError, r"q: expected \[tokens, num_q_heads, head_dim\], got shape \(8, 32\)"),
    ({"q": torch.zeros(1, 8, 32).half()}, TypeError, "q: expected dtype torch.float32, got torch.float16"),
    ({"k_pool": torch.zeros(4, 2, 8, 32)}, ValueError, r"v_pool: expected size 8 in dimension 2"),
    ({"k_pool": torch.zeros(4, 2, 16, 32).half()}, TypeError, "v_pool: expected dtype torch.float16"),
    ({"k_pool": torch.zeros(4, 2, 16, 48)}, ValueError, r"k_pool: expected size 32 in dimension 3"),
    ({"sinks": torch.zeros(4)}, ValueError, r"sinks: expected size 8 in dimension 0"),
    (
        {"k_scale": torch.zeros(5)},
        ValueError,
        r"k_scale: expected shape \[\], \[1\], \[2\] or \[4, 2, 16\], got \(5,\)",
    ),
    ({"k_scale": 0.0}, ValueError, "k_scale: expected a positive finite number, got 0.0"),
    ({"v_scale": math.nan}, ValueError, "v_scale: expected a positive finite number, got nan"),
    ({"scale": -1.0}, ValueError, "scale: expected a positive finite number, got -1.0"),
    ({"scale": math.inf}, ValueError, "scale: expected a positive finite number, got inf"),
    ({"window": -1}, ValueError, "window, soft_cap: expected no negative and no infinite value"),
    ({"soft_cap": math.nan}, ValueError, "window, soft_cap: expected no negative and no infinite value"),
    ({"q": None}, TypeError, r"q: expected a tensor \[tokens, num_q_heads, head_dim\], got NoneType"),
    ({"sinks": [0.0] * 8}, TypeError, r"sinks: expected a tensor \[num_q_heads\], got list"),
    ({"out": torch.zeros(1, 8, 16)}, ValueError, r"out: expected shape \[1, 8, 32\], got \(1, 8, 16\)"),
    ({"lse": torch.zeros(1, 8).double()}, TypeError, "lse: expected dtype torch.float32, got torch.float64"),
    ({"q": torch.zeros(1, 8, 32, device="meta")}, ValueError, "q: expected device cpu, got meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), ATTENTION, ids=[m[:40] for _, _, m in ATTENTION])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_attention(change, error, message, warm):
    plan = plan_forest([[1, 2]], [20], spec=spec_of())
    arguments = {"q": torch.zeros(1, 8, 32), "k_pool": torch.zeros(4, 2, 16, 32), "v_pool": torch.zeros(4, 2, 16, 32)}
    if warm:
        extend(plan=plan, **arguments)
        extend(plan=plan, **arguments, k_scale=1.0, v_scale=1.0)
    with pytest.raises(error, match=message):
        extend(plan=plan, **{**arguments, **change})


def test_a_window_beyond_int32_reaches_kernels_as_the_largest(monkeypatch):
    """They take int32; no sequence is longer, so the result is the same."""
    handed = []
    recorder = SimpleNamespace(attention=lambda *_, window, **__: handed.append(window))
    monkeypatch.setattr("radixpool.kernels.ops.implementation", lambda backend, device: recorder)
    plan, pool = plan_forest([[1, 2]], [20], spec=spec_of()), torch.zeros(4, 2, 16, 32)
    for window in (0, 7, 2**31 - 1, 2**31, 2**63 - 1):
        extend(torch.zeros(1, 8, 32), pool, pool, plan, window=window)
    assert handed == [0, 7, 2**31 - 1, 2**31 - 1, 2**31 - 1]


def test_block_ids_outside_the_pool_on_request():
    plan = plan_forest([[1, 7, -5]], [20], spec=spec_of())
    pool = torch.zeros(4, 2, 16, 32)
    with pytest.raises(ValueError, match="block_tables: row 0 names block 7, the pool has 4 blocks"):
        attend(torch.zeros(1, 8, 32), pool, pool, plan, debug=True)


def test_attend_refuses_a_prefill():
    plan = plan_forest([[1, 2]], [20], [9], spec=spec_of())
    pool = torch.zeros(4, 2, 16, 32)
    with pytest.raises(ValueError, match="attend takes at most 8 tokens a sequence, got 9"):
        attend(torch.zeros(9, 8, 32), pool, pool, plan)


WRITES = [
    ({"k": torch.zeros(3, 1, 32)}, ValueError, "k: expected size 2 in dimension 1"),
    ({"v": torch.zeros(2, 2, 32)}, ValueError, "v: expected size 3 in dimension 0"),
    ({"k": torch.zeros(3, 2, 32).half()}, TypeError, "k: expected dtype torch.float32, got torch.float16"),
    ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, ValueError, "slot_mapping: expected size 3 in dimension 0"),
    ({"slot_mapping": torch.zeros(3)}, TypeError, "slot_mapping: expected dtype torch.int32 or torch.int64"),
    ({"slot_mapping": [0, 1, 2]}, TypeError, r"slot_mapping: expected a tensor \[tokens\], got list"),
    ({"slot_mapping": torch.tensor([0, 1, 64])}, ValueError, "slot_mapping: expected slots below 64, got 64"),
    ({"rope": RoPE(torch.zeros(2, 16), torch.zeros(2, 16))}, ValueError, "rope.cos: expected size 3 in dimension 0"),
    (
        {"rope": RoPE(torch.zeros(3, 17), torch.zeros(3, 17))},
        ValueError,
        "rope.cos: expected at most 16 columns, got 17",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), WRITES, ids=[m[:40] for _, _, m in WRITES])
def test_writes(change, error, message):
    pools = {"k_pool": torch.zeros(4, 2, 16, 32), "v_pool": torch.zeros(4, 2, 16, 32)}
    arguments = {"k": torch.ones(3, 2, 32), "v": torch.ones(3, 2, 32), "slot_mapping": torch.tensor([0, 1, 2]), **pools}
    with pytest.raises(error, match=message):
        write_kv(**{**arguments, **change}, debug=True)
    assert not any(pool.any() for pool in pools.values())


def test_rope_shapes():
    with pytest.raises(ValueError, match="rope: expected cos and sin of one shape"):
        RoPE(torch.zeros(2, 16), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0], [4], "dst: expected block ids in 0 to 3, got 4 to 4"),
        ([-1], [1], "src: expected block ids in 0 to 3, got -1 to -1"),
        ([0, 1], [2], "dst: expected 2 blocks as in src, got 1"),
        ([0, 1], [2, 2], "dst: expected each destination once"),
    ],
)
def test_copies(src, dst, message):
    pool = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 16).contiguous()
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks(pool, src, dst)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("ids", [[0.9], [True], torch.tensor([1.0])], ids=["float", "bool", "tensor"])
def test_block_ids_that_are_no_integers(ids):
    """They were cut down to the next one."""
    with pytest.raises(TypeError, match="src: expected integers, got torch"):
        copy_blocks(torch.zeros(4, 1, 2, 16), ids, [1])
    with pytest.raises(TypeError, match="blocks: expected integers, got torch"):
        gather_blocks(torch.zeros(4, 1, 2, 16), ids)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_seqs": 0}, "max_seqs: expected an integer from 1 on, got 0"),
        ({"max_blocks": -1}, "max_blocks: expected an integer from 1 on, got -1"),
        ({"max_rows": -1}, "max_rows: expected an integer from 0 on, got -1"),
        ({"max_parts": 1.5}, "max_parts: expected an integer from 0 on, got 1.5"),
    ],
)
def test_capacities(sizes, message):
    with pytest.raises(ValueError, match=message):
        PlanCapacity(**{"max_seqs": 2, "max_blocks": 2, **sizes})


def test_gathers_and_merges():
    with pytest.raises(ValueError, match="blocks: expected block ids in 0 to 3, got 9 to 9"):
        gather_blocks(torch.zeros(4, 1, 2, 16), [9])
    with pytest.raises(ValueError, match=r"lses: expected shape \[2, 3, 4\], got \(2, 3\)"):
        merge_states(torch.zeros(2, 3, 4, 16), torch.zeros(2, 3))


def test_the_backend_follows_the_device():
    assert choose_backend("cpu") == "torch" and choose_backend("cuda") == "triton"
    assert choose_backend("cuda", "torch") == "torch"


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
@pytest.mark.parametrize("tall", [False, True])
def test_configurations_fit_the_shared_memory(arch, head_dim, kv_bytes, tall):
    limit = {80: 163, 89: 99, 90: 227}.get(arch, 99) * 1024
    for rows in (16, 32, 64, 128):
        config = tile_config(kv_bytes, head_dim, rows, arch, tall=tall)
        width = 1 << (head_dim - 1).bit_length()
        assert config.block_n >= 16 and config.num_stages >= 2
        assert config.block_n * width * 2 * kv_bytes * (config.num_stages - 1) <= limit


def test_too_large_configurations_lose_stages_then_width():
    big = TileConfig(block_n=128, num_warps=8, num_stages=4, ctas_per_sm=1)
    fitted = fit_shared_memory(big, 2, 256, 128, 227 * 1024)
    assert fitted.num_stages == 2 and fitted.block_n < 128


def test_every_entry_of_the_table_is_a_configuration():
    for entries in tuning_table().values():
        for key, fields in entries.items():
            size, width, rows = key.split("/")
            assert size in ("*", "1", "2", "4") and (width == "*" or int(width) in (16, 32, 64, 128, 256))
            assert int(rows.rstrip("+")) in (16, 32, 64, 128)
            config = TileConfig(**fields)
            assert config.block_n & (config.block_n - 1) == 0 and config.num_warps in (1, 2, 4, 8)


def test_programs_fill_the_device_once():
    device = DeviceInfo(arch=90, num_sms=132, pdl=True)
    config = TileConfig(64, 4, 3, 2, ctas_beside=1)
    assert ctas_per_head(config, spec_of(num_q_heads=32, num_kv_heads=8), device) == 33
    assert ctas_per_head(config, spec_of(num_q_heads=32, num_kv_heads=8), device, beside=True) == 16
    assert ctas_per_head(config, spec_of(num_q_heads=512, num_kv_heads=512), device) == 1


def test_pairs_are_for_narrow_fp8_tiles_on_chips_that_convert():
    fp8 = spec_of(kv_dtype=torch.float8_e4m3fn)
    assert uses_pairs(fp8, 16, 90, interpreted=False)
    assert not uses_pairs(fp8, 64, 90, interpreted=False)
    assert not uses_pairs(fp8, 16, 80, interpreted=False)
    assert not uses_pairs(spec_of(), 16, 90, interpreted=False)
