"""Longer forward passes as CUDA graphs in pieces, cut where the layers attend (vLLM calls them piecewise).

A pass of a small model takes as long as the host needs to launch it, whatever it computes. All of it but the attention
depends on the number of tokens alone: it is captured for some numbers of rows, one graph from each layer's attention to
the next, with the writes of new KV, and replayed for every pass that fits. Attention is launched as usual, by the fast
kernels for long prompts, and rows beyond the pass's own cost none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from radixpool.kernels import AttentionSpec
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.worker.paged_attention import AttentionStep, PagedStep, write_new_kv
from radixpool.rpc.worker.step import NO_SLOT
from radixpool.rpc.worker.step_tensors import SLOTS

Hidden: TypeAlias = Callable[[torch.Tensor, AttentionStep], torch.Tensor]
"""From packed inputs `[4, rows]` and what attends to the last hidden states `[rows, hidden_size]`."""

ROWS_STEP = 256


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    """The graphs of one number of rows, and between each two the layer that attends, with the scale of its scores."""

    rows: int
    graphs: list[torch.cuda.CUDAGraph]
    layers: list[tuple[int, float]]


class _Recording:
    """Attends in the place of a `PagedStep` during a capture: ends one graph there and begins the next.

    `q` and `out` `[rows, H, D]` are what goes into the attention of every layer and comes out of it.
    """

    def __init__(self, pool: KvPool, slots: torch.Tensor, q: torch.Tensor, out: torch.Tensor, memory: Any) -> None:
        self._pool = pool
        self._slots = slots
        self._q = q
        self._out = out
        self._memory = memory
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.layers: list[tuple[int, float]] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        # Other threads may use the GPU meanwhile; what they do is no part of the graph.
        self.graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        write_new_kv(self._pool, layer, k, v, self._slots, backend="triton")
        self._q.copy_(q)
        if self.graphs:  # else it is the warm-up
            self.end()
            self.layers.append((layer, scale))
            self.begin()
        return self._out


class GraphedPieces:
    """The graphs of one model over one pool, for passes of `min_rows` to `max_rows` tokens. Owned by one thread.

    Takes the memory of one pass of `max_rows` tokens besides that of the graphs themselves.
    """

    def __init__(self, hidden: Hidden, spec: AttentionSpec, pool: KvPool, *, min_rows: int, max_rows: int) -> None:
        self._compute = hidden
        self._pool = pool
        self._min_rows = min_rows
        self._inputs = torch.zeros((4, max_rows), dtype=torch.int64, device=spec.device)
        self._inputs[SLOTS] = NO_SLOT
        shape = (max_rows, spec.num_q_heads, spec.head_dim)
        self._q, self._out = (torch.zeros(shape, dtype=spec.q_dtype, device=spec.device) for _ in range(2))
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(spec.device)  # type: ignore[no-untyped-call]
        self._hidden = torch.empty(0)
        self._passes = [self._capture(rows) for rows in reversed(pass_sizes(min_rows, max_rows))]
        torch.cuda.synchronize()

    def holds(self, num_tokens: int) -> bool:
        """Whether there are graphs for a pass of so many tokens."""
        return self._min_rows <= num_tokens <= self._inputs.shape[1]

    def rows_for(self, num_tokens: int) -> int:
        """Return the number of rows of the graphs that a pass of `num_tokens` takes."""
        return next(one.rows for one in reversed(self._passes) if one.rows >= num_tokens)

    def hidden(self, inputs: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Run a pass over packed inputs `[4, rows_for(T)]` on the host; hidden `[T, hidden_size]` until the next."""
        rows, num_tokens = inputs.shape[1], step.plan.num_rows
        captured = next(one for one in self._passes if one.rows == rows)
        self._inputs[:, :rows].copy_(inputs)
        q, out = self._q[:num_tokens], self._out[:num_tokens]
        for graph, (layer, scale) in zip(captured.graphs, captured.layers, strict=False):
            graph.replay()
            step.read(layer, q, scale=scale, out=out)
        captured.graphs[-1].replay()
        return self._hidden[:num_tokens]

    @property
    def inputs(self) -> torch.Tensor:
        """Return the packed inputs on the device, `[4, max_rows]`."""
        return self._inputs

    def _capture(self, rows: int) -> _CapturedPass:
        """Capture one number of rows, the largest first: the others fit into its memory."""
        inputs = self._inputs[:, :rows]
        recording = _Recording(self._pool, inputs[SLOTS], self._q[:rows], self._out[:rows], self._memory)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            hidden = self._compute(inputs, recording)  # loads what is loaded at first use
            if len(self._hidden) < rows:
                self._hidden = torch.zeros_like(hidden)
            torch.cuda.synchronize()
            recording.begin()
            try:
                self._hidden[:rows].copy_(self._compute(inputs, recording))
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ends the capture; the reason is the error before
                    recording.end()
                raise
            recording.end()
        return _CapturedPass(rows, recording.graphs, recording.layers)


def pass_sizes(min_rows: int, max_rows: int) -> list[int]:
    """Return the numbers of rows to capture, ascending: every 256 in between, and `max_rows`.

    >>> pass_sizes(257, 1000)
    [512, 768, 1000]
    """
    first = -(-min_rows // ROWS_STEP) * ROWS_STEP
    return [*range(first, max_rows, ROWS_STEP), max_rows]
