"""Forward passes of few tokens as CUDA graphs: a decode step is one launch instead of a thousand.

One graph for each power of two of rows, captured at the start over buffers that stay. A step takes the smallest graph
that holds it, fills its buffers and replays it; rows beyond the step's own are padding that writes and reads no KV.
What changes from step to step (who attends to what) the kernels read on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from radixpool.kernels import AttentionSpec, ForestPlan, PlanCapacity, plan_forest
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.worker.paged_attention import PagedStep
from radixpool.rpc.worker.step import NO_SLOT, StepBatch
from radixpool.rpc.worker.step_tensors import SLOTS, pack_inputs, padded_tables, table_width

Compute: TypeAlias = Callable[[torch.Tensor, int, PagedStep], torch.Tensor]
"""From packed inputs, a number of rows to sample and the paged step to the logits of those rows."""

MAX_WHOLE_ROWS = 256
"""Longer steps gain nothing from graphs that also fix the attention; see `pieces.py`."""

_MAX_SEQS = 256
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One graph, and the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    plan: ForestPlan
    logits: torch.Tensor


class GraphedSteps:
    """The graphs of one model over one pool, for steps of up to `max_rows` tokens of up to 256 sequences.

    Owned by one thread. Keeps the logits of a row for each sequence and graph, and a plan each.
    """

    def __init__(self, compute: Compute, spec: AttentionSpec, pool: KvPool, *, max_rows: int, max_blocks: int) -> None:
        self._compute = compute
        self._spec = spec
        self._pool = pool
        self._max_blocks = table_width(max_blocks)
        self._max_rows = max_rows
        self._memory = torch.cuda.graph_pool_handle()
        sizes = sorted({*(1 << bits for bits in range((max_rows - 1).bit_length())), max_rows}, reverse=True)
        self._steps = [self._capture(rows) for rows in sizes]  # the largest first: the others fit into its memory

    def holds(self, batch: StepBatch) -> bool:
        """Whether a graph is large enough for this step."""
        return batch.num_tokens <= self._max_rows and len(batch.query_lens) <= _MAX_SEQS

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Run one step; logits `[R, vocab_size]`, valid until the next one."""
        step = next(step for step in reversed(self._steps) if step.inputs.shape[1] >= batch.num_tokens)
        step.plan.update(padded_tables(batch, self._spec.block_size), batch.context_lens, batch.query_lens)
        step.inputs.copy_(torch.from_numpy(pack_inputs(batch, step.inputs.shape[1])))
        step.graph.replay()
        return step.logits[: len(batch.sample_rows)]

    def _capture(self, rows: int) -> CapturedStep:
        seqs = min(rows, _MAX_SEQS)
        lens = np.ones(seqs, np.int32)
        lens[0] += rows - seqs
        tables = np.zeros((seqs, -(-int(lens[0]) // self._spec.block_size)), np.int32)
        capacity = PlanCapacity(max_seqs=seqs, max_blocks=max(self._max_blocks, tables.shape[1]), max_rows=rows)
        plan = plan_forest(tables, lens, lens, spec=self._spec, capacity=capacity)
        inputs = torch.zeros((4, rows), dtype=torch.int64, device=self._spec.device)
        inputs[SLOTS] = NO_SLOT
        paged = PagedStep(self._pool, plan, inputs[SLOTS])
        for _ in range(_WARM_UPS):
            self._compute(inputs, seqs, paged)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; what they do is no part of the graph.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._compute(inputs, seqs, paged)
        return CapturedStep(graph, inputs, plan, logits)
