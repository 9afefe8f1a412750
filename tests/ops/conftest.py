"""A server of the real services whose handlers do what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from radixpool.v1 import admin_pb2_grpc, cache_pb2_grpc, pool_pb2_grpc

SERVICES = {
    "CacheService": cache_pb2_grpc,
    "AdminService": admin_pb2_grpc,
    "PoolService": pool_pb2_grpc,
}


def scripted_servicer(name: str, behaviors: dict[str, Callable[..., Any]]) -> Any:
    """Return a servicer of service `name` whose methods in `behaviors` are replaced."""
    base = getattr(SERVICES[name], f"{name}Servicer")
    methods = {method: staticmethod(behavior) for method, behavior in behaviors.items()}
    return type(f"Scripted{name}", (base,), methods)()


@pytest.fixture
def serve() -> Iterator[Callable[..., grpc.Channel]]:
    """Return `serve(interceptors, CacheService={...}, ...)`: starts a server, returns a channel to it."""
    stops: list[Callable[[], Any]] = []

    def start(interceptors: list[grpc.ServerInterceptor], **behaviors: dict[str, Callable[..., Any]]) -> grpc.Channel:
        executor = ThreadPoolExecutor(4)
        server = grpc.server(executor, interceptors=interceptors, options=(("grpc.so_reuseport", 0),))
        for name, methods in behaviors.items():
            add = getattr(SERVICES[name], f"add_{name}Servicer_to_server")
            add(scripted_servicer(name, methods), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        stops.extend((channel.close, lambda: server.stop(0).wait(), executor.shutdown))
        return channel

    yield start
    for stop in stops:
        stop()
