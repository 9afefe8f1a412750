"""One ragged batch, planned once per forward pass and used by every layer.

`plan_forest` checks the batch on the host and, for the Triton backend, cuts it into work items (see `forest.py`).
A plan never reads or writes the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixpool.kernels.spec import AttentionSpec

Int32Array = NDArray[np.int32]


@dataclass(slots=True)
class ForestPlan:
    """A planned batch of `B` sequences with `num_rows` query tokens in all. Made by `plan_forest`.

    `block_tables` int32 `[B, max_blocks]`, `seq_lens` (all KV tokens, new ones included), `query_lens` and
    `query_starts` `[B + 1]` are host arrays; row `query_starts[i] + j` of `q` is query token `j` of sequence `i`.
    """

    spec: AttentionSpec
    block_tables: Int32Array
    seq_lens: Int32Array
    query_lens: Int32Array
    query_starts: Int32Array

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """Query tokens in the batch: the first dimension of `q`."""
        return int(self.query_starts[-1])

    @property
    def blocks_needed(self) -> Int32Array:
        """Blocks that each sequence's length needs, `[B]`."""
        return -(-self.seq_lens // np.int32(self.spec.block_size))


def host_int32(name: str, value: Any, ndim: int) -> Int32Array:
    """Return `value` (ndarray, tensor or nested sequence of ints) as a C-contiguous int32 host array."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int32).reshape((0,) * ndim)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension(s), got shape {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int32)


def plan_forest(
    block_tables: Any, seq_lens: Any, query_lens: Any | None = None, *, spec: AttentionSpec
) -> ForestPlan:  # fmt: skip
    """Plan attention for a ragged batch: prefill, extend and decode rows in any mixture.

    `block_tables` int `[B, max_blocks]`: physical block ids, read up to what each length needs. `seq_lens` int `[B]`:
    all KV tokens of each sequence, those of this step included. `query_lens` int `[B]`: how many of them are new (the
    query tokens; default 1 each; 0 is allowed). Query token `j` sees the first `seq_len - query_len + j + 1` tokens.

    O(table entries). Raises `ValueError` for lengths that don't fit each other or the tables.
    """
    tables = host_int32("block_tables", block_tables, 2)
    lens = host_int32("seq_lens", seq_lens, 1)
    new = np.ones_like(lens) if query_lens is None else host_int32("query_lens", query_lens, 1)
    check_lengths(tables, lens, new, spec.block_size)
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(new, out=starts[1:])
    return ForestPlan(spec, tables, lens, new, starts)


def check_lengths(tables: Int32Array, lens: Int32Array, new: Int32Array, block_size: int) -> None:
    """Check that tables, lengths and query lengths describe one batch."""
    if len(lens) != len(tables) or len(new) != len(tables):
        raise ValueError(
            f"seq_lens, query_lens: expected {len(tables)} entries as block_tables has rows, "
            f"got {len(lens)} and {len(new)}"
        )
    for name, array in (("seq_lens", lens), ("query_lens", new)):
        if array.size and array.min() < 0:
            raise ValueError(f"{name}: expected no negative length, got {array.min()}")
    if lens.size and lens.max() > tables.shape[1] * block_size:
        i = int(lens.argmax())
        raise ValueError(
            f"block_tables: row {i} holds {tables.shape[1]} blocks of {block_size} tokens, seq_lens[{i}] is {lens[i]}"
        )


def device_of(plan: ForestPlan) -> torch.device:
    """Return the device whose tensors the plan speaks of."""
    return torch.device(plan.spec.device)
