"""One plan from step to step: what keeps the cut, what is sent, and that attention stays right on the way."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.kernels import PlanCapacity, native_cut, plan_forest, plan_step
from radixpool.kernels.plan_step import MAX_CHANGES, MAX_GROWTH_TOKENS

BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
CAPACITY = PlanCapacity(max_seqs=4, max_blocks=40)


def entries(tables, old_lens, lens, block_size):
    """Return rows, columns and blocks of the table entries that a step adds."""
    added = [
        (row, column)
        for row, (old, new) in enumerate(zip(old_lens, lens, strict=True))
        for column in range(-(-old // block_size), -(-new // block_size))
    ]
    rows, columns = [row for row, _ in added], [column for _, column in added]
    return {"rows": rows, "columns": columns, "blocks": [int(tables[row, column]) for row, column in added]}


def device_tables(plan):
    return plan.device_plan.tables.cpu().numpy()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["update", "advance", "none"]), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
        min_size=1, max_size=8,
    ),
    fixed=st.booleans(), share=st.booleans(),
)  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("planner", ["C", "numpy"])
def test_steps_that_grow_keep_the_cut_and_the_result(make_batch, monkeypatch, planner, steps, fixed, share):
    """Tables get wider on the way; each step is told as whole tables, as changes, or as lengths alone."""
    if planner == "numpy":
        monkeypatch.setattr(native_cut, "library", lambda: None)
        monkeypatch.setattr(plan_step, "library", lambda: None)
    batch = make_batch(heads=(4, 2), head_dim=16, block_size=4, lens=(76, 60, 71), shared=[([0, 2], 6)] * share)
    whole, lens = batch.tables.numpy(), [36, 20, 31]
    plan = plan_forest(whole[:, :9], lens, spec=batch.spec, capacity=CAPACITY if fixed else None)
    cuts = plan.forest
    for kind, growth in steps:
        old, lens = lens, [n + g for n, g in zip(lens, growth, strict=True)]
        width = max(9, -(-max(lens) // 4))
        added = entries(whole, old, lens, 4)
        if kind == "none" and not added["rows"]:
            assert plan.update(None, lens)
        elif kind == "advance":
            assert plan.advance(lens, **added)
        else:
            assert plan.update(whole[:, :width], lens)
        assert plan.forest is cuts
        for row, n in enumerate(lens):
            used = -(-n // 4)
            assert (device_tables(plan)[row, :used] == whole[row, :used]).all()
            assert (plan.block_tables[row, :used] == whole[row, :used]).all()
        assert plan.seq_lens.tolist() == lens
    batch.lens = tuple(lens)
    batch.check(plan)


@BOTH
def test_advance_gives_what_update_gives(make_batch, backend):
    batch = make_batch(backend=backend, lens=(50, 33, 64), new=(2, 1, 3))
    start = [31, 17, 60]
    advanced = plan_forest(batch.tables[:, :4], start, batch.query_lens, spec=batch.spec)
    advanced.advance(list(batch.lens), **entries(batch.tables, start, batch.lens, 16))
    updated = plan_forest(batch.tables[:, :4], start, batch.query_lens, spec=batch.spec)
    updated.update(batch.tables, list(batch.lens), batch.query_lens)
    assert torch.equal(batch.run(advanced)[0], batch.run(updated)[0])
    batch.check(advanced)


@pytest.mark.parametrize(
    "change",
    ["too long", "shorter", "another block", "fewer sequences", "other queries", "too wide"],
)
def test_what_is_no_growth_is_cut_anew(make_batch, change):
    batch = make_batch(lens=(90, 40, 64))
    plan = plan_forest(batch.tables, [20, 20, 20], spec=batch.spec)
    cut, tables, lens, new = plan.forest, batch.tables.numpy().copy(), [21, 21, 21], None
    if change == "too long":
        lens = [20 + MAX_GROWTH_TOKENS + 1, 21, 21]
    elif change == "shorter":
        lens = [19, 21, 21]
    elif change == "another block":
        tables[0, 0] = tables[1, 2]
    elif change == "fewer sequences":
        tables, lens = tables[:2], lens[:2]
    elif change == "other queries":
        new = [1, 2, 1]
    else:
        tables = np.pad(tables, ((0, 0), (0, 100)))
    assert not plan.update(tables, lens, new)
    assert plan.forest is not cut
    assert (device_tables(plan)[: len(lens), : tables.shape[1]] == tables).all()


def test_more_changes_than_fit_are_cut_anew(make_batch):
    batch = make_batch(block_size=1, lens=(40,))
    tables = np.arange(1000 * 40).reshape(1000, 40)
    plan = plan_forest(tables[:, :2], [2] * 1000, spec=batch.spec)
    few = np.arange(MAX_CHANGES // 2)
    columns, blocks = np.array([2, 3]), tables[few[:, None], [2, 3]].reshape(-1)
    lens = np.where(np.arange(1000) < len(few), 4, 2)
    assert plan.advance(lens, rows=few.repeat(2), columns=np.tile(columns, len(few)), blocks=blocks)
    assert (device_tables(plan)[: len(few), :4] == tables[: len(few), :4]).all()
    assert not plan.update(tables[:, :6], [6] * 1000)
    assert (device_tables(plan)[:, :6] == tables[:, :6]).all()


@pytest.mark.parametrize(
    ("entries_given", "message"),
    [
        ({"rows": [3], "columns": [3], "blocks": [1]}, "rows: expected 0 to 2, got 3 to 3"),
        ({"rows": [-1], "columns": [3], "blocks": [1]}, "rows: expected 0 to 2, got -1 to -1"),
        ({"rows": [0], "columns": [-2], "blocks": [1]}, "columns: expected no negative column, got -2"),
        (
            {"rows": [0, 1], "columns": [3], "blocks": [1]},
            "rows, columns, blocks: expected as many of each, got 2, 1 and 1",
        ),
    ],
)
@BOTH
def test_entries_outside_the_batch_are_refused(make_batch, backend, entries_given, message):
    batch = make_batch(backend=backend, lens=(40, 40, 40))
    plan = batch.plan()
    with pytest.raises(ValueError, match=message):
        plan.advance([41] * 3, **entries_given)
    assert plan.seq_lens.tolist() == [40] * 3


@BOTH
@pytest.mark.parametrize("fixed", [False, True])
def test_a_refused_step_changes_nothing(make_batch, backend, fixed):
    batch = make_batch(backend=backend, lens=(40, 33))
    plan = batch.plan(capacity=PlanCapacity(max_seqs=2, max_blocks=3) if fixed else None)
    steps = [
        lambda: plan.update(batch.tables, [40, 4000]),
        lambda: plan.update(batch.tables, [40, -1]),
        lambda: plan.update(batch.tables, [40]),
        lambda: plan.update(None, [40, 33, 3]),
        lambda: plan.advance([40, 4000]),
    ]
    if fixed:
        steps.append(lambda: plan.advance([49, 33], rows=[0], columns=[3], blocks=[1]))
        steps.append(lambda: plan.update(torch.zeros(3, 3, dtype=torch.int32), [1, 1, 1]))
    for step in steps:
        with pytest.raises(ValueError, match=r"seq_lens|block_tables|capacity"):
            step()
        assert plan.seq_lens.tolist() == [40, 33] and plan.num_rows == 2
    batch.check(plan)


def test_a_refused_step_with_wider_tables_leaves_no_room_behind(make_batch):
    batch = make_batch(lens=(40, 33))
    plan = batch.plan()
    narrow = plan.block_tables.shape[1]
    wider = np.pad(batch.tables.numpy(), ((0, 0), (0, 2)))
    too_long = [16 * narrow + 1, 33]
    with pytest.raises(ValueError, match="block_tables"):
        plan.update(wider, [40, 4000])
    with pytest.raises(ValueError, match="block_tables"):
        plan.update(None, too_long)
    assert plan.update(wider, [41, 34])


def test_a_step_of_more_sequences_than_the_kernel_has_threads(make_batch):
    batch = make_batch(block_size=1, lens=(4,))
    count = MAX_CHANGES + 70
    tables = np.arange(count * 4, dtype=np.int32).reshape(count, 4)
    plan = plan_forest(tables[:, :2], [2] * count, spec=batch.spec)
    lens = np.full(count, 2)
    lens[-MAX_CHANGES:] = 3
    rows = np.arange(count - MAX_CHANGES, count)
    assert plan.advance(lens, rows=rows, columns=np.full(MAX_CHANGES, 2), blocks=tables[rows, 2])
    assert (device_tables(plan)[rows, :3] == tables[rows, :3]).all()
    assert plan.device_plan.sections["lens"][:count].tolist() == lens.tolist()


def test_a_message_is_written_again_when_the_device_has_read_it(make_batch, monkeypatch):
    """Steps may be queued without end: each gets a message of its own until the first are back, oldest first."""
    plan_send = pytest.importorskip("radixpool.kernels.plan_send")
    unread = []
    monkeypatch.setattr(plan_send, "_RINGS", {})
    monkeypatch.setattr(plan_send.StepSender, "send_directly", lambda *_: False)
    monkeypatch.setattr(plan_send.StepSender, "send_by_triton", lambda _, message, changes: unread.append(message))
    plan = make_batch(lens=(40, 33)).plan()
    for growth in range(1, 5):
        assert plan.update(None, [40 + growth, 33])
    assert len(set(map(id, unread))) == 4
    assert [m.body[0] for m in unread] == [41, 42, 43, 44]
    for message in unread[:2]:
        message.words[0] = message.ticket
    for growth in range(5, 8):
        assert plan.update(None, [40 + growth, 33])
    assert unread[4:6] == unread[:2] and unread[6] not in unread[:6]


def test_a_message_that_is_not_sent_is_given_back(make_batch):
    plan = make_batch(lens=(40, 33)).plan()
    ring = plan.device_plan.sender.ring
    assert plan.update(None, [41, 34])
    waiting = list(ring)
    assert not plan.update(None, [39, 34])
    assert list(ring) == waiting


@pytest.mark.parametrize("kind", ["update", "advance"])
def test_a_step_that_could_not_be_sent_is_made_up_for(make_batch, monkeypatch, kind):
    """The host has moved on when sending fails (Ctrl-C, a full disk under the compiler): the next step is a new cut."""
    plan_send = pytest.importorskip("radixpool.kernels.plan_send")
    batch = make_batch(block_size=4, lens=(46, 33))
    whole, lens = batch.tables.numpy(), [39, 31]
    plan = plan_forest(whole[:, :10], lens, spec=batch.spec)

    def fail(*_):
        raise KeyboardInterrupt

    def step():
        if kind == "update":
            return plan.update(whole, list(batch.lens))
        return plan.advance(list(batch.lens), **entries(whole, lens, batch.lens, 4))

    with monkeypatch.context() as patch:
        patch.setattr(plan_send.StepSender, "send", fail)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert plan.seq_lens.tolist() == lens
    assert not step() and plan.seq_lens.tolist() == list(batch.lens)
    for row, n in enumerate(batch.lens):
        assert (device_tables(plan)[row, : -(-n // 4)] == whole[row, : -(-n // 4)]).all()
    batch.check(plan)


def test_the_driver_is_handed_what_the_kernel_takes(make_batch):
    """C launches without Triton: the arguments of `apply_step` in their order, and two more that Triton adds."""
    code = native_cut.library()
    if code is None:
        pytest.skip("no C compiler: steps go through Triton")
    plan_send = pytest.importorskip("radixpool.kernels.plan_send")
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    def launch(function, *given):
        places = (ctypes.c_void_p * 9).from_address(given[8])
        kinds = [ctypes.c_int32 if i in (1, 2, 5, 6) else ctypes.c_void_p for i in range(9)]
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        seen.append((function, given[:8], values, given[9]))
        return 7

    address = ctypes.cast(launch, ctypes.c_void_p).value
    bound = plan_send.Bound(address, 11, 0x1000, 0x2000, 1024, 64, 256, 272)
    assert code.radixpool_send(ctypes.addressof(bound), 55, 0x3000, 16, 9) == 7
    grid_block_shared_stream = (1, 1, 1, 1024, 1, 1, 64, 55)
    assert seen == [(11, grid_block_shared_stream, [0x3000, 16, 9, 0x1000, 0x2000, 256, 272, None, None], None)]


TOO_LARGE = [2**31, -(2**31) - 1, 2**40 + 1, 2**70]


@pytest.mark.parametrize("value", TOO_LARGE)
@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "query_lens"])
def test_values_beyond_int32_are_refused(make_batch, name, value):
    spec = make_batch().spec
    batch = {"block_tables": [[5, 6], [7, 8]], "seq_lens": [9, 30], "query_lens": [1, 1]}
    bad = [[5, value], [7, 8]] if name == "block_tables" else [1, value]
    with pytest.raises(ValueError, match=rf"{name}: expected values from .* \(int32\), got {value}"):
        plan_forest(**batch | {name: bad}, spec=spec)


@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.uint64, np.float64, torch.int64])
def test_steps_beyond_int32_change_nothing(make_batch, kind):
    plan = make_batch(lens=(40, 33)).plan()
    make = (lambda x: torch.tensor(x, dtype=kind)) if isinstance(kind, torch.dtype) else lambda x: np.array(x, kind)
    error, message = (TypeError, "integers") if kind is np.float64 else (ValueError, "int32")
    for step in (
        lambda: plan.update(None, make([2**31 + 3, 33])),
        lambda: plan.update(make([[2**31 + 3] * 3] * 2), [40, 33]),
        lambda: plan.advance([40, 33], rows=make([2**31 + 3]), columns=[3], blocks=[1]),
        lambda: plan.advance([40, 33], rows=[0], columns=make([2**31 + 3]), blocks=[1]),
        lambda: plan.advance([40, 33], rows=[0], columns=[3], blocks=make([2**31 + 3])),
    ):
        with pytest.raises(error, match=message):
            step()
    assert plan.seq_lens.tolist() == [40, 33]
