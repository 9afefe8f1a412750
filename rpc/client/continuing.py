"""A generation from a caller's own sequence that goes on when the sequence is lost.

The caller owns the sequence, so the worker cannot acquire it again after a restart of the manager: the caller's client
does, with the tokens that have come so far, and lets the worker continue. Whoever reads the events sees one generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from radixpool.radix.errors import UnknownSequence
from radixpool.rpc.client.aio_sequence import AsyncSequence
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
AsyncGenerate: TypeAlias = Callable[[bytes, SamplingParams], AsyncGenerator[GenerateEvent, None]]
MAX_LOSSES_IN_A_ROW: Final = 5
"""Without a new token in between."""
LOSSES: Final = (SequenceLost, UnknownSequence, Fenced)


class Continuation:
    """What one generation has brought so far, over all its parts; the same for both clients.

    For each part `rest` says what to ask a worker for, `take` passes on what the reader should see of an event, and
    `lost` what to do after a loss. It is over when `is_over`.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.is_over = False
        self._sampling = sampling
        self._started: GenerateStarted | None = None
        self._came: list[int] = []
        self._known = 0  # of them, those that the sequence has
        self._losses_in_a_row = 0

    def rest(self) -> SamplingParams:
        """Return how to sample the tokens that are missing."""
        came = len(self._came)
        return replace(
            self._sampling,
            max_new_tokens=self._sampling.max_new_tokens - came,
            skip_draws=self._sampling.skip_draws + came,
        )

    def take(self, event: GenerateEvent) -> GenerateEvent | None:
        """Return an event as the reader should see it, None for one that tells nothing new."""
        match event:
            case GenerateStarted():
                if self._started is not None:
                    return None
                self._started = event
                return event
            case GenerateTokens(tokens):
                self._came += tokens
                self._losses_in_a_row = 0
                return event
            case GenerateFinished(reason):
                return self._finished(reason)

    def lost(self, loss: Exception) -> GenerateFinished | None:
        """Return the last event if nothing is missing but it. Raises the loss after `MAX_LOSSES_IN_A_ROW`."""
        self._losses_in_a_row += 1
        if self._losses_in_a_row > MAX_LOSSES_IN_A_ROW:
            raise loss
        return self._finished(FinishReason.LENGTH) if len(self._came) == self._sampling.max_new_tokens else None

    def ended(self) -> None:
        """Note the end of a part's stream. Raises ProtocolError when the generation is not over."""
        if not self.is_over:
            raise ProtocolError("the worker's stream ended in the middle")

    def tokens_since(self) -> bytes:
        """Return the tokens, packed, that came since the sequence was last acquired: it has them from now on."""
        tokens = self._came[self._known :]
        self._known = len(self._came)
        return np.array(tokens, dtype="<u4").tobytes()

    def _finished(self, reason: FinishReason) -> GenerateFinished:
        assert self._started is not None, "a generation begins before it ends"
        self.is_over = True
        return GenerateFinished(reason, self._started.prompt_tokens, self._started.cached_tokens, len(self._came))


def continue_through_losses(
    generate: Generate, sequence: RemoteSequence, sampling: SamplingParams
) -> Iterator[GenerateEvent]:
    """Yield the events of one generation, however often the sequence is lost and acquired again meanwhile.

    `generate` continues the sequence of a handle. The first event counts what was cached when the generation began.
    Raises what `generate` and `RemoteSequence.resume` raise, and the loss itself after `MAX_LOSSES_IN_A_ROW`.
    """
    try:
        sequence.refresh()
    except LOSSES:
        sequence.resume(b"")
    generation = Continuation(sampling)
    while not generation.is_over:
        try:
            for event in generate(sequence.handle, generation.rest()):
                if (seen := generation.take(event)) is not None:
                    yield seen
                if generation.is_over:
                    return  # a loss after the last event is none
            generation.ended()
        except LOSSES as loss:
            if (last := generation.lost(loss)) is not None:
                yield last
            else:
                sequence.resume(generation.tokens_since())


async def continue_through_losses_async(
    generate: AsyncGenerate, sequence: AsyncSequence, sampling: SamplingParams
) -> AsyncIterator[GenerateEvent]:
    """Do the same for asyncio."""
    try:
        await sequence.refresh()
    except LOSSES:
        await sequence.resume(b"")
    generation = Continuation(sampling)
    while not generation.is_over:
        try:
            async with aclosing(generate(sequence.handle, generation.rest())) as events:
                async for event in events:
                    if (seen := generation.take(event)) is not None:
                        yield seen
                    if generation.is_over:
                        return
            generation.ended()
        except LOSSES as loss:
            if (last := generation.lost(loss)) is not None:
                yield last
            else:
                await sequence.resume(generation.tokens_since())
