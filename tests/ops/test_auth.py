"""The authorisation interceptor on a real server: who is let in, as whom, and that a refused call never runs."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from radixpool.rpc.errors import PermissionDenied, Unauthenticated
from radixpool.rpc.security.identity import LOCAL_IDENTITY, Identity, Role, current_identity, current_tenant
from radixpool.rpc.security.interceptor import AuthInterceptor
from radixpool.rpc.status import error_from_rpc
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2

FRONTEND = Identity(name="f", roles=frozenset({Role.FRONTEND}), tenant="acme")
WORKER = Identity(name="w", roles=frozenset({Role.WORKER}))
OPERATOR = Identity(name="o", roles=frozenset({Role.OPERATOR}))


class Tokens:
    """Tokens that the test knows; time is what the test says."""

    knows_certificates = False

    def __init__(self, **identities: Identity) -> None:
        self.identities = identities
        self.now = 0.0

    def by_token(self, token: str) -> Identity:
        identity = self.identities.get(token)
        if identity is None or self.is_expired(identity):
            raise Unauthenticated("the bearer token is not known")
        return identity

    def by_certificate(self, names: Iterable[str]) -> Identity:
        raise AssertionError("not asked for")

    def is_expired(self, identity: Identity) -> bool:
        return identity.expires_at <= self.now


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(frontend=FRONTEND, worker=WORKER, operator=OPERATOR)


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def channel(serve: Callable[..., grpc.Channel], tokens: Tokens, seen: list[Any]) -> grpc.Channel:
    def acquire(request: Any, _context: object) -> Any:
        seen.append((request, current_identity.get(), current_tenant()))
        return cache_pb2.AcquireResponse()

    def session(requests: Iterator[Any], _context: object) -> Iterator[Any]:
        seen.append("opened")
        for request in requests:
            seen.append((request, current_identity.get(), current_tenant()))
            yield cache_pb2.SessionResponse()

    def stats(_request: Any, _context: object) -> Any:
        seen.append(current_identity.get())
        return admin_pb2.GetStatsResponse()

    methods = {"CacheService": {"Acquire": acquire, "Session": session}, "AdminService": {"GetStats": stats}}
    return serve([AuthInterceptor(tokens)], **methods)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def failure(call: Callable[[], Any]) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert rpc_status.from_call(caught.value) is not None
    return error_from_rpc(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ((), "a bearer token is needed"),
        ((("authorization", "Basic abc"),), "authorization must be one header: Bearer TOKEN"),
        ((("authorization", "bearer frontend"),), "authorization must be one header: Bearer TOKEN"),
        ((*bearer("frontend"), *bearer("worker")), "authorization must be one header: Bearer TOKEN"),
        (bearer("stolen"), "the bearer token is not known"),
    ],
)
def test_without_a_known_token_nothing_runs(
    channel: grpc.Channel, seen: list[Any], metadata: tuple[tuple[str, str], ...], message: str
) -> None:
    cache = cache_pb2_grpc.CacheServiceStub(channel)
    for call in (
        lambda: cache.Acquire(cache_pb2.AcquireRequest(), metadata=metadata),
        lambda: list(cache.Session(iter([cache_pb2.SessionRequest()]), metadata=metadata)),
    ):
        error = failure(call)
        assert isinstance(error, Unauthenticated)
        assert str(error) == message
    assert seen == []


def test_a_refused_stream_ends_at_once_although_its_client_sends_nothing(channel: grpc.Channel) -> None:
    silence = threading.Event()

    def nothing() -> Iterator[Any]:
        silence.wait(30)
        yield from ()

    call = cache_pb2_grpc.CacheServiceStub(channel).Session(nothing(), timeout=10)
    assert isinstance(failure(lambda: next(call)), Unauthenticated)
    silence.set()


def test_refused_calls_hold_no_thread_although_their_request_never_comes(
    channel: grpc.Channel, seen: list[Any]
) -> None:
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(30)
        yield from ()

    acquire = channel.stream_unary("/radixpool.v1.CacheService/Acquire")
    calls = [acquire.future(nothing(), metadata=bearer("stolen")) for _ in range(20)]
    for call in calls:
        assert isinstance(call.exception(timeout=10), grpc.RpcError)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    cache_pb2_grpc.CacheServiceStub(channel).Acquire(cache_pb2.AcquireRequest(), metadata=bearer("worker"), timeout=10)
    assert len(seen) == 1
    silence.set()


def test_a_refused_request_is_not_parsed(channel: grpc.Channel) -> None:
    acquire = channel.unary_unary("/radixpool.v1.CacheService/Acquire")
    assert isinstance(failure(lambda: acquire(b"\xff not a message", metadata=bearer("stolen"))), Unauthenticated)


def test_the_role_decides(channel: grpc.Channel, seen: list[Any]) -> None:
    admin, cache = admin_pb2_grpc.AdminServiceStub(channel), cache_pb2_grpc.CacheServiceStub(channel)
    error = failure(lambda: admin.GetStats(admin_pb2.GetStatsRequest(), metadata=bearer("frontend")))
    assert isinstance(error, PermissionDenied)
    assert str(error) == "/radixpool.v1.AdminService/GetStats needs a role of: operator; 'f' has: frontend"
    error = failure(lambda: cache.Acquire(cache_pb2.AcquireRequest(), metadata=bearer("operator")))
    assert isinstance(error, PermissionDenied)
    assert seen == []
    admin.GetStats(admin_pb2.GetStatsRequest(), metadata=bearer("operator"))
    assert seen == [OPERATOR]


def test_methods_outside_the_table_are_for_nobody(serve: Callable[..., grpc.Channel], tokens: Tokens) -> None:
    methods = {"GetStats": lambda _request, _context: admin_pb2.GetStatsResponse()}
    channel = serve([AuthInterceptor(tokens, table={})], AdminService=methods)
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    error = failure(lambda: stub.GetStats(admin_pb2.GetStatsRequest(), metadata=bearer("operator")))
    assert isinstance(error, PermissionDenied)
    assert "may be called by nobody" in str(error)
    local = admin_pb2_grpc.AdminServiceStub(serve([AuthInterceptor(table={})], AdminService=methods))
    assert isinstance(failure(lambda: local.GetStats(admin_pb2.GetStatsRequest())), PermissionDenied)


def test_a_frontends_requests_are_of_its_tenant_whatever_they_say(channel: grpc.Channel, seen: list[Any]) -> None:
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    stub.Acquire(cache_pb2.AcquireRequest(), metadata=bearer("frontend"))
    model = common_pb2.Namespace(model="m")
    stub.Acquire(cache_pb2.AcquireRequest(namespace=model), metadata=bearer("frontend"))
    assert [(request.namespace.tenant, identity, tenant) for request, identity, tenant in seen] == [
        ("acme", FRONTEND, "acme")
    ] * 2
    assert seen[1][0].namespace.model == "m"
    rival = cache_pb2.AcquireRequest(namespace=common_pb2.Namespace(tenant="rival"))
    assert isinstance(failure(lambda: stub.Acquire(rival, metadata=bearer("frontend"))), PermissionDenied)
    assert len(seen) == 2


def test_workers_serve_every_tenant(channel: grpc.Channel, seen: list[Any]) -> None:
    request = cache_pb2.AcquireRequest(namespace=common_pb2.Namespace(tenant="rival"))
    cache_pb2_grpc.CacheServiceStub(channel).Acquire(request, metadata=bearer("worker"))
    assert [(got.namespace.tenant, identity, tenant) for got, identity, tenant in seen] == [("rival", WORKER, None)]


def operation(tenant: str) -> Any:
    acquire = cache_pb2.AcquireRequest(namespace=common_pb2.Namespace(tenant=tenant))
    return cache_pb2.SessionRequest(operations=[cache_pb2.Operation(acquire=acquire)])


def test_every_message_of_a_stream_is_bound(channel: grpc.Channel, seen: list[Any]) -> None:
    call = cache_pb2_grpc.CacheServiceStub(channel).Session(
        iter([operation(""), operation("acme"), operation("rival")]), metadata=bearer("frontend")
    )
    assert [next(call), next(call)] == [cache_pb2.SessionResponse()] * 2
    assert isinstance(failure(lambda: next(call)), PermissionDenied)
    assert [message[0].operations[0].acquire.namespace.tenant for message in seen[1:]] == ["acme", "acme"]
    assert {message[1:] for message in seen[1:]} == {(FRONTEND, "acme")}


def test_a_stream_ends_when_its_credential_expires(channel: grpc.Channel, tokens: Tokens) -> None:
    tokens.identities["brief"] = Identity(name="b", roles=frozenset({Role.WORKER}), expires_at=100.0)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = cache_pb2_grpc.CacheServiceStub(channel).Session(iter(requests.get, None), metadata=bearer("brief"))
    requests.put(operation(""))
    next(call)
    tokens.now = 100.0
    requests.put(operation(""))
    error = failure(lambda: next(call))
    assert isinstance(error, Unauthenticated)
    assert str(error) == "the credential of 'b' has expired or was revoked"
    requests.put(None)


def test_a_stream_of_answers_ends_when_its_credential_expires(
    serve: Callable[..., grpc.Channel], tokens: Tokens
) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def subscribe(_request: Any, _context: object) -> Iterator[Any]:
        yield from iter(answers.get, None)

    tokens.identities["brief"] = Identity(name="b", roles=frozenset({Role.SUBSCRIBER}), expires_at=100.0)
    channel = serve([AuthInterceptor(tokens)], AdminService={"SubscribeEvents": subscribe})
    call = admin_pb2_grpc.AdminServiceStub(channel).SubscribeEvents(
        admin_pb2.SubscribeEventsRequest(), metadata=bearer("brief")
    )
    answers.put(admin_pb2.SubscribeEventsResponse())
    next(call)
    tokens.now = 100.0
    answers.put(admin_pb2.SubscribeEventsResponse())
    assert isinstance(failure(lambda: next(call)), Unauthenticated)
    answers.put(None)


def test_without_credentials_whoever_reaches_the_socket_is_local(
    serve: Callable[..., grpc.Channel], seen: list[Any]
) -> None:
    def acquire(request: Any, _context: object) -> Any:
        seen.append((request.namespace.tenant, current_identity.get(), current_tenant()))
        return cache_pb2.AcquireResponse()

    stub = cache_pb2_grpc.CacheServiceStub(serve([AuthInterceptor()], CacheService={"Acquire": acquire}))
    stub.Acquire(cache_pb2.AcquireRequest(namespace=common_pb2.Namespace(tenant="any")))
    assert seen == [("any", LOCAL_IDENTITY, None)]
    assert math.isinf(LOCAL_IDENTITY.expires_at)


def test_identities_do_not_leak_into_the_next_call(channel: grpc.Channel, seen: list[Any]) -> None:
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    for _ in range(20):
        stub.Acquire(cache_pb2.AcquireRequest(), metadata=bearer("worker"))
        stub.Acquire(cache_pb2.AcquireRequest(), metadata=bearer("frontend"))
        failure(lambda: stub.Acquire(cache_pb2.AcquireRequest()))
    assert [identity for _request, identity, _tenant in seen] == [WORKER, FRONTEND] * 20
    assert current_identity.get() is None
