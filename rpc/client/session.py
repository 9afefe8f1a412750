"""The blocking end of a Session stream: batches go out, answers come back in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from radixpool.rpc import operations as ops
from radixpool.rpc.client import codec
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.errors import ProtocolError
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import cache_pb2


class Session:
    """One open stream. `batch` may be called from many threads; batches are answered one after the other.

    After an error that is raised (not returned in a result) the stream is over: open another one.
    """

    def __init__(self, open_stream: Callable[..., Any], identity: Identity) -> None:
        self._identity = identity
        self._requests: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._call = open_stream(iter(self._requests.get, None))
        self._replies: Iterator[cache_pb2.SessionResponse] = iter(self._call)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def batch(self, operations: Iterable[ops.Operation]) -> list[ops.Result | Exception]:
        """Run operations in order. One that fails gives an exception in its place and disturbs no other."""
        messages = list(map(codec.operation_message, operations))
        request = cache_pb2.SessionRequest(header=self._identity.header(), operations=messages)
        with self._lock:
            self._requests.put(request)
            reply = self._receive()
        return codec.results(reply.results, len(messages))

    def close(self) -> None:
        """End the stream. A second close does nothing."""
        self._requests.put(None)
        self._call.cancel()

    def _receive(self) -> cache_pb2.SessionResponse:
        try:
            reply = next(self._replies, None)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        if reply is None:
            raise ProtocolError("the manager ended the session")
        return reply
