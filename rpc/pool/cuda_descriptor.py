"""GPU memory behind a file descriptor, as a memfd is memory of the CPU behind one (CUDA's virtual memory management).

Whoever is given the descriptor maps the memory; it lives until the last descriptor is closed and the last mapping is
gone. CUDA promises that of `cuMemRelease`, and the kernel closes what a killed process had open, so nobody's end can
take the memory from under a process that maps it, and nothing stays behind.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack

from radixpool.rpc.pool.cuda import CudaDevice, shared_bytes

_CAN_MAP, _CAN_EXPORT_DESCRIPTORS = 102, 103
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""
_PINNED = _ON_DEVICE = _DESCRIPTOR = 1
_READ_WRITE = 3
_NO_FLAGS = ctypes.c_uint64(0)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def is_supported(device: CudaDevice) -> bool:
    """Whether memory of this GPU can be shared by descriptor."""
    return bool(device.attribute(_CAN_MAP) and device.attribute(_CAN_EXPORT_DESCRIPTORS))


def create(device: CudaDevice, size_bytes: int) -> int:
    """Return a descriptor of `shared_bytes(size_bytes)` zero bytes of their own. Raises `PoolMemoryError`."""
    size = shared_bytes(size_bytes)
    device.require_free(size)
    kind = _Allocation(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, device.number))
    handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
    with device.current(), ExitStack() as stack:
        device.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(kind), _NO_FLAGS)
        stack.callback(device.call, "cuMemRelease", handle)  # the descriptor keeps the memory
        device.call(
            "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, ctypes.c_int(_DESCRIPTOR), _NO_FLAGS
        )
    try:
        pointer = map_descriptor(device, descriptor.value, size)
        with ExitStack() as stack, device.current():
            stack.callback(unmap, device, pointer, size)
            device.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(size))
    except BaseException:
        os.close(descriptor.value)
        raise
    os.set_inheritable(descriptor.value, False)
    return descriptor.value


def map_descriptor(device: CudaDevice, descriptor: int, size_bytes: int) -> int:
    """Return the address of the `shared_bytes(size_bytes)` bytes behind a descriptor, to read and write.

    The caller keeps the descriptor; the mapping does not need it. Raises `PoolMemoryError`, also for fewer bytes.
    """
    size, handle, pointer = ctypes.c_size_t(shared_bytes(size_bytes)), ctypes.c_uint64(), ctypes.c_uint64()
    access = _Access(_Location(_ON_DEVICE, device.number), _READ_WRITE)
    with device.current(), ExitStack() as always, ExitStack() as on_failure:
        device.call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_DESCRIPTOR),
        )
        always.callback(device.call, "cuMemRelease", handle)  # the mapping keeps the memory
        device.call(
            "cuMemAddressReserve", ctypes.byref(pointer), size, ctypes.c_size_t(0), ctypes.c_uint64(0), _NO_FLAGS
        )
        on_failure.callback(device.call, "cuMemAddressFree", pointer, size)
        device.call("cuMemMap", pointer, size, ctypes.c_size_t(0), handle, _NO_FLAGS)
        on_failure.callback(device.call, "cuMemUnmap", pointer, size)
        device.call("cuMemSetAccess", pointer, size, ctypes.byref(access), ctypes.c_size_t(1))
        on_failure.pop_all()
    return pointer.value


def unmap(device: CudaDevice, pointer: int, size_bytes: int) -> None:
    """Undo `map_descriptor`, once nothing on the GPU uses the memory any more."""
    address, size = ctypes.c_uint64(pointer), ctypes.c_size_t(shared_bytes(size_bytes))
    with device.current():
        device.call("cuCtxSynchronize")
        device.call("cuMemUnmap", address, size)
        device.call("cuMemAddressFree", address, size)
