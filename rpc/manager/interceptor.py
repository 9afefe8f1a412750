"""One place through which every call passes: errors become statuses here, and only here.

The wrapped handler of each method is made once and kept, so a call costs one dictionary lookup more.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from radixpool.rpc import limits
from radixpool.rpc.errors import Overloaded
from radixpool.rpc.interception import Behavior, Continuation, Handler, behavior_of, with_behavior
from radixpool.rpc.status import row_of, status_from_error

_LOG = logging.getLogger(__name__)
MALFORMED: Final = empty_pb2.Empty()
"""Stands for a request that could not be read. A message without fields, so that other interceptors can look at it."""
OVERLOADED: Final = empty_pb2.Empty()
"""Stands for a request that was not read, because too much else is under way."""


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers an error raised by a handler with its row of the error table; anything else is logged as a bug."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the called method, None when there is no such method."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = _wrap(handler)
        return wrapped


def _wrap(handler: Handler) -> Handler:
    guard = _guard_stream if handler.response_streaming else _guard_unary
    behavior = _check_stream(behavior_of(handler)) if handler.request_streaming else _check_one(behavior_of(handler))
    return with_behavior(handler, guard(behavior), deserializer=_lenient(handler.request_deserializer))


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Return a deserializer that gives `MALFORMED` for bytes that are no message.

    gRPC for Python ends such a call with INTERNAL and never frees its stream, so that a connection is refused for good
    after as many of them as it may have streams.
    """
    assert deserializer is not None, "every method takes a message"

    def deserialize(packed: bytes) -> Any:
        try:
            return deserializer(packed)
        except DecodeError:
            return MALFORMED

    return deserialize


def _check_one(behavior: Behavior) -> Behavior:
    return lambda request, context: behavior(_checked(request), context)


def _check_stream(behavior: Behavior) -> Behavior:
    return lambda requests, context: behavior(map(_checked, requests), context)


def _checked(request: Any) -> Any:
    if request is MALFORMED:
        raise ValueError("the request's bytes are not a message of its type")
    if request is OVERLOADED:
        limit = limits.MAX_REQUEST_BYTES_IN_FLIGHT
        raise Overloaded(f"requests in flight: the limit is {limit} bytes of all together, try again")
    return request


def _guard_unary(behavior: Behavior) -> Behavior:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except Exception as error:
            abort(context, error)

    return call


def _guard_stream(behavior: Behavior) -> Behavior:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(request, context)
        except Exception as error:
            abort(context, error)

    return call


def abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """End the call with the status that `error` travels as."""
    if isinstance(error, grpc.RpcError) or not context.is_active():
        raise error  # the client has gone: there is nobody to answer
    if row_of(error) is None:
        # Class and places only: the message could hold what the request held.
        trace = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("a handler failed: %s\n%s", type(error).__name__, trace)
    # The error may be kept as the reply to this request: the frames of its traceback would keep the request as well.
    error.__traceback__ = None
    context.abort_with_status(rpc_status.to_status(status_from_error(error)))
    raise AssertionError("abort_with_status returned")
