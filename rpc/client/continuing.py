"""A generation from a caller's own sequence that goes on when the sequence is lost.

The caller owns the sequence, so the worker cannot acquire it again after a restart of the manager: the caller's client
does, with the tokens that have come so far, and lets the worker continue. Whoever reads the events sees one generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from radixpool.radix.errors import UnknownSequence
from radixpool.rpc.client.sequence import RemoteSequence
from radixpool.rpc.errors import Fenced, ProtocolError, SequenceLost
from radixpool.rpc.generation import (
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    GenerateTokens,
    SamplingParams,
)

Generate: TypeAlias = Callable[[bytes, SamplingParams], Iterator[GenerateEvent]]
MAX_LOSSES_IN_A_ROW: Final = 5
"""Without a new token in between."""
_LOST: Final = (SequenceLost, UnknownSequence, Fenced)


def continue_through_losses(
    generate: Generate, sequence: RemoteSequence, sampling: SamplingParams
) -> Iterator[GenerateEvent]:
    """Yield the events of one generation, however often the sequence is lost and acquired again meanwhile.

    `generate` continues the sequence of a handle. The first event counts what was cached when the generation began.
    Raises what `generate` and `RemoteSequence.resume` raise, and the loss itself after `MAX_LOSSES_IN_A_ROW`.
    """
    try:
        sequence.refresh()
    except _LOST:
        sequence.resume(b"")
    came: list[int] = []
    known = losses = 0  # tokens that the sequence has, and losses since the last token
    started: GenerateStarted | None = None
    while True:
        try:
            rest = replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - len(came),
                skip_draws=sampling.skip_draws + len(came),
            )
            for event in generate(sequence.handle, rest):
                match event:
                    case GenerateStarted():
                        if started is None:
                            started = event
                            yield event
                    case GenerateTokens(tokens):
                        came += tokens
                        losses = 0
                        yield event
                    case GenerateFinished(reason):
                        yield _finished(reason, started, came)
                        return
            raise ProtocolError("the worker's stream ended in the middle")
        except _LOST:
            losses += 1
            if losses > MAX_LOSSES_IN_A_ROW:
                raise
        if len(came) == sampling.max_new_tokens:
            yield _finished(FinishReason.LENGTH, started, came)
            return
        sequence.resume(np.array(came[known:], dtype="<u4").tobytes())
        known = len(came)


def _finished(reason: FinishReason, started: GenerateStarted | None, came: list[int]) -> GenerateFinished:
    assert started is not None, "a generation begins before it ends"
    return GenerateFinished(reason, started.prompt_tokens, started.cached_tokens, len(came))
