"""The pool holder process: allocate what the manager manages, announce it, and keep it announced until stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.client.retry import NO_RETRY
from radixpool.rpc.errors import Fenced, ManagerUnavailable, PoolMismatch
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.operations import ServiceInfo
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool_types import PoolSpec

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_CONNECT_INTERVAL_S = 0.1
_SWEEP_S = 1.0
"""After which the manager has noticed for certain that a lease is over."""
_REGISTERED = failpoint("holder.registered")
_KEEPING = failpoint("holder.keeping")


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderOptions:
    """How a holder behaves.

    manager: address of the manager, which decides `num_blocks` and `block_size`.
    name: shown to operators.
    device: where the pool lies.
    socket_address: where memory of the CPU is handed out; None chooses an abstract socket.
    connect_timeout_s: how long the manager may be out of reach at the start.
    """

    manager: str
    name: str = "pool"
    device: Device = CPU
    socket_address: str | None = None
    connect_timeout_s: float = 30.0


class HolderProcess:
    """Hold one pool and keep it registered, through restarts of the manager, until `stop` is set.

    `make_spec(num_blocks, block_size)` says what to allocate.
    """

    def __init__(
        self, options: HolderOptions, make_spec: Callable[[int, int], PoolSpec], *, stop: threading.Event
    ) -> None:
        self._options = options
        self._make_spec = make_spec
        self._stop = stop

    def run(self, on_ready: Callable[[PoolHolder], None]) -> None:
        """Allocate, register, call `on_ready` once, and stay. Returns when stopped, also before it was ready.

        Raises `ManagerUnavailable` (at the start only), `PoolMemoryError`, `CudaUnavailable`, or `PoolMismatch` when a
        manager of other sizes has taken the place of the first, or another holder lives.
        """
        options = ClientOptions(name=self._options.name, role=ClientRole.POOL_HOLDER, retry=NO_RETRY)
        client = Client(self._options.manager, options=options)
        try:
            info = self._reach(client)
            if info is None:
                return
            spec = self._make_spec(info.num_blocks, info.block_size)
            with self._hold(spec) as holder:
                if not self._register(client, holder, lease_s=info.lease_ttl_ms / 1000):
                    return
                _REGISTERED()
                on_ready(holder)
                while not self._stop.wait(_CHECK_INTERVAL_S):
                    _KEEPING()
                    self._keep_registered(client, holder)
        finally:
            client.close()

    def _hold(self, spec: PoolSpec) -> PoolHolder:
        return PoolHolder(spec, socket_address=self._options.socket_address, device=self._options.device)

    def _reach(self, client: Client) -> ServiceInfo | None:
        """Wait for the manager and return what it says of itself; None when stopped meanwhile."""
        gone_at = time.monotonic() + self._options.connect_timeout_s
        said = False
        while not self._stop.is_set():
            try:
                return client.info()
            except ManagerUnavailable as error:
                if time.monotonic() >= gone_at:
                    raise
                if not said:
                    log.info("waiting up to %g s for the manager: %s", self._options.connect_timeout_s, error)
                    said = True
            self._stop.wait(_CONNECT_INTERVAL_S)
        return None

    def _register(self, client: Client, holder: PoolHolder, *, lease_s: float) -> bool:
        """Register for the first time; False when stopped meanwhile.

        A holder that was killed keeps its place until its lease is over: wait for that. Raises `PoolMismatch` when the
        other holder is alive, `ManagerUnavailable` when the manager has gone for good.
        """
        vacant_at = time.monotonic() + lease_s + _SWEEP_S
        gone_at = time.monotonic() + self._options.connect_timeout_s
        waited_for = b""
        while not self._stop.is_set():
            try:
                taken = client.get_pool()
                if taken is None or time.monotonic() >= vacant_at:
                    client.register_pool(holder.describe())
                    return True
                if taken.pool_id != waited_for:
                    waited_for = taken.pool_id
                    log.info(
                        "another pool is registered (%s): waiting up to %.1f s for the lease of its holder to end",
                        waited_for.hex(),
                        vacant_at - time.monotonic(),
                    )
            except (ManagerUnavailable, Fenced):
                if time.monotonic() >= gone_at:
                    raise
            self._stop.wait(_CONNECT_INTERVAL_S)
        return False

    def _keep_registered(self, client: Client, holder: PoolHolder) -> None:
        """Register again where the manager has forgotten the pool. Raises `PoolMismatch` when it has another one.

        Nothing else ends the holder, and with it the pool: a manager that does not answer, or refuses, is asked again.
        """
        pool = holder.describe()
        try:
            registered = client.get_pool()
            if registered is None:
                self._require_same_sizes(client.info(), pool.spec)
                client.register_pool(pool)
                log.info("registered the pool again")
            elif registered.pool_id != pool.pool_id:
                raise PoolMismatch("pool_id: the manager has the pool of another holder now")
        except PoolMismatch:
            raise
        except RadixPoolError as error:
            expected = isinstance(error, ManagerUnavailable | Fenced)
            log.log(logging.DEBUG if expected else logging.WARNING, "the pool is not registered: %s", error)

    def _require_same_sizes(self, info: ServiceInfo, spec: PoolSpec) -> None:
        if (info.num_blocks, info.block_size) != (spec.num_blocks, spec.block_size):
            raise PoolMismatch(
                f"the manager has num_blocks {info.num_blocks} and block_size {info.block_size} now, "
                f"the pool was made for {spec.num_blocks} and {spec.block_size}"
            )
