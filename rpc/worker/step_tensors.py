"""A `StepBatch` in the form in which it travels to the device: one int64 matrix, and padded block tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixpool.rpc.worker.step import NO_SLOT, StepBatch

TABLE_STEP = 64
"""Tables are a multiple of so many blocks wide, so that a plan can be kept while sequences grow."""

TOKEN_IDS, POSITIONS, SLOTS, SAMPLE_ROWS = range(4)


def pack_inputs(batch: StepBatch, num_rows: int) -> npt.NDArray[np.int64]:
    """Return token ids, positions, slots and sample rows as the rows of one matrix `[4, num_rows]`.

    The rest of each row is padding: token 0 at position 0, written nowhere, sampled from row 0.
    """
    packed = np.zeros((4, num_rows), np.int64)
    packed[SLOTS] = NO_SLOT
    for row, values in (
        (TOKEN_IDS, batch.token_ids),
        (POSITIONS, batch.positions),
        (SLOTS, batch.slot_mapping),
        (SAMPLE_ROWS, batch.sample_rows),
    ):
        packed[row, : len(values)] = values
    return packed


def padded_tables(batch: StepBatch, block_size: int) -> npt.NDArray[np.int32]:
    """Return the block tables as one matrix `[S, max_blocks]`, what each length needs of them, the rest zeros."""
    needed = -(-batch.context_lens // block_size)
    tables = np.zeros((len(needed), table_width(int(needed.max()))), np.int32)
    for row, table, count in zip(tables, batch.block_tables, needed, strict=True):
        row[:count] = table[:count]
    return tables


def table_width(num_blocks: int) -> int:
    """Return the width of tables that hold `num_blocks`.

    >>> table_width(1), table_width(64), table_width(65)
    (64, 64, 128)
    """
    return -(-num_blocks // TABLE_STEP) * TABLE_STEP
