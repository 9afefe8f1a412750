"""Large requests are bounded in number of bytes, unary ones in threads; streams have threads of their own."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import NO_RETRY, Client, ClientOptions
from radixpool.rpc.errors import Overloaded
from radixpool.rpc.manager import ManagerOptions, ManagerServer
from radixpool.rpc.manager.admission import AdmissionInterceptor, RequestBytes
from radixpool.rpc.metrics import ObserverInterceptor, RpcMetrics
from radixpool.rpc.security.client import ClientSecurity
from radixpool.rpc.security.interceptor import AuthInterceptor, LocalAuthenticator
from radixpool.rpc.security.tokens import new_token
from radixpool.v1 import cache_pb2, cache_pb2_grpc

LARGE = bytes(2 * limits.LARGE_REQUEST_BYTES)
ROOM_FOR = 3


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Let the garbage collector find nothing: bytes are given back when a call ends, not some time after it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., ManagerServer]) -> ManagerServer:
    """Start a manager that takes three large requests at a time."""
    monkeypatch.setattr(limits, "MAX_REQUEST_BYTES_IN_FLIGHT", ROOM_FOR * (len(LARGE) + 100))
    return make_server()


@pytest.fixture
def stub(crowded: ManagerServer) -> Iterator[cache_pb2_grpc.CacheServiceStub]:
    with grpc.insecure_channel(crowded.address) as channel:
        yield cache_pb2_grpc.CacheServiceStub(channel)


def waiting(server: ManagerServer, stub: Any, count: int, eventually: Callable[..., Any]) -> list[Any]:
    """Send large requests, one after the other, that wait for the engine's lock."""
    calls = []
    for number in range(1, count + 1):
        calls.append(stub.Match.future(cache_pb2.MatchRequest(tokens=LARGE)))
        eventually(lambda number=number: server.admission.in_flight.taken >= number * len(LARGE))
    return calls


def test_bytes_are_counted_up_to_the_limit():
    in_flight = RequestBytes(10)
    assert in_flight.take(4)
    assert in_flight.take(6)
    assert not in_flight.take(1)
    in_flight.give_back(6)
    assert not in_flight.take(7)
    assert in_flight.taken == 4


def test_one_request_too_many_is_refused_and_the_others_are_answered(crowded, stub, eventually):
    with crowded.engine.lock:
        calls = waiting(crowded, stub, ROOM_FOR, eventually)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Match(cache_pb2.MatchRequest(tokens=LARGE), timeout=10)
        assert not any(call.done() for call in calls)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    limit = limits.MAX_REQUEST_BYTES_IN_FLIGHT
    assert refusal.value.details() == f"requests in flight: the limit is {limit} bytes of all together, try again"
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(refusal.value).details)
    assert [call.result().cached_tokens for call in calls] == [0] * ROOM_FOR
    eventually(lambda: crowded.admission.in_flight.taken == 0)
    stub.Match(cache_pb2.MatchRequest(tokens=LARGE))


def test_small_requests_are_always_let_in(crowded, stub, eventually):
    with crowded.engine.lock:
        large = waiting(crowded, stub, ROOM_FOR, eventually)
        assert stub.GetInfo(cache_pb2.GetInfoRequest(), timeout=10).num_blocks == 64
    assert [call.result().cached_tokens for call in large] == [0] * ROOM_FOR


def test_a_call_that_is_given_up_gives_its_bytes_back(crowded, stub, eventually):
    with crowded.engine.lock:
        for call in waiting(crowded, stub, ROOM_FOR, eventually):
            call.cancel()
    eventually(lambda: crowded.admission.in_flight.taken == 0)


@pytest.mark.parametrize("packed", [b"\xff" * len(LARGE), LARGE], ids=["no message", "an empty tag"])
def test_bytes_that_are_no_message_are_given_back(crowded, eventually, packed):
    with grpc.insecure_channel(crowded.address) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary("/radixpool.v1.CacheService/Match")(packed)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    eventually(lambda: crowded.admission.in_flight.taken == 0)


def test_a_refused_request_gives_its_bytes_back(crowded, eventually):
    with Client(crowded.address) as client, pytest.raises(ValueError, match="multiple of 4"):
        client._change(client._cache.Acquire, cache_pb2.AcquireRequest(tokens=LARGE + b"1"))
    eventually(lambda: crowded.admission.in_flight.taken == 0)


@pytest.mark.parametrize("streamed", [False, True], ids=["batch", "session"])
def test_clients_try_again_until_there_is_room(crowded, stub, eventually, streamed):
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        client = stack.enter_context(Client(crowded.address))
        batch = stack.enter_context(client.session()).batch if streamed else client.batch
        batch([])
        with crowded.engine.lock:
            calls = waiting(crowded, stub, ROOM_FOR, eventually)
            answer: Future[Any] = thread.submit(batch, [ops.Match(LARGE)])
            time.sleep(0.15)  # it is refused, and has sent it again
            assert not answer.done()
        assert answer.result(10) == [ops.Matched(0)]
        assert all(call.result() for call in calls)
    eventually(lambda: crowded.admission.in_flight.taken == 0)


def test_a_client_that_does_not_wait_is_told(crowded, stub, eventually):
    with Client(crowded.address, options=ClientOptions(retry=NO_RETRY)) as client, crowded.engine.lock:
        waiting(crowded, stub, ROOM_FOR, eventually)
        with pytest.raises(Overloaded, match="requests in flight"):
            client.match(LARGE)


def test_health_checks_without_end_keep_nobody_out(server, client):
    """Health needs no credential: who opens checks and sends no request must not hold a thread of anybody else."""
    with grpc.insecure_channel(server.address) as channel:
        open_check = channel.stream_unary("/grpc.health.v1.Health/Check", request_serializer=bytes)
        over = threading.Event()
        checks = [open_check.future(iter(over.wait, True)) for _ in range(4 * limits.UNARY_THREADS)]
        client.acquire([1, 2, 3]).release()
        with client.session() as session:
            assert session.batch([ops.Match([1])]) == [ops.Matched(0)]
        for check in checks:
            check.cancel()
        over.set()
    with grpc.insecure_channel(server.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING  # there is no pool


def test_an_idle_session_holds_no_request(socket_dir, monkeypatch, eventually):
    server = ManagerServer(
        ManagerOptions(listen=f"unix:{socket_dir}/m.sock", num_blocks=64, block_size=4),
        interceptors=(ObserverInterceptor(RpcMetrics(CollectorRegistry())), AuthInterceptor(LocalAuthenticator())),
    )
    seen: list[cache_pb2.SessionRequest] = []
    run = server.engine.run_batch
    monkeypatch.setattr(server.engine, "run_batch", lambda request, reply: (seen.append(request), run(request, reply)))
    server.start()
    security = ClientSecurity(token=new_token().secret)
    with Client(server.address, options=ClientOptions(security=security)) as client, client.session() as session:
        for _ in range(2):
            assert session.batch([ops.Match(LARGE)]) == [ops.Matched(0)]
            eventually(lambda: sys.getrefcount(seen[-1]) == 2)  # the list's and the argument's
        assert not server.admission.in_flight.taken
    server.stop(0)


def test_a_streams_request_counts_until_it_is_answered_not_until_the_answer_is_read():
    """Four sessions whose clients read no answers kept everybody's large requests out."""
    taken: list[int] = []

    def answer(requests: Iterator[bytes], _context: Any) -> Iterator[int]:
        for request in requests:
            taken.append(admission.in_flight.taken)
            yield len(request)

    admission = AdmissionInterceptor()
    inner = grpc.stream_stream_rpc_method_handler(answer, request_deserializer=bytes)
    handler = admission.intercept_service(lambda _details: inner, SimpleNamespace(method="/service/Stream"))
    assert handler is not None
    responses = handler.stream_stream(map(handler.request_deserializer, [LARGE, LARGE]), None)
    for _ in range(2):
        assert next(responses) == len(LARGE)
        assert admission.in_flight.taken == 0
    assert taken == [len(LARGE)] * 2


def test_streams_go_on_while_every_thread_of_unary_calls_waits(server, client):
    """Callers who open a call and send no request hold a thread each."""
    with client.session() as session, grpc.insecure_channel(server.address) as channel:
        session.batch([])
        open_call = channel.stream_unary("/radixpool.v1.CacheService/Match", request_serializer=bytes)
        over = threading.Event()
        silent = [open_call.future(iter(over.wait, True)) for _ in range(limits.UNARY_THREADS)]
        assert session.batch([ops.Match([1])]) == [ops.Matched(0)]
        with client.session() as another:
            assert another.batch([ops.Match([1])]) == [ops.Matched(0)]
        for call in silent:
            call.cancel()
        over.set()
    assert client.match([1]).cached_tokens == 0
