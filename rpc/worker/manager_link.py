"""A worker's connection to its manager: the session its engine speaks over, and the pool it is attached to."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Sequence

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions, ClientRole, Session
from radixpool.rpc.client.retry import RetryOptions
from radixpool.rpc.errors import Fenced, ManagerUnavailable, PoolUnavailable
from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool.cuda import HandleRefused
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import require_complete
from radixpool.rpc.pool.sockets import DescriptorRefused
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.pool_types import PoolSpec
from radixpool.rpc.step_columns import Step, Stepped
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.model_source import ModelSource, pool_spec_for

log = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.2
_RETRY = RetryOptions(total_s=1.0)
_NOT_YET = (ManagerUnavailable, PoolUnavailable, Fenced, DescriptorRefused, HandleRefused)
"""What passes when manager and pool holder have (re)started."""

_REGISTERED = failpoint("worker.registered")
_ATTACHED = failpoint("worker.attached")


class ManagerLink:
    """The `CachePort` of a worker. `connect` makes it usable; after `CacheLost`, `connect` again.

    `pool` and `pool_id` are those of the last successful `connect`; the mapping is kept while the pool stays the same.
    """

    pool: KvPool
    pool_id: bytes

    def __init__(
        self, address: str, source: ModelSource, *, name: str, stop: threading.Event, device: Device = CPU
    ) -> None:
        self._address = address
        self._source = source
        self._device = device
        self._name = name
        self._stop = stop
        self._client: Client | None = None
        self._session: Session | None = None
        self._client_id = secrets.token_bytes(limits.CLIENT_ID_BYTES)
        self.pool_id = b""

    def connect(self, timeout_s: float | None = None) -> None:
        """Register with the manager and map its pool, waiting for both to appear; None waits until stopped.

        Raises `PoolMismatch` naming what does not fit, or the reason for the last failure when the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.close()
            try:
                return self._connect_once()
            except _NOT_YET as error:
                late = deadline is not None and time.monotonic() >= deadline
                if late or self._stop.wait(_RETRY_INTERVAL_S):
                    raise
                log.debug("not connected yet: %s", error)

    def batch(self, operations: Sequence[ops.Operation], /, *, steps: ops.StepReport) -> list[ops.Result | Exception]:
        """Run `operations` over the session; see `CachePort.batch`."""
        if self._session is None:
            raise CacheLost("not connected to the manager")
        try:
            return self._session.batch(operations, steps=steps)
        except (RadixPoolError, ValueError, TypeError) as error:  # also a batch that the manager does not understand
            raise CacheLost(str(error)) from error

    def step(self, step: Step, operations: Sequence[ops.Operation] = (), /, *, steps: ops.StepReport) -> Stepped:
        """Run the rows of `step`, then `operations`, over the session; see `CachePort.step`."""
        if self._session is None:
            raise CacheLost("not connected to the manager")
        try:
            return self._session.step(step, operations, steps=steps)
        except (RadixPoolError, ValueError, TypeError) as error:
            raise CacheLost(str(error)) from error

    def close(self) -> None:
        """End the session and the lease. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect_once(self) -> None:
        # One id for the life of the process. To register it anew is to say that no step of the former epoch runs any
        # more, and so it is: the steps run in this thread.
        options = ClientOptions(name=self._name, role=ClientRole.WORKER, client_id=self._client_id, retry=_RETRY)
        self._client = client = Client(self._address, options=options)
        info = client.info()
        wanted = pool_spec_for(self._source, num_blocks=info.num_blocks, block_size=info.block_size, dtype=None)
        # First the lease, then the pool: a pool that replaces this one fences the lease.
        self._session = client.session()
        _REGISTERED()
        pool = client.attach_pool(wanted)
        if pool.pool_id != self.pool_id:
            self.pool = attach(pool, expected=_with_numbers_of(wanted, pool.spec), device=self._device)
            self.pool_id = pool.pool_id
        _ATTACHED()


def _with_numbers_of(wanted: PoolSpec, offered: PoolSpec) -> PoolSpec:
    """Return `wanted` with the element type and scales of the pool, which a worker adapts to, if it can be mapped."""
    expected = dataclasses.replace(wanted, dtype=offered.dtype, k_scale=offered.k_scale, v_scale=offered.v_scale)
    require_complete(expected)
    return expected
