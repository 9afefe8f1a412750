"""Turn the chunks of one step into the arrays of a `StepBatch`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixpool.rpc.worker.requests import RunningSequence
from radixpool.rpc.worker.scheduler import Chunk
from radixpool.rpc.worker.step import NO_SLOT, StepBatch


def build_batch(running: Sequence[RunningSequence], chunks: Sequence[Chunk], *, block_size: int) -> StepBatch:
    """Return the batch of `chunks`, which number `running`. O(tokens in the step)."""
    sequences = [running[chunk.index] for chunk in chunks]
    ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
    sampled = [row for row, chunk in enumerate(chunks) if chunk.end == len(sequences[row].tokens)]
    token_ids = [
        token for chunk, seq in zip(chunks, sequences, strict=True) for token in seq.tokens[chunk.start : chunk.end]
    ]
    slots = [slots_of(seq, chunk.start, chunk.end, block_size) for chunk, seq in zip(chunks, sequences, strict=True)]
    return StepBatch(
        token_ids=np.asarray(token_ids, np.int64),
        positions=np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks]),
        slot_mapping=np.concatenate(slots),
        query_lens=np.asarray([chunk.end - chunk.start for chunk in chunks], np.int32),
        context_lens=np.asarray([chunk.end for chunk in chunks], np.int32),
        block_tables=[sequence.block_table for sequence in sequences],
        sample_rows=ends[sampled].astype(np.int64) - 1,
        samplers=[sequences[row].sampler for row in sampled],
    )


def slots_of(sequence: RunningSequence, start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Return where the KV of positions `start` to `end` goes; what others may read already is not written again."""
    positions = np.arange(start, end, dtype=np.int64)
    slots = sequence.block_table[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return np.where(positions < sequence.findable, NO_SLOT, slots)
