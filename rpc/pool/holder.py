"""The process that owns the pool's memory: it allocates, hands the memory out, and outlives workers and manager."""

from __future__ import annotations

import logging
import os
import secrets
from types import TracebackType
from typing import Protocol, Self

from radixpool.rpc.failpoints import failpoint
from radixpool.rpc.pool import cuda_descriptor
from radixpool.rpc.pool.cuda import CudaDevice, shared_bytes
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import pool_bytes, require_complete
from radixpool.rpc.pool.memory import create_memfd
from radixpool.rpc.pool.sockets import DescriptorServer
from radixpool.rpc.pool_types import (
    Attachment,
    CudaFdAttachment,
    CudaIpcAllocation,
    CudaIpcAttachment,
    MemfdAttachment,
    Pool,
    PoolSpec,
)

log = logging.getLogger(__name__)
_ALLOCATED = failpoint("holder.allocated")


class HeldMemory(Protocol):
    """Memory that this process owns and others map."""

    @property
    def attachment(self) -> Attachment:
        """Return how another process maps it."""
        ...

    def close(self) -> None:
        """Stop handing it out and give it up."""
        ...


class SharedMemory:
    """Memory behind a descriptor, handed out over a unix socket: a memfd, or memory of a GPU."""

    def __init__(self, descriptor: int, address: str, *, tag: bytes, attachment: Attachment) -> None:
        self.attachment = attachment
        self._descriptor = descriptor
        try:
            self._server = DescriptorServer(address, descriptor, tag=tag)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Stop handing it out; it is freed when no worker maps it any more."""
        self._server.close()
        os.close(self._descriptor)


class IpcMemory:
    """Memory of a GPU that is shared by CUDA IPC: whoever has the handle and sees the GPU can map it.

    It is freed by the end of this process, never before: CUDA leaves undefined what a process that maps it finds then.
    """

    def __init__(self, size_bytes: int, device: CudaDevice) -> None:
        self.pointer = device.allocate(size_bytes)
        try:
            allocation = CudaIpcAllocation(device.export(self.pointer), shared_bytes(size_bytes))
        except BaseException:
            device.free(self.pointer)
            raise
        self.attachment: Attachment = CudaIpcAttachment(device.uuid, (allocation,))

    def close(self) -> None:
        """Leave it to the end of the process."""


class PoolHolder:
    """Own one allocation of `pool_bytes(spec)` on `device` and serve it to workers of this user until closed.

    `pool_id` is new for every allocation, so that cached metadata never outlives the bytes that it describes. The
    memory is freed when the holder has closed *and* no worker maps it any more, but see `IpcMemory`. Raises
    `PoolMemoryError` when memory is short, `CudaUnavailable` without such a GPU.
    """

    def __init__(self, spec: PoolSpec, *, socket_address: str | None = None, device: Device = CPU) -> None:
        require_complete(spec)
        self._spec = spec
        self._pool_id = secrets.token_bytes(16)
        address = socket_address or f"@radixpool-pool-{secrets.token_hex(16)}"
        self._memory = _held(pool_bytes(spec), device, address, tag=self._pool_id)
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


def _held(size_bytes: int, device: Device, address: str, *, tag: bytes) -> HeldMemory:
    """Allocate on `device` and begin to hand out."""
    attachment: Attachment
    if device.cuda_index is None:
        descriptor, attachment = create_memfd(size_bytes), MemfdAttachment(address, size_bytes)
        return SharedMemory(descriptor, address, tag=tag, attachment=attachment)
    gpu = CudaDevice(device.cuda_index)
    if not cuda_descriptor.is_supported(gpu):
        log.warning("%s: its memory cannot be shared by descriptor, so it is shared by CUDA IPC", device)
        return IpcMemory(size_bytes, gpu)
    descriptor = cuda_descriptor.create(gpu, size_bytes)
    attachment = CudaFdAttachment(gpu.uuid, address, shared_bytes(size_bytes))
    return SharedMemory(descriptor, address, tag=tag, attachment=attachment)
