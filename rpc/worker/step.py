"""What one forward pass computes, as plain arrays: the seam between the engine and the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.rpc.generation import SamplingParams

Sampler: TypeAlias = object
"""The state of one request's sampling; only the runner looks inside."""

NO_SLOT = -1
"""In a slot mapping: the KV of this position is in the pool already and must not be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A ragged batch: the new tokens of several sequences, one after the other (T in all, S sequences).

    token_ids, positions, slot_mapping: int64 [T]; a slot is `block_id * block_size + offset`, or `NO_SLOT`.
    query_lens, context_lens: int32 [S]; new tokens, and KV length including them.
    block_tables: int32, one per sequence, at least `ceil(context_len / block_size)` entries.
    sample_rows: int64 [R], rows of T whose next token is wanted; `samplers` has R entries.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_lens: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: Sequence[npt.NDArray[np.int32]]
    sample_rows: npt.NDArray[np.int64]
    samplers: Sequence[Sampler]

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.token_ids)


def idle_batch(num_seqs: int, tokens_each: int, block_size: int) -> StepBatch:
    """Return a step that computes tokens and writes and samples nothing; it reads block 0, whatever it holds."""
    positions = np.arange(tokens_each, dtype=np.int64)
    lens = np.full(num_seqs, tokens_each, np.int32)
    return StepBatch(
        token_ids=np.zeros(num_seqs * tokens_each, np.int64),
        positions=np.tile(positions, num_seqs),
        slot_mapping=np.full(num_seqs * tokens_each, NO_SLOT, np.int64),
        query_lens=lens,
        context_lens=lens,
        block_tables=[np.zeros(-(-tokens_each // block_size), np.int32)] * num_seqs,
        sample_rows=np.zeros(0, np.int64),
        samplers=[],
    )


class Runner(Protocol):
    """Run a model over the pool. Called by one thread."""

    def sampler(self, sampling: SamplingParams) -> Sampler:
        """Return fresh sampling state for one request."""
        ...

    def forward(self, batch: StepBatch) -> Sequence[int]:
        """Write the KV of the new tokens to their slots and return the next token of each sample row.

        Whether it returns or raises, no part of the step runs any more, on any device.
        Raises `OutOfMemory` when the batch does not fit; whatever was written then is in slots that nobody may read.
        Raises `DeviceLost` when no step can run any more.
        """
        ...
