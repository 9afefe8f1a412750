"""The process that owns the pool's memory: it allocates, hands the memory out, and outlives workers and manager."""

from __future__ import annotations

import os
import secrets
from types import TracebackType
from typing import Self

from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool.geometry import pool_bytes, require_complete
from radixpool.rpc.pool.memory import create_memfd
from radixpool.rpc.pool.sockets import DescriptorServer
from radixpool.rpc.pool_types import MemfdAttachment, Pool, PoolSpec

_ALLOCATED = failpoint("holder.allocated")


class PoolHolder:
    """Own one allocation of `pool_bytes(spec)` and serve it to workers of this user until closed.

    `pool_id` is new for every allocation, so that cached metadata never outlives the bytes that it describes. Memory is
    freed when the holder has closed *and* no worker maps it any more. Raises `PoolMemoryError` when memory is short.
    """

    def __init__(self, spec: PoolSpec, *, socket_address: str | None = None) -> None:
        require_complete(spec)
        self._spec = spec
        self._pool_id = secrets.token_bytes(16)
        self._descriptor = create_memfd(pool_bytes(spec))
        try:
            address = socket_address or f"@radixpool-pool-{secrets.token_hex(16)}"
            self._server = DescriptorServer(address, self._descriptor, tag=self._pool_id)
        except BaseException:
            os.close(self._descriptor)
            raise
        _ALLOCATED()
        self._closed = False

    def describe(self) -> Pool:
        """Return what a worker needs to know to map the pool; `pool_id` names this allocation."""
        attachment = MemfdAttachment(self._server.address, pool_bytes(self._spec))
        return Pool(self._pool_id, self._spec, attachment)

    def close(self) -> None:
        """Stop handing out the pool and give up its memory; workers that map it keep it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._server.close()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
