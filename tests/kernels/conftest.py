"""Batches over a poisoned pool: every slot that no length covers is NaN, physical blocks are always permuted.

Without a CUDA device the Triton kernels run in Triton's interpreter, which must be chosen before they are imported.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda" if CUDA else "cpu"
torch.set_num_threads(1)

from radixpool.kernels import AttentionSpec, ForestPlan, attend, extend, native_cut, plan_forest, reference  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 5e-3}
if CUDA:
    TOLERANCE[torch.float32] = 1e-4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: large pools, graphs, streams"))


@dataclass
class Batch:
    """One ragged batch and its pools. `shared` lists (rows, blocks): these rows begin with the same blocks."""

    heads: tuple[int, int] = (8, 2)
    head_dim: int = 32
    v_head_dim: int = 0
    block_size: int = 16
    lens: tuple[int, ...] = (40, 7, 64)
    new: tuple[int, ...] | None = None
    shared: list[tuple[list[int], int]] = field(default_factory=list)
    kv_dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype | None = None
    backend: Any = "triton"
    layout: str = "HND"
    seed: int = 0

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        fp8 = self.kv_dtype == torch.float8_e4m3fn
        self.q_dtype = self.q_dtype or (torch.float16 if fp8 else self.kv_dtype)
        self.v_head_dim = self.v_head_dim or self.head_dim
        self.new = self.new or (1,) * len(self.lens)
        width = max(1, max(-(-n // self.block_size) for n in self.lens))
        count = len(self.lens) * width + 5
        ids = torch.randperm(count, generator=gen)[: len(self.lens) * width]
        self.tables = ids.reshape(len(self.lens), width).to(torch.int32)
        for rows, blocks in self.shared:
            self.tables[rows, :blocks] = self.tables[rows[0], :blocks].clone()
        self.k_pool = self.make_pool(count, self.head_dim, gen)
        self.v_pool = self.make_pool(count, self.v_head_dim, gen)
        rows = sum(self.new)
        self.q = torch.randn(rows, self.heads[0], self.head_dim, generator=gen).to(self.q_dtype).to(DEVICE)
        self.spec = AttentionSpec(
            num_q_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim=self.head_dim, v_head_dim=self.v_head_dim,
            block_size=self.block_size, q_dtype=self.q_dtype, kv_dtype=self.kv_dtype, device=DEVICE,
            backend=self.backend,
        )  # fmt: skip

    def make_pool(self, count: int, dim: int, gen: torch.Generator) -> torch.Tensor:
        data = torch.full((count, self.heads[1], self.block_size, dim), math.nan)
        used = torch.zeros(count, self.block_size, dtype=torch.bool)
        for table, n in zip(self.tables, self.lens, strict=True):
            pos = torch.arange(n)
            used[table[pos // self.block_size].long(), pos % self.block_size] = True
        values = torch.randn(data.shape, generator=gen)
        data = torch.where(used[:, None, :, None], values, data).to(self.kv_dtype).to(DEVICE)
        return lay_out(data, self.layout)

    @property
    def query_lens(self) -> torch.Tensor:
        return torch.tensor(self.new)

    def plan(self, **options: Any) -> ForestPlan:
        return plan_forest(self.tables, torch.tensor(self.lens), self.query_lens, spec=self.spec, **options)

    def run(self, plan: ForestPlan | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run into NaN-filled outputs; return out and LSE."""
        shape = (*self.q.shape[:2], self.v_head_dim)
        out = torch.full(shape, math.nan, dtype=self.q_dtype, device=DEVICE)
        lse = torch.full(shape[:2], math.nan, device=DEVICE)
        operation = attend if max(self.new) <= 8 else extend
        operation(self.q, self.k_pool, self.v_pool, plan or self.plan(), out=out, lse=lse, **options)
        return out, lse

    def reference(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        host.setdefault("scale", 1 / math.sqrt(self.head_dim))
        lens = torch.tensor(self.lens)
        return reference.attention(
            self.q.cpu(), self.k_pool.cpu(), self.v_pool.cpu(), self.tables, lens, self.query_lens, **host
        )

    def check(self, plan: ForestPlan | None = None, tolerance: float = 0.0, **options: Any) -> None:
        """Run and compare output and LSE with the float64 reference."""
        out, lse = self.run(plan, **options)
        want, want_lse = self.reference(**options)
        limit = tolerance or TOLERANCE[self.kv_dtype]
        torch.testing.assert_close(out.cpu().double(), want, atol=limit, rtol=limit)
        torch.testing.assert_close(lse.cpu().double(), want_lse, atol=max(limit, 1e-4), rtol=1e-3)


def lay_out(data: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values with the strides of another layout; `half` is a view of [N, 2, block, heads, D]."""
    if layout == "NHD":
        return data.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "layer":  # [N, layers, 2, block, heads, D], as engines that move whole blocks keep them
        n, h, b, d = data.shape
        whole = torch.full((n, 3, 2, b, h, d), math.nan, device=data.device).to(data.dtype)
        view = whole[:, 1, 0].transpose(1, 2)
        view.copy_(data)
        return view
    if layout == "half":
        n, h, b, d = data.shape
        whole = torch.empty(n, 2, b, h, d, dtype=torch.float32, device=data.device).fill_(math.nan).to(data.dtype)
        view = whole[:, 1].transpose(1, 2)
        view.copy_(data)
        return view
    return data


@pytest.fixture
def programs_per_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that makes plans for so many programs a KV head, whatever the device."""

    def fix(count: int) -> None:
        monkeypatch.setattr("radixpool.kernels.forest.ctas_per_head", lambda *_, beside=False: count)
        native_cut.fixed_fields.cache_clear()

    yield fix
    native_cut.fixed_fields.cache_clear()


def carried_by_outer_loops(loops: list[str]) -> list[int]:
    """Return how many values each loop carries that is in no other, from the lines of the IR that begin a loop."""
    counts, open_loops = [], []
    for line in loops:
        indent = len(line) - len(line.lstrip())
        while open_loops and indent <= open_loops[-1]:
            open_loops.pop()
        found = re.match(r" *(?:%[\w.]+(?::(\d+))? = )?scf\.", line)
        if not open_loops:
            counts.append(int(found[1] or "=" in found[0]))
        open_loops.append(indent)
    return counts


@pytest.fixture
def carried() -> Callable[[list[str]], list[int]]:
    """Return `carried_by_outer_loops`. Triton 3.6 loses a carried value that only bounds a loop inside."""
    return carried_by_outer_loops


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return Batch


@pytest.fixture
def device() -> str:
    return DEVICE
