"""The metrics listener: what it serves, what it refuses, and that a bad scraper cannot hold it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter

from radixpool.rpc.errors import AddressInUse
from radixpool.rpc.metrics import MetricsServer
from radixpool.rpc.metrics.http import MAX_SCRAPES


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("radixpool_example", "An example.", registry=registry).inc(3)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1:0", registry) as server:
        yield server


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served_at_their_path_only(server: MetricsServer) -> None:
    status, text = get(server, "/metrics")
    assert status == 200
    assert "radixpool_example_total 3.0" in text
    assert get(server, "/")[0] == 404
    assert get(server, "/metrics/../x")[0] == 404
    assert get(server, "/metrics?name[]=radixpool_example_total")[0] == 200


def test_a_taken_port_is_an_error_that_names_it(server: MetricsServer, registry: CollectorRegistry) -> None:
    with pytest.raises(AddressInUse, match=f"metrics address 127.0.0.1:{server.port} cannot be served"):
        MetricsServer(f"127.0.0.1:{server.port}", registry)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "metrics.example:9400"])
def test_other_machines_need_mutual_tls(registry: CollectorRegistry, address: str) -> None:
    with pytest.raises(ValueError, match=r"needs mutual TLS \(tls_cert, tls_key and tls_client_ca\)"):
        MetricsServer(address, registry)


def test_a_unix_path_is_refused_by_name(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match=r"metrics address must be HOST:PORT, got 'unix:/tmp/x'"):
        MetricsServer("unix:/tmp/x", registry)


def test_silent_connections_are_bounded_and_others_are_served_once_they_go(server: MetricsServer) -> None:
    with ExitStack() as held:
        for _ in range(MAX_SCRAPES):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as extra:
            assert extra.recv(1) == b""
    for _ in range(100):
        try:
            if get(server, "/metrics")[0] == 200:
                return
        except OSError:
            continue
    pytest.fail("the listener did not recover")


def test_closing_frees_the_port(registry: CollectorRegistry) -> None:
    first = MetricsServer("127.0.0.1:0", registry)
    port = first.port
    first.close()
    with MetricsServer(f"127.0.0.1:{port}", registry) as second:
        assert get(second, "/metrics")[0] == 200
