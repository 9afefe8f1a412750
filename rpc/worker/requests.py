"""One request on its way through the engine: what was asked, and how far it is."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.radix import Namespace
from radixpool.rpc.generation import FinishReason, GenerateEvent, SamplingParams
from radixpool.rpc.operations import Remap
from radixpool.rpc.worker.scheduler import Pending
from radixpool.rpc.worker.step import Sampler

Events: TypeAlias = "queue.SimpleQueue[GenerateEvent | Exception]"


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Tokens that the engine acquires and releases itself. `tokens` is uint32."""

    tokens: npt.NDArray[np.uint32]
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class HandleSource:
    """A sequence that the caller acquired and will release; the engine commits and extends it.

    `tenant` is the only one whose sequences the caller may use; None for callers that serve all.
    """

    handle: bytes
    tenant: str | None = None


@dataclass(eq=False, slots=True)
class GenerateCall:
    """A request and where its events go: Started, Tokens…, Finished, or an exception at any point, which ends it."""

    source: PromptSource | HandleSource
    sampling: SamplingParams
    events: Events = field(default_factory=queue.SimpleQueue)
    arrival: int = -1
    resumed: RunningSequence | None = None
    """The former life of a request that was preempted or lost its blocks; it goes on after what was streamed."""


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence:
    """An admitted request.

    `tokens` are prompt and answer so far. The first `computed` have their KV in the pool, the first `registered` are
    known to the cache, and the first `streamed` to the caller (the prompt counts). The first `findable` may be shared,
    so their blocks must not be written any more.
    Invariant: findable <= computed <= registered <= len(tokens), num_prompt <= streamed <= len(tokens).
    """

    call: GenerateCall
    handle: bytes
    tokens: list[int]
    block_table: npt.NDArray[np.int32]
    sampler: Sampler
    num_prompt: int
    streamed: int
    cached_tokens: int
    computed: int
    findable: int
    registered: int
    finish_reason: FinishReason | None = None
    starved_since: float | None = None
    error: Exception | None = None

    @property
    def owned(self) -> bool:
        """Whether the engine acquired the sequence, and so may preempt and must release it."""
        return isinstance(self.call.source, PromptSource)

    @property
    def num_output(self) -> int:
        """Return how many tokens were generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefilling(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < self.num_prompt

    def pending(self) -> Pending:
        """Return what may be computed now: nothing beyond what the cache has given room for."""
        return Pending(self.computed, self.computed if self.finish_reason else self.registered)

    def apply_remaps(self, remaps: Sequence[Remap]) -> None:
        """Read from the blocks that already held the same content from now on."""
        for remap in remaps:
            assert self.block_table[remap.block_index] == remap.from_block
            self.block_table[remap.block_index] = remap.to_block

    def append_blocks(self, blocks: npt.NDArray[np.int32]) -> None:
        """Put `blocks` at the end of the block table."""
        if len(blocks):
            self.block_table = np.concatenate((self.block_table, blocks))

    def check(self, block_size: int) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert 0 <= self.findable <= self.computed <= self.registered <= len(self.tokens), self
        assert len(self.block_table) * block_size >= self.registered, self
        assert len(np.unique(self.block_table)) == len(self.block_table), self
        assert self.num_prompt <= self.streamed <= len(self.tokens), self


def common_prefix(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> int:
    """Return how many leading tokens are equal. O(min(len))."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
