"""A request that is sent again has one effect and one answer."""

from __future__ import annotations

import grpc
import pytest

from radixpool.radix.errors import PoolExhausted
from radixpool.rpc import limits
from radixpool.rpc.errors import ReplyExpired
from radixpool.rpc.manager import Engine, ManagerOptions
from radixpool.rpc.manager.leases import Lease
from radixpool.rpc.manager.replies import ReplyCache
from radixpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

A = b"a" * 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return ReplyCache(clock)


@pytest.fixture
def lease():
    return Lease(A, name="a", role=1, epoch=7, deadline=10.0)


def header(request_id: int, acknowledged: int = 0) -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(request_id=request_id, acknowledged_request_id=acknowledged)


def reply(size: int = 0) -> cache_pb2.AcquireResponse:
    return cache_pb2.AcquireResponse(block_table=bytes(size))


def test_the_first_outcome_is_found_until_it_is_acknowledged(cache, lease):
    first = reply()
    assert cache.find(lease, header(1)) is None
    cache.keep(lease, 1, first)
    assert cache.find(lease, header(1)) is first
    assert cache.find(lease, header(2, acknowledged=1)) is None
    assert len(cache) == 0
    with pytest.raises(ReplyExpired, match="request_id 1"):
        cache.find(lease, header(1))


def test_a_reply_is_kept_for_a_minute(cache, lease, clock):
    cache.keep(lease, 1, reply())
    clock.now = limits.REPLY_RETENTION_S - 0.001
    cache.keep(lease, 2, reply())
    assert cache.find(lease, header(1)) is not None
    clock.now = limits.REPLY_RETENTION_S
    cache.keep(lease, 3, reply())
    with pytest.raises(ReplyExpired):
        cache.find(lease, header(1))
    assert len(cache) == 2


def test_the_memory_of_all_replies_is_bounded(cache, lease, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REPLY_BYTES", 100_000)
    for request_id in range(1, 1000):
        cache.keep(lease, request_id, reply(request_id))
        assert cache.size_bytes <= 100_000
    assert cache.find(lease, header(999)) is not None
    with pytest.raises(ReplyExpired):
        cache.find(lease, header(1))


def test_requests_of_many_threads_may_arrive_out_of_order(cache, lease):
    cache.keep(lease, 2, reply())
    assert cache.find(lease, header(1)) is None
    cache.keep(lease, 1, reply())
    assert cache.find(lease, header(3, acknowledged=2)) is None
    assert len(cache) == 0


def test_epochs_do_not_share_replies(cache, lease):
    cache.keep(lease, 1, reply())
    assert cache.find(Lease(A, name="a", role=1, epoch=8, deadline=10.0), header(1)) is None


@pytest.fixture
def raw(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        epoch = stub.RegisterClient(cache_pb2.RegisterClientRequest(client_id=A)).epoch
        yield stub, lambda request_id: common_pb2.RequestHeader(client_id=A, epoch=epoch, request_id=request_id)


def test_a_repeated_acquire_holds_one_sequence(server, raw):
    stub, head = raw
    request = cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))
    replies = [stub.Acquire(request) for _ in range(3)]
    assert replies[0] == replies[1] == replies[2]
    assert server.engine.cache.stats().num_sequences == 1
    assert stub.Acquire(cache_pb2.AcquireRequest(header=head(2), tokens=bytes(40))).handle != replies[0].handle


def test_a_repeated_release_answers_the_same(server, raw):
    stub, head = raw
    handle = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))).handle
    request = cache_pb2.ReleaseRequest(header=head(2), handle=handle)
    assert stub.Release(request) == stub.Release(request)
    with pytest.raises(grpc.RpcError) as failure:
        stub.Release(cache_pb2.ReleaseRequest(header=head(3), handle=handle))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_repeated_refusal_stays_a_refusal(raw):
    stub, head = raw
    first = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(4 * 256)))
    too_much = cache_pb2.AcquireRequest(header=head(2), tokens=bytes(40), max_hit_tokens=0)
    for attempt in range(2):
        with pytest.raises(grpc.RpcError) as failure:
            stub.Acquire(too_much)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        if attempt == 0:
            stub.Release(cache_pb2.ReleaseRequest(header=head(3), handle=first.handle))
    assert stub.Acquire(cache_pb2.AcquireRequest(header=head(4), tokens=bytes(40))).handle


def test_a_repeated_batch_extends_once(server, raw):
    stub, head = raw
    handle = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))).handle
    extend = cache_pb2.Operation(extend=cache_pb2.ExtendRequest(handle=handle, tokens=bytes(8)))
    batch = cache_pb2.BatchRequest(header=head(2), operations=[extend, cache_pb2.Operation()])
    assert stub.Batch(batch) == stub.Batch(batch)
    for _ in range(2):
        session = stub.Session(iter([cache_pb2.SessionRequest(header=head(3), operations=[extend])]))
        assert next(session).results[0].extend.num_tokens == 14
        session.cancel()
    (view,) = stub.GetBlockTables(cache_pb2.GetBlockTablesRequest(handles=[handle])).results
    assert len(view.sequence.tokens) == 4 * 14


def test_a_number_is_not_shared_by_requests_of_two_kinds(raw):
    stub, head = raw
    handle = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))).handle
    with pytest.raises(grpc.RpcError, match="request_id 1 belongs to an earlier request of another kind"):
        stub.Release(cache_pb2.ReleaseRequest(header=head(1), handle=handle))


def test_without_a_number_every_request_counts():
    engine = Engine(ManagerOptions(listen="localhost:0", num_blocks=8, block_size=4))
    epoch = engine.register_client(A, name="a", role=1)
    request = cache_pb2.AcquireRequest(header=common_pb2.RequestHeader(client_id=A, epoch=epoch), tokens=bytes(4))
    for _ in range(2):
        engine.run("acquire", request, cache_pb2.AcquireResponse())
    assert engine.cache.stats().num_sequences == 2
    assert len(engine.replies) == 0


def test_a_kept_refusal_holds_no_request(server, raw):
    """Its traceback would hold up to 8 MiB a refusal, which the bound of all replies does not see."""
    stub, head = raw
    too_much = cache_pb2.AcquireRequest(tokens=bytes(4 * 257))
    ragged = cache_pb2.AcquireRequest(tokens=bytes(4 * 257 + 1))
    for number, request in enumerate((too_much, ragged), start=1):
        request.header.CopyFrom(head(number))
        with pytest.raises(grpc.RpcError):
            stub.Acquire(request)
    kept = [server.engine.replies.find(lease, head(number)) for lease in server.engine.leases for number in (1, 2)]
    assert [type(error) for error in kept] == [PoolExhausted, ValueError]
    assert [(error.__traceback__, error.__context__) for error in kept] == [(None, None)] * 2
