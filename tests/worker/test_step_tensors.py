"""What travels to the device with a step: padding that does nothing, and tables cut to what is read."""

from __future__ import annotations

import numpy as np

from radixpool.rpc.worker.step import NO_SLOT, StepBatch, idle_batch
from radixpool.rpc.worker.step_tensors import POSITIONS, SAMPLE_ROWS, SLOTS, TOKEN_IDS, pack_inputs, padded_tables


def a_batch():
    """A decode row at position 34 and a prompt chunk of 3 from position 0; blocks of 16."""
    return StepBatch(
        token_ids=np.asarray([7, 8, 9, 10]),
        positions=np.asarray([34, 0, 1, 2]),
        slot_mapping=np.asarray([5 * 16 + 2, NO_SLOT, 4 * 16 + 1, 4 * 16 + 2]),
        query_lens=np.asarray([1, 3], np.int32),
        context_lens=np.asarray([35, 3], np.int32),
        block_tables=[np.asarray([2, 9, 5, 11, 12], np.int32), np.asarray([4], np.int32)],
        sample_rows=np.asarray([0, 3]),
        samplers=[None, None],
    )


def test_rows_of_the_matrix_and_padding_that_writes_nothing():
    packed = pack_inputs(a_batch(), 6)
    assert packed.dtype == np.int64
    assert packed[TOKEN_IDS].tolist() == [7, 8, 9, 10, 0, 0]
    assert packed[POSITIONS].tolist() == [34, 0, 1, 2, 0, 0]
    assert packed[SLOTS].tolist() == [82, NO_SLOT, 65, 66, NO_SLOT, NO_SLOT]
    assert packed[SAMPLE_ROWS].tolist() == [0, 3, 0, 0, 0, 0]


def test_tables_hold_what_the_lengths_need_and_keep_their_width():
    """Reserved blocks are left out, and the width changes seldom: then a plan can be kept."""
    tables = padded_tables(a_batch(), 16)
    assert tables.shape == (2, 64)
    assert tables[0].tolist() == [2, 9, 5] + [0] * 61
    assert tables[1].tolist() == [4] + [0] * 63


def test_an_idle_step_writes_and_samples_nothing():
    batch = idle_batch(3, 20, 16)
    assert batch.num_tokens == 60
    assert set(batch.slot_mapping.tolist()) == {NO_SLOT}
    assert len(batch.sample_rows) == 0
    assert batch.positions.tolist() == [*range(20)] * 3
    assert padded_tables(batch, 16).max() == 0
