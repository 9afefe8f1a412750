"""The asyncio end of a Session stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio

from radixpool.rpc import operations as ops
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.retry import RetryOptions, call_with_retries_async
from radixpool.rpc.client.stepping import batch_request, batch_results, stepped
from radixpool.rpc.errors import Fenced, ManagerUnavailable
from radixpool.rpc.status import error_from_rpc
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.v1 import cache_pb2

_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class AsyncSession:
    """One stream of batches. `batch` may be awaited by many tasks; batches are answered one after the other.

    A stream that breaks is opened anew, and the batch under way is sent again under its number, so that it runs once.
    Fenced means that the epoch is over: every handle is void then, and `AsyncClient.session` opens the next session.
    """

    def __init__(
        self, open_stream: Callable[..., Any], identity: Identity, *, retry: RetryOptions, address: str
    ) -> None:
        self._open_stream = open_stream
        self._identity = identity
        self._retry = retry
        self._address = address
        self._lock = asyncio.Lock()
        self._call: Any = None

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def batch(
        self, operations: Iterable[ops.Operation], *, steps: ops.StepReport | None = None
    ) -> list[ops.Result | Exception]:
        """Run operations in order. One that fails gives an exception in its place and disturbs no other.

        A worker reports its `steps`: what is over counts before the operations, what it launches next after them.
        """
        request = batch_request(cache_pb2.SessionRequest, operations, steps)
        return batch_results(await self._send(request), request)

    async def step(
        self, step: Step, operations: Iterable[ops.Operation] = (), *, steps: ops.StepReport | None = None
    ) -> Stepped:
        """Extend and commit many sequences at once, then run `operations`, in one message; see `Step` and `Stepped`.

        Several times faster than the same single operations. A row that fails disturbs no other. Raises ValueError or
        TypeError, nothing sent, for columns that do not fit together, and ValueError, nothing changed, for one sequence
        in two rows.
        """
        request = batch_request(cache_pb2.SessionRequest, operations, steps, step=step)
        return stepped(await self._send(request), request)

    async def _send(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        """Send a message under one number, however often."""
        async with self._lock:
            header = self._identity.begin()
            request.header.CopyFrom(header)
            try:
                return await call_with_retries_async(lambda: self._exchange(request), self._retry)
            except Fenced:
                self._identity.end_epoch(header.epoch)
                raise
            finally:
                self._identity.end(header)

    async def close(self) -> None:
        """End the stream. A second close does nothing."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _exchange(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        if self._call is None:
            self._call = self._open_stream()
        try:
            await self._call.write(request)
            reply = await self._call.read()
        except grpc.RpcError as error:
            await self.close()
            if error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata():
                # What asyncio gRPC says of a write to a connection that is gone.
                raise ManagerUnavailable(f"the session with {self._address} broke") from None
            raise error_from_rpc(error, address=self._address) from None
        except asyncio.InvalidStateError:
            reply = _END  # the call was over before the write
        except asyncio.CancelledError:
            await self.close()  # gRPC has cancelled the stream along with us; the next batch opens another
            raise
        if reply is _END:
            await self.close()
            raise ManagerUnavailable("the manager ended the session")
        assert isinstance(reply, cache_pb2.SessionResponse)
        return reply
