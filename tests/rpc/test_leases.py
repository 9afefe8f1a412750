"""Leases: the table on a clock of its own, then clients that fall silent, over the wire."""

from __future__ import annotations

import itertools

import grpc
import numpy as np
import pytest

from radixpool.radix import UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc.client import Client
from radixpool.rpc.errors import Fenced, LimitExceeded
from radixpool.rpc.manager import ManagerOptions, engine
from radixpool.rpc.manager.leases import LeaseTable
from radixpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

PROMPT = list(range(10))
A, B = b"a" * 16, b"b" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(ttl_s=10, clock=clock, first_epoch=1000)


def test_epochs_count_up_and_the_older_one_is_fenced(table):
    first, nothing = table.register(A, name="a", role=1)
    second, former = table.register(A, name="a", role=1)
    assert (first.epoch, second.epoch, nothing, former) == (1000, 1001, None, first)
    assert not first.alive
    assert table.admit(A, 1001) is second
    with pytest.raises(Fenced, match="epoch 1000 is over"):
        table.admit(A, 1000)
    with pytest.raises(Fenced, match="not registered"):
        table.admit(B, 1000)


def test_a_lease_ends_exactly_at_its_deadline_and_is_never_revived(table, clock):
    lease, _ = table.register(A, name="a", role=1)
    clock.now += 9.999
    assert table.pop_expired() is None
    table.renew(table.admit(A, lease.epoch))
    clock.now += 10
    with pytest.raises(Fenced, match="expired"):
        table.admit(A, lease.epoch)
    assert table.pop_expired() is lease
    assert table.pop_expired() is None
    assert len(table) == 0


def test_the_one_silent_for_longest_expires_first(table, clock):
    leases = [table.register(bytes([n]) * 16, name=str(n), role=1)[0] for n in range(3)]
    clock.now += 5
    table.renew(leases[0])
    clock.now += 5
    assert [table.pop_expired(), table.pop_expired(), table.pop_expired()] == [leases[1], leases[2], None]


def test_the_number_of_clients_is_limited(table, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLIENTS", 1)
    table.register(A, name="a", role=1)
    with pytest.raises(LimitExceeded, match="1"):
        table.register(B, name="b", role=1)
    table.register(A, name="a", role=1)


def silence(client: Client) -> None:
    """Stop the client's heartbeat, as if the process hung."""
    assert client._heartbeat is not None
    client._heartbeat.stop()


def test_a_client_that_stops_its_heartbeat_loses_its_blocks(make_server, eventually):
    """Rows 54 and 55: what it had committed stays cached, the rest is free, and a late call changes nothing."""
    server = make_server(lease_ttl_ms=1000)
    with Client(server.address) as watcher, Client(server.address) as client:
        committed, uncommitted = client.acquire(PROMPT), client.acquire([7] * 40)
        committed.commit(10)
        assert watcher.stats().cache.held_blocks == 13
        silence(client)
        epoch = client._identity.bare_header().epoch
        eventually(lambda: watcher.stats().cache.num_sequences == 0)
        cache = watcher.stats().cache
        assert (cache.held_blocks, cache.cached_blocks, cache.free_blocks) == (0, 2, 62)
        assert watcher.match(PROMPT).cached_tokens == 8
        assert watcher.match([7] * 40).cached_tokens == 0
        before = watcher.stats().cache
        for late in (lambda: client.commit(uncommitted.handle, 40), lambda: client.release(committed.handle)):
            client._identity.start_epoch(epoch)
            with pytest.raises(Fenced):
                late()
        assert watcher.stats().cache == before
        with pytest.raises(UnknownSequence):
            watcher.extend(committed.handle, [1])
        assert watcher.stats().service.expired_leases == 1


def test_a_heartbeat_keeps_the_lease(make_server, eventually):
    server = make_server(lease_ttl_ms=3000)
    with Client(server.address) as client, client.acquire(PROMPT) as seq:
        (lease,) = server.engine.leases
        granted = lease.deadline
        eventually(lambda: lease.deadline > granted)
        seq.commit(10)
    assert server.engine.expired_leases == 0


def test_registering_again_aborts_what_the_former_epoch_held(server, client, eventually):
    with grpc.insecure_channel(server.address) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        request = cache_pb2.RegisterClientRequest(client_id=A, name="again")
        epoch = stub.RegisterClient(request).epoch
        header = common_pb2.RequestHeader(client_id=A, epoch=epoch)
        handle = stub.Acquire(cache_pb2.AcquireRequest(header=header, tokens=bytes(40))).handle
        assert stub.RegisterClient(request).epoch > epoch
        with pytest.raises(grpc.RpcError) as failure:
            stub.Release(cache_pb2.ReleaseRequest(header=header, handle=handle))
        assert failure.value.code() is grpc.StatusCode.ABORTED
    with pytest.raises(UnknownSequence):
        client.release(handle)
    eventually(lambda: client.stats().cache.num_sequences == 0)


def test_a_slice_of_the_expiry_ends_with_its_blocks_too(monkeypatch):
    monkeypatch.setattr(limits, "EXPIRY_SLICE_BLOCKS", 100)
    clock = Clock()
    manager = engine.Engine(ManagerOptions(listen="localhost:0", num_blocks=4096, block_size=1), clock=clock)
    epoch = manager.register_client(A, name="large", role=1)
    header = common_pb2.RequestHeader(client_id=A, epoch=epoch)
    for number in range(40):
        tokens = (np.arange(30, dtype="<u4") + number * 100).tobytes()
        manager.run("acquire", cache_pb2.AcquireRequest(header=header, tokens=tokens), cache_pb2.AcquireResponse())
    clock.now += 10
    free = [manager.cache.stats().free_blocks]
    while manager.sweep():
        free.append(manager.cache.stats().free_blocks)
    slices = [after - before for before, after in itertools.pairwise(free)]
    assert set(slices) == {120}, "100 blocks are reached with the fourth sequence of 30"
    assert manager.cache.stats().free_blocks == 4096


def test_expiry_is_swept_in_slices():
    """Row 58: a client with many sequences is given up a slice at a time, so that others wait no longer than that."""
    clock = Clock()
    manager = engine.Engine(ManagerOptions(listen="localhost:0", num_blocks=4096, block_size=1), clock=clock)
    epoch = manager.register_client(A, name="many", role=1)
    header = common_pb2.RequestHeader(client_id=A, epoch=epoch)
    for token in range(1000):
        request = cache_pb2.AcquireRequest(header=header, tokens=token.to_bytes(4, "little"))
        manager.run("acquire", request, cache_pb2.AcquireResponse())
    clock.now += 10
    left = [1000]
    while manager.sweep():
        left.append(manager.cache.stats().num_sequences)
        manager.check()
    steps = [before - after for before, after in itertools.pairwise(left)]
    assert max(steps) == limits.EXPIRY_SLICE_SEQUENCES
    assert manager.cache.stats().free_blocks == 4096


def test_a_sweep_that_fails_is_logged_and_not_the_last(make_server, eventually, caplog, monkeypatch):
    server = make_server(lease_ttl_ms=100)
    sweep = server.engine.sweep
    failures = iter([RuntimeError("a bug"), RuntimeError("another")])

    def failing() -> bool:
        for failure in failures:
            raise failure
        return sweep()

    monkeypatch.setattr(server.engine, "sweep", failing)
    server.engine.register_client(A, name="a", role=1)
    eventually(lambda: server.engine.expired_leases == 1)
    assert caplog.text.count("a sweep of the leases failed") == 2
