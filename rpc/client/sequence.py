"""A sequence as its owner sees it: the handle, the block table, and how much of it is cached and committed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixpool.radix.errors import UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.errors import Fenced

if TYPE_CHECKING:
    from radixpool.rpc.client.sync import Client


class SequenceState:
    """What a client knows of one sequence; kept in step with the manager by the results of its operations.

    handle: 16 bytes, a capability. cached_tokens: leading tokens that needed no computing when it was acquired.
    num_tokens: its present length. committed_tokens: leading tokens whose KV is known to be written.
    block_table: int32, read-only.
    """

    __slots__ = ("block_table", "cached_tokens", "committed_tokens", "handle", "num_tokens")

    def __init__(self, acquired: ops.Acquired, num_tokens: int) -> None:
        self.handle = acquired.handle
        self.cached_tokens = acquired.cached_tokens
        self.committed_tokens = acquired.cached_tokens
        self.num_tokens = num_tokens
        self.block_table = acquired.block_table

    def __repr__(self) -> str:
        """Show lengths only: handle and tokens are secrets."""
        return (
            f"{type(self).__name__}(num_tokens={self.num_tokens}, cached_tokens={self.cached_tokens}, "
            f"committed_tokens={self.committed_tokens}, blocks={len(self.block_table)})"
        )

    def apply_extended(self, result: ops.Extended) -> None:
        """Take over the new length and the blocks that were added."""
        self.num_tokens = result.num_tokens
        self.append_blocks(result.appended_blocks)

    def append_blocks(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Put `block_ids` at the end of the block table."""
        if len(block_ids):
            self.block_table = _read_only(np.concatenate((self.block_table, block_ids)))

    def apply_committed(self, result: ops.Committed) -> None:
        """Take over the committed length and the remapped blocks."""
        self.committed_tokens = result.committed_tokens
        if result.remaps:
            table = self.block_table.copy()
            for remap in result.remaps:
                table[remap.block_index] = remap.to_block
            self.block_table = _read_only(table)


class RemoteSequence(SequenceState):
    """A sequence that this process acquired; a context manager that releases it on exit."""

    __slots__ = ("_client", "_released")

    def __init__(self, client: Client, acquired: ops.Acquired, num_tokens: int) -> None:
        super().__init__(acquired, num_tokens)
        self._client = client
        self._released = False

    def __enter__(self) -> RemoteSequence:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.release()

    def extend(self, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens; allocates when a block boundary is crossed. Raises PoolExhausted, nothing changed."""
        result = self._client.extend(self.handle, tokens)
        self.apply_extended(result)
        return result

    def reserve(self, num_tokens: int) -> ops.Reserved:
        """Make room for `num_tokens` beyond the present length. Raises PoolExhausted, nothing changed."""
        result = self._client.reserve(self.handle, num_tokens)
        self.append_blocks(result.appended_blocks)
        return result

    def commit(self, upto: int) -> ops.Committed:
        """Make the full blocks of the first `upto` tokens findable: their KV has been written."""
        result = self._client.commit(self.handle, upto)
        self.apply_committed(result)
        return result

    def release(self) -> None:
        """Give the blocks back; what was committed stays cached. One that is gone already counts as released."""
        if not self._released:
            with contextlib.suppress(Fenced, UnknownSequence):
                self._client.release(self.handle)
            self._released = True


def _read_only(table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    table.setflags(write=False)
    return table
