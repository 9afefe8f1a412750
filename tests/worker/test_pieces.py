"""Graphs in pieces, up to the GPU's door: what is captured, replayed and attended to in which order.

The graphs are played: they note what is done with them. That a replay computes what a launched pass does is tested on a
GPU, in test_on_gpu.py.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from radixpool.kernels import AttentionSpec, plan_forest
from radixpool.rpc.pool.tensors import private_pool
from radixpool.rpc.pool_types import KvDtype, PoolLayout, PoolSpec
from radixpool.rpc.worker import pieces
from radixpool.rpc.worker.paged_attention import PagedStep
from radixpool.rpc.worker.pieces import GraphedPieces, pass_sizes
from radixpool.rpc.worker.step import NO_SLOT
from radixpool.rpc.worker.step_tensors import SLOTS

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
POOL = PoolSpec(
    model="m", revision="r", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, num_blocks=64,
    dtype=KvDtype.FLOAT32, layout=PoolLayout.HND,
)  # fmt: skip
HIDDEN = 8


@pytest.fixture
def log(monkeypatch):
    """What is done with the graphs, by their number."""
    noted = []

    class Graph:
        made = 0

        def __init__(self):
            self.number = Graph.made
            Graph.made += 1

        def capture_begin(self, **_options):
            noted.append(("begin", self.number))

        def capture_end(self):
            noted.append(("end", self.number))

        def replay(self):
            noted.append(("replay", self.number))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(
        pieces, "write_new_kv", lambda _pool, layer, _k, _v, slots, backend: noted.append(("write", layer, len(slots)))
    )
    return noted


def two_layers(inputs, step):
    """A model of two layers that attend."""
    rows = inputs.shape[1]
    assert (inputs[SLOTS] == NO_SLOT).all(), "a capture must not write"
    for layer in range(2):
        q, k = torch.ones(rows, 4, 16), torch.ones(rows, 2, 16)
        assert step.attend(layer, q, k, k, scale=0.25 * (layer + 1)).shape == (rows, 4, 16)
    return torch.full((rows, HIDDEN), 1.0)


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [
        (257, 4096, [*range(512, 4097, 256)]),
        (257, 600, [512, 600]),
        (257, 300, [300]),
        (257, 512, [512]),
        (1, 256, [256]),
    ],
)
def test_the_sizes_that_are_captured(least, most, sizes):
    assert pass_sizes(least, most) == sizes


def test_a_graph_ends_where_a_layer_attends_and_the_largest_comes_first(log):
    graphs = GraphedPieces(two_layers, SPEC, private_pool(POOL), min_rows=257, max_rows=600)
    captured = [entry for entry in log if entry[0] != "write"]
    assert captured == [(what, number) for number in range(6) for what in ("begin", "end")]
    assert [entry[1:] for entry in log if entry[0] == "write"] == [
        (layer, rows) for rows in (600, 512) for _warm_up in range(2) for layer in range(2)
    ]
    assert [graphs.rows_for(tokens) for tokens in (257, 512, 513, 600)] == [512, 512, 600, 600]
    assert [graphs.holds(tokens) for tokens in (256, 257, 600, 601)] == [False, True, True, False]


def test_a_pass_replays_its_graphs_and_attends_for_its_own_rows_in_between(log, monkeypatch):
    pool = private_pool(POOL)
    graphs = GraphedPieces(two_layers, SPEC, pool, min_rows=257, max_rows=600)
    log.clear()
    length = np.asarray([300], np.int32)
    plan = plan_forest(np.arange(19, dtype=np.int32)[None], length, length, spec=SPEC)
    monkeypatch.setattr(
        PagedStep, "read", lambda _self, layer, q, scale, out: log.append(("read", layer, len(q), len(out), scale))
    )
    packed = torch.zeros((4, 512), dtype=torch.int64)
    packed[SLOTS, :300] = torch.arange(300)
    hidden = graphs.hidden(packed, PagedStep(pool, plan, graphs.inputs[SLOTS, :300]))
    assert hidden.shape == (300, HIDDEN)
    assert log == [
        ("replay", 3), ("read", 0, 300, 300, 0.25), ("replay", 4), ("read", 1, 300, 300, 0.5), ("replay", 5),
    ]  # fmt: skip
    assert torch.equal(graphs.inputs[SLOTS, :300], torch.arange(300)), "the graphs write to the slots of this pass"


def test_a_capture_that_fails_is_ended(log):
    def failing(inputs, step):
        two_layers(inputs, step)
        if any(entry[0] == "begin" for entry in log):
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(inputs.shape[1], HIDDEN)

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        GraphedPieces(failing, SPEC, private_pool(POOL), min_rows=257, max_rows=600)
    assert log[-1] == ("end", 2)
