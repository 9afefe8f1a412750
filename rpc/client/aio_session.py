"""The asyncio end of a Session stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio

from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.errors import ProtocolError
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import cache_pb2

_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class AsyncSession:
    """One open stream. `batch` may be awaited by many tasks; batches are answered one after the other.

    After an error that is raised (not returned in a result) the stream is over: open another one.
    """

    def __init__(self, open_stream: Callable[..., Any], identity: Identity) -> None:
        self._identity = identity
        self._call = open_stream()
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def batch(self, operations: Iterable[ops.Operation]) -> list[ops.Result | Exception]:
        """Run operations in order. One that fails gives an exception in its place and disturbs no other."""
        messages = list(map(codec.operation_message, operations))
        request = cache_pb2.SessionRequest(header=self._identity.header(), operations=messages)
        async with self._lock:
            reply = await self._exchange(request)
        return codec.results(reply.results, len(messages))

    async def close(self) -> None:
        """End the stream. A second close does nothing."""
        self._call.cancel()

    async def _exchange(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        try:
            await self._call.write(request)
            reply = await self._call.read()
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        except asyncio.InvalidStateError:
            reply = _END
        if reply is _END:
            raise await self._reason_of_end()
        assert isinstance(reply, cache_pb2.SessionResponse)
        return reply

    async def _reason_of_end(self) -> Exception:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return ProtocolError("the manager ended the session")
        trailers = await self._call.trailing_metadata()
        details = await self._call.details()
        return error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details, None))
