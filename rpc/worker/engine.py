"""Continuous batching over a prefix cache: admit, compute what is not cached, commit, extend, stream.

One thread calls `step`; `submit` and `cancel` may be called from any. Each step is one forward pass over a ragged batch
of decode rows and prompt chunks, then one round trip to the cache. KV is reported as written only after the pass that
wrote it, so nobody can ever find a block whose content does not exist.

When the pool is exhausted requests wait in order of arrival. A running one that cannot grow makes the youngest request
that the engine owns start over later (recompute preemption, as in vLLM's scheduler); a preempted request holds nothing
while it waits, so engines that share a pool cannot block each other for good.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixpool.radix.errors import RadixPoolError, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.errors import LimitExceeded
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.generation import FinishReason, GenerateFinished, GenerateStarted, GenerateTokens
from radixpool.rpc.worker.admission import Admission
from radixpool.rpc.worker.batching import build_batch
from radixpool.rpc.worker.cache_port import CachePort
from radixpool.rpc.worker.errors import BlocksInvalidated, DeviceLost, InternalError, OutOfMemory
from radixpool.rpc.worker.limits import EngineLimits, check_prompt, check_sampling
from radixpool.rpc.worker.reporting import REFUSALS, CacheReports
from radixpool.rpc.worker.requests import GenerateCall, PromptSource, RunningSequence
from radixpool.rpc.worker.scheduler import Chunk, plan_chunks
from radixpool.rpc.worker.step import Runner

log = logging.getLogger(__name__)
_LAUNCHED = failpoint("worker.step.launched")
_WRITTEN = failpoint("worker.step.written")
_REPORTED = failpoint("worker.step.reported")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters since the start, and what is on the way now."""

    running_sequences: int
    waiting_sequences: int
    completed_steps: int
    computed_tokens: int
    reused_tokens: int
    preemptions: int


class Engine:
    """Run requests over one model and one cache.

    Any thread: submit, cancel, status, wait_for_work. The owning thread: step, interrupt, fail_all, check.
    """

    def __init__(
        self, port: CachePort, runner: Runner, *, limits: EngineLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._reports = CacheReports(port, block_size=limits.block_size, clock=clock)
        self._admission = Admission(self._reports.tell, runner, limits)
        self._clock = clock
        self._token_budget = limits.token_budget
        self._lock = threading.Condition()
        self._inbox: deque[GenerateCall] = deque()
        self._cancelled: set[GenerateCall] = set()
        self._waiting: list[GenerateCall] = []
        self._running: list[RunningSequence] = []
        self._num_submitted = 0
        self._retry_at = 0.0
        self._completed_steps = 0
        self._computed_tokens = 0
        self._reused_tokens = 0
        self._preemptions = 0

    # Any thread.

    def submit(self, call: GenerateCall) -> None:
        """Queue a request. Raises ValueError for one that can never run, `LimitExceeded` when too many wait."""
        check_sampling(call.sampling, self._limits)
        if isinstance(call.source, PromptSource):
            check_prompt(call.source.tokens, call.sampling, self._limits)
        with self._lock:
            if len(self._waiting) + len(self._inbox) >= self._limits.max_waiting:
                raise LimitExceeded(f"waiting requests: at most {self._limits.max_waiting}; try again later")
            call.arrival = self._num_submitted
            self._num_submitted += 1
            self._inbox.append(call)
            self._lock.notify()

    def cancel(self, call: GenerateCall) -> None:
        """Stop a request before the next step; it gets no more events. Harmless when it has ended."""
        with self._lock:
            self._cancelled.add(call)
            self._lock.notify()

    def status(self) -> EngineStatus:
        """Return the counters. O(1)."""
        return EngineStatus(
            running_sequences=len(self._running),
            waiting_sequences=len(self._waiting) + len(self._inbox),
            completed_steps=self._completed_steps,
            computed_tokens=self._computed_tokens,
            reused_tokens=self._reused_tokens,
            preemptions=self._preemptions,
        )

    def wait_for_work(self, timeout_s: float) -> None:
        """Return when a request or a cancellation has come, or after `timeout_s`."""
        with self._lock:
            if not (self._inbox or self._cancelled):
                self._lock.wait(timeout_s)

    # The owning thread.

    def step(self) -> bool:
        """Take in what came, run one forward pass, report it to the cache; False when there was nothing to compute.

        Raises `CacheLost` when the cache is out of reach; call `interrupt` then. Raises `DeviceLost`, which ends the
        engine, and nothing else.
        """
        self._take_in()
        self._feed_starved()
        self._admit()
        pending = [sequence.pending() for sequence in self._running]
        chunks = plan_chunks(pending, token_budget=self._token_budget, block_size=self._limits.block_size)
        if not chunks:
            self._fail_stalled()
            self._reports.rest()
            return False
        _LAUNCHED()
        tokens = self._forward(chunks)
        _WRITTEN()
        if tokens is not None:
            self._advance(chunks, tokens)
        self._confirm()
        _REPORTED()
        return True

    def interrupt(self, error: Exception) -> None:
        """Void every handle without a word to the cache, which is lost.

        Owned requests go on where they were once there is a cache again; callers' own sequences end with `error`.
        """
        for sequence in self._running:
            if sequence.owned:
                self._requeue(sequence)
            else:
                sequence.call.events.put(error)
        self._running.clear()
        self._retry_at = 0.0

    def fail_all(self, error: Exception) -> None:
        """End every request with `error`, without a word to the cache."""
        with self._lock:
            calls = [sequence.call for sequence in self._running] + self._waiting + list(self._inbox)
            self._inbox.clear()
        self._running.clear()
        self._waiting.clear()
        for call in calls:
            call.events.put(error)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. O(sequences * blocks)."""
        assert len(self._running) <= self._limits.max_running
        assert len({sequence.handle for sequence in self._running}) == len(self._running)
        calls = [sequence.call for sequence in self._running] + self._waiting
        assert len(set(calls)) == len(calls)
        assert self._waiting == sorted(self._waiting, key=lambda call: call.arrival)
        for sequence in self._running:
            sequence.check(self._limits.block_size)

    # Coming and going.

    def _take_in(self) -> None:
        with self._lock:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            self._waiting = [call for call in self._waiting if call not in cancelled]
            self._drop([sequence for sequence in self._running if sequence.call in cancelled])

    def _admit(self) -> None:
        """Admit waiting requests in order; when one is refused for want of blocks, those behind it wait too.

        Not so callers' own sequences: they hold their blocks already, and may be what the others wait for.
        """
        starving = any(sequence.starved_since is not None for sequence in self._running)
        short = starving or self._clock() < self._retry_at
        for call in list(self._waiting):
            if len(self._running) >= self._limits.max_running:
                return
            if isinstance(call.source, PromptSource) and (
                short or self._admission.shares_with_prefill(call.source, self._running)
            ):
                continue
            if not self._try_admit(call):
                self._retry_at = self._clock() + self._limits.retry_interval_s
                short = True

    def _try_admit(self, call: GenerateCall) -> bool:
        """Start a request, or end it with the reason why it can never start; False when it has to wait for blocks."""
        try:
            sequence = self._admission.open(call, self._running)
        except REFUSALS:
            return False
        except (RadixPoolError, ValueError, TypeError) as error:
            self._waiting.remove(call)
            call.events.put(error)
            return True
        self._waiting.remove(call)
        self._running.append(sequence)
        if call.resumed is None:
            self._reused_tokens += sequence.cached_tokens
            call.events.put(GenerateStarted(sequence.num_prompt, sequence.cached_tokens))
        return True

    def _drop(self, sequences: Sequence[RunningSequence]) -> None:
        """Forget running sequences; those that the engine owns are released, what they committed stays cached."""
        for sequence in sequences:
            self._running.remove(sequence)
        owned = [ops.Release(sequence.handle) for sequence in sequences if sequence.owned]
        if owned:
            self._reports.tell(owned)  # a handle that is unknown by now is released just as well
            self._retry_at = 0.0

    # When the pool is short.

    def _feed_starved(self) -> None:
        """Ask once more for the blocks that growing sequences lack, and make room if there are still none."""
        starved = [sequence for sequence in self._running if sequence.starved_since is not None]
        if not starved:
            return
        self._reports.report(starved)
        for sequence in starved:
            self._settle(sequence)
        if any(sequence.starved_since is not None for sequence in self._running):
            self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        owned = [sequence for sequence in self._running if sequence.owned]
        if not owned:
            return
        victim = max(owned, key=lambda sequence: sequence.call.arrival)
        self._preemptions += 1
        self._requeue(victim)  # first: the cache may be lost while it is told
        self._drop([victim])

    def _requeue(self, sequence: RunningSequence) -> None:
        """Let an owned request wait at its place in the order of arrival, with what it has streamed so far."""
        del sequence.tokens[sequence.streamed :]
        sequence.call.resumed = sequence
        self._waiting.append(sequence.call)
        self._waiting.sort(key=lambda call: call.arrival)

    def _fail_stalled(self) -> None:
        """Nothing can run: give up callers' own sequences that have waited for a block too long."""
        now = self._clock()
        for sequence in list(self._running):
            since = sequence.starved_since
            if since is not None and now - since >= self._limits.stall_timeout_s:
                waited = f"no block was free for {self._limits.stall_timeout_s:g} s"
                self._end(sequence, LimitExceeded(f"pool exhausted: {waited} (num_blocks {self._limits.num_blocks})"))

    # One step.

    def _forward(self, chunks: Sequence[Chunk]) -> Sequence[int] | None:
        """Run the pass; None when it failed and the step has to be planned anew."""
        batch = build_batch(self._running, chunks, block_size=self._limits.block_size)
        try:
            tokens = self._runner.forward(batch)
        except OutOfMemory as error:
            self._shrink(chunks, error)
            return None
        except DeviceLost:
            raise
        except Exception:
            log.exception("a forward pass of %d tokens failed", batch.num_tokens)
            for chunk in chunks:
                self._running[chunk.index].error = InternalError("the forward pass failed; see the worker's log")
            return None
        finally:
            self._reports.pass_is_over()
        self._completed_steps += 1
        self._computed_tokens += batch.num_tokens
        self._token_budget = min(self._limits.token_budget, self._token_budget + self._limits.block_size)
        return tokens

    def _shrink(self, chunks: Sequence[Chunk], error: OutOfMemory) -> None:
        """Halve the budget; when a single token is too much already, its request fails."""
        batch_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        log.warning("out of memory with %d tokens in a step: %s", batch_tokens, error)
        if batch_tokens == 1:
            self._running[chunks[0].index].error = error
        self._token_budget = max(1, batch_tokens // 2)

    def _advance(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> None:
        """Take over what a pass computed."""
        sampled = iter(tokens)
        for chunk in chunks:
            sequence = self._running[chunk.index]
            sequence.computed = chunk.end
            if chunk.end == len(sequence.tokens):
                self._append_token(sequence, next(sampled))

    def _confirm(self) -> None:
        """Commit, extend and release after a pass, in one round trip; then stream, and end what is over.

        Every running sequence is named to the cache, so that the next pass touches none that is gone by now.
        """
        named = list(self._running)
        self._reports.report(named)
        for sequence in named:
            self._settle(sequence)

    def _append_token(self, sequence: RunningSequence, token: int) -> None:
        sequence.tokens.append(token)
        sampling = sequence.call.sampling
        ends = token in self._limits.eos_token_ids and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            sequence.finish_reason = FinishReason.STOP
        elif sequence.num_output == sampling.max_new_tokens:
            sequence.finish_reason = FinishReason.LENGTH

    def _settle(self, sequence: RunningSequence) -> None:
        """Stream what the cache has confirmed, and end a sequence that has finished or failed.

        A handle that is unknown all at once (the lease was over for a moment) means that others may have written to the
        blocks during the last step, and an invalidated block means that it was damaged before. The step's token is
        thrown away, and what the engine owns goes on from the one before, with blocks acquired anew.
        """
        if isinstance(sequence.error, UnknownSequence | BlocksInvalidated) and sequence.owned:
            self._requeue(sequence)
            self._drop([sequence])
            return
        if sequence.error is not None:
            self._end(sequence, sequence.error)
            return
        if sequence.finish_reason is not None and sequence.starved_since is not None:
            return  # the last token goes out with the end: a client that lost the sequence in between would go on
        events = sequence.call.events
        if sequence.streamed < len(sequence.tokens):
            events.put(GenerateTokens(tuple(sequence.tokens[sequence.streamed :])))
            sequence.streamed = len(sequence.tokens)
        if sequence.finish_reason is not None:
            self._running.remove(sequence)
            self._retry_at = 0.0
            counts = (sequence.num_prompt, sequence.cached_tokens, sequence.num_output)
            events.put(GenerateFinished(sequence.finish_reason, *counts))

    def _end(self, sequence: RunningSequence, error: Exception) -> None:
        sequence.call.events.put(error)
        self._drop([sequence])
