"""The door to a GPU: the driver's own library (libcuda), no torch, no toolkit; and memory shared by CUDA IPC.

By CUDA IPC a process exports a handle of 64 bytes, and any process of the same machine that sees the same GPU opens it
and reads and writes the very same memory. That memory is its maker's: CUDA leaves undefined what others find after it
was freed. So it is for GPUs whose memory cannot be shared by descriptor, see `cuda_descriptor.py`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc import limits
from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.pool.memory import PoolMemoryError

_LIBRARY = "libcuda.so.1"
_GRANULE_BYTES = 2 << 20
"""Smaller allocations may share one, and a handle opens the whole of it."""
_LAZY_PEER_ACCESS = 1


class CudaUnavailable(RadixPoolError):
    """There is no CUDA driver here, or not the GPU that was asked for."""


class HandleRefused(RadixPoolError):
    """The driver does not open a handle: the process that allocated the memory is gone, or out of this one's reach."""


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * limits.CUDA_IPC_HANDLE_BYTES)]


class CudaDevice:
    """One GPU, by its number in this process. Uses the primary context, as torch does, and keeps it.

    Pointers are plain integers. Raises `CudaUnavailable`.
    """

    def __init__(self, index: int, driver: Any = None) -> None:
        self._driver = driver or _load_driver()
        self._index = index
        code = self._driver.cuInit(0)
        if code:
            raise CudaUnavailable(f"device cuda:{index}: the CUDA driver does not start: {self._reason(code)}")
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= index < count.value:
            raise CudaUnavailable(f"device cuda:{index}: this process sees {count.value} GPUs, numbered from 0")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        uuid = (ctypes.c_ubyte * limits.DEVICE_UUID_BYTES)()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._device = device
        self._context = context
        self._uuid = bytes(uuid)

    @property
    def number(self) -> int:
        """Return the driver's number of this GPU."""
        return self._device.value

    @property
    def uuid(self) -> bytes:
        """Return the 16 bytes that name this GPU everywhere."""
        return self._uuid

    def require(self, uuid: bytes) -> None:
        """Raise `PoolMismatch` unless this is the GPU named `uuid`."""
        if self._uuid != uuid:
            raise PoolMismatch(
                f"device: the pool lies on GPU-{uuid.hex()}, cuda:{self._index} of this process is "
                f"GPU-{self._uuid.hex()}; choose it with --device or CUDA_VISIBLE_DEVICES"
            )

    def attribute(self, number: int) -> int:
        """Return an attribute of the GPU (CU_DEVICE_ATTRIBUTE_...)."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self._device)
        return value.value

    def free_bytes(self) -> int:
        """Return how much memory could be allocated now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def require_free(self, size_bytes: int) -> None:
        """Raise `PoolMemoryError` unless `size_bytes` could be allocated now."""
        free = self.free_bytes()
        if size_bytes > free:
            raise PoolMemoryError(
                f"the pool needs {size_bytes / 2**30:.2f} GiB, cuda:{self._index} has {free / 2**30:.2f} GiB free; "
                "use fewer blocks (num_blocks) or a smaller dtype"
            )

    def allocate(self, size_bytes: int) -> int:
        """Return the address of `shared_bytes(size_bytes)` zero bytes of their own. Raises `PoolMemoryError`."""
        size = shared_bytes(size_bytes)
        self.require_free(size)
        pointer = ctypes.c_uint64()
        with self.current():
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            self.call("cuCtxSynchronize")
        return pointer.value

    def free(self, pointer: int) -> None:
        """Free what `allocate` returned. CUDA does not define what a process that still has it open finds there."""
        with self.current():
            self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        """Return the handle by which other processes open the memory that `allocate` returned."""
        handle = _IpcHandle()
        with self.current():
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, handle: bytes, size_bytes: int) -> int:
        """Return the address of another process's memory, at least `size_bytes` of it by the driver's word.

        Raises `HandleRefused`, or `PoolMemoryError` when there is less of it.
        """
        if len(handle) != limits.CUDA_IPC_HANDLE_BYTES:
            raise ValueError(f"handle must be {limits.CUDA_IPC_HANDLE_BYTES} bytes, got {len(handle)}")
        pointer, base, actual = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        passed = _IpcHandle.from_buffer_copy(handle)
        with self.current():
            code = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), passed, ctypes.c_uint(_LAZY_PEER_ACCESS))
            if code:
                raise HandleRefused(
                    f"cuda:{self._index} cannot map the pool ({self._reason(code)}): its holder is gone, or in another "
                    "container whose memory this one must not see"
                )
            try:
                self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(actual), pointer)
            except PoolMemoryError:
                self.close(pointer.value)
                raise
        end = base.value + actual.value
        if pointer.value + size_bytes > end:
            self.close(pointer.value)
            raise PoolMemoryError(f"the pool's memory has {end - pointer.value} bytes, expected {size_bytes}")
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap what `open` returned, once nothing on the GPU uses it any more."""
        with self.current():
            self.call("cuCtxSynchronize")
            self.call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU's context the thread's for the time being."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises `PoolMemoryError` with its name and the reason."""
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise PoolMemoryError(f"cuda:{self._index}: {name} failed: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        name = ctypes.c_char_p()
        known = not self._driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        return name.value.decode() if known and name.value else f"error {code}"


def shared_bytes(size_bytes: int) -> int:
    """Return how much to allocate for `size_bytes` that are to be shared: a multiple of 2 MiB.

    >>> shared_bytes(1), shared_bytes(4 << 20)
    (2097152, 4194304)
    """
    return -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES


@functools.cache
def _load_driver() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaUnavailable(f"there is no CUDA driver here: {error}") from error
