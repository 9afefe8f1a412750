"""Decode workloads for `decode.py` and `tune.py`: batches whose tables form a forest, over a large scattered pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from radixpool.kernels import AttentionSpec

POOL_BYTES = 6 * 2**30
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """`levels` lists (tokens, nodes) from the root down: each node's path is shared by the sequences below it.

    `own` tokens follow for each of `batch` sequences, or are drawn log-uniformly from (low, high).
    """

    name: str
    heads: tuple[int, int]
    batch: int
    own: int | tuple[int, int]
    levels: tuple[tuple[int, int], ...] = ()
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim=self.head_dim,
            block_size=self.block_size, q_dtype=torch.bfloat16, kv_dtype=self.dtype, device="cuda",
        )  # fmt: skip


def no_sharing() -> list[Case]:
    small = [Case(f"8/1 B={b} 4k", (8, 1), b, 4096) for b in (1, 16, 64, 256)]
    large = [Case(f"32/8 B={b} 4k", (32, 8), b, 4096) for b in (1, 16, 64)]
    return [*small, *large, Case("32/8 B=1 64k", (32, 8), 1, 65536)]


def more_shapes() -> list[Case]:
    return [
        Case("8/1 B=256 1k", (8, 1), 256, 1024),
        Case("32/8 B=256 1k", (32, 8), 256, 1024),
        Case("32/8 B=8 32k", (32, 8), 8, 32768),
        Case("32/8 B=64 ragged 64..16k", (32, 8), 64, (64, 16384)),
        *(Case(f"32/8 B=64 4k block {b}", (32, 8), 64, 4096, block_size=b) for b in (8, 32, 64)),
    ]


def fp8() -> list[Case]:
    return [Case(f"fp8 {h}/{k} B=64 4k", (h, k), 64, 4096, dtype=FP8) for h, k in ((8, 1), (32, 8))]


def sharing() -> list[Case]:
    return [
        Case("32/8 B=64 sharing 4k + 256", (32, 8), 64, 256, ((4096, 1),)),
        Case("32/8 B=64 sharing 16k + 256", (32, 8), 64, 256, ((16384, 1),)),
        Case("32/8 B=64 8 x 4k + 256", (32, 8), 64, 256, ((4096, 8),)),
        Case("8/1 B=64 sharing 4k + 256", (8, 1), 64, 256, ((4096, 1),)),
        Case("32/8 B=256 tree 2k, 8 x 2k, 64 x 1k + 128", (32, 8), 256, 128, ((2048, 1), (2048, 8), (1024, 64))),
        Case("32/8 B=64 binary tree 6 x 512 + 128", (32, 8), 64, 128, tuple((512, 2**i) for i in range(6))),
        Case("32/8 B=128 16 roots x 1k, 64 x 512 + 256", (32, 8), 128, 256, ((1024, 16), (512, 64))),
    ]


SUITES = {"plain": no_sharing, "more": more_shapes, "fp8": fp8, "shared": sharing}

_POOLS: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a pool of normal values, filled in slices to bound the memory in use."""
    pool = torch.empty(shape, dtype=dtype, device="cuda")
    for i in range(0, shape[0], 8192):
        pool[i : i + 8192] = torch.randn(pool[i : i + 8192].shape, dtype=torch.bfloat16, device="cuda").to(dtype)
    return pool


def pools(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V pools of about 6 GiB together; kept for the next case of the same geometry."""
    key = (case.heads[1], case.block_size, case.head_dim, case.dtype)
    if key not in _POOLS:
        _POOLS.clear()
        torch.cuda.empty_cache()
        block_bytes = case.heads[1] * case.block_size * case.head_dim * case.dtype.itemsize
        count = POOL_BYTES // (2 * block_bytes)
        shape = (count, case.heads[1], case.block_size, case.head_dim)
        _POOLS[key] = random_pool(shape, case.dtype), random_pool(shape, case.dtype)
    return _POOLS[key]


class Workload:
    """One case with its tensors. `unique_bytes` counts each shared block once, `flat_bytes` once for each reader."""

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.case, self.spec = case, case.spec
        self.k_pool, self.v_pool = pools(case)
        ids = rng.permutation(len(self.k_pool)).astype(np.int32)
        taken = 0
        paths: list[list[np.ndarray]] = [[] for _ in range(case.batch)]
        self.level_blocks: list[list[np.ndarray]] = []
        shared_tokens = sum(tokens for tokens, _ in case.levels)
        unique = 0
        for tokens, nodes in case.levels:
            count = tokens // case.block_size
            blocks = [ids[taken + i * count : taken + (i + 1) * count] for i in range(nodes)]
            self.level_blocks.append(blocks)
            taken += nodes * count
            unique += nodes * tokens
            for i, path in enumerate(paths):
                path.append(blocks[i * nodes // case.batch])
        if isinstance(case.own, tuple):
            low, high = map(math.log, case.own)
            own = np.exp(rng.uniform(low, high, case.batch)).astype(np.int64)
        else:
            own = np.full(case.batch, case.own)
        self.own_blocks = []
        for path, tokens in zip(paths, own, strict=True):
            count = -(-int(tokens) // case.block_size)
            self.own_blocks.append(ids[taken : taken + count])
            path.append(self.own_blocks[-1])
            taken += count
        assert taken <= len(ids), (case.name, taken, len(ids))
        rows = [np.concatenate(path) for path in paths]
        self.tables = np.zeros((case.batch, max(map(len, rows))), np.int32)
        for table, row in zip(self.tables, rows, strict=True):
            table[: len(row)] = row
        self.own = own
        self.lens = (own + shared_tokens).astype(np.int32)
        per_token = case.heads[1] * case.head_dim * case.dtype.itemsize * 2
        self.unique_bytes = (unique + int(own.sum())) * per_token
        self.flat_bytes = int(self.lens.sum()) * per_token
        self.q = torch.randn(case.batch, case.heads[0], case.head_dim, device="cuda", dtype=torch.bfloat16)
        self.scale = case.head_dim**-0.5
        self.device_tables = torch.from_numpy(self.tables).cuda()
        self.device_lens = torch.from_numpy(self.lens).cuda()
        self.rows_checked = sorted({0, case.batch // 2, case.batch - 1})

    def reference(self) -> torch.Tensor:
        """Return the float64 result of `rows_checked`."""
        outs = []
        for row in self.rows_checked:
            n = int(self.lens[row])
            blocks = self.device_tables[row, : -(-n // self.case.block_size)].long()
            k, v = (p[blocks].transpose(1, 2).flatten(0, 1)[:n].double() for p in (self.k_pool, self.v_pool))
            q = self.q[row].double().unflatten(0, (self.case.heads[1], -1))
            weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.scale).softmax(-1)
            outs.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
        return torch.stack(outs)

    def error(self, out: torch.Tensor, reference: torch.Tensor) -> float:
        """Return the relative error in the Euclidean norm over the rows checked."""
        return ((out[self.rows_checked].double() - reference).norm() / reference.norm()).item()
