"""The process that owns the pool's memory: it allocates, hands the memory out, and outlives workers and manager."""

from __future__ import annotations

import os
import secrets
from types import TracebackType
from typing import Protocol, Self

from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool.cuda import CudaDevice, shared_bytes
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import pool_bytes, require_complete
from radixpool.rpc.pool.memory import create_memfd
from radixpool.rpc.pool.sockets import DescriptorServer
from radixpool.rpc.pool_types import CudaIpcAllocation, CudaIpcAttachment, MemfdAttachment, Pool, PoolSpec

_ALLOCATED = failpoint("holder.allocated")


class HeldMemory(Protocol):
    """Memory that this process owns and others map."""

    @property
    def attachment(self) -> MemfdAttachment | CudaIpcAttachment:
        """Return how another process maps it."""
        ...

    def close(self) -> None:
        """Stop handing it out and give it up."""
        ...


class SharedMemory:
    """One memfd, handed out over a unix socket."""

    def __init__(self, size_bytes: int, *, tag: bytes, socket_address: str | None) -> None:
        self._descriptor = create_memfd(size_bytes)
        try:
            address = socket_address or f"@radixpool-pool-{secrets.token_hex(16)}"
            self._server = DescriptorServer(address, self._descriptor, tag=tag)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.attachment = MemfdAttachment(address, size_bytes)

    def close(self) -> None:
        """Stop handing it out; it is freed when no worker maps it any more."""
        self._server.close()
        os.close(self._descriptor)


class DeviceMemory:
    """One allocation on a GPU. Whoever has the handle and sees the GPU can map it; this process's end frees it."""

    def __init__(self, size_bytes: int, device: CudaDevice) -> None:
        self._device = device
        self._pointer = device.allocate(size_bytes)
        try:
            allocation = CudaIpcAllocation(device.export(self._pointer), shared_bytes(size_bytes))
        except BaseException:
            device.free(self._pointer)
            raise
        self.attachment = CudaIpcAttachment(device.uuid, (allocation,))

    def close(self) -> None:
        """Free it."""
        self._device.free(self._pointer)


class PoolHolder:
    """Own one allocation of `pool_bytes(spec)` on `device` and serve it to workers of this user until closed.

    `pool_id` is new for every allocation, so that cached metadata never outlives the bytes that it describes. Memory of
    the CPU is freed when the holder has closed *and* no worker maps it any more. `socket_address` is for the CPU only.
    Raises `PoolMemoryError` when memory is short, `CudaUnavailable` without such a GPU.
    """

    def __init__(self, spec: PoolSpec, *, socket_address: str | None = None, device: Device = CPU) -> None:
        require_complete(spec)
        self._spec = spec
        self._pool_id = secrets.token_bytes(16)
        self._memory: HeldMemory
        if device.cuda_index is None:
            self._memory = SharedMemory(pool_bytes(spec), tag=self._pool_id, socket_address=socket_address)
        else:
            self._memory = DeviceMemory(pool_bytes(spec), CudaDevice(device.cuda_index))
        _ALLOCATED()
        self._closed = False

    def describe(self) -> Pool:
        """Return what a worker needs to know to map the pool; `pool_id` names this allocation."""
        return Pool(self._pool_id, self._spec, self._memory.attachment)

    def close(self) -> None:
        """Stop handing out the pool and give up its memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
