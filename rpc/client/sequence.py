"""A sequence as its owner sees it: the handle, the block table, and how much of it is cached and committed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from radixpool.radix import CopyOrder
from radixpool.radix.errors import UnknownSequence
from radixpool.radix.tokens import pack_tokens
from radixpool.rpc import operations as ops
from radixpool.rpc.errors import Fenced
from radixpool.v1 import cache_pb2

if TYPE_CHECKING:
    from radixpool.rpc.client.sync import Client

TOKEN_BYTES: Final = 4


class SequenceState:
    """What a client knows of one sequence; kept in step with the manager by the results of its operations.

    handle: 16 bytes, a capability. cached_tokens: leading tokens that needed no computing when it was acquired.
    num_tokens: its present length. committed_tokens: leading tokens whose KV is known to be written.
    block_table: int32, read-only. copies: orders to run before anything is written to its blocks.
    """

    __slots__ = ("_request", "_tokens", "block_table", "cached_tokens", "committed_tokens", "copies", "handle")

    handle: bytes
    cached_tokens: int
    committed_tokens: int
    block_table: npt.NDArray[np.int32]
    copies: tuple[CopyOrder, ...]

    def __init__(self, request: cache_pb2.AcquireRequest, acquired: ops.Acquired) -> None:
        self._request = request
        self._tokens = bytearray(request.tokens)
        self.apply_acquired(acquired)

    def __repr__(self) -> str:
        """Show lengths only: handle and tokens are secrets."""
        return (
            f"{type(self).__name__}(num_tokens={self.num_tokens}, cached_tokens={self.cached_tokens}, "
            f"committed_tokens={self.committed_tokens}, blocks={len(self.block_table)})"
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose ids are known."""
        return len(self._tokens) // TOKEN_BYTES

    def apply_acquired(self, result: ops.Acquired) -> None:
        """Take over a handle and all that comes with it."""
        self.handle = result.handle
        self.cached_tokens = self.committed_tokens = result.cached_tokens
        self.block_table = result.block_table
        self.copies = result.copies

    def apply_view(self, view: ops.SequenceView) -> None:
        """Take over what others made of it meanwhile."""
        self._tokens = bytearray(view.tokens.astype("<u4").tobytes())
        self.cached_tokens, self.committed_tokens = view.cached_tokens, view.committed_tokens
        self.block_table = view.block_table

    def apply_extended(self, tokens: bytes, result: ops.Extended) -> None:
        """Take over the new tokens and the blocks that were added."""
        self._tokens += tokens
        self.append_blocks(result.appended_blocks)

    def acquire_again(self) -> cache_pb2.AcquireRequest:
        """Return the acquire of all its present tokens."""
        self._request.tokens = bytes(self._tokens)
        return self._request

    def acquire_longer(self, tokens: bytes) -> cache_pb2.AcquireRequest:
        """Take the packed `tokens` over that came while it was lost, and return the acquire of all of them."""
        self._tokens += tokens
        request = self.acquire_again()
        request.partial = False  # nobody would run the copies
        return request

    def append_blocks(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Put `block_ids` at the end of the block table."""
        if len(block_ids):
            self.block_table = _read_only(np.concatenate((self.block_table, block_ids)))

    def apply_rewound(self, result: ops.Rewound) -> None:
        """Take over the shorter length."""
        del self._tokens[result.num_tokens * TOKEN_BYTES :]
        self.block_table = self.block_table[: result.num_blocks]
        self.committed_tokens = min(self.committed_tokens, result.num_tokens)

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

    def __init__(self, client: Client, request: cache_pb2.AcquireRequest, acquired: ops.Acquired) -> None:
        super().__init__(request, acquired)
        self._client = client
        self._released = False

    def __enter__(self) -> RemoteSequence:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.release()

    def extend(self, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens; allocates when a block boundary is crossed. Raises PoolExhausted, nothing changed."""
        packed = pack_tokens(tokens)
        result = self._client.extend(self.handle, packed)
        self.apply_extended(packed, result)
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

    def rewind(self, to: int) -> None:
        """Forget the tokens from `to` on, and room reserved for more."""
        self.apply_rewound(self._client.rewind(self.handle, to))

    def reacquire(self) -> None:
        """Acquire all its tokens again, under a new handle, when Fenced or UnknownSequence said that it is gone.

        What `cached_tokens` says then has survived; the rest must be computed again. Raises PoolExhausted.
        """
        self.apply_acquired(self._client.reacquire(self.acquire_again()))

    def refresh(self) -> None:
        """Learn what others, such as a worker, have made of it. Raises UnknownSequence."""
        (view,) = self._client.get_block_tables([self.handle]).sequences
        if isinstance(view, Exception):
            raise view
        self.apply_view(view)

    def resume(self, tokens: bytes) -> None:
        """Acquire all its tokens and the packed `tokens` after them again, once there is room. Like `reacquire`.

        Waits for room half as long again as calls are tried again: a former life's blocks may still be fenced.
        """
        self.apply_acquired(self._client.reacquire_when_there_is_room(self.acquire_longer(tokens)))

    def release(self, *, commit_upto: int | None = None) -> None:
        """Give the blocks back; what was committed stays cached. One that is gone already counts as released.

        `commit_upto` commits so many leading tokens before, in the same call: the cheapest end of a request.
        """
        if not self._released:
            with contextlib.suppress(Fenced, UnknownSequence):
                self._client.release(self.handle, commit_upto=commit_upto)
            self._released = True


def _read_only(table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    table.setflags(write=False)
    return table
