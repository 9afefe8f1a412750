"""The blocking end of a Session stream: batches go out, answers come back in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from radixpool.rpc import operations as ops
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.retry import RetryOptions, call_with_retries
from radixpool.rpc.client.stepping import batch_request, batch_results, stepped
from radixpool.rpc.errors import Fenced, ManagerUnavailable
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.status import error_from_rpc
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.v1 import cache_pb2

_SENT = failpoint("session.sent")
_ANSWERED = failpoint("session.answered")


class Session:
    """One stream of batches. `batch` may be called from many threads; batches are answered one after the other.

    A stream that breaks is opened anew, and the batch under way is sent again under its number, so that it runs once.
    Fenced means that the epoch is over: every handle is void then, and `Client.session` opens the next session.
    """

    def __init__(
        self, open_stream: Callable[..., Any], identity: Identity, *, retry: RetryOptions, address: str
    ) -> None:
        self._open_stream = open_stream
        self._identity = identity
        self._retry = retry
        self._address = address
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def batch(
        self, operations: Iterable[ops.Operation], *, steps: ops.StepReport | None = None
    ) -> list[ops.Result | Exception]:
        """Run operations in order. One that fails gives an exception in its place and disturbs no other.

        A worker reports its `steps`: what is over counts before the operations, what it launches next after them.
        """
        request = batch_request(cache_pb2.SessionRequest, operations, steps)
        return batch_results(self._send(request), request)

    def step(
        self, step: Step, operations: Iterable[ops.Operation] = (), *, steps: ops.StepReport | None = None
    ) -> Stepped:
        """Extend and commit many sequences at once, then run `operations`, in one message; see `Step` and `Stepped`.

        Several times faster than the same single operations. A row that fails disturbs no other. Raises ValueError or
        TypeError, nothing sent, for columns that do not fit together, and ValueError, nothing changed, for one sequence
        in two rows.
        """
        request = batch_request(cache_pb2.SessionRequest, operations, steps, step=step)
        return stepped(self._send(request), request)

    def _send(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        """Send a message under one number, however often."""
        with self._lock:
            header = self._identity.begin()
            request.header.CopyFrom(header)
            try:
                return call_with_retries(lambda: self._exchange(request), self._retry)
            except Fenced:
                self._identity.end_epoch(header.epoch)
                raise
            finally:
                self._identity.end(header)

    def close(self) -> None:
        """End the stream. A second close does nothing."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _exchange(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        if self._stream is None:
            self._stream = _Stream(self._open_stream)
        try:
            return self._stream.exchange(request)
        except grpc.RpcError as error:
            self.close()
            raise error_from_rpc(error, address=self._address) from None
        except BaseException:
            self.close()  # an answer that still comes must not be taken for that of the next batch
            raise


class _Stream:
    """The two directions of one call."""

    def __init__(self, open_stream: Callable[..., Any]) -> None:
        self._requests: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._call = open_stream(iter(self._requests.get, None))
        self._replies: Iterator[cache_pb2.SessionResponse] = iter(self._call)

    def exchange(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        """Send one message and wait for its answer. Raises grpc.RpcError."""
        self._requests.put(request)
        _SENT()
        reply = next(self._replies, None)
        if reply is None:
            raise ManagerUnavailable("the manager ended the session")
        _ANSWERED()
        return reply

    def close(self) -> None:
        """End the call and the thread that feeds it."""
        self._requests.put(None)
        self._call.cancel()
