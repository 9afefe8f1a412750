"""Map a pool that another process holds."""

from __future__ import annotations

import os

from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.pool.geometry import pool_bytes, require_equal
from radixpool.rpc.pool.memory import map_memfd
from radixpool.rpc.pool.sockets import receive_descriptor
from radixpool.rpc.pool.tensors import KvPool, pool_over
from radixpool.rpc.pool_types import MemfdAttachment, Pool, PoolSpec


def attach(pool: Pool, *, expected: PoolSpec) -> KvPool:
    """Map `pool` into this process and return its tensors, over the very bytes that every other worker sees.

    Checks `expected` first and maps nothing that differs. The mapping lives as long as the tensors; nothing needs to be
    closed. Raises `PoolMismatch`, `DescriptorRefused` (the holder is gone) or `PoolMemoryError`.
    """
    require_equal(expected, pool.spec)
    if not isinstance(pool.attachment, MemfdAttachment):
        raise PoolMismatch(
            f"attachment: this worker maps memfd pools, the pool offers {type(pool.attachment).__name__}"
        )
    descriptor = receive_descriptor(pool.attachment.socket_path, tag=pool.pool_id)
    try:
        memory = map_memfd(descriptor, pool_bytes(pool.spec))
    finally:
        os.close(descriptor)
    return pool_over(memory, pool.spec)
