"""The server interceptor that sees how every call ends: it times, counts and logs, and contains our own bugs.

It goes first in the list of interceptors, so that calls which a later one turns away are seen too. A call that ends
well costs two clock reads and one observation; only calls that fail are logged, a bounded number a second.

An exception that is not an orderly refusal leaves as INTERNAL with a request id. Its message goes nowhere: it could
hold what the request held.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2

from radixpool.rpc.interception import (
    Behavior,
    Continuation,
    Handler,
    behavior_of,
    status_code,
    status_details,
    with_behavior,
)
from radixpool.rpc.metrics.logs import REQUEST_ID_KEY, RequestScope, current_request
from radixpool.rpc.metrics.rpcs import RpcMetrics

MAX_FAILURES_LOGGED_PER_S: Final = 20
"""Failed calls logged a second; how many were not is told by the next line."""
MAX_WRAPPED_HANDLERS: Final = 512
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"

_OUR_FAULT: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})
_SUSPICIOUS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

_log = structlog.get_logger("radixpool.rpc")


class ObserverInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Feeds `metrics` and the log. `clock` is monotonic, in seconds."""

    def __init__(self, metrics: RpcMetrics, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics = metrics
        self._clock = clock
        self._gate = _LogGate(clock)
        self._wrapped = lru_cache(maxsize=MAX_WRAPPED_HANDLERS)(self._wrap)

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler with observation around it, None for an unknown method."""
        current_request.set(RequestScope(handler_call_details.invocation_metadata))
        handler = continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        inner = behavior_of(handler)
        if getattr(inner, "experimental_non_blocking", False):
            return handler  # health's Watch: it calls back instead of yielding, and nothing of it is ours to time
        if not handler.response_streaming:
            return with_behavior(handler, self._unary(method, inner))
        if handler.request_streaming:
            return with_behavior(handler, self._both_ways(method, inner))
        return with_behavior(handler, self._one_way(method, inner))

    def _unary(self, method: str, inner: Behavior) -> Behavior:
        clock, ended = self._clock, self._metrics.call_ended

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            start = clock()
            try:
                response = inner(request, context)
            except Exception as error:
                code = self._failed(method, context, error)
                ended(method, code, clock() - start)
                raise
            ended(method, status_code(context) or grpc.StatusCode.OK, clock() - start)
            return response

        return handle

    def _one_way(self, method: str, inner: Behavior) -> Behavior:
        def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            self._metrics.stream_opened(method)
            yield from self._until_end(method, context, lambda: inner(request, context))

        return handle

    def _both_ways(self, method: str, inner: Behavior) -> Behavior:
        clock = self._clock

        def handle(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            latency = self._metrics.stream_opened(method)
            arrived = clock()

            def note_arrival(request: Any) -> Any:
                nonlocal arrived
                arrived = clock()
                return request

            # A map, not a generator, which would hold the last request for as long as it waits for the next one.
            for response in self._until_end(method, context, lambda: inner(map(note_arrival, requests), context)):
                latency.observe(clock() - arrived)
                yield response

        return handle

    def _until_end(
        self, method: str, context: grpc.ServicerContext, start: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        code = grpc.StatusCode.CANCELLED
        try:
            yield from start()
            # The requests of a stream that its client has cancelled may just end.
            code = status_code(context) or (grpc.StatusCode.OK if context.is_active() else code)
        except Exception as error:
            code = self._failed(method, context, error)
            raise
        finally:
            self._metrics.stream_ended(method, code)

    def _failed(self, method: str, context: grpc.ServicerContext, error: Exception) -> grpc.StatusCode:
        """Count and log a failed call and return its code; an error that nobody made a status of becomes INTERNAL."""
        scope = current_request.get() or RequestScope(None)
        code = status_code(context)
        if code is None:
            if not context.is_active():
                return grpc.StatusCode.CANCELLED
            _log.error("call broke", method=method, request_id=scope.request_id, error=_where(error))
            self._metrics.refused(grpc.StatusCode.INTERNAL.name)
            self._show_request_id(context, scope)
            self._abort_as_internal(context, scope)
            return grpc.StatusCode.INTERNAL
        reason = _reason(context.trailing_metadata() or ())
        self._metrics.refused(reason or code.name)
        if self._gate.open():
            self._log_refusal(method, reason, context, scope)
        self._show_request_id(context, scope)
        return code

    @staticmethod
    def _show_request_id(context: Any, scope: RequestScope) -> None:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), (REQUEST_ID_KEY, scope.request_id)))

    @staticmethod
    def _abort_as_internal(context: grpc.ServicerContext, scope: RequestScope) -> None:
        try:
            context.abort(grpc.StatusCode.INTERNAL, f"internal error; the manager's log has it as {scope.request_id}")
        except Exception:
            # abort() marks the call as over and raises; the caller re-raises the first exception, which grpc then
            # neither logs nor sends, because the call is marked.
            return

    def _log_refusal(self, method: str, reason: str, context: grpc.ServicerContext, scope: RequestScope) -> None:
        code = status_code(context)
        level = logging.ERROR if code in _OUR_FAULT else logging.WARNING if code in _SUSPICIOUS else logging.INFO
        _log.log(
            level,
            "call refused",
            method=method,
            code=code.name if code else "",
            reason=reason,
            detail=status_details(context),
            peer=context.peer(),
            request_id=scope.request_id,
            unlogged=self._gate.take_suppressed(),
        )


class _LogGate:
    """Lets a bounded number of lines a second through and counts the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._second = -1
        self._lines = 0
        self._suppressed = 0

    def open(self) -> bool:
        """Say whether one more line may be written now."""
        second = int(self._clock())
        with self._lock:
            if second != self._second:
                self._second, self._lines = second, 0
            if self._lines >= MAX_FAILURES_LOGGED_PER_S:
                self._suppressed += 1
                return False
            self._lines += 1
            return True

    def take_suppressed(self) -> int:
        """Return how many lines were held back since the last one, and forget them."""
        with self._lock:
            suppressed, self._suppressed = self._suppressed, 0
            return suppressed


def _where(error: Exception) -> str:
    """Return class and place of an exception, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"


def _reason(trailers: Any) -> str:
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY:
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return str(info.reason)
    return ""
