"""Every way a call can end is timed, counted and, when it failed, logged once with its request id."""

from __future__ import annotations

import io
import json
import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from radixpool.rpc.metrics import LogFormat, ObserverInterceptor, RpcMetrics, configure_logging
from radixpool.rpc.metrics.observer import MAX_FAILURES_LOGGED_PER_S
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

CACHE = "radixpool.v1.CacheService"
ADMIN = "radixpool.v1.AdminService"


class Watch:
    """Metrics and log of one observed server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RpcMetrics(self.registry)
        self.interceptor = ObserverInterceptor(self.metrics)
        self.stream = io.StringIO()

    def count(self, method: str, code: str, service: str = ADMIN) -> float | None:
        labels = {"service": service, "method": method, "code": code}
        return self.registry.get_sample_value("radixpool_rpc_handling_seconds_count", labels)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logging(form=LogFormat.JSON, stream=watch.stream)
    yield watch
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def refuse(_request: object, context: grpc.ServicerContext) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="POOL_EXHAUSTED", domain="radixpool"))
    status = status_pb2.Status(code=8, message="pool exhausted: 3 short", details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


def test_success_is_timed_and_not_logged(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    channel = serve(
        [watch.interceptor], AdminService={"GetStats": lambda _request, _context: admin_pb2.GetStatsResponse()}
    )
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(3):
        stub.GetStats(admin_pb2.GetStatsRequest())
    assert watch.count("GetStats", "OK") == 3
    assert watch.events() == []


def test_refusal_is_counted_by_code_and_logged_with_reason_and_id(
    serve: Callable[..., grpc.Channel], watch: Watch
) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(serve([watch.interceptor], AdminService={"GetStats": refuse}))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetStats(admin_pb2.GetStatsRequest(), metadata=(("x-request-id", "req-7"),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["x-request-id"] == "req-7"
    assert rpc_status.from_call(caught.value).message == "pool exhausted: 3 short"
    assert watch.count("GetStats", "RESOURCE_EXHAUSTED") == 1
    (event,) = watch.events()
    assert event["request_id"] == "req-7"
    assert event["reason"] == "POOL_EXHAUSTED"
    assert event["method"] == "/radixpool.v1.AdminService/GetStats"
    assert event["level"] == "info"


def test_a_bug_leaves_as_internal_without_its_message(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    def broken(_request: object, _context: object) -> None:
        raise KeyError("canary-4711")

    stub = admin_pb2_grpc.AdminServiceStub(serve([watch.interceptor], AdminService={"GetStats": broken}))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetStats(admin_pb2.GetStatsRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    request_id = dict(caught.value.trailing_metadata())["x-request-id"]
    assert request_id in caught.value.details()
    (event,) = watch.events()
    assert event["request_id"] == request_id
    assert event["level"] == "error"
    assert event["error"].startswith("KeyError at ")
    assert "canary" not in watch.stream.getvalue() + caught.value.details()
    assert watch.count("GetStats", "INTERNAL") == 1


def test_a_forged_request_id_is_replaced(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(serve([watch.interceptor], AdminService={"GetStats": refuse}))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetStats(admin_pb2.GetStatsRequest(), metadata=(("x-request-id", 'x" level="error' + "y" * 300),))
    assert len(dict(caught.value.trailing_metadata())["x-request-id"]) < 32


def test_stream_messages_are_timed_and_the_stream_is_counted(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    def session(requests: Iterator[Any], _context: object) -> Iterator[Any]:
        for _request in requests:
            yield cache_pb2.SessionResponse()

    stub = cache_pb2_grpc.CacheServiceStub(serve([watch.interceptor], CacheService={"Session": session}))
    answers = list(stub.Session(iter([cache_pb2.SessionRequest()] * 5)))
    assert len(answers) == 5
    method = {"service": CACHE, "method": "Session"}
    sample = watch.registry.get_sample_value
    assert sample("radixpool_rpc_stream_message_seconds_count", method) == 5
    assert sample("radixpool_rpc_open_streams", method) == 0
    assert sample("radixpool_rpc_streams_total", {**method, "code": "OK"}) == 1


def test_a_stream_that_its_client_drops_is_closed_in_the_metrics(
    serve: Callable[..., grpc.Channel], watch: Watch
) -> None:
    """Many times: now and then gRPC tells of the end of the requests before it tells of the cancellation."""

    def session(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for _request in requests:
            yield cache_pb2.SessionResponse()

    stub = cache_pb2_grpc.CacheServiceStub(serve([watch.interceptor], CacheService={"Session": session}))
    all_requests: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(100)]
    for requests in all_requests:
        requests.put(cache_pb2.SessionRequest())
        call = stub.Session(iter(requests.get, None))
        next(call)
        call.cancel()
    labels = {"service": CACHE, "method": "Session"}
    deadline = time.monotonic() + 10
    while watch.registry.get_sample_value("radixpool_rpc_open_streams", labels) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.registry.get_sample_value("radixpool_rpc_open_streams", labels) == 0
    cancelled, ended = (
        watch.registry.get_sample_value("radixpool_rpc_streams_total", {**labels, "code": code}) or 0
        for code in ("CANCELLED", "OK")
    )
    for requests in all_requests:
        requests.put(None)
    assert cancelled + ended == 100
    assert cancelled > ended


def test_a_flood_of_refusals_does_not_flood_the_log(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    watch.interceptor = ObserverInterceptor(watch.metrics, clock=lambda: 100.5)
    stub = admin_pb2_grpc.AdminServiceStub(serve([watch.interceptor], AdminService={"GetStats": refuse}))
    calls = MAX_FAILURES_LOGGED_PER_S + 30
    for _ in range(calls):
        with pytest.raises(grpc.RpcError):
            stub.GetStats(admin_pb2.GetStatsRequest())
    assert len(watch.events()) == MAX_FAILURES_LOGGED_PER_S
    assert watch.count("GetStats", "RESOURCE_EXHAUSTED") == calls


def test_unknown_methods_add_no_label(serve: Callable[..., grpc.Channel], watch: Watch) -> None:
    channel = serve([watch.interceptor], AdminService={})
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/radixpool.v1.AdminService/Nonsense")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    families = [family for family in watch.registry.collect() if family.name == "radixpool_rpc_handling_seconds"]
    assert [sample for family in families for sample in family.samples] == []
