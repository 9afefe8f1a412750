"""A sequence as its owner sees it, for asyncio; what it knows is kept by `SequenceState`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from radixpool.radix.errors import UnknownSequence
from radixpool.radix.tokens import pack_tokens
from radixpool.rpc import operations as ops
from radixpool.rpc.client.sequence import SequenceState
from radixpool.rpc.errors import Fenced
from radixpool.v1 import cache_pb2

if TYPE_CHECKING:
    from radixpool.rpc.client.aio import AsyncClient


class AsyncSequence(SequenceState):
    """A sequence that this process acquired; an async context manager that releases it on exit."""

    __slots__ = ("_client", "_released")

    def __init__(self, client: AsyncClient, request: cache_pb2.AcquireRequest, acquired: ops.Acquired) -> None:
        super().__init__(request, acquired)
        self._client = client
        self._released = False

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.release()

    async def extend(self, tokens: ops.Tokens) -> ops.Extended:
        """Append known tokens; allocates when a block boundary is crossed. Raises PoolExhausted, nothing changed."""
        packed = pack_tokens(tokens)
        result = await self._client.extend(self.handle, packed)
        self.apply_extended(packed, result)
        return result

    async def reserve(self, num_tokens: int) -> ops.Reserved:
        """Make room for `num_tokens` beyond the present length. Raises PoolExhausted, nothing changed."""
        result = await self._client.reserve(self.handle, num_tokens)
        self.append_blocks(result.appended_blocks)
        return result

    async def commit(self, upto: int) -> ops.Committed:
        """Make the full blocks of the first `upto` tokens findable: their KV has been written."""
        result = await self._client.commit(self.handle, upto)
        self.apply_committed(result)
        return result

    async def rewind(self, to: int) -> None:
        """Forget the tokens from `to` on, and room reserved for more."""
        self.apply_rewound(await self._client.rewind(self.handle, to))

    async def reacquire(self) -> None:
        """Acquire all its tokens again, under a new handle, when Fenced or UnknownSequence said that it is gone.

        What `cached_tokens` says then has survived; the rest must be computed again. Raises PoolExhausted.
        """
        self.apply_acquired(await self._client.reacquire(self.acquire_again()))

    async def refresh(self) -> None:
        """Learn what others, such as a worker, have made of it. Raises UnknownSequence."""
        (view,) = (await self._client.get_block_tables([self.handle])).sequences
        if isinstance(view, Exception):
            raise view
        self.apply_view(view)

    async def resume(self, tokens: bytes) -> None:
        """Acquire all its tokens and the packed `tokens` after them again, once there is room. Like `reacquire`.

        Waits for room half as long again as calls are tried again: a former life's blocks may still be fenced.
        """
        self.apply_acquired(await self._client.reacquire_when_there_is_room(self.acquire_longer(tokens)))

    async def release(self, *, commit_upto: int | None = None) -> None:
        """Give the blocks back; what was committed stays cached. One that is gone already counts as released.

        `commit_upto` commits so many leading tokens before, in the same call: the cheapest end of a request.
        """
        if not self._released:
            with contextlib.suppress(Fenced, UnknownSequence):
                await self._client.release(self.handle, commit_upto=commit_upto)
            self._released = True
