"""Decode steps in columns: an Extend and a Commit per row through the same cache, without a message for each.

The rows run in order and each by itself, so that the state and the answers are those of the single operations. What a
step saves is everything around the cache: messages, dispatch, and what the rows share looked up once for all of them.
The caller holds the engine's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from radixpool.radix import RadixCache
from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.manager.handles import HandleTable, Held
from radixpool.rpc.manager.leases import Lease
from radixpool.rpc.manager.reply_room import ReplyRoom
from radixpool.rpc.manager.steps import WorkerSteps
from radixpool.rpc.status import row_of, status_from_error
from radixpool.rpc.step_columns import StepRows
from radixpool.v1 import cache_pb2

_COMMIT_BEGUN = failpoint("commit.begun")
_FINDABLE = failpoint("commit.findable")
_REMAPPED = failpoint("commit.remapped")
_HALF = failpoint("batch.half")
_REFUSALS = (RadixPoolError, ValueError, TypeError)
_REMAP_BYTES: Final = 16
_REMAPS_OF_A_ROW: Final = 8
"""Blocks that a row may commit without being asked what it would answer: every answer has room for their remaps."""


class Stepping:
    """Runs steps over one cache and its handles. `room` is that of the reply; `on_refusal` hears of refused rows."""

    def __init__(
        self,
        cache: RadixCache,
        handles: HandleTable,
        steps: WorkerSteps,
        *,
        room: ReplyRoom,
        on_refusal: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._handles = handles
        self._steps = steps
        self._room = room
        self._counted_tokens = _REMAPS_OF_A_ROW * cache.block_size
        self._on_refusal = on_refusal

    def run(self, lease: Lease, rows: StepRows, result: cache_pb2.StepUpdateResult) -> None:
        """Run the rows of a step and fill `result`. O(rows + new tokens)."""
        answer = _Answer(len(rows))
        fences: dict[tuple[Lease, ...], dict[str, int]] = {}
        uses_blocks = lease.role == cache_pb2.CLIENT_ROLE_WORKER
        extend, num_tokens, committed_tokens = self._cache.extend, answer.num_tokens, answer.committed_tokens
        found = self._handles.get_all(rows.handles)
        for row, (held, tokens, upto) in enumerate(zip(found, rows.tokens, rows.commit_upto, strict=True)):
            if not isinstance(held, Held):
                answer.errors[row] = held
                continue
            if uses_blocks and lease not in held.workers:
                held.used_by(lease)
            sequence = held.sequence
            if tokens:
                table = sequence.packed_block_table
                try:
                    extend(sequence, tokens)
                except _REFUSALS as error:
                    answer.errors[row] = error
                if sequence.packed_block_table is not table:  # immutable, so a longer one is another object
                    answer.append(row, sequence.packed_block_table[len(table) :])
            if upto > sequence.committed_tokens:
                fence = fences.get(held.workers)
                if fence is None:
                    fence = fences[held.workers] = self._steps.fence(held, lease)
                self._commit(row, held, upto, fence, answer)
            num_tokens[row] = sequence.num_tokens
            committed_tokens[row] = sequence.committed_tokens
            if sequence.invalid_from is not None:
                answer.invalid.append((row, sequence.invalid_from))
            _HALF()
        answer.write(result)
        for row, failure in answer.errors.items():
            self._refuse(result.errors.add(row=row), failure)

    def _commit(self, row: int, held: Held, upto: int, fence: dict[str, int], answer: _Answer) -> None:
        new_tokens = min(upto, held.sequence.num_tokens) - held.sequence.committed_tokens
        try:
            if new_tokens > self._counted_tokens:
                self._room.take(new_tokens // self._cache.block_size * _REMAP_BYTES)
            _COMMIT_BEGUN()
            done = self._cache.commit(held.sequence, upto, after_step=fence)
        except _REFUSALS as error:
            answer.errors.setdefault(row, error)
            return
        _FINDABLE()
        if done.remaps:
            _REMAPPED()
        for remap in done.remaps:
            answer.remaps.append((row, remap.index, remap.old_block, remap.new_block))

    def _refuse(self, message: cache_pb2.StepError, error: Exception) -> None:
        table_row = row_of(error)
        assert table_row is not None, "every error of a row is in the error table"
        self._on_refusal(table_row.reason)
        message.error.CopyFrom(status_from_error(error))


class _Answer:
    """The columns of a result while they grow."""

    __slots__ = ("appended_blocks", "appended_rows", "committed_tokens", "errors", "invalid", "num_tokens", "remaps")

    def __init__(self, rows: int) -> None:
        self.num_tokens = array("I", bytes(4 * rows))
        self.committed_tokens = array("I", bytes(4 * rows))
        self.appended_rows = array("I")
        self.appended_blocks = bytearray()
        self.remaps: list[tuple[int, int, int, int]] = []
        self.invalid: list[tuple[int, int]] = []
        self.errors: dict[int, Exception] = {}

    def append(self, row: int, blocks: bytes) -> None:
        """Note packed `blocks` at the end of a row's table."""
        self.appended_rows.extend([row] * (len(blocks) >> 2))
        self.appended_blocks += blocks

    def write(self, result: cache_pb2.StepUpdateResult) -> None:
        """Pack the columns into the message."""
        result.num_tokens = self.num_tokens.tobytes()
        result.committed_tokens = self.committed_tokens.tobytes()
        result.appended_rows = self.appended_rows.tobytes()
        result.appended_blocks = bytes(self.appended_blocks)
        if self.remaps:
            rows, indices, old, new = zip(*self.remaps, strict=True)
            result.remap_rows = array("I", rows).tobytes()
            result.remap_block_indices = array("I", indices).tobytes()
            result.remap_from_blocks = array("i", old).tobytes()
            result.remap_to_blocks = array("i", new).tobytes()
        if self.invalid:
            invalid_rows, first = zip(*self.invalid, strict=True)
            result.invalid_rows = array("I", invalid_rows).tobytes()
            result.invalid_from_blocks = array("I", first).tobytes()
