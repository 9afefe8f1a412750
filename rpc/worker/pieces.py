"""Longer forward passes as CUDA graphs in pieces, cut where the layers attend (vLLM calls them piecewise).

A pass of a small model takes as long as the host needs to launch it, whatever it computes. All of it but the attention
depends on the number of tokens alone: it is captured for some numbers of rows, one graph between each two layers'
attention, and replayed for every pass that fits. Attention is launched as usual, by the fast kernels for long prompts;
so the graphs know no pool, and rows beyond the pass's own cost no attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from radixpool.kernels import AttentionSpec
from radixpool.rpc.worker.paged_attention import AttentionStep, PagedStep

Hidden: TypeAlias = Callable[[torch.Tensor, AttentionStep], torch.Tensor]
"""From packed inputs `[4, rows]` and what attends to the last hidden states `[rows, hidden_size]`."""

ROWS_STEP = 256


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What goes into the attention of every layer and comes out of it, `[rows, heads, head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def first(self, rows: int) -> _Buffers:
        return _Buffers(self.q[:rows], self.k[:rows], self.v[:rows], self.out[:rows])


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    """The graphs of one number of rows, and between each two the layer that attends, with the scale of its scores."""

    rows: int
    graphs: list[torch.cuda.CUDAGraph]
    layers: list[tuple[int, float]]


class _Recording:
    """Attends in the place of a `PagedStep` during a capture: ends one graph there and begins the next."""

    def __init__(self, buffers: _Buffers, memory: Any) -> None:
        self._buffers = buffers
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
        for buffer, tensor in ((self._buffers.q, q), (self._buffers.k, k), (self._buffers.v, v)):
            buffer.copy_(tensor)
        if self.graphs:  # else it is the warm-up
            self.end()
            self.layers.append((layer, scale))
            self.begin()
        return self._buffers.out


class GraphedPieces:
    """The graphs of one model for passes of `min_rows` to `max_rows` tokens; for any pool. Owned by one thread.

    Takes the memory of one pass of `max_rows` tokens besides that of the graphs themselves.
    """

    def __init__(self, hidden: Hidden, spec: AttentionSpec, *, min_rows: int, max_rows: int) -> None:
        self._compute = hidden
        self._min_rows = min_rows
        self._inputs = torch.zeros((4, max_rows), dtype=torch.int64, device=spec.device)
        shapes = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_q_heads]
        self._buffers = _Buffers(
            *(torch.zeros((max_rows, heads, spec.head_dim), dtype=spec.q_dtype, device=spec.device) for heads in shapes)
        )
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
        own = self._buffers.first(num_tokens)
        for graph, (layer, scale) in zip(captured.graphs, captured.layers, strict=False):
            graph.replay()
            step.attend(layer, own.q, own.k, own.v, scale=scale, out=own.out)
        captured.graphs[-1].replay()
        return self._hidden[:num_tokens]

    @property
    def inputs(self) -> torch.Tensor:
        """Return the packed inputs on the device, `[4, max_rows]`."""
        return self._inputs

    def _capture(self, rows: int) -> _CapturedPass:
        """Capture one number of rows, the largest first: the others fit into its memory."""
        inputs, recording = self._inputs[:, :rows], _Recording(self._buffers.first(rows), self._memory)
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
