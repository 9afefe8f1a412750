"""Decide what one step computes: every decoding sequence, then prompts in chunks, within a token budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pending:
    """How far one sequence is: the KV of `computed` of its `known` tokens is in the pool."""

    computed: int
    known: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the tokens `start` to `end` of sequence number `index`."""

    index: int
    start: int
    end: int


def plan_chunks(pending: Sequence[Pending], *, token_budget: int, block_size: int) -> list[Chunk]:
    """Return what the next step computes, at most `token_budget` tokens in all. O(len(pending)).

    Sequences with one token to go (decoding) come first, so that a long prompt never stalls them; prompts share what is
    left in the given order. A chunk that does not finish its prompt ends at a block boundary where it can, because only
    full blocks can be shared.

    >>> plan_chunks([Pending(0, 100), Pending(40, 41)], token_budget=36, block_size=16)
    [Chunk(index=1, start=40, end=41), Chunk(index=0, start=0, end=32)]
    """
    chunks = []
    prefilling = []
    for index, sequence in enumerate(pending):
        if sequence.known - sequence.computed > 1:
            prefilling.append(index)
        elif sequence.known > sequence.computed and token_budget > 0:
            chunks.append(Chunk(index, sequence.computed, sequence.known))
            token_budget -= 1
    for index in prefilling:
        if token_budget <= 0:
            break
        chunk = _prefill_chunk(index, pending[index], token_budget, block_size)
        chunks.append(chunk)
        token_budget -= chunk.end - chunk.start
    return chunks


def _prefill_chunk(index: int, sequence: Pending, token_budget: int, block_size: int) -> Chunk:
    end = min(sequence.known, sequence.computed + token_budget)
    if end < sequence.known:
        boundary = end - end % block_size
        end = boundary if boundary > sequence.computed else end
    return Chunk(index, sequence.computed, end)
