"""What the engine needs from a cache: operations in, one result or error each, in order.

A manager's session (`radixpool.rpc.client.Session`) is one; `LocalPort` drives a `RadixCache` of this process,
for tests and for embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from radixpool.radix import RadixCache
from radixpool.radix import Sequence as CacheSequence
from radixpool.radix.errors import RadixPoolError, UnknownSequence
from radixpool.rpc.client.stepping import step_update
from radixpool.rpc.operations import (
    Acquire,
    Acquired,
    BlockTables,
    Commit,
    Committed,
    Extend,
    Extended,
    GetBlockTables,
    Match,
    Matched,
    Operation,
    Release,
    Released,
    Remap,
    Reserve,
    Reserved,
    Result,
    SequenceView,
    StepReport,
)
from radixpool.rpc.step_columns import Step, Stepped, read_rows


class CachePort(Protocol):
    """Run cache operations for the engine, which is the only caller and calls from one thread."""

    def batch(self, operations: Sequence[Operation], /, *, steps: StepReport) -> Sequence[Result | Exception]:
        """Run `operations` in order, each by itself: a failed one yields its error and stops none of the others.

        `steps` says which steps are over (before the operations) and which one may begin after them: until it is over
        the cache hands out no block that it may touch.
        Raises `CacheLost`, and nothing else, when the cache as a whole is out of reach: every handle is void then.
        """
        ...

    def step(self, step: Step, operations: Sequence[Operation] = (), /, *, steps: StepReport) -> Stepped:
        """Run an Extend and a Commit for each row of `step`, then `operations`; else like `batch`."""
        ...


class CacheLost(Exception):
    """The manager is gone, or has ended this client's lease. Not an operating error of one request."""


class LocalPort:
    """A `CachePort` over a `RadixCache` that this thread owns."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._sequences: dict[bytes, CacheSequence] = {}

    def batch(self, operations: Sequence[Operation], /, *, steps: StepReport | None = None) -> list[Result | Exception]:
        """Run `operations` in order; see `CachePort`. No step runs meanwhile in this process, so none is waited for."""
        return [self._run_one(operation) for operation in operations]

    def step(self, step: Step, operations: Sequence[Operation] = (), /, *, steps: StepReport | None = None) -> Stepped:
        """Run the rows of `step` as single operations, then `operations`; see `CachePort`."""
        rows = read_rows(step_update(step))
        errors: dict[int, Exception] = {}
        appended: list[tuple[int, int]] = []
        remaps: list[tuple[int, int, int, int]] = []
        for row, (handle, tokens, upto) in enumerate(zip(rows.handles, rows.tokens, rows.commit_upto, strict=True)):
            row_operations: list[Operation] = [Extend(handle, tokens)] if tokens else []
            if upto or not tokens:
                row_operations.append(Commit(handle, upto))
            for operation in row_operations:
                match self._run_one(operation):
                    case Extended(_, blocks):
                        appended += [(row, block) for block in blocks.tolist()]
                    case Committed(_, moved):
                        remaps += [(row, one.block_index, one.from_block, one.to_block) for one in moved]
                    case Exception() as error:
                        errors.setdefault(row, error)
        sequences = [self._sequences.get(handle) for handle in rows.handles]
        invalid = [(row, seq.invalid_from) for row, seq in enumerate(sequences) if seq and seq.invalid_from is not None]
        return Stepped(
            num_tokens=np.array([seq.num_tokens if seq else 0 for seq in sequences], np.uint32),
            committed_tokens=np.array([seq.committed_tokens if seq else 0 for seq in sequences], np.uint32),
            appended_rows=_column(appended, 0, np.uint32),
            appended_blocks=_column(appended, 1, np.int32),
            remap_rows=_column(remaps, 0, np.uint32),
            remap_block_indices=_column(remaps, 1, np.uint32),
            remap_from_blocks=_column(remaps, 2, np.int32),
            remap_to_blocks=_column(remaps, 3, np.int32),
            invalid_rows=_column(invalid, 0, np.uint32),
            invalid_from_blocks=_column(invalid, 1, np.uint32),
            errors=errors,
            results=tuple(self._run_one(operation) for operation in operations),
        )

    def _run_one(self, operation: Operation) -> Result | Exception:
        try:
            return self._apply(operation)
        except (RadixPoolError, ValueError, TypeError) as error:
            return error

    def _apply(self, operation: Operation) -> Result:
        match operation:
            case Acquire(tokens, namespace, reserve, max_hit):
                sequence = self._cache.acquire(tokens, namespace=namespace, reserve=reserve, max_hit=max_hit)
                handle = sequence.handle.to_bytes(16, "little")
                self._sequences[handle] = sequence
                return Acquired(handle, sequence.cached_tokens, sequence.block_table)
            case Extend(handle, tokens):
                sequence = self._sequence(handle)
                before = len(sequence.block_table)
                self._cache.extend(sequence, tokens)
                return Extended(sequence.num_tokens, sequence.block_table[before:], sequence.invalid_from)
            case Reserve(handle, num_tokens):
                sequence = self._sequence(handle)
                before = len(sequence.block_table)
                self._cache.reserve(sequence, num_tokens)
                return Reserved(sequence.block_table[before:])
            case Commit(handle, upto):
                sequence = self._sequence(handle)
                done = self._cache.commit(sequence, upto)
                remaps = tuple(Remap(remap.index, remap.old_block, remap.new_block) for remap in done.remaps)
                return Committed(done.committed_tokens, remaps, sequence.invalid_from)
            case Release(handle, _, commit_upto):
                sequence = self._sequence(handle)
                if commit_upto is not None:
                    self._cache.commit(sequence, commit_upto)
                self._cache.release(sequence)
                del self._sequences[handle]
                return Released()
            case Match(tokens, namespace):
                return Matched(self._cache.match(tokens, namespace=namespace).tokens)
            case GetBlockTables(handles):
                return BlockTables(tuple(self._view(handle) for handle in handles))
            case _:
                raise TypeError(f"{type(operation).__name__} is no operation of an engine")

    def _sequence(self, handle: bytes) -> CacheSequence:
        if handle not in self._sequences:
            raise UnknownSequence(handle)
        return self._sequences[handle]

    def _view(self, handle: bytes) -> SequenceView | Exception:
        sequence = self._sequences.get(handle)
        if sequence is None:
            return UnknownSequence(handle)
        return SequenceView(
            handle,
            sequence.tokens,
            sequence.block_table,
            sequence.cached_tokens,
            sequence.committed_tokens,
            tenant=sequence.namespace.tenant,
        )


def _column(entries: Sequence[tuple[int, ...]], place: int, dtype: type[Any]) -> npt.NDArray[Any]:
    return np.array([entry[place] for entry in entries], dtype)
