"""What may be under way at a time, so that memory is bounded whatever callers send.

gRPC takes a request into memory once a thread has been given to its call, and no earlier. So unary calls share
`UNARY_THREADS` threads and streams have their own: no more requests are read at once than there are threads. Probes,
which need no credential, have their own too, so that nobody without one can hold a thread that others wait for. What is
read and not answered yet is counted: a large request beyond `MAX_REQUEST_BYTES_IN_FLIGHT` is dropped before it is
parsed, and refused as Overloaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import grpc

from radixpool.rpc import limits
from radixpool.rpc.interception import Behavior, Continuation, Handler, behavior_of, with_behavior
from radixpool.rpc.manager.interceptor import OVERLOADED
from radixpool.rpc.security.policy import ANYONE, METHOD_ROLES

_STREAM_THREADS: Final = limits.MAX_SESSIONS + limits.MAX_SUBSCRIBERS + limits.SPARE_STREAM_THREADS
_MAX_HANDLERS: Final = 512


class RequestBytes:
    """The bytes of large requests that are in flight, at most `limit`. Safe from many threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Reentrant: the garbage collector may find a request that was given up while its thread is in here.
        self._lock = threading.RLock()
        self.taken = 0

    def take(self, size: int) -> bool:
        """Count `size` more bytes, unless there is no room for them. Returns whether there was."""
        with self._lock:
            if self.taken + size > self._limit:
                return False
            self.taken += size
            return True

    def give_back(self, size: int) -> None:
        """Count so many bytes no longer."""
        with self._lock:
            self.taken -= size


class _Large:
    """A large request, counted until it is `done` with, or dropped because its call was given up before it ran."""

    __slots__ = ("_in_flight", "_size", "message")

    message: Any

    def __init__(self, in_flight: RequestBytes, size: int) -> None:
        self._in_flight = in_flight
        self._size = size

    def done(self) -> None:
        """Count it no longer and let go of it. A second time does nothing."""
        self._in_flight.give_back(self._size)
        self._size = 0
        self.message = None

    __del__ = done


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Gives streams and probes their own threads and counts large requests. It goes first in the list."""

    def __init__(self) -> None:
        self.in_flight = RequestBytes(limits.MAX_REQUEST_BYTES_IN_FLIGHT)
        self._streams = ThreadPoolExecutor(_STREAM_THREADS, thread_name_prefix="stream")
        self._probes = ThreadPoolExecutor(limits.PROBE_THREADS, thread_name_prefix="probe")
        self._admitting = lru_cache(maxsize=_MAX_HANDLERS)(self._admit)

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler behind the admission, None for an unknown method."""
        handler = continuation(handler_call_details)
        return None if handler is None else self._admitting(handler_call_details.method, handler)

    def close(self) -> None:
        """Wait for the threads, which have nothing more to do when the server has stopped."""
        self._streams.shutdown(wait=True)
        self._probes.shutdown(wait=True)

    def _admit(self, method: str, handler: Handler) -> Handler:
        inner = behavior_of(handler)
        if getattr(inner, "experimental_non_blocking", False):
            return handler  # health's Watch: it calls back, and keeps no thread
        if handler.request_streaming and not handler.response_streaming:
            return handler  # a call that is turned away unread
        behavior = _each_message(inner) if handler.request_streaming else _message(inner)
        threads = self._streams if handler.response_streaming else None
        if METHOD_ROLES.get(method) == ANYONE:
            threads = self._probes
        # Where gRPC for Python looks for the threads of one method; None stands for the server's own.
        behavior.experimental_thread_pool = threads  # type: ignore[attr-defined]
        return with_behavior(handler, behavior, deserializer=self._counting(handler.request_deserializer))

    def _counting(self, deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        assert deserializer is not None, "every method takes a message"
        in_flight = self.in_flight

        def deserialize(packed: bytes) -> Any:
            size = len(packed)
            if size < limits.LARGE_REQUEST_BYTES:
                return deserializer(packed)
            if not in_flight.take(size):
                return OVERLOADED
            large = _Large(in_flight, size)
            large.message = deserializer(packed)
            return large

        return deserialize


def _message(inner: Behavior) -> Behavior:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        if type(request) is not _Large:
            return inner(request, context)
        try:
            return inner(request.message, context)
        finally:
            request.done()

    return call


def _each_message(inner: Behavior) -> Behavior:
    """Unpack the requests of a stream: each counts until it is answered, whether or not the answer is read."""

    def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        large: _Large | None = None

        def messages() -> Iterator[Any]:
            nonlocal large
            for request in requests:
                if type(request) is not _Large:
                    yield request
                    continue
                large = request
                yield request.message

        try:
            for response in inner(messages(), context):
                if large is not None:
                    large.done()
                    large = None
                yield response
        finally:
            if large is not None:
                large.done()

    return call
