"""The one physical pool that the block ids point into: who holds it, what it is, how to map it.

Remembers the id of the last pool after its holder has gone: when another pool comes, what was cached is worthless.
"""

from __future__ import annotations

import math

from radixpool.rpc import limits
from radixpool.rpc.errors import PoolMismatch, PoolUnavailable
from radixpool.rpc.manager.leases import Lease
from radixpool.v1 import pool_pb2

_SPEC_FIELDS = tuple(field.name for field in pool_pb2.PoolSpec.DESCRIPTOR.fields)


class PoolRegistry:
    """At most one registered pool, bound to the lease of its holder."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._pool: pool_pb2.Pool | None = None
        self._holder: Lease | None = None
        self.last_pool_id = b""

    @property
    def pool(self) -> pool_pb2.Pool | None:
        """The registered pool, None while no holder is alive."""
        if self._holder is not None and not self._holder.alive:
            self._pool = self._holder = None
        return self._pool

    def register(self, pool: pool_pb2.Pool, holder: Lease) -> bool:
        """Take over `pool` of `holder`. Returns whether it is another than the last one, or the first.

        Raises ValueError for a malformed field, PoolMismatch when the pool does not fit or another one is registered.
        """
        self._check(pool)
        current = self.pool
        if current is not None and current.pool_id != pool.pool_id:
            raise PoolMismatch("pool_id: another pool is registered and its holder is alive; stop that one first")
        is_new = self.last_pool_id != pool.pool_id
        self._pool = pool_pb2.Pool()
        self._pool.CopyFrom(pool)
        self._holder = holder
        self.last_pool_id = pool.pool_id
        return is_new

    def attach(self, expected: pool_pb2.PoolSpec) -> pool_pb2.Pool:
        """Return the pool if it is what a worker expects. Raises PoolUnavailable, PoolMismatch naming the field."""
        pool = self.pool
        if pool is None:
            raise PoolUnavailable("no pool is registered: start a pool holder (radixpool pool) for this manager")
        for field in _SPEC_FIELDS:
            needed, has = getattr(expected, field), getattr(pool.spec, field)
            if needed and needed != has:
                raise PoolMismatch(
                    f"{field}: the pool has {_show(field, has)}, the worker needs {_show(field, needed)}"
                )
        return pool

    def _check(self, pool: pool_pb2.Pool) -> None:
        _check_length("pool.pool_id", pool.pool_id, limits.POOL_ID_BYTES)
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"):
            if getattr(pool.spec, field) < 1:
                raise ValueError(f"pool.spec.{field} must be at least 1, got {getattr(pool.spec, field)}")
        for field, enum in (("dtype", pool_pb2.KvDtype), ("layout", pool_pb2.PoolLayout)):
            value = getattr(pool.spec, field)
            if value == 0 or value not in enum.values():
                raise ValueError(f"pool.spec.{field} must be one of {', '.join(enum.keys()[1:])}, got {value}")
        _check_scales(pool.spec)
        for field, ours in (("num_blocks", self._num_blocks), ("block_size", self._block_size)):
            theirs = getattr(pool.spec, field)
            if theirs != ours:
                raise PoolMismatch(f"{field}: the pool has {theirs}, the manager serves {ours}")
        _check_attachment(pool.attachment)


def _check_scales(spec: pool_pb2.PoolSpec) -> None:
    scaled = spec.dtype == pool_pb2.KV_DTYPE_FLOAT8_E4M3
    for field in ("k_scale", "v_scale"):
        value = getattr(spec, field)
        if scaled and not 0 < value < math.inf:
            raise ValueError(f"pool.spec.{field} must be a positive number for fp8, got {value}")
        if not scaled and value:
            raise ValueError(f"pool.spec.{field} must be 0 unless dtype is fp8, got {value}")


def _check_attachment(attachment: pool_pb2.PoolAttachment) -> None:
    match attachment.WhichOneof("attachment"):
        case "memfd":
            _check_socket_path("pool.attachment.memfd.socket_path", attachment.memfd.socket_path)
        case "cuda_ipc":
            _check_cuda_ipc(attachment.cuda_ipc)
        case "cuda_fd":
            uuid = attachment.cuda_fd.device_uuid
            _check_length("pool.attachment.cuda_fd.device_uuid", uuid, limits.DEVICE_UUID_BYTES)
            _check_socket_path("pool.attachment.cuda_fd.socket_path", attachment.cuda_fd.socket_path)
        case _:
            raise ValueError("pool.attachment must be memfd, cuda_ipc or cuda_fd, got none")


def _check_cuda_ipc(attachment: pool_pb2.CudaIpcAttachment) -> None:
    _check_length("pool.attachment.cuda_ipc.device_uuid", attachment.device_uuid, limits.DEVICE_UUID_BYTES)
    count = len(attachment.allocations)
    if not 1 <= count <= limits.MAX_CUDA_ALLOCATIONS:
        limit = limits.MAX_CUDA_ALLOCATIONS
        raise ValueError(f"pool.attachment.cuda_ipc.allocations must be 1 to {limit} entries, got {count}")
    for index, allocation in enumerate(attachment.allocations):
        field = f"pool.attachment.cuda_ipc.allocations[{index}].handle"
        _check_length(field, allocation.handle, limits.CUDA_IPC_HANDLE_BYTES)


def _check_socket_path(field: str, path: str) -> None:
    size = len(path.encode())
    if not 1 <= size <= limits.MAX_PATH_BYTES:
        raise ValueError(f"{field} must be 1 to {limits.MAX_PATH_BYTES} bytes, got {size}")


def _check_length(field: str, value: bytes, expected: int) -> None:
    if len(value) != expected:
        raise ValueError(f"{field} must be {expected} bytes, got {len(value)}")


def _show(field: str, value: object) -> object:
    names = {"dtype": pool_pb2.KvDtype, "layout": pool_pb2.PoolLayout}
    return names[field].Name(value) if field in names else repr(value)
