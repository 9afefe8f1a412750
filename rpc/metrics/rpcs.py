"""Metrics of remote calls: how long they took, how they ended, and what was refused.

Label values come from the services' descriptors, gRPC's status codes and the table of reasons, never from a request,
so their number is bounded.
"""

from __future__ import annotations

from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""From a tenth of a cheap call to the time after which clients give up."""


class RpcMetrics:
    """Counts calls, streams and refusals of one server. Safe from many threads; every method is O(1)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handling = Histogram(
            "radixpool_rpc_handling_seconds",
            "Time from a unary request's arrival in its handler to the reply, by outcome.",
            ("service", "method", "code"),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._message = Histogram(
            "radixpool_rpc_stream_message_seconds",
            "Time from one message of a bidirectional stream to its answer.",
            ("service", "method"),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._streams = Counter(
            "radixpool_rpc_streams", "Streams that ended, by outcome.", ("service", "method", "code"), registry=registry
        )
        self._open = Gauge("radixpool_rpc_open_streams", "Streams open now.", ("service", "method"), registry=registry)
        self._refusals = Counter(
            "radixpool_refusals",
            "Requests and operations of a batch that were refused, by the reason on the wire.",
            ("reason",),
            registry=registry,
        )
        self._calls: dict[tuple[str, grpc.StatusCode], Histogram] = {}

    def call_ended(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Record a unary call to `method` (`/package.Service/Method`) that took `seconds`."""
        child = self._calls.get((method, code))
        if child is None:
            child = self._handling.labels(*split_method(method), code.name)
            self._calls[method, code] = child
        child.observe(seconds)

    def stream_opened(self, method: str) -> Histogram:
        """Record a stream that begins and return where the latency of its messages goes."""
        names = split_method(method)
        self._open.labels(*names).inc()
        return self._message.labels(*names)

    def stream_ended(self, method: str, code: grpc.StatusCode) -> None:
        """Record the end of a stream that `stream_opened` was called for."""
        names = split_method(method)
        self._open.labels(*names).dec()
        self._streams.labels(*names, code.name).inc()

    def refused(self, reason: str) -> None:
        """Count one refusal by its reason in `radixpool.rpc.status`."""
        self._refusals.labels(reason).inc()


def split_method(method: str) -> tuple[str, str]:
    """Return service and method of a full method name.

    >>> split_method("/radixpool.v1.CacheService/Acquire")
    ('radixpool.v1.CacheService', 'Acquire')
    """
    service, _, name = method.removeprefix("/").rpartition("/")
    return service, name
