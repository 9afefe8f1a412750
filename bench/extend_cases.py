"""Workloads for `extend.py`: new tokens over cached prefixes, scattered over a large pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixpool.kernels import AttentionSpec

POOL_BYTES = 2 * 2**30
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """`sequences` lists (how many, new tokens, cached tokens); the first `shared` cached tokens are one prefix."""

    name: str
    heads: tuple[int, int]
    sequences: tuple[tuple[int, int, int], ...]
    shared: int = 0
    block_size: int = 16
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            *self.heads, self.head_dim, self.block_size, q_dtype=torch.bfloat16, kv_dtype=self.dtype, device="cuda"
        )

    @property
    def new(self) -> list[int]:
        return [new for count, new, _ in self.sequences for _ in range(count)]

    @property
    def lens(self) -> list[int]:
        return [new + cached for count, new, cached in self.sequences for _ in range(count)]

    @property
    def flops(self) -> float:
        """Operations of the visible part: 4 for each query head, column and (query, key) pair."""
        pairs = sum(n * (length - n) + n * (n + 1) / 2 for n, length in zip(self.new, self.lens, strict=True))
        return 4 * self.heads[0] * self.head_dim * pairs


LARGE, SMALL = (32, 8), (8, 1)
SUITES = {
    "main": [
        Case("4 x 4096 new", LARGE, ((4, 4096, 0),)),
        Case("4 x 512 over 4096", LARGE, ((4, 512, 4096),)),
        Case("8/1 8 x 2048 over 4096", SMALL, ((8, 2048, 4096),)),
        Case("64 x 128 over one 8192", LARGE, ((64, 128, 8192),), shared=8192),
        Case("64 x 16 over one 8192", LARGE, ((64, 16, 8192),), shared=8192),
    ],
    "mixed": [
        Case("1 x 2048 + 64 decodes 2048", LARGE, ((1, 2048, 0), (64, 1, 2047))),
        Case("2 x 4096 + 16 decodes 8192", LARGE, ((2, 4096, 0), (16, 1, 8191))),
        Case("1 x 512 over 1024 + 128 decodes 1024", LARGE, ((1, 512, 1024), (128, 1, 1023))),
    ],
    "shapes": [
        Case("d64 4 x 4096 new", LARGE, ((4, 4096, 0),), head_dim=64),
        Case("d256 4 x 2048 new", (16, 4), ((4, 2048, 0),), head_dim=256),
        Case("block 64 4 x 4096 new", LARGE, ((4, 4096, 0),), block_size=64),
    ],
    "fp8": [
        Case("fp8 4 x 512 over 4096", LARGE, ((4, 512, 4096),), dtype=FP8),
        Case("fp8 4 x 4096 new", LARGE, ((4, 4096, 0),), dtype=FP8),
        Case("fp8 8/1 8 x 2048 over 4096", SMALL, ((8, 2048, 4096),), dtype=FP8),
        Case("fp8 64 x 128 over one 8192", LARGE, ((64, 128, 8192),), shared=8192, dtype=FP8),
        Case("fp8 d64 4 x 4096 new", LARGE, ((4, 4096, 0),), head_dim=64, dtype=FP8),
    ],
}


class Workload:
    """One case with its tensors; physical blocks are a random permutation of a pool of about 2 GiB."""

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        heads, kv_heads = case.heads
        self.spec = case.spec
        self.lens, self.new = np.array(case.lens, np.int32), np.array(case.new, np.int32)
        blocks = -(-self.lens // case.block_size)
        prefix = case.shared // case.block_size
        per_block = kv_heads * case.block_size * case.head_dim * case.dtype.itemsize * 2
        count = max(POOL_BYTES // per_block, int(blocks.sum()) + 1)
        shape = (count, kv_heads, case.block_size, case.head_dim)
        self.k_pool, self.v_pool = (
            torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(case.dtype) for _ in range(2)
        )
        ids = np.random.default_rng(seed).permutation(count).astype(np.int32)
        self.tables = np.zeros((len(self.lens), int(blocks.max())), np.int32)
        taken = prefix
        for table, n in zip(self.tables, blocks.tolist(), strict=True):
            table[:prefix] = ids[:prefix]
            table[prefix:n] = ids[taken : taken + n - prefix]
            taken += n - prefix
        self.starts = np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)
        self.q = torch.randn(int(self.new.sum()), heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
        self.scale = case.head_dim**-0.5
        self.device_tables = torch.from_numpy(self.tables).cuda()
        self.device_lens = torch.from_numpy(self.lens).cuda()
        self.device_starts = torch.from_numpy(self.starts).cuda()
        self.rows_checked = self.pick_rows()

    def pick_rows(self) -> list[int]:
        """Return rows to check: the first, some and the last of the first and the last sequence."""
        rows: set[int] = set()
        for i in (0, len(self.new) - 1):
            first, last = int(self.starts[i]), int(self.starts[i + 1]) - 1
            rows |= {first, last, (first + last) // 2, (3 * first + last) // 4}
        return sorted(rows)

    def reference(self) -> torch.Tensor:
        """Return the float64 result of `rows_checked`."""
        outs = []
        for row in self.rows_checked:
            i = int(np.searchsorted(self.starts, row, side="right")) - 1
            n = int(self.lens[i] - self.new[i]) + row - int(self.starts[i]) + 1
            blocks = self.device_tables[i, : -(-n // self.case.block_size)].long()
            k, v = (p[blocks].transpose(1, 2).flatten(0, 1)[:n].double() for p in (self.k_pool, self.v_pool))
            q = self.q[row].double().unflatten(0, (self.case.heads[1], -1))
            weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.scale).softmax(-1)
            outs.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
        return torch.stack(outs)

    def error(self, out: torch.Tensor, reference: torch.Tensor) -> float:
        """Return the relative error in the Euclidean norm over the rows checked; dense results are [B, H, S, D]."""
        if out.ndim == 4:
            out = out.transpose(1, 2).flatten(0, 1)
        return ((out[self.rows_checked].double() - reference).norm() / reference.norm()).item()
