"""The gRPC server of a worker: its service, health and reflection at one local address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixpool.rpc import limits
from radixpool.rpc.address import Address, TcpAddress, UnixAddress, parse_address
from radixpool.rpc.errors import AddressInUse
from radixpool.rpc.pool.sockets import remove_stale_socket
from radixpool.rpc.security.credentials import CredentialFile
from radixpool.rpc.security.interceptor import AuthInterceptor
from radixpool.rpc.security.transport import private_files
from radixpool.rpc.worker.service import WorkerServicer
from radixpool.v1 import worker_pb2, worker_pb2_grpc

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_SPARE_THREADS = 4
"""For health checks and status while every request slot streams."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers at `address`."""

    server: grpc.Server
    address: str

    def stop(self, grace_s: float) -> None:
        """Take no more calls, let those under way go on for `grace_s`, then end them."""
        self.server.stop(grace_s).wait()


def start_server(servicer: WorkerServicer, *, listen: str, max_requests: int, credentials: str = "") -> RunningServer:
    """Serve at `listen`; at most `max_requests` calls at once, more are refused with RESOURCE_EXHAUSTED.

    `credentials` is the file that says who may call; without one whoever can reach the address may.
    Raises ValueError for an address that other machines can reach, `AddressInUse` for a taken one.
    """
    threads = max_requests + _SPARE_THREADS
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="radixpool-rpc"),
        interceptors=[AuthInterceptor(CredentialFile(credentials) if credentials else None)],
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", limits.MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", limits.HANDSHAKE_TIMEOUT_MS),
            ("grpc.max_connection_idle_ms", limits.IDLE_CONNECTION_MS),
            ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
            *limits.SERVER_PINGS,
        ],
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    health_servicer = health.HealthServicer()
    for name in ("", _SERVICE):
        health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, listen)
    server.start()
    return RunningServer(server, address)


def require_local(listen: str) -> Address:
    """Return the address to listen on. Raises ValueError for one that other machines can reach."""
    parsed = parse_address(listen)
    if not parsed.is_local:
        raise ValueError(f"listen must be a unix socket or a loopback address, got {listen!r}")
    return parsed


def _bind(server: grpc.Server, listen: str) -> str:
    parsed = require_local(listen)
    try:
        if isinstance(parsed, UnixAddress):
            remove_stale_socket(parsed.path)
        with private_files():
            port = server.add_insecure_port(parsed.target)
    except (RuntimeError, OSError) as error:
        raise AddressInUse(f"listen: cannot serve at {listen}: {error}") from error
    return TcpAddress(parsed.host, port).target if isinstance(parsed, TcpAddress) else parsed.target
