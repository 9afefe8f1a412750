"""The HTTP listener that Prometheus scrapes: GET /metrics, nothing else.

Bounded: few connections at a time, each with a time limit, so that a scraper that never reads cannot hold the manager's
memory or threads. Like the service itself it takes a non-loopback address only with mutual TLS.
"""

from __future__ import annotations

import ssl
import threading
from http.server import ThreadingHTTPServer
from socket import AF_INET6, socket
from socketserver import TCPServer
from types import TracebackType
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from radixpool.rpc.address import TcpAddress, UnixAddress, parse_address
from radixpool.rpc.errors import AddressInUse

MAX_SCRAPES: Final = 8
"""Connections served at once; more are closed at once."""
SCRAPE_TIMEOUT_S: Final = 10.0
"""How long a connection may be silent."""
METRICS_PATH: Final = "/metrics"


class _Handler(MetricsHandler):
    timeout = SCRAPE_TIMEOUT_S
    server_version = "radixpool"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        if self.path.partition("?")[0] != METRICS_PATH:
            self.send_error(404, f"only {METRICS_PATH} is served here")
            return
        super().do_GET()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler], context: ssl.SSLContext | None) -> None:
        self._slots = threading.BoundedSemaphore(MAX_SCRAPES)
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, handler)
        if context is not None:
            # The handshake runs in the connection's own thread, under its time limit, not in accept().
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for this host's name, which can take as long as a broken resolver likes.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "radixpool", int(self.server_address[1])

    def process_request(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a scraper that went away is no event of ours."""


class MetricsServer:
    """Serves one registry at one address, from construction to `close()`. Also a context manager.

    Raises ValueError for an address it may not serve, AddressInUse when somebody else does.
    """

    def __init__(self, address: str, registry: CollectorRegistry, *, tls: ssl.SSLContext | None = None) -> None:
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            raise ValueError(f"metrics address must be HOST:PORT, got {address!r}")
        if not parsed.is_local and tls is None:
            raise ValueError(
                f"metrics address {address} can be reached from other machines, which needs mutual TLS "
                "(tls_cert, tls_key and tls_client_ca)"
            )
        self._server = _bind(parsed, registry, tls)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port that is served, also when port 0 was asked for."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving. Closing again is harmless."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bind(address: TcpAddress, registry: CollectorRegistry, tls: ssl.SSLContext | None) -> _BoundedServer:
    handler = type("_RegistryHandler", (_Handler,), {"registry": registry})
    try:
        return _BoundedServer((address.host, address.port), handler, tls)
    except OSError as error:
        raise AddressInUse(f"metrics address {address.target} cannot be served: {error.strerror}") from error
