"""The manager as a process: one gRPC server with bounded thread pools over one engine, and the lease sweeper.

Why a sync server with one lock: see docs/service.md, which has the measurements.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixpool.rpc import limits
from radixpool.rpc.address import parse_address
from radixpool.rpc.failpoints import VARIABLE, armed_steps, failpoint
from radixpool.rpc.manager.admin_service import AdminService
from radixpool.rpc.manager.admission import AdmissionInterceptor
from radixpool.rpc.manager.cache_service import CacheService
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.interceptor import ErrorInterceptor
from radixpool.rpc.manager.listen import Listener
from radixpool.rpc.manager.options import ManagerOptions
from radixpool.rpc.manager.pool_service import PoolService
from radixpool.rpc.manager.recovery import open_former_life
from radixpool.rpc.security.transport import check_listen
from radixpool.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAMES: Final = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in ((cache_pb2, "CacheService"), (pool_pb2, "PoolService"), (admin_pb2, "AdminService"))
)
_CACHE, _POOL, _ADMIN = SERVICE_NAMES
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_DRAIN_POLL_S: Final = 0.05
_SETTLE_S: Final = 0.25
"""For calls that are running when the last sequence has ended; streams are cut off then."""
SWEEPS_PER_TTL: Final = 20
MAX_SWEEP_INTERVAL_S: Final = 0.5
SWEEP_PAUSE_S: Final = 0.001
"""Between two slices of one sweep, so that waiting calls get the lock."""

_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", limits.MAX_CONCURRENT_RPCS),
    ("grpc.server_handshake_timeout_ms", limits.HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", limits.IDLE_CONNECTION_MS),
    # Else gRPC takes in megabytes of a request that no thread waits for, to keep a fast line busy that we do not have.
    ("grpc.http2.bdp_probe", 0),
    *limits.SERVER_PINGS,
)

_BOUND = failpoint("manager.bound")
_DRAINING = failpoint("manager.draining")
_STOPPED = failpoint("manager.stopped")


class ManagerServer:
    """One manager. Start it, wait, stop it; `address` is known after the start."""

    def __init__(
        self,
        options: ManagerOptions,
        *,
        interceptors: Sequence[grpc.ServerInterceptor[Any, Any]] = (),
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        check_listen(options.listen, secure=credentials is not None)
        if armed_steps() and not parse_address(options.listen).is_local:
            raise ValueError(
                f"{VARIABLE} is set, which is for tests on one machine; unset it to listen on {options.listen}"
            )
        self.engine = Engine(options, former_life=open_former_life(options))
        self._credentials = credentials
        self._listener = Listener(options.listen)
        self._health = health.HealthServicer(experimental_non_blocking=True)
        self._threads = ThreadPoolExecutor(limits.UNARY_THREADS, thread_name_prefix="rpc")
        self.admission = AdmissionInterceptor()
        self._server = grpc.server(
            self._threads,
            interceptors=[self.admission, *interceptors, ErrorInterceptor()],
            options=(*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", options.max_connections)),
            maximum_concurrent_rpcs=limits.MAX_CONCURRENT_RPCS,
        )
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(self.engine), self._server)
        pool_pb2_grpc.add_PoolServiceServicer_to_server(PoolService(self.engine), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self.engine), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._has_data_path = self._is_draining = False
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="lease-sweeper", daemon=True)

    @property
    def address(self) -> str:
        """Where the manager listens, with the port that the system chose."""
        return self._listener.address

    @property
    def is_serving(self) -> bool:
        """What health says of the data path: not while a restored cache waits for its pool, nor while it drains."""
        return self._has_data_path and not self._is_draining

    def start(self) -> None:
        """Listen and serve. Raises AddressInUse, AddressUnavailable; nothing is left behind then."""
        try:
            self._listener.bind(self._server, self._credentials)
        except BaseException:
            self.engine.close()
            raise
        _BOUND()
        self._server.start()
        self._tell_health()
        self._sweeper.start()

    def stop(self, grace_s: float) -> None:
        """Take no new sequences, give live ones `grace_s` to end, and leave the address."""
        deadline = time.monotonic() + grace_s
        self._is_draining = True
        self._health.enter_graceful_shutdown()
        self.engine.begin_drain()
        _DRAINING()
        while time.monotonic() < deadline and not self.engine.is_drained():
            time.sleep(_DRAIN_POLL_S)
        self._server.stop(min(grace_s, _SETTLE_S)).wait()
        self._stopping.set()
        self._sweeper.join()
        self._threads.shutdown(wait=True)
        self.admission.close()
        _STOPPED()
        self._listener.close()
        self.engine.close()

    def _sweep(self) -> None:
        interval_s = min(MAX_SWEEP_INTERVAL_S, self.engine.options.lease_ttl_ms / 1000 / SWEEPS_PER_TTL)
        while not self._stopping.wait(interval_s):
            try:
                while self.engine.sweep():
                    self._stopping.wait(SWEEP_PAUSE_S)
                self._tell_health()
            except Exception:  # a bug of ours; without the sweep no dead client's blocks would ever come back
                _log.exception("a sweep of the leases failed; the next one goes on")

    def _tell_health(self) -> None:
        """Say the truth: a restored cache that waits for its pool is not served, and without a pool nothing is whole.

        Once the drain has begun the health service keeps everything at not serving by itself.
        """
        has_pool, awaits_pool = self.engine.pool_state()
        states = {"": has_pool and not awaits_pool, _CACHE: not awaits_pool, _POOL: has_pool, _ADMIN: True}
        self._has_data_path = states[_CACHE]
        for name, serves in states.items():
            self._health.set(name, _SERVING if serves else _NOT_SERVING)
