"""Masks of draft trees: every node sees the context and its own path, counted by depth where there is a window."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.kernels import TreeMask, extend

BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])


@st.composite
def trees(draw):
    """A forest of at most 12 nodes, parents before children."""
    size = draw(st.integers(1, 12))
    return [draw(st.integers(-1, j - 1)) for j in range(size)]


@BOTH
@given(
    parents=st.lists(trees(), min_size=1, max_size=3), cached=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    window=st.sampled_from([0, 0, 1, 3, 20]), cap=st.sampled_from([0.0, 4.0]), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_trees(make_batch, device, backend, parents, cached, window, cap, seed):
    new = tuple(len(tree) for tree in parents)
    lens = tuple(n + c for n, c in zip(new, cached, strict=False))
    batch = make_batch(backend=backend, heads=(4, 2), head_dim=16, lens=lens, new=new, seed=seed)
    batch.check(tree=TreeMask.from_parents(parents, device=device), window=window, soft_cap=cap)


@BOTH
def test_siblings_are_at_equal_depth_in_a_window(make_batch, device, backend):
    """Case 37: window 3 over a root with three children and a grandchild: flat indices would cut too early."""
    batch = make_batch(backend=backend, heads=(1, 1), head_dim=16, v_head_dim=16, lens=(10,), new=(5,))
    batch.q.zero_()
    for pos in range(10):
        one_hot = torch.eye(16)[pos]
        batch.v_pool[batch.tables[0, pos // 16], 0, pos % 16] = one_hot.to(batch.v_pool)
    tree = TreeMask.from_parents([[-1, 0, 0, 0, 3]], device=device)
    out = extend(batch.q, batch.k_pool, batch.v_pool, batch.plan(), window=3, tree=tree)
    seen = [set(row[0].nonzero().flatten().tolist()) for row in out]
    assert seen == [{3, 4, 5}, {4, 5, 6}, {4, 5, 7}, {4, 5, 8}, {5, 8, 9}]


@BOTH
def test_a_chain_is_the_causal_mask(make_batch, device, backend):
    batch = make_batch(backend=backend, lens=(40, 21), new=(6, 3))
    tree = TreeMask.from_parents([[-1, 0, 1, 2, 3, 4], [-1, 0, 1]], device=device)
    out = extend(batch.q, batch.k_pool, batch.v_pool, batch.plan(), tree=tree)
    torch.testing.assert_close(out, batch.run()[0], atol=1e-6, rtol=1e-6)


@BOTH
def test_sixty_four_nodes(make_batch, device, backend):
    """Bit 63 is the sign of an int64."""
    parents = [-1, *range(62), 0]
    batch = make_batch(backend=backend, heads=(2, 1), head_dim=16, lens=(70,), new=(64,))
    batch.check(tree=TreeMask.from_parents([parents], device=device))


@BOTH
def test_trees_over_a_shared_prefix(make_batch, device, backend):
    batch = make_batch(backend=backend, lens=(70, 69, 68), new=(6, 5, 4), shared=[([0, 1, 2], 4)])
    batch.check(tree=TreeMask.from_parents([[-1, 0, 0, 1, 1, 2], [-1, -1, 0, 1, 2], [-1, 0, 0, 0]], device=device))


def test_bad_masks_are_refused_before_any_launch(make_batch):
    batch = make_batch(lens=(100,), new=(65,))
    rows = torch.zeros(65, dtype=torch.int64, device=batch.q.device)
    with pytest.raises(ValueError, match="at most 64 query tokens"):
        extend(batch.q, batch.k_pool, batch.v_pool, batch.plan(), tree=TreeMask(rows))
    batch = make_batch(lens=(100,), new=(4,))
    with pytest.raises(ValueError, match=r"tree\.nodes"):
        extend(batch.q, batch.k_pool, batch.v_pool, batch.plan(), tree=TreeMask(rows))
    plan = batch.plan()
    extend(batch.q, batch.k_pool, batch.v_pool, plan, tree=TreeMask(rows[:4]))
    with pytest.raises(ValueError, match=r"tree\.nodes: expected size 4"):
        extend(batch.q, batch.k_pool, batch.v_pool, plan, tree=TreeMask(rows[:3]))
    with pytest.raises(ValueError, match=r"tree\.nodes: expected stride 1"):
        extend(batch.q, batch.k_pool, batch.v_pool, plan, tree=TreeMask(rows[:8:2]))
    with pytest.raises(TypeError, match="nodes"):
        TreeMask(rows.int())
    with pytest.raises(ValueError, match=r"parents\[0\]\[1\]"):
        TreeMask.from_parents([[-1, 1]])
    with pytest.raises(ValueError, match="at most 64 nodes"):
        TreeMask.from_parents([[-1] * 65])


def test_the_window_is_computed_once():
    tree = TreeMask.from_parents([[-1, 0, 1, 1]])
    nodes, depths = tree.within(2)
    assert depths.tolist() == [1, 2, 3, 3] and nodes.tolist() == [0b1, 0b11, 0b110, 0b1010]
    assert tree.within(2)[0] is nodes
    assert math.isfinite(tree.within(0)[0].sum())
