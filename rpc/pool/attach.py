"""Map a pool that another process holds."""

from __future__ import annotations

import os
from functools import partial

from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.pool import cuda_descriptor
from radixpool.rpc.pool.cuda import CudaDevice
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import pool_bytes, require_equal
from radixpool.rpc.pool.memory import map_memfd
from radixpool.rpc.pool.sockets import receive_descriptor
from radixpool.rpc.pool.tensors import CudaMapping, KvPool, pool_on_device, pool_over
from radixpool.rpc.pool_types import CudaFdAttachment, CudaIpcAttachment, MemfdAttachment, Pool, PoolSpec


def attach(pool: Pool, *, expected: PoolSpec, device: Device = CPU) -> KvPool:
    """Map `pool` into this process and return its tensors, over the very bytes that every other worker sees.

    Checks `expected` and where the pool lies first, and maps nothing that differs. The mapping lives as long as the
    tensors; nothing needs to be closed. Raises `PoolMismatch`, `CudaUnavailable`, `DescriptorRefused` or
    `HandleRefused` (the holder is gone), or `PoolMemoryError`.
    """
    require_equal(expected, pool.spec)
    match pool.attachment:
        case MemfdAttachment() as attachment if device.cuda_index is None:
            return _map_memfd(pool, attachment)
        case CudaFdAttachment() as attachment if device.cuda_index is not None:
            return _map_device_memory(pool, attachment, device.cuda_index)
        case CudaIpcAttachment() as attachment if device.cuda_index is not None:
            return _map_ipc_memory(pool, attachment, device.cuda_index)
    where = "the memory of the CPU" if isinstance(pool.attachment, MemfdAttachment) else "the memory of a GPU"
    raise PoolMismatch(f"device: the pool lies in {where}, this worker runs on {device}; start both with one --device")


def _map_memfd(pool: Pool, attachment: MemfdAttachment) -> KvPool:
    descriptor = receive_descriptor(attachment.socket_path, tag=pool.pool_id)
    try:
        memory = map_memfd(descriptor, pool_bytes(pool.spec))
    finally:
        os.close(descriptor)
    return pool_over(memory, pool.spec)


def _map_device_memory(pool: Pool, attachment: CudaFdAttachment, index: int) -> KvPool:
    device, size = CudaDevice(index), pool_bytes(pool.spec)
    device.require(attachment.device_uuid)
    descriptor = receive_descriptor(attachment.socket_path, tag=pool.pool_id)
    try:
        pointer = cuda_descriptor.map_descriptor(device, descriptor, size)
    finally:
        os.close(descriptor)
    mapping = CudaMapping(pointer, size, partial(cuda_descriptor.unmap, device, pointer, size))
    return pool_on_device(mapping, pool.spec, index)


def _map_ipc_memory(pool: Pool, attachment: CudaIpcAttachment, index: int) -> KvPool:
    if len(attachment.allocations) != 1:
        raise PoolMismatch(f"attachment: expected 1 allocation, the pool has {len(attachment.allocations)}")
    device, size = CudaDevice(index), pool_bytes(pool.spec)
    device.require(attachment.device_uuid)
    pointer = device.open(attachment.allocations[0].handle, size)
    mapping = CudaMapping(pointer, size, partial(device.close, pointer))
    return pool_on_device(mapping, pool.spec, index)
