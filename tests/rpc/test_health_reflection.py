"""Health says the truth, draining lets live sequences end, reflection lists what there is."""

from __future__ import annotations

import os
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixpool.rpc.client import NO_RETRY, Client, ClientOptions, ClientRole, RetryOptions
from radixpool.rpc.errors import Draining, ManagerUnavailable
from radixpool.rpc.manager.server import SERVICE_NAMES
from radixpool.rpc.pool_types import KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec

CACHE, POOL, ADMIN = SERVICE_NAMES
SPEC = PoolSpec(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=4,
    num_blocks=64,
    dtype=KvDtype.FLOAT32,
    layout=PoolLayout.HND,
)


def serving(address: str) -> set[str]:
    """Return the names that health says are served."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        states = {name: stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", *SERVICE_NAMES)}
    return {name for name, state in states.items() if state == health_pb2.HealthCheckResponse.SERVING}


def test_without_a_pool_only_metadata_are_served(server):
    assert serving(server.address) == {CACHE, ADMIN}


def test_with_a_pool_all_is_served_until_its_holder_goes(server, make_client, eventually):
    holder = make_client(role=ClientRole.POOL_HOLDER)
    holder.register_pool(Pool(os.urandom(16), SPEC, MemfdAttachment("/run/pool.sock", 1)))
    eventually(lambda: serving(server.address) == {"", CACHE, POOL, ADMIN})
    holder.close()
    eventually(lambda: serving(server.address) == {CACHE, ADMIN})


def test_a_drain_lets_live_sequences_end_and_takes_no_new_ones(make_server, eventually):
    server = make_server()
    assert server.is_serving
    with Client(server.address, options=ClientOptions(retry=NO_RETRY)) as client:
        seq = client.acquire(range(10))
        stop = threading.Thread(target=server.stop, args=(30,))
        stop.start()
        eventually(lambda: serving(server.address) == set())
        server._tell_health()  # as every sweep does
        assert not server.is_serving
        assert serving(server.address) == set()
        with pytest.raises(Draining, match="shutting down"):
            client.acquire(range(10))
        seq.extend([1, 2, 3])
        seq.commit(13)
        start = time.monotonic()
        seq.release()
        stop.join()
        assert time.monotonic() - start < 10
        with pytest.raises(ManagerUnavailable):
            client.info()


def test_a_drain_does_not_wait_longer_than_its_grace(make_server):
    server = make_server()
    with Client(server.address, options=ClientOptions(retry=NO_RETRY)) as client:
        client.acquire(range(10))
        start = time.monotonic()
        server.stop(0.3)
        assert 0.25 < time.monotonic() - start < 5


def test_an_acquire_during_a_drain_goes_to_the_next_manager(serve, socket_dir, eventually):
    arguments = ("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64")
    first = serve(*arguments)
    options = ClientOptions(retry=RetryOptions(total_s=60))
    with Client(first.address, options=options) as client:
        seq = client.acquire(range(10))
        incarnation = client.info().incarnation
        first.process.send_signal(signal.SIGTERM)
        eventually(lambda: CACHE not in serving(first.address))
        later = [threading.Timer(0.3, seq.release), threading.Timer(0.6, lambda: (first.wait(), serve(*arguments)))]
        for timer in later:
            timer.start()
        with client.acquire(range(20)) as late:
            assert late.num_tokens == 20
        assert client.info().incarnation > incarnation
        for timer in later:
            timer.join()


def test_reflection_lists_the_services(server):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(server.address) as channel:
        (reply,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    listed = {service.name for service in reply.list_services_response.service}
    assert listed == {*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
