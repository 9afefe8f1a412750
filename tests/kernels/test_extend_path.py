"""Who takes the fast extend path, and what it is handed: its kernel is replaced by a recorder, so no GPU is needed."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from radixpool.kernels import PlanCapacity, extend_path, extend_plan
from radixpool.kernels.extend_plan import ExtendConfig

CONFIG = ExtendConfig(page=16, block_d=64, block_dv=64, block_n=128, num_stages=2, value_stages=2)
ARGUMENTS = {"scale", "v_factor", "soft_cap", "window", "sinks", "k_scale", "v_scale", "out", "lse", "tables", "part",
             "part_lse", "spec", "config", "precision", "places"}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """Take the fast path everywhere; return the launches it makes."""
    made = []
    recorder = SimpleNamespace(
        upload=lambda schedule, device: schedule,
        launch_extend=lambda q, k, v, schedule, **arguments: made.append((k, v, schedule, arguments)),
    )
    monkeypatch.setattr(extend_path, "config_of", lambda plan, precision: CONFIG)
    monkeypatch.setattr(extend_path, "gluon_launcher", lambda: recorder)
    return made


def mixed(make_batch, **changes):
    return make_batch(heads=(8, 2), head_dim=64, lens=(200, 40), new=(150, 1), **changes)


def test_tall_tiles_go_to_the_fast_kernel_and_the_others_stay(make_batch, launches):
    batch = mixed(make_batch)
    plan = batch.plan()
    assert 128 in plan.device_plan.heights and len(plan.device_plan.heights) == 2
    out, lse = batch.run(plan)
    want, want_lse = batch.reference()
    torch.testing.assert_close(out[150].double().cpu(), want[150], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse[150].double().cpu(), want_lse[150], atol=1e-4, rtol=1e-4)
    ((k, v, schedule, arguments),) = launches
    assert k is batch.k_pool and v is batch.v_pool
    assert set(arguments) == ARGUMENTS
    assert arguments["tables"] is plan.device_plan.tables and arguments["out"] is out
    assert set(schedule.entries[:, 2].tolist()) == {0}


def test_the_schedule_is_made_once_for_all_layers_and_again_after_an_update(make_batch, launches):
    batch = mixed(make_batch)
    plan = batch.plan()
    for _ in range(3):
        batch.run(plan)
    assert len({id(schedule) for _, _, schedule, _ in launches}) == 1
    plan.update(batch.tables, [201, 41], [150, 1])
    assert plan.fast is None
    batch.run(plan)
    assert len({id(schedule) for _, _, schedule, _ in launches}) == 2


def test_two_items_run_as_one_tile_in_large_batches_only(make_batch, launches, monkeypatch):
    small = mixed(make_batch)
    small.run()
    monkeypatch.setattr(extend_plan, "MIN_ROUNDS", 0)
    monkeypatch.setattr(extend_plan, "MAX_ALONE", 1)
    monkeypatch.setattr(extend_plan, "MOSTLY_CACHED", 1)
    small.run(small.plan())
    narrow, wide = ((schedule, arguments["config"].tile_rows) for _, _, schedule, arguments in launches)
    assert (narrow[1], wide[1]) == (128, 256)
    assert narrow[0].entries[:, 1].max() == 32 and wide[0].entries[:, 1].max() == 64


def test_fp8_pools_are_widened_first(make_batch, launches, monkeypatch):
    wide = ExtendConfig(**{n: getattr(CONFIG, n) for n in CONFIG.__slots__ if n != "widen"}, widen=True)
    monkeypatch.setattr(extend_path, "config_of", lambda plan, precision: wide)
    batch = mixed(make_batch, kv_dtype=torch.float8_e4m3fn)
    batch.run()
    ((k, v, schedule, arguments),) = launches
    assert k.dtype == v.dtype == torch.float16
    for i in range(200 // 16):
        copy = int(arguments["tables"][0, i])
        want = batch.k_pool[batch.tables[0, i].long()].to(torch.float16)
        torch.testing.assert_close(k[copy], want, atol=0, rtol=0)
    assert schedule.entries[:, 4].max() == 200


def test_pools_that_the_copy_engine_cannot_read_stay_with_the_plain_kernel(make_batch, launches):
    batch = mixed(make_batch)
    odd = torch.zeros(batch.k_pool.numel() + 1, device=batch.k_pool.device)[1:].view(batch.k_pool.shape)
    odd.copy_(batch.k_pool)
    batch.k_pool = odd
    batch.check()
    assert not launches


def test_token_scales_stay_with_the_plain_kernel(make_batch, launches):
    batch = mixed(make_batch, kv_dtype=torch.float8_e4m3fn)
    scale = torch.ones(batch.k_pool.shape[:3], device=batch.q.device)
    batch.check(k_scale=scale, v_scale=scale)
    assert not launches


def test_plans_that_never_take_it(make_batch):
    decode = make_batch(heads=(8, 2), head_dim=64, lens=(70, 69, 68), new=(6, 8, 8), shared=[([0, 1, 2], 4)])
    captured = mixed(make_batch)
    capacity = PlanCapacity(max_seqs=2, max_blocks=captured.tables.shape[1], max_rows=151)
    for plan in (decode.plan(), captured.plan(capacity=capacity)):
        assert extend_path.config_of(plan, "full") is None and extend_path.config_of(plan, "fp8") is None


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize(("lens", "new"), [((700, 333, 64, 257), (700, 200, 64, 30)), ((2047,), (2047,))], ids=str)
def test_two_items_in_one_tile_on_a_gpu(make_batch, monkeypatch, lens, new, options):
    monkeypatch.setattr(extend_plan, "MIN_ROUNDS", 0)
    monkeypatch.setattr(extend_plan, "MAX_ALONE", 1)
    monkeypatch.setattr(extend_plan, "MOSTLY_CACHED", 1)
    batch = make_batch(heads=(8, 2), head_dim=64, lens=lens, new=new, kv_dtype=torch.bfloat16)
    plan = batch.plan()
    batch.check(plan, **options)
    assert plan.fast["full"].config.tile_rows == 256


def test_a_gluon_of_another_form_leaves_all_to_the_plain_kernel(monkeypatch):
    """Triton 3.5 has a Gluon too, but its warp_specialize takes other arguments: the kernel would not compile."""
    gluon = pytest.importorskip("triton.experimental.gluon.language")
    if "functions_and_args" not in inspect.signature(gluon.warp_specialize).parameters:
        assert extend_path.gluon_launcher() is None
        return
    assert extend_path.gluon_launcher() is not None

    def warp_specialize(default_args, default_partition, worker_args, worker_partitions):
        raise NotImplementedError

    monkeypatch.setattr(gluon, "warp_specialize", warp_specialize)
    assert extend_path.gluon_launcher() is None
