"""From chunks to arrays: ragged rows one after the other, decoding sequences first."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixpool.rpc.worker.batching import build_batch, slot_of, slots_of
from radixpool.rpc.worker.scheduler import Chunk
from radixpool.rpc.worker.step import NO_SLOT

BLOCK = 4


def sequence(number, length, findable):
    """Blocks `100 * number`, `100 * number + 7`, … and tokens that tell themselves apart."""
    table = 100 * number + 7 * np.arange(-(-length // BLOCK), dtype=np.int32)
    tokens = [1000 * number + position for position in range(length)]
    return SimpleNamespace(tokens=tokens, block_table=table, findable=findable, sampler=f"sampler {number}")


@st.composite
def steps(draw):
    running, chunks = [], []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 30))
        findable = draw(st.integers(0, length // BLOCK)) * BLOCK
        running.append(sequence(number + 1, length, findable))
        start = draw(st.integers(0, length - 1))
        chunks.append(Chunk(number, start, draw(st.integers(start + 1, length))))
    return running, draw(st.permutations(chunks))


@given(steps())
def test_every_row_is_what_its_chunk_says(step):
    running, chunks = step
    batch = build_batch(running, chunks, block_size=BLOCK)
    rows = [(running[chunk.index], position) for chunk in chunks for position in range(chunk.start, chunk.end)]
    assert batch.token_ids.tolist() == [seq.tokens[position] for seq, position in rows]
    assert batch.positions.tolist() == [position for _, position in rows]
    assert batch.slot_mapping.tolist() == [
        NO_SLOT if position < seq.findable else seq.block_table[position // BLOCK] * BLOCK + position % BLOCK
        for seq, position in rows
    ]
    assert batch.query_lens.tolist() == [chunk.end - chunk.start for chunk in chunks]
    assert batch.context_lens.tolist() == [chunk.end for chunk in chunks]
    finished = [chunk for chunk in chunks if chunk.end == len(running[chunk.index].tokens)]
    assert batch.samplers == [running[chunk.index].sampler for chunk in finished]
    assert [batch.token_ids[row] for row in batch.sample_rows] == [running[c.index].tokens[-1] for c in finished]
    assert {array.dtype for array in (batch.token_ids, batch.positions, batch.slot_mapping)} == {np.dtype(np.int64)}
    assert {array.dtype for array in (batch.query_lens, batch.context_lens)} == {np.dtype(np.int32)}


def test_one_slot_is_the_slot_of_many():
    seq = sequence(3, 17, 8)
    assert [slot_of(seq, position, BLOCK) for position in range(17)] == slots_of(seq, 0, 17, BLOCK).tolist()
