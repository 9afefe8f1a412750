"""Turn a waiting request into a running sequence: acquire its blocks, or look up those that its caller acquired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from radixpool.radix.errors import UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.worker.limits import EngineLimits, check_prompt
from radixpool.rpc.worker.requests import GenerateCall, HandleSource, PromptSource, RunningSequence, common_prefix
from radixpool.rpc.worker.step import Runner

Tell: TypeAlias = Callable[[Sequence[ops.Operation]], Sequence[ops.Result | Exception]]


class Admission:
    """Open sequences for one engine. Keeps no state of its own."""

    def __init__(self, tell: Tell, runner: Runner, limits: EngineLimits) -> None:
        self._tell = tell
        self._runner = runner
        self._limits = limits

    def open(self, call: GenerateCall, running: Iterable[RunningSequence]) -> RunningSequence:
        """Return the sequence of `call`, ready to be computed from where the cache ends.

        Raises `PoolExhausted` or `QuotaExceeded` when it has to wait, another error when it can never run.
        """
        if isinstance(call.source, PromptSource):
            return self._acquire(call, call.source)
        if any(sequence.handle == call.source.handle for sequence in running):
            raise ValueError("handle: the sequence is being generated from already")
        return self._borrow(call, call.source)

    def shares_with_prefill(self, source: PromptSource, running: Iterable[RunningSequence]) -> bool:
        """Whether a running prompt is about to compute a prefix of this one: waiting for it beats doing it twice."""
        for other in running:
            if not other.prefilling or not isinstance(other.call.source, PromptSource):
                continue
            if other.call.source.namespace == source.namespace:
                shared = min(common_prefix(source.tokens, other.call.source.tokens), len(source.tokens) - 1)
                if shared - shared % self._limits.block_size > other.computed:
                    return True
        return False

    def _acquire(self, call: GenerateCall, source: PromptSource) -> RunningSequence:
        former = call.resumed
        tokens = former.tokens if former else source.tokens.tolist()
        num_prompt = len(source.tokens)
        num_output = len(tokens) - num_prompt
        reserve = min(self._limits.reserve_tokens, call.sampling.max_new_tokens - num_output)
        # Not the former sampler: it may have drawn a token that was thrown away, and a seed is one answer.
        sampling = replace(call.sampling, skip_draws=call.sampling.skip_draws + num_output)
        acquired = self._one(ops.Acquire(np.asarray(tokens, np.uint32), source.namespace, reserve))
        assert isinstance(acquired, ops.Acquired)
        return RunningSequence(
            call=call,
            handle=acquired.handle,
            tokens=tokens,
            block_table=acquired.block_table.copy(),
            sampler=self._runner.sampler(sampling),
            num_prompt=num_prompt,
            streamed=len(tokens),
            cached_tokens=former.cached_tokens if former else acquired.cached_tokens,
            computed=acquired.cached_tokens,
            findable=acquired.cached_tokens,
            registered=len(tokens),
        )

    def _borrow(self, call: GenerateCall, source: HandleSource) -> RunningSequence:
        tables = self._one(ops.GetBlockTables((source.handle,)))
        assert isinstance(tables, ops.BlockTables)
        view = tables.sequences[0]
        if isinstance(view, Exception):
            raise view
        if source.tenant not in (None, view.tenant):  # answered as the manager answers a handle that never was
            raise UnknownSequence(f"{source.handle[:4].hex()}…")
        check_prompt(view.tokens, call.sampling, self._limits)
        num_tokens = len(view.tokens)
        written = max(view.cached_tokens, view.committed_tokens)
        # The rest of a block is computed again: a fork has it only by a copy order, which its caller may not have run.
        findable = written - written % self._limits.block_size
        return RunningSequence(
            call=call,
            handle=source.handle,
            tokens=view.tokens.tolist(),
            block_table=view.block_table.copy(),
            sampler=self._runner.sampler(call.sampling),
            num_prompt=num_tokens,
            streamed=num_tokens,
            cached_tokens=view.cached_tokens,
            computed=min(findable, num_tokens - 1),  # the last token's logits are needed in any case
            findable=findable,
            registered=num_tokens,
        )

    def _one(self, operation: ops.Operation) -> ops.Result:
        result = self._tell([operation])[0]
        if isinstance(result, Exception):
            raise result
        return result
