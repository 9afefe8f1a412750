"""Bad input: one clear error that names the field, the limit and the value; nothing else is disturbed."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from radixpool.radix import Namespace, PoolExhausted, UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc.manager import ManagerOptions
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2

PROMPT = list(range(10))


@pytest.fixture
def unchanged(client):
    """Something is cached and held; afterwards everything is as it was."""
    kept = client.acquire(PROMPT)
    kept.commit(10)
    before = client.stats().cache
    yield
    after = client.stats().cache
    counts_of_tries = {"admitted_requests", "refused_requests", "queried_tokens"}
    names = before.__dataclass_fields__.keys() - counts_of_tries
    assert {name: getattr(after, name) for name in names} == {name: getattr(before, name) for name in names}
    assert client.check().violations == ()
    assert kept.commit(10).committed_tokens == 10


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -2], ValueError, r"tokens\[1\] is -2.*4294967295"),
        ([1, 2**32], ValueError, r"tokens\[1\] is 4294967296.*4294967295"),
        (np.array([-1]), ValueError, r"tokens\[0\] is -1"),
        ([1.5], TypeError, r"float at \[0\]"),
        (np.array([1.0]), TypeError, "float64"),
        ("hello", TypeError, "str"),
        (b"12345", ValueError, "5 bytes"),
        (np.zeros((2, 2), dtype=np.uint32), ValueError, "one-dimensional"),
        ([], ValueError, "tokens is empty"),
    ],
    ids=str,
)
def test_token_ids(client, unchanged, tokens, error, message):
    with pytest.raises(error, match=message):
        client.acquire(tokens)


def test_a_prompt_longer_than_the_pool(client, unchanged):
    with pytest.raises(PoolExhausted, match=r"250 blocks, 6[0-9] of 64.*never be admitted") as refusal:
        client.acquire(range(1000, 2000))
    assert refusal.value.permanent


def test_more_than_is_free_now(client, unchanged):
    with client.acquire(range(1000, 1200)), pytest.raises(PoolExhausted) as refusal:
        client.acquire(range(2000, 2100))
    assert not refusal.value.permanent
    assert refusal.value.short_blocks == 14


@pytest.mark.parametrize("call", ["extend", "reserve", "commit", "release"])
def test_unknown_handles(client, unchanged, call):
    arguments = {"extend": ([1],), "reserve": (1,), "commit": (1,), "release": ()}[call]
    with pytest.raises(UnknownSequence):
        getattr(client, call)(b"?" * 16, *arguments)
    with pytest.raises(ValueError, match="handle must be 16 bytes, got 3"):
        getattr(client, call)(b"abc", *arguments)


def test_a_released_handle_is_unknown(client, unchanged):
    seq = client.acquire([5, 6, 7])
    client.release(seq.handle)
    with pytest.raises(UnknownSequence):
        client.release(seq.handle)
    seq.release()


def test_committing_more_than_there_is(client, unchanged):
    with client.acquire([5, 6, 7]) as seq, pytest.raises(ValueError, match="4"):
        seq.commit(4)


def test_inspections_out_of_range(client, unchanged):
    with pytest.raises(ValueError, match="block_id must be from 0 to 63, got 64"):
        client.inspect_block(64)
    with pytest.raises(ValueError, match=f"{limits.MAX_INSPECTED}, got 10001"):
        client.inspect_tree(max_nodes=10_001)
    with pytest.raises(ValueError, match=f"{limits.MAX_INSPECTED}, got 10001"):
        client.list_sequences(max_sequences=10_001)
    with pytest.raises(UnknownSequence):
        client.inspect_sequence(999)
    with pytest.raises(UnknownSequence):
        client.inspect_sequence(b"?" * 16)


def test_a_namespace_field_that_is_too_long(client, unchanged):
    with pytest.raises(ValueError, match=r"namespace\.tenant must be at most 512 bytes, got 513"):
        client.acquire([1], namespace=Namespace(tenant="t" * 513))


def test_too_many_handles_in_one_query(client, unchanged):
    with pytest.raises(ValueError, match="handles: the limit is 4096, got 4097"):
        client.get_block_tables([b"?" * 16] * 4097)


def test_too_many_sequences_of_one_client(client, unchanged, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SEQUENCES_PER_CLIENT", 1)
    with pytest.raises(Exception, match="the limit is 1"):
        client.acquire([1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be from 1 to 2147483647, got 0"),
        ({"num_blocks": 2**31}, "num_blocks must be from 1 to 2147483647, got 2147483648"),
        ({"block_size": 0}, "block_size must be from 1 to 65536, got 0"),
        ({"block_size": -4}, "block_size must be from 1 to 65536, got -4"),
        ({"lease_ttl_ms": 1}, "lease_ttl_ms must be from 100 to 3600000, got 1"),
        ({"listen": "nowhere"}, "address must be unix:/path or HOST:PORT, got 'nowhere'"),
    ],
    ids=str,
)
def test_manager_options(values, message):
    with pytest.raises(ValueError) as refusal:
        ManagerOptions(**{"listen": "localhost:0", "num_blocks": 8, "block_size": 4, **values})
    assert str(refusal.value) == message


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (cache_pb2.RegisterClientRequest(client_id=b"short"), "client_id must be 16 bytes, got 5"),
        (
            cache_pb2.RegisterClientRequest(client_id=b"c" * 16, name="n" * 129),
            "name must be at most 128 bytes, got 129",
        ),
        (cache_pb2.RegisterClientRequest(client_id=b"c" * 16, role=99), "role must be one of .*, got 99"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_raw_registrations(channel, unchanged, request_message, field):
    with pytest.raises(grpc.RpcError, match=field) as failure:
        cache_pb2_grpc.CacheServiceStub(channel).RegisterClient(request_message)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_raw_requests_without_a_header_are_fenced(channel, unchanged):
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    calls = [
        (stub.Acquire, cache_pb2.AcquireRequest(tokens=b"1234")),
        (stub.Batch, cache_pb2.BatchRequest()),
        (stub.Heartbeat, cache_pb2.HeartbeatRequest()),
        (stub.UnregisterClient, cache_pb2.UnregisterClientRequest()),
    ]
    for method, request in calls:
        with pytest.raises(grpc.RpcError) as failure:
            method(request)
        assert failure.value.code() is grpc.StatusCode.ABORTED


def test_a_message_that_is_too_large_is_cut_off(channel, unchanged):
    with pytest.raises(grpc.RpcError) as failure:
        cache_pb2_grpc.CacheServiceStub(channel).Match(cache_pb2.MatchRequest(tokens=bytes(limits.MAX_MESSAGE_BYTES)))
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message(channel, unchanged):
    call = channel.unary_unary("/radixpool.v1.CacheService/Acquire", request_serializer=bytes)
    with pytest.raises(grpc.RpcError) as failure:
        call(b"\xff\xff\xff")
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_operation_of_no_kind_is_an_error_in_its_place(channel, server, unchanged):
    epoch = server.engine.register_client(b"r" * 16, name="raw", role=1)
    header = common_pb2.RequestHeader(client_id=b"r" * 16, epoch=epoch)
    request = cache_pb2.BatchRequest(header=header, operations=[cache_pb2.Operation()])
    (result,) = cache_pb2_grpc.CacheServiceStub(channel).Batch(request).results
    assert "operation must be one of acquire, extend" in result.error.message


def test_an_unknown_method(channel, unchanged):
    call = channel.unary_unary("/radixpool.v1.CacheService/Conjure", request_serializer=bytes)
    with pytest.raises(grpc.RpcError) as failure:
        call(b"")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_bug_in_a_handler_is_logged_and_shows_nothing(channel, server, caplog, monkeypatch):
    def broken() -> None:
        raise KeyError("token 4711")

    monkeypatch.setattr(server.engine, "uptime_ms", broken)
    with pytest.raises(grpc.RpcError) as failure:
        admin_pb2_grpc.AdminServiceStub(channel).GetStats(admin_pb2.GetStatsRequest())
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert "4711" not in failure.value.details()
    assert "a handler failed" in caplog.text
