"""What the engine tells its cache, and takes over from the answers: one step in columns after each forward pass.

Numbers the passes as `StepReport` wants it: a pass begins only after a message that announced it and named every
sequence that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixpool.radix.errors import PoolExhausted, QuotaExceeded
from radixpool.rpc import operations as ops
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.rpc.worker.cache_port import CachePort
from radixpool.rpc.worker.errors import BlocksInvalidated
from radixpool.rpc.worker.requests import RunningSequence

REFUSALS = (PoolExhausted, QuotaExceeded)
"""There is no block now; there may be one later."""


@dataclass(frozen=True, slots=True)
class _Report:
    """One row: what is new of a sequence since the cache heard of it last."""

    sequence: RunningSequence
    tokens: list[int]
    commit_upto: int
    ends: bool


class CacheReports:
    """The engine's end of a `CachePort`. Owned by one thread; raises `CacheLost` where the port does."""

    def __init__(self, port: CachePort, *, block_size: int, clock: Callable[[], float]) -> None:
        self._port = port
        self._block_size = block_size
        self._clock = clock
        self._passes = 0  # forward passes that are over, however they ended; empty ones count
        self._announced = 0  # the pass that the cache was told of last

    def pass_is_over(self) -> None:
        """Count a forward pass, however it ended; the next message says so."""
        self._passes += 1

    def tell(self, operations: Sequence[ops.Operation]) -> Sequence[ops.Result | Exception]:
        """Run operations, and announce the next pass."""
        return self._port.batch(operations, steps=self._announce())

    def report(self, sequences: Sequence[RunningSequence]) -> None:
        """Extend, commit and release in one message, and take over what the cache answers.

        Sets `starved_since` of a sequence that got no block, and `error` of one that failed.
        """
        if not sequences:
            return
        rows = [self._row(sequence) for sequence in sequences]
        step = Step(
            handles=[row.sequence.handle for row in rows],
            tokens=[token for row in rows for token in row.tokens],
            token_counts=[len(row.tokens) for row in rows],
            commit_upto_tokens=[row.commit_upto for row in rows],
        )
        ending = [row.sequence for row in rows if row.ends]
        releases = [ops.Release(sequence.handle) for sequence in ending]
        stepped = self._port.step(step, releases, steps=self._announce())
        self._take_over_tables(rows, stepped)
        self._take_over_lengths(rows, stepped)
        for sequence, result in zip(ending, stepped.results, strict=True):
            if isinstance(result, Exception):
                sequence.error = result

    def rest(self) -> None:
        """Report the announced pass as over: nothing was left for it to do."""
        if self._announced > self._passes:
            self._passes = self._announced
            self._port.batch([], steps=ops.StepReport(self._passes, self._passes))

    def _announce(self) -> ops.StepReport:
        self._announced = self._passes + 1
        return ops.StepReport(self._passes, self._announced)

    def _row(self, sequence: RunningSequence) -> _Report:
        """Say what the cache has to know. The last token of an owned sequence is never computed, so it never does."""
        ends = sequence.finish_reason is not None and sequence.owned
        fills_block = sequence.computed - sequence.computed % self._block_size > sequence.findable
        tokens = [] if ends else sequence.tokens[sequence.registered :]
        commits = fills_block or not (ends or tokens)
        return _Report(sequence, tokens, sequence.computed if commits else 0, ends)

    def _take_over_tables(self, rows: Sequence[_Report], stepped: Stepped) -> None:
        for index, row in enumerate(stepped.appended_rows.tolist()):
            rows[row].sequence.append_blocks(stepped.appended_blocks[index : index + 1])
        remaps = zip(
            stepped.remap_rows.tolist(),
            stepped.remap_block_indices.tolist(),
            stepped.remap_from_blocks.tolist(),
            stepped.remap_to_blocks.tolist(),
            strict=True,
        )
        for row, block_index, from_block, to_block in remaps:
            rows[row].sequence.apply_remaps([ops.Remap(block_index, from_block, to_block)])

    def _take_over_lengths(self, rows: Sequence[_Report], stepped: Stepped) -> None:
        lengths = zip(rows, stepped.num_tokens.tolist(), stepped.committed_tokens.tolist(), strict=True)
        for number, (row, num_tokens, committed_tokens) in enumerate(lengths):
            sequence, error = row.sequence, stepped.errors.get(number)
            if error is not None and not isinstance(error, REFUSALS):
                sequence.error = error
                continue
            if row.commit_upto:
                sequence.findable = committed_tokens - committed_tokens % self._block_size
            if error is not None:
                sequence.starved_since = sequence.starved_since or self._clock()
            elif row.tokens:
                sequence.registered = num_tokens
                sequence.starved_since = None
        invalid = zip(stepped.invalid_rows.tolist(), stepped.invalid_from_blocks.tolist(), strict=True)
        for number, first in invalid:
            rows[number].sequence.error = BlocksInvalidated(f"block {first} of the sequence is damaged")
