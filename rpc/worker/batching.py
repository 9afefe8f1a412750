"""Turn the chunks of one step into the arrays of a `StepBatch`. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixpool.rpc.worker.requests import RunningSequence
from radixpool.rpc.worker.scheduler import Chunk
from radixpool.rpc.worker.step import NO_SLOT, StepBatch


def build_batch(running: Sequence[RunningSequence], chunks: Sequence[Chunk], *, block_size: int) -> StepBatch:
    """Return the batch of `chunks`, which number `running`. O(tokens in the step)."""
    sequences = [running[chunk.index] for chunk in chunks]
    starts = np.asarray([chunk.start for chunk in chunks], np.int64)
    context_lens = np.asarray([chunk.end for chunk in chunks], np.int32)
    query_lens = (context_lens - starts).astype(np.int32)
    ends = np.cumsum(query_lens, dtype=np.int64)
    sampled = [row for row, chunk in enumerate(chunks) if chunk.end == len(sequences[row].tokens)]
    token_ids = [
        token for chunk, seq in zip(chunks, sequences, strict=True) for token in seq.tokens[chunk.start : chunk.end]
    ]
    return StepBatch(
        token_ids=np.asarray(token_ids, np.int64),
        positions=np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - ends + query_lens, query_lens),
        slot_mapping=slot_mapping(sequences, chunks, block_size),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=[sequence.block_table for sequence in sequences],
        sample_rows=ends[sampled] - 1,
        samplers=[sequences[row].sampler for row in sampled],
    )


def slot_mapping(
    sequences: Sequence[RunningSequence], chunks: Sequence[Chunk], block_size: int
) -> npt.NDArray[np.int64]:
    """Return the slots of all chunks. Single tokens, which come first and are many, go without arrays of their own."""
    pairs = list(zip(sequences, chunks, strict=True))
    singles = list(itertools.takewhile(lambda pair: pair[1].end - pair[1].start == 1, pairs))
    single_slots = [slot_of(sequence, chunk.start, block_size) for sequence, chunk in singles]
    longer = [slots_of(sequence, chunk.start, chunk.end, block_size) for sequence, chunk in pairs[len(singles) :]]
    return np.concatenate([np.asarray(single_slots, np.int64), *longer])


def slot_of(sequence: RunningSequence, position: int, block_size: int) -> int:
    """Return where the KV of one position goes; see `slots_of`."""
    if position < sequence.findable:
        return NO_SLOT
    block, offset = divmod(position, block_size)
    return int(sequence.block_table[block]) * block_size + offset


def slots_of(sequence: RunningSequence, start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Return where the KV of positions `start` to `end` goes; what others may read already is not written again."""
    positions = np.arange(start, end, dtype=np.int64)
    slots = sequence.block_table[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return np.where(positions < sequence.findable, NO_SLOT, slots)
