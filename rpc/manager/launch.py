"""A manager with everything around it, as its configuration says: logs, credentials, metrics, KV events.

The order matters and is here only: what can be refused is checked before anything listens, the manager's address is
taken before the metrics', and whatever fails later leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from radixpool._version import __version__
from radixpool.radix.stats import CacheStats
from radixpool.rpc.address import UnixAddress, parse_address
from radixpool.rpc.config import SecurityConfig, ServeConfig
from radixpool.rpc.manager.kv_events import make_publisher, require_packages
from radixpool.rpc.manager.listen import room_for_connections
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.server import ManagerServer
from radixpool.rpc.metrics import ManagerCollector, MetricsServer, ObserverInterceptor, RpcMetrics, ServiceSnapshot
from radixpool.rpc.security.credentials import CredentialFile
from radixpool.rpc.security.interceptor import AuthInterceptor
from radixpool.rpc.security.transport import TlsFiles
from radixpool.v1 import cache_pb2

if TYPE_CHECKING:
    from radixpool.rpc.kv_events.publisher import KvEventPublisher

_ROLE_PREFIX = "CLIENT_ROLE_"


class ManagerService:
    """One configured manager. Raises ValueError for files that cannot be used; start, wait, stop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        if config.kv_events.endpoint:
            require_packages()
        self._tls = _tls_files(config.security)
        self.registry = CollectorRegistry()
        metrics = RpcMetrics(self.registry)
        path = config.security.credentials
        self.server = ManagerServer(
            manager_options(config),
            interceptors=(ObserverInterceptor(metrics), AuthInterceptor(CredentialFile(path) if path else None)),
            credentials=self._server_credentials(),
        )
        self.server.engine.on_refusal = metrics.refused
        self._metrics_server: MetricsServer | None = None
        self._publisher: KvEventPublisher | None = None
        self.registry.register(ManagerCollector(self))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    @property
    def address(self) -> str:
        """Where the manager listens, with the port that the system chose."""
        return self.server.address

    @property
    def kv_events_endpoints(self) -> tuple[str, str]:
        """The ZMQ endpoints of KV events and of their replay, empty where there is none."""
        return ("", "") if self._publisher is None else (self._publisher.endpoint, self._publisher.replay_endpoint)

    @property
    def metrics_port(self) -> int | None:
        """The TCP port that metrics are served at, None when they are not."""
        return None if self._metrics_server is None else self._metrics_server.port

    def start(self) -> None:
        """Listen everywhere and serve. Raises AddressInUse, AddressUnavailable; nothing is left behind then."""
        self.server.start()
        try:
            self._start_metrics()
            self._start_kv_events()
        except Exception:
            self.stop(0)
            raise

    def _start_metrics(self) -> None:
        listen = self._config.metrics.listen
        if listen:
            exposed = not parse_address(listen).is_local
            context = self._tls.server_context() if self._tls and exposed else None
            self._metrics_server = MetricsServer(listen, self.registry, tls=context)

    def _start_kv_events(self) -> None:
        if self._config.kv_events.endpoint:
            self._publisher = make_publisher(self._config.kv_events, self.server.engine, self.registry)
            self._publisher.start()

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, give running ones `grace_s` (the configured time by default), and leave the addresses."""
        self.server.stop(self._config.server.drain_timeout_s if grace_s is None else grace_s)
        if self._publisher is not None:
            self._publisher.close()
        if self._metrics_server is not None:
            # Last, so that the drain can be watched.
            self._metrics_server.close()

    def cache_stats(self) -> CacheStats:
        """Return the cache's counters; for the collector."""
        with self.server.engine.lock:
            return self.server.engine.cache.stats()

    def service_snapshot(self) -> ServiceSnapshot:
        """Return the process's counters; for the collector."""
        engine = self.server.engine
        with engine.lock:
            roles = Counter(lease.role for lease in engine.leases)
            return ServiceSnapshot(
                version=__version__,
                policy=engine.options.policy,
                incarnation=engine.incarnation,
                uptime_s=engine.uptime_ms() / 1000,
                serving=self.server.is_serving,
                clients={_role_name(role): count for role, count in roles.items()},
                expired_leases=engine.expired_leases,
                fenced_requests=engine.fenced_requests,
                open_sessions=engine.sessions.taken,
                evicted_by_cause={"operator": engine.removals["operator"]},
                removed_by_cause={cause: engine.removals[cause] for cause in ("flush", "invalidate")},
                advised_hit_ratio={
                    (advice.policy, f"{advice.multiple:g}"): advice.hit_ratio
                    for advice in engine.shadow.report().advice
                    if advice.hit_ratio is not None
                },
            )

    def _server_credentials(self) -> grpc.ServerCredentials | None:
        if self._tls is None:
            return None
        self._tls.check()
        if isinstance(parse_address(self._config.server.listen), UnixAddress):
            return None
        return self._tls.server_credentials()


def manager_options(config: ServeConfig) -> ManagerOptions:
    """Return what the manager itself is started with."""
    return ManagerOptions(
        listen=config.server.listen,
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        policy=config.cache.policy,
        lease_ttl_ms=config.cache.lease_ttl_ms,
        directory=config.directory.path,
        max_connections=room_for_connections(config.server.max_connections),
        advice_cpu_share=config.cache.advice_cpu_share,
    )


def _tls_files(security: SecurityConfig) -> TlsFiles | None:
    if not security.tls_cert:
        return None
    return TlsFiles(Path(security.tls_cert), Path(security.tls_key), Path(security.tls_client_ca))


def _role_name(role: int) -> str:
    name: str = cache_pb2.ClientRole.Name(cache_pb2.ClientRole.ValueType(role))
    return name.removeprefix(_ROLE_PREFIX).lower()
