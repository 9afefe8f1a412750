"""What our server interceptors share: taking a method handler apart and putting it together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behavior: TypeAlias = Callable[..., Any]
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], "Handler | None"]


def behavior_of(handler: Handler) -> Behavior:
    """Return the one function of `handler`, whatever kind of call it serves."""
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behavior is not None, "a method handler has exactly one behavior"
    return behavior


def with_behavior(
    handler: Handler, behavior: Behavior, *, deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """Return a handler of the same kind as `handler` that runs `behavior`; its codec too unless another is given."""
    make: Callable[..., Handler]
    if handler.request_streaming:
        streamed = grpc.stream_stream_rpc_method_handler
        make = streamed if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    else:
        streamed = grpc.unary_stream_rpc_method_handler
        make = streamed if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        behavior,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def status_code(context: Any) -> grpc.StatusCode | None:
    """Return the code that a call was ended with, None while nothing was set. grpc-stubs do not know `code()`."""
    code: grpc.StatusCode | None = context.code()
    return code


def status_details(context: Any) -> str:
    """Return the message that a call was ended with."""
    details: bytes | str | None = context.details()
    return details.decode(errors="replace") if isinstance(details, bytes) else details or ""
