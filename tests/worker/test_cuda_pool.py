"""The pool on a GPU, up to the driver's door: what is asked of libcuda, and what is said when it refuses.

Memory is shared by descriptor where the driver can, else by CUDA IPC; the played driver can if `by_descriptor`.

The driver is played by a table of its functions, so that every refusal can be had on a machine without a GPU. That
memory is really shared is tested on one, in test_on_gpu.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixpool.rpc.cli.device_option import pool_dtype
from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.pool import cuda
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool.cuda import CudaDevice, CudaUnavailable, HandleRefused, shared_bytes
from radixpool.rpc.pool.cuda_descriptor import map_descriptor, unmap
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import pool_bytes
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool.memory import PoolMemoryError
from radixpool.rpc.pool.sockets import DescriptorRefused, receive_descriptor
from radixpool.rpc.pool_types import (
    CudaFdAttachment,
    CudaIpcAllocation,
    CudaIpcAttachment,
    KvDtype,
    Pool,
    PoolLayout,
    PoolSpec,
)

GPU = Device(0)
UUID = bytes(range(16))
HANDLE = bytes(range(100, 164))
BASE = 0x7F0000000000
SPEC = PoolSpec(
    model="m", revision="r", num_layers=2, num_kv_heads=3, head_dim=5, block_size=7, num_blocks=11,
    dtype=KvDtype.BFLOAT16, layout=PoolLayout.HND,
)  # fmt: skip


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


class Driver:
    """The functions of libcuda that the pool calls. `refusing` maps a function to the code that it returns."""

    def __init__(self, *, gpus=1, free=1 << 30, mapped_bytes=1 << 21, by_descriptor=False, **refusing):
        self.gpus = gpus
        self.by_descriptor = by_descriptor
        self.handles = {}
        self.mapped = {}
        self.reserved = {}
        self.memory = free
        self.mapped_bytes = mapped_bytes
        self.refusing = refusing
        self.calls = []
        self.contexts = 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            self.calls.append(name)
            if name in self.refusing:
                return self.refusing[name]
            return getattr(self, f"do_{name}", lambda *_: 0)(*arguments) or 0

        return function

    def do_cuGetErrorName(self, code, name):
        known = {
            1: b"CUDA_ERROR_INVALID_VALUE",
            2: b"CUDA_ERROR_OUT_OF_MEMORY",
            100: b"CUDA_ERROR_NO_DEVICE",
            201: b"CUDA_ERROR_INVALID_CONTEXT",
        }
        name._obj.value = known.get(code.value)
        return int(code.value not in known)

    def do_cuDeviceGetCount(self, count):
        count._obj.value = self.gpus

    def do_cuDeviceGetUuid_v2(self, uuid, device):
        ctypes.memmove(ctypes.byref(uuid._obj), UUID, 16)

    def do_cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = self.memory, 2 * self.memory

    def do_cuMemAlloc_v2(self, pointer, size):
        pointer._obj.value = BASE
        self.memory -= size.value

    def do_cuIpcGetMemHandle(self, handle, pointer):
        assert pointer.value == BASE
        ctypes.memmove(ctypes.byref(handle._obj), HANDLE, 64)

    def do_cuIpcOpenMemHandle_v2(self, pointer, handle, flags):
        assert bytes(handle) == HANDLE
        assert flags.value == 1
        pointer._obj.value = BASE

    def do_cuMemGetAddressRange_v2(self, base, size, pointer):
        base._obj.value, size._obj.value = BASE, self.mapped_bytes

    def do_cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute.value in (102, 103)
        value._obj.value = int(self.by_descriptor)

    def do_cuMemCreate(self, handle, size, kind, flags):
        made = kind._obj
        assert (made.type, made.handle_types, made.location.type, made.location.id) == (1, 1, 1, 0)
        assert size.value % (2 << 20) == 0
        handle._obj.value = 900 + len(self.calls)
        self.handles[handle._obj.value] = size.value

    def do_cuMemExportToShareableHandle(self, descriptor, handle, kind, flags):
        assert self.handles[handle.value]
        descriptor._obj.value = os.memfd_create("played", 0)
        os.ftruncate(descriptor._obj.value, self.handles[handle.value])

    def do_cuMemImportFromShareableHandle(self, handle, descriptor, kind):
        handle._obj.value = 900 + len(self.calls)
        self.handles[handle._obj.value] = os.fstat(descriptor.value).st_size

    def do_cuMemRelease(self, handle):
        del self.handles[handle.value]

    def do_cuMemAddressReserve(self, pointer, size, *_):
        pointer._obj.value = BASE
        self.reserved[BASE] = size.value

    def do_cuMemAddressFree(self, pointer, size):
        assert self.reserved.pop(pointer.value) == size.value
        assert not self.mapped

    def do_cuMemMap(self, pointer, size, offset, handle, flags):
        if size.value > self.handles[handle.value]:
            return 1
        self.mapped[pointer.value] = size.value
        return 0

    def do_cuMemUnmap(self, pointer, size):
        assert self.mapped.pop(pointer.value) == size.value

    def do_cuMemsetD8_v2(self, pointer, value, size):
        assert not self.by_descriptor or self.mapped[pointer.value] == size.value

    def do_cuCtxPushCurrent_v2(self, context):
        self.contexts += 1

    def do_cuCtxPopCurrent_v2(self, context):
        self.contexts -= 1


@pytest.fixture
def use_driver(monkeypatch):
    def use(driver):
        monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
        return driver

    return use


@pytest.mark.parametrize(
    ("text", "device"), [("cpu", CPU), ("cuda", Device(0)), ("cuda:0", Device(0)), ("cuda:11", Device(11))]
)
def test_devices_are_named_as_torch_names_them(text, device):
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CUDA", "cuda:0:1", "cuda:²"])
def test_a_device_that_is_none_is_named(text):
    with pytest.raises(ValueError, match=rf"device must be cpu, cuda or cuda:N, got '{text}'"):
        Device.parse(text)


@pytest.mark.parametrize(
    ("given", "device", "dtype"),
    [
        (None, CPU, KvDtype.FLOAT32),
        (None, GPU, KvDtype.BFLOAT16),
        ("float32", GPU, KvDtype.FLOAT32),
        ("float16", CPU, KvDtype.FLOAT16),
        ("fp8_e4m3", GPU, KvDtype.FLOAT8_E4M3),
    ],
)
def test_the_element_type_follows_the_device_unless_it_is_given(given, device, dtype):
    assert pool_dtype(given, device) is dtype


def test_memory_is_offered_as_a_descriptor_and_outlives_its_holder(use_driver):
    """What remains of the holder's memory when it has closed is the descriptor of whoever has taken one."""
    driver = use_driver(Driver(by_descriptor=True))
    size = shared_bytes(pool_bytes(SPEC))
    with PoolHolder(SPEC, device=GPU) as holder:
        described = holder.describe()
        assert described.attachment == CudaFdAttachment(UUID, described.attachment.socket_path, size)
        assert "cuMemsetD8_v2" in driver.calls  # nobody reads what was there before
        descriptor = receive_descriptor(described.attachment.socket_path, tag=described.pool_id)
    assert os.fstat(descriptor).st_size == size
    pointer = map_descriptor(CudaDevice(0), descriptor, pool_bytes(SPEC))
    os.close(descriptor)
    assert driver.mapped == {pointer: size}
    unmap(CudaDevice(0), pointer, pool_bytes(SPEC))
    assert driver.handles == driver.mapped == driver.reserved == {}
    assert "cuMemFree_v2" not in driver.calls
    assert driver.contexts == 0


@pytest.mark.parametrize(
    "step",
    ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemsetD8_v2"],
)
def test_memory_that_cannot_be_shared_leaves_nothing_behind(use_driver, step):
    driver = use_driver(Driver(by_descriptor=True, **{step: 2}))
    before = open_files()
    with pytest.raises(PoolMemoryError, match=f"cuda:0: {step} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        PoolHolder(SPEC, device=GPU)
    assert driver.handles == driver.mapped == driver.reserved == {}
    assert open_files() == before
    assert driver.contexts == 0


def test_a_descriptor_of_less_memory_is_not_mapped(use_driver):
    driver = use_driver(Driver(by_descriptor=True))
    descriptor = os.memfd_create("small")
    try:
        with pytest.raises(PoolMemoryError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE"):
            map_descriptor(CudaDevice(0), descriptor, 1)
    finally:
        os.close(descriptor)
    assert driver.handles == driver.mapped == driver.reserved == {}


def test_a_descriptor_is_asked_for_only_by_the_right_gpu(use_driver):
    driver = use_driver(Driver(by_descriptor=True))
    with PoolHolder(SPEC, device=GPU) as holder:
        described = holder.describe()
        moved = dataclasses.replace(described.attachment, device_uuid=b"\xab" * 16)
        with pytest.raises(PoolMismatch, match=f"the pool lies on GPU-{'ab' * 16}"):
            attach(dataclasses.replace(described, attachment=moved), expected=SPEC, device=GPU)
        with pytest.raises(PoolMismatch, match="the pool lies in the memory of a GPU, this worker runs on cpu"):
            attach(described, expected=SPEC)
    assert driver.calls.count("cuMemImportFromShareableHandle") == 1  # the holder's own, to fill it with zeros
    with pytest.raises(DescriptorRefused):
        attach(described, expected=SPEC, device=GPU)


def test_by_cuda_ipc_the_holder_offers_a_handle_of_64_bytes(use_driver):
    driver = use_driver(Driver())
    with PoolHolder(SPEC, device=GPU) as holder:
        size = shared_bytes(pool_bytes(SPEC))
        assert holder.describe().attachment == CudaIpcAttachment(UUID, (CudaIpcAllocation(HANDLE, size),))
        assert driver.memory == (1 << 30) - size
        assert "cuMemsetD8_v2" in driver.calls  # nobody reads what was there before
    assert "cuMemFree_v2" not in driver.calls, "workers may map it still: the end of the process frees it"
    assert driver.contexts == 0, "a context is still current that was not before"


def test_memory_whose_handle_cannot_be_had_is_given_back(use_driver):
    driver = use_driver(Driver(cuIpcGetMemHandle=201))
    with pytest.raises(PoolMemoryError, match="cuda:0: cuIpcGetMemHandle failed: CUDA_ERROR_INVALID_CONTEXT"):
        PoolHolder(SPEC, device=GPU)
    assert driver.calls.count("cuMemFree_v2") == 1
    assert driver.contexts == 0


def test_a_pool_larger_than_the_gpu_is_refused_before_it_is_made(use_driver):
    driver = use_driver(Driver(free=1 << 20))
    with pytest.raises(PoolMemoryError, match=r"needs 0\.00 GiB, cuda:0 has 0\.00 GiB free; use fewer blocks"):
        PoolHolder(SPEC, device=GPU)
    assert "cuMemAlloc_v2" not in driver.calls


def test_no_driver_on_this_machine(monkeypatch):
    monkeypatch.setattr(cuda, "_LIBRARY", "libcuda-that-is-not-here.so.1")
    cuda._load_driver.cache_clear()
    with pytest.raises(CudaUnavailable, match=r"there is no CUDA driver here: libcuda-that-is-not-here\.so\.1"):
        PoolHolder(SPEC, device=GPU)


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (Driver(cuInit=100), "device cuda:0: the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"),
        (Driver(cuInit=777), "device cuda:0: the CUDA driver does not start: error 777"),
        (Driver(gpus=0), "device cuda:0: this process sees 0 GPUs"),
    ],
)
def test_no_gpu_on_this_machine(use_driver, driver, message):
    use_driver(driver)
    with pytest.raises(CudaUnavailable, match=message):
        CudaDevice(0)


def test_a_gpu_that_is_not_there_is_named(use_driver):
    use_driver(Driver(gpus=2))
    CudaDevice(1)
    with pytest.raises(CudaUnavailable, match="device cuda:2: this process sees 2 GPUs, numbered from 0"):
        CudaDevice(2)


def offered(**changes):
    attachment = CudaIpcAttachment(UUID, (CudaIpcAllocation(HANDLE, shared_bytes(pool_bytes(SPEC))),))
    return Pool(bytes(16), SPEC, dataclasses.replace(attachment, **changes))


def test_a_pool_on_another_gpu_is_refused_before_it_is_mapped(use_driver):
    driver = use_driver(Driver())
    with pytest.raises(PoolMismatch, match=f"the pool lies on GPU-{'ab' * 16}, cuda:0 of this process is"):
        attach(offered(device_uuid=b"\xab" * 16), expected=SPEC, device=GPU)
    assert "cuIpcOpenMemHandle_v2" not in driver.calls


def test_a_handle_that_the_driver_does_not_open_may_be_tried_again(use_driver):
    """Its holder is gone: the worker waits for the next one, as for a socket that nobody serves."""
    driver = use_driver(Driver(cuIpcOpenMemHandle_v2=201))
    with pytest.raises(HandleRefused, match=r"cuda:0 cannot map the pool \(CUDA_ERROR_INVALID_CONTEXT\): its holder"):
        attach(offered(), expected=SPEC, device=GPU)
    assert driver.contexts == 0


def test_memory_that_is_smaller_than_the_pool_is_unmapped_again(use_driver):
    driver = use_driver(Driver(mapped_bytes=4096))
    with pytest.raises(PoolMemoryError, match=f"the pool's memory has 4096 bytes, expected {pool_bytes(SPEC)}"):
        attach(offered(), expected=SPEC, device=GPU)
    assert driver.calls.count("cuIpcCloseMemHandle") == 1
    assert driver.contexts == 0


def test_memory_whose_size_cannot_be_had_is_unmapped_again(use_driver):
    driver = use_driver(Driver(cuMemGetAddressRange_v2=201))
    with pytest.raises(PoolMemoryError, match="cuMemGetAddressRange_v2 failed: CUDA_ERROR_INVALID_CONTEXT"):
        attach(offered(), expected=SPEC, device=GPU)
    assert driver.calls.count("cuIpcCloseMemHandle") == 1
    assert driver.contexts == 0


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_handle_of_another_length_never_reaches_the_driver(use_driver, length):
    driver = use_driver(Driver())
    with pytest.raises(ValueError, match=f"handle must be 64 bytes, got {length}"):
        CudaDevice(0).open(bytes(length), 1)
    assert "cuIpcOpenMemHandle_v2" not in driver.calls


@pytest.mark.parametrize("count", [0, 2])
def test_a_pool_in_pieces_is_refused(use_driver, count):
    driver = use_driver(Driver())
    with pytest.raises(PoolMismatch, match=f"attachment: expected 1 allocation, the pool has {count}"):
        attach(offered(allocations=offered().attachment.allocations * count), expected=SPEC, device=GPU)
    assert driver.calls == []


def test_a_pool_of_the_cpu_is_none_for_a_worker_on_a_gpu(use_driver):
    driver = use_driver(Driver())
    with (
        PoolHolder(SPEC) as holder,
        pytest.raises(PoolMismatch, match="the pool lies in the memory of the CPU, this worker runs on cuda:0"),
    ):
        attach(holder.describe(), expected=SPEC, device=GPU)
    assert driver.calls == []


def test_a_pool_that_does_not_fit_is_named_before_the_driver_is_asked(use_driver):
    driver = use_driver(Driver())
    with pytest.raises(PoolMismatch, match="num_blocks: expected 12, pool has 11"):
        attach(offered(), expected=dataclasses.replace(SPEC, num_blocks=12), device=GPU)
    assert driver.calls == []


def test_a_holder_needs_no_torch():
    code = "import sys, radixpool.rpc.pool.cli; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
