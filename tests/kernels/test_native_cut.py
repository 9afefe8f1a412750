"""The C twin of the cut: the same items as numpy's, bit for bit; steps that keep a cut; machines without a compiler."""

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.kernels import AttentionSpec, PlanCapacity, forest, native, native_cut, plan_step
from radixpool.kernels.device_plan import DevicePlan
from radixpool.kernels.forest_pack import CutFacts, Layout, unpack
from radixpool.kernels.launch import DeviceInfo, TileConfig

HEADS = [(8, 8), (8, 2), (9, 3), (32, 8), (48, 1)]


def config_of(height, *, tall):
    return TileConfig(64, 4, 3, 2 if height < 64 else 1)


@pytest.fixture(autouse=True)
def needs_a_compiler():
    if native.compiler() is None:
        pytest.skip("no C compiler: numpy plans alone")


@st.composite
def batches(draw):
    """Draw tables that branch at random, in chains and in levels, with ragged or equal lengths; decode or prefill."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, width, block_size = draw(st.integers(0, 40)), draw(st.integers(0, 70)), draw(st.sampled_from([1, 3, 16]))
    tables = rng.permutation(count * width + 7)[: count * width].reshape(count, width).astype(np.int32)
    branching = draw(st.floats(0, 1))
    for row in range(1, count):
        if rng.random() < branching:
            parent, depth = rng.integers(0, row), rng.integers(0, width + 1)
            tables[row, :depth] = tables[parent, :depth]
    full = width * block_size
    lens = np.full(count, full) if draw(st.booleans()) else rng.integers(0, full + 1, count)
    new = np.ones(count) if draw(st.booleans()) else rng.integers(0, draw(st.sampled_from([5, 300])), count)
    heads = draw(st.sampled_from(HEADS))
    spec = AttentionSpec(heads[0], heads[1], draw(st.sampled_from([16, 128])), block_size, backend="torch")
    return tables[rng.permutation(count)], lens.astype(np.int32), new.astype(np.int32), spec


def both(tables, lens, new, spec, sms=132, **options):
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(new, out=starts[1:])
    arguments = (np.ascontiguousarray(tables), lens, new, starts, spec, DeviceInfo(90, sms, True), config_of)
    cut = native_cut.cut_batch(*arguments, **options)
    widths = (16, 1, len(lens), 4 * cut.facts.num_rows, *[cut.facts.num_rows + 1] * 2, cut.facts.num_parts)
    layout = Layout.of((*widths, *(16 * n for n in cut.facts.items), tables.size), cut.facts.programs, tables.shape[1])
    host = torch.full((layout.total,), -7, dtype=torch.int32)
    cut.pack(layout, host)
    return forest.build_forest(*arguments, **options), unpack(cut.facts, layout, host.numpy())


def assert_same(want, got):
    assert got.programs == want.programs and list(got.items) == list(want.items)
    for height, items in want.items.items():
        np.testing.assert_array_equal(got.items[height], items)
    for name in ("rows", "merge_rows", "merge_starts", "merge_parts"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        assert getattr(got, name).dtype == np.int32
    for name in ("num_parts", "unique_tokens", "growable", "tall", "tall_sms"):
        assert getattr(got, name) == getattr(want, name), name


@settings(max_examples=400, deadline=None)
@given(
    batches(), st.sampled_from([1.0, -1e9, np.inf]), st.sampled_from([1, 4, 132]),
    st.sampled_from(["plain", "persistent"]),
)  # fmt: skip
def test_the_same_cut_bit_for_bit(drawn, gain, sms, tall_kernel):
    assert_same(*both(*drawn, sms, min_gain_bytes=gain, tall_kernel=tall_kernel))


@settings(max_examples=200, deadline=None)
@given(batches(), st.booleans())
def test_the_same_bytes_for_the_device(drawn, fixed):
    """Every section of the buffer, empty items of idle programs too; what belongs to none is written by neither."""
    tables, lens, new, spec = drawn
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    device = DeviceInfo(90, 132, True)
    arguments = np.ascontiguousarray(tables), lens, new, starts, spec, device, config_of
    native_one = native_cut.cut_batch(*arguments)
    numpy_one = native_cut.NumpyCut(forest.build_forest(*arguments), *arguments[:2])
    assert native_one.facts == numpy_one.facts == CutFacts.of(numpy_one.forest)
    capacity = PlanCapacity(50, 80, max_rows=20_000, max_parts=50_000) if fixed else None
    layout = DevicePlan(spec, device, config_of, capacity).lay_out(native_one.facts, *tables.shape)
    hosts = [torch.full((layout.total,), -7, dtype=torch.int32) for _ in range(2)]
    native_one.pack(layout, hosts[0])
    numpy_one.pack(layout, hosts[1])
    assert torch.equal(*hosts)
    assert_same(numpy_one.forest, unpack(native_one.facts, layout, hosts[0].numpy()))


def test_tall_and_narrow_tiles_get_processors_of_their_own():
    """2,048 new tokens beside 64 decodes of 4,096: the persistent kernel leaves processors to them."""
    tables = np.random.default_rng(0).permutation(65 * 256).reshape(65, 256).astype(np.int32)
    new = np.array([2048] + [1] * 64, np.int32)
    spec = AttentionSpec(32, 8, 128, 16, backend="torch")
    batch = tables, np.full(65, 4096, np.int32), new, spec
    want, got = both(*batch, tall_kernel="persistent")
    assert_same(want, got)
    assert 20 < got.tall_sms < 112 and not got.tall
    assert got.programs[128] == max(1, got.tall_sms // 8)
    assert (132 - got.tall_sms) * 2 == got.programs[16] * 8, "no multiprocessor of the narrow ones is left over"
    plain, _ = both(*batch)
    assert plain.tall_sms == 132 and plain.tall
    decode, _ = both(tables, batch[1], np.ones(65, np.int32), spec, tall_kernel="persistent")
    assert decode.tall_sms == 132


@pytest.mark.parametrize(
    ("heads", "prefill", "decodes", "best"),
    [
        ((32, 8), (1, 2048, 2048), (64, 2048), (52, 60)),
        ((32, 8), (2, 4096, 4096), (16, 8192), (100, 112)),
        ((32, 8), (1, 512, 1536), (128, 1024), (24, 44)),
        ((32, 8), (1, 8192, 8192), (32, 4096), (112, 116)),
        ((8, 1), (1, 2048, 6144), (64, 4096), (96, 104)),
    ],
)
def test_processors_are_split_as_measured_best(heads, prefill, decodes, best):
    """Sequences, new tokens and lengths, and the shares of prefill that took the least time on an H200."""
    new = np.array([prefill[1]] * prefill[0] + [1] * decodes[0], np.int32)
    lens = np.array([prefill[2]] * prefill[0] + [decodes[1]] * decodes[0], np.int32)
    width = int(lens.max()) // 16
    tables = np.arange(len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    want, got = both(tables, lens, new, AttentionSpec(*heads, 128, 16, backend="torch"), tall_kernel="persistent")
    assert want.tall_sms == got.tall_sms and best[0] <= got.tall_sms <= best[1]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shared", [0, 100, 255])
def test_the_same_cut_of_a_serving_batch(heads, shared):
    tables = np.random.default_rng(0).permutation(256 * 256).reshape(256, 256).astype(np.int32)
    tables[:, :shared] = tables[0, :shared]
    spec = AttentionSpec(*heads, 128, 16, kv_dtype=torch.bfloat16, q_dtype=torch.bfloat16, backend="torch")
    assert_same(*both(tables, np.full(256, 4096, np.int32), np.ones(256, np.int32), spec))


def test_constants_of_the_definition_reach_the_compiled_code(monkeypatch):
    tables = np.arange(256 * 8, dtype=np.int32).reshape(256, 8)
    tables[:, :4] = tables[0, :4]
    batch = tables, np.full(256, 128, np.int32), np.ones(256, np.int32), AttentionSpec(32, 8, 128, 16, backend="torch")
    before, _ = both(*batch)
    monkeypatch.setattr(forest, "ITEM_OVERHEAD_BYTES", 2**30)
    want, got = both(*batch)
    assert_same(want, got)
    assert want.unique_tokens > before.unique_tokens


KINDS = st.sampled_from(["grow", "grow", "change", "shrink"])
STEPS = st.lists(st.tuples(st.integers(0, 2**32 - 1), KINDS), max_size=6)


def watched(tables, lens, block_size):
    """Return a watch of 12 columns that allows 5 tokens and 16 entries, and a message for it."""
    whole = np.full((len(tables), 14), 55, np.int32)
    whole[:, : tables.shape[1]] = tables
    options = {"width": tables.shape[1], "room": 12, "max_growth": 5, "most": 16}
    return plan_step.StepWatch(whole, lens, block_size, **options), plan_step.Message(np.full(64, -5, np.int32))


@contextlib.contextmanager
def without_the_library():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_step, "library", lambda: None)
        yield


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 6), width=st.integers(1, 9), block_size=st.sampled_from([1, 4]), steps=STEPS)
def test_steps_are_told_from_new_batches(count, width, block_size, steps):
    """Compiled and numpy watches agree, and what they report turns the device's old table into the new one."""
    rng = np.random.default_rng(width)
    tables = rng.integers(0, 50, (count, width)).astype(np.int32)
    lens = rng.integers(0, width * block_size + 1, count).astype(np.int32)
    (native_one, message), (numpy_one, other) = (watched(tables, lens, block_size) for _ in range(2))
    device = np.full((count, 12), -9)
    device[:, :width] = tables
    planned = lens
    for seed, kind in steps:
        rng = np.random.default_rng(seed)
        width = max(1, width + int(rng.integers(-1, 2)))
        step = np.full((count, width), 77, np.int32)
        both_have = min(width, tables.shape[1])
        step[:, :both_have] = tables[:, :both_have]
        grown = lens + rng.integers(-1 if kind == "shrink" else 0, 3, count).astype(np.int32)
        for row in range(count):
            step[row, -(-int(lens[row]) // block_size) :] = rng.integers(0, 50)
        if kind == "change" and count:
            step[rng.integers(count), rng.integers(width)] = 99
        found = native_one.compare(grown, step, message)
        with without_the_library():
            assert numpy_one.compare(grown, step, other) == found
        used = -(-lens // block_size)
        fits = (
            width <= 12 and (used <= width).all() and (grown <= width * block_size).all() and (grown >= planned).all()
            and (grown - planned <= 5).all()
            and all((step[r, :u] == tables[r, :u]).all() for r, u in enumerate(used.tolist()))
        )  # fmt: skip
        if found == plan_step.NO_GROWTH:
            assert not fits or sum((step[r, used[r] :] != -7).sum() for r in range(count)) > 16
            return
        assert fits
        rows, columns, blocks = changes = message.changes(count, 16)[:, :found]
        np.testing.assert_array_equal(changes, other.changes(count, 16)[:, :found])
        for told in (message, other):
            np.testing.assert_array_equal(told.body[:count], grown)
        device[rows, columns] = blocks
        for row, length in enumerate(grown.tolist()):
            needed = -(-length // block_size)
            assert (device[row, :needed] == step[row, :needed]).all()
        np.testing.assert_array_equal(native_one.tables, step)
        np.testing.assert_array_equal(numpy_one.tables, step)
        tables, lens = step, grown


ENTRY = st.tuples(st.integers(-1, 4), st.integers(-1, 13), st.integers(0, 99))


@settings(max_examples=300, deadline=None)
@given(given=st.lists(ENTRY, max_size=20), grown=st.integers(-1, 6), seed=st.integers(0, 99))
def test_entries_are_put_alike(given, grown, seed):
    """Compiled and numpy watches agree on entries by name: doubles (the last counts), outside the tables, too many."""
    rng = np.random.default_rng(seed)
    tables, lens = rng.integers(0, 50, (4, 9)).astype(np.int32), rng.integers(0, 30, 4).astype(np.int32)
    entries = tuple(np.ascontiguousarray(column) for column in np.array(given, np.int32).reshape(-1, 3).T)
    (native_one, message), (numpy_one, other) = (watched(tables, lens, 4) for _ in range(2))
    step = (lens + grown).astype(np.int32)
    found = native_one.advance(step, entries, message)
    with without_the_library():
        assert numpy_one.advance(step, entries, other) == found
    rows, columns, blocks = (e.tolist() for e in entries)
    names_entries = all(
        0 <= row < 4 and 0 <= column < 12 and column * 4 >= lens[row] for row, column in zip(rows, columns, strict=True)
    )
    width = max([9, *(column + 1 for column in columns)])
    fits = names_entries and len(rows) <= 16 and 0 <= grown <= 5 and (step <= 4 * width).all()
    assert (found != plan_step.NO_GROWTH) == fits
    if not fits:
        return
    assert found == len(rows)
    want = np.full((4, width), -1, np.int32)
    want[:, :9] = tables
    for row, column, block in zip(rows, columns, blocks, strict=True):
        want[row, column] = block
    for watch, told in ((native_one, message), (numpy_one, other)):
        np.testing.assert_array_equal(watch.tables, want)
        np.testing.assert_array_equal(told.body[:4], step)
        changes = told.changes(4, 16)[:, :found]
        assert changes[:2].tolist() == [rows, columns]
        np.testing.assert_array_equal(changes[2], want[rows, columns])


@pytest.mark.parametrize("cc", ["no-such-compiler", "false"])
def test_without_a_working_compiler_numpy_plans(monkeypatch, tmp_path, caplog, cc):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", cc)
    if cc == "no-such-compiler":
        monkeypatch.setenv("PATH", "")
    native.load.cache_clear()
    native_cut.library.cache_clear()
    try:
        tables = np.arange(64, dtype=np.int32).reshape(4, 16)
        batch = tables, np.full(4, 200, np.int32), np.ones(4, np.int32), AttentionSpec(8, 2, 32, 16, backend="torch")
        assert_same(*both(*batch))
        assert native_cut.library() is None
        assert "forest_step.c is not compiled, numpy does its work" in caplog.text
        assert not list(tmp_path.rglob("*.so"))
    finally:
        native.load.cache_clear()
        native_cut.library.cache_clear()


def test_code_is_compiled_once_for_equal_constants(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = dict(native_cut.constants())
    first = native.build(native_cut.SOURCES, constants)
    written = first.stat().st_mtime_ns
    assert native.build(native_cut.SOURCES, constants) == first and first.stat().st_mtime_ns == written
    assert native.build(native_cut.SOURCES, constants | {"CUT_TOKENS": 32}) != first
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["forest_step.so"] * 2


def test_processes_that_compile_at_once_all_get_the_library(tmp_path):
    """Each compiles in a folder of its own and moves the result into place, over that of another."""
    source, target = "int seven(void) { return 7; }", tmp_path / "x" / "seven.so"
    cc, both_started = native.compiler(), threading.Barrier(2)

    def compile_and_call(_):
        both_started.wait(30)
        native.compile_library(source, (), target, cc)
        return ctypes.CDLL(str(target)).seven()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(compile_and_call, range(2))) == [7, 7]
    assert list(target.parent.iterdir()) == [target]


def test_a_user_without_a_home_plans_in_numpy_or_in_the_cache_that_is_named(monkeypatch, tmp_path, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", no_home)
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    load = native.load.__wrapped__
    assert load(native_cut.SOURCES, native_cut.constants()) is None
    assert "Could not determine home directory" in caplog.text
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert load(native_cut.SOURCES, native_cut.constants()) is not None
