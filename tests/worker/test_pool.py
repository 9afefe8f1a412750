"""The pool's memory between processes that know nothing of each other, and what is left when one is killed."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from radixpool.rpc.errors import AddressInUse, AddressUnavailable, PoolMismatch
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool.geometry import pool_bytes, pool_shape, require_complete
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool.memory import PoolMemoryError, available_memory_bytes, create_memfd, map_memfd
from radixpool.rpc.pool.sockets import DescriptorRefused, DescriptorServer, receive_descriptor
from radixpool.rpc.pool_types import CudaIpcAttachment, KvDtype, MemfdAttachment, Pool, PoolLayout, PoolSpec

SPEC = PoolSpec(
    model="m",
    revision="r",
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
    block_size=7,
    num_blocks=11,
    dtype=KvDtype.FLOAT32,
    layout=PoolLayout.HND,
)


@pytest.fixture
def short_dir():
    """A directory whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_two_mappings_see_the_same_bytes():
    with PoolHolder(SPEC) as holder:
        first, second = attach(holder.describe(), expected=SPEC), attach(holder.describe(), expected=SPEC)
        assert all(tensor.shape == (11, 3, 7, 5) for tensor in (*first.k, *first.v))
        first.v[1][4, 2, 6, 3] = 1.5
        assert second.v[1][4, 2, 6, 3] == 1.5
        assert torch.count_nonzero(second.k[0]) == torch.count_nonzero(second.k[1]) == 0


FP8 = dataclasses.replace(SPEC, dtype=KvDtype.FLOAT8_E4M3, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("dtype", KvDtype)
def test_every_layer_is_apart_in_every_dtype(dtype):
    spec = FP8 if dtype is KvDtype.FLOAT8_E4M3 else dataclasses.replace(SPEC, dtype=dtype)
    with PoolHolder(spec) as holder:
        pool = attach(holder.describe(), expected=spec)
        for number, tensor in enumerate((*pool.k, *pool.v), 1):
            tensor.fill_(number)
        assert [int(tensor.float().unique()) for tensor in (*pool.k, *pool.v)] == [1, 2, 3, 4]
        assert pool.k[0].dtype is getattr(torch, dtype.value)
        assert pool.scales == ({"k_scale": 0.5, "v_scale": 2.0} if spec is FP8 else {})


ATTACH_AND_HANG = """
import sys, time
sys.path[:0] = {path!r}
from radixpool.rpc.pool.attach import attach
from radixpool.rpc.pool_types import *
spec = PoolSpec(model="m", revision="r", num_layers=2, num_kv_heads=3, head_dim=5, block_size=7, num_blocks=11,
                dtype=KvDtype.FLOAT32, layout=PoolLayout.HND)
pool = attach(Pool(bytes.fromhex({pool_id!r}), spec, MemfdAttachment({socket!r}, {size})), expected=spec)
pool.k[0][3] = 2.5
print("attached", flush=True)
time.sleep(60)
"""


def test_a_killed_worker_leaves_the_pool_and_its_bytes_usable(named_memory_of):
    with PoolHolder(SPEC) as holder:
        description = holder.describe()
        code = ATTACH_AND_HANG.format(
            path=sys.path,
            pool_id=description.pool_id.hex(),
            socket=description.attachment.socket_path,
            size=pool_bytes(SPEC),
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
            assert worker.stdout.readline() == b"attached\n"
            assert named_memory_of(worker.pid) == named_memory_of(os.getpid()) == []
            worker.kill()
        assert torch.all(attach(description, expected=SPEC).k[0][3] == 2.5)


def test_a_mapping_outlives_its_holder():
    with PoolHolder(SPEC) as holder:
        pool = attach(holder.describe(), expected=SPEC)
    pool.k[0].fill_(1)
    assert pool.k[0].sum() == pool.k[0].numel()
    with pytest.raises(DescriptorRefused):
        attach(holder.describe(), expected=SPEC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("revision", "x"),
        ("num_layers", 3),
        ("head_dim", 4),
        ("dtype", KvDtype.FLOAT16),
        ("k_scale", 1.0),
    ],
)
def test_a_pool_that_does_not_fit_is_named_field_by_field(field, value):
    with PoolHolder(SPEC) as holder:
        expected = dataclasses.replace(SPEC, **{field: value})
        with pytest.raises(PoolMismatch, match=rf"{field}: expected .*, pool has"):
            attach(holder.describe(), expected=expected)


def test_an_attachment_of_another_kind_is_refused():
    pool = Pool(bytes(16), SPEC, CudaIpcAttachment(bytes(16), ()))
    with pytest.raises(PoolMismatch, match="device: the pool lies in the memory of a GPU, this worker runs on cpu"):
        attach(pool, expected=SPEC)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"])
def test_a_size_of_zero_is_named(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        require_complete(dataclasses.replace(SPEC, **{field: 0}))


def test_a_pool_without_a_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, fp8_e4m3, got None"):
        require_complete(dataclasses.replace(SPEC, dtype=None))


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive number for fp8, got {value}"):
        require_complete(dataclasses.replace(FP8, **{field: value}))


def test_a_scale_is_for_fp8_only():
    with pytest.raises(ValueError, match=r"k_scale must be 0 for float32, got 1\.5"):
        require_complete(dataclasses.replace(SPEC, k_scale=1.5))


def test_a_pool_larger_than_the_memory_is_refused_before_it_is_made():
    with pytest.raises(PoolMemoryError, match=r"needs 2\.00 GiB, but only 1\.00 GiB"):
        create_memfd(2 << 30, available_bytes=1 << 30)


def test_the_memory_of_a_container_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert available_memory_bytes(tmp_path) == 1_024_000
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("500000\n")
    (cgroup / "memory.current").write_text("200000\n")
    assert available_memory_bytes(tmp_path) == 300_000
    (cgroup / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) == 1_024_000


def test_the_memory_cannot_be_resized_by_anybody():
    descriptor = create_memfd(4096)
    try:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def test_memory_that_could_shrink_is_not_mapped(tmp_path):
    descriptor = os.memfd_create("unsealed")
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for wrong in (descriptor, plain):
            os.ftruncate(wrong, 4096)
            with pytest.raises(PoolMemoryError, match="seal"):
                map_memfd(wrong, 4096)
            with pytest.raises(PoolMemoryError, match="4096 bytes, expected 8192"):
                map_memfd(wrong, 8192)
    finally:
        os.close(descriptor)
        os.close(plain)


@pytest.fixture
def descriptor():
    number = create_memfd(4096)
    yield number
    os.close(number)


def test_another_pool_at_the_same_address_is_not_taken_for_the_old_one(descriptor):
    server = DescriptorServer("@radixpool-test-tag", descriptor, tag=b"a" * 16)
    try:
        with pytest.raises(DescriptorRefused, match="another pool"):
            receive_descriptor(server.address, tag=b"b" * 16)
        os.close(receive_descriptor(server.address, tag=b"a" * 16))
    finally:
        server.close()


def test_a_path_socket_is_private_and_removed_and_a_stale_one_is_replaced(descriptor, short_dir):
    path = short_dir / "run" / "pool.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:  # bound and gone, as after SIGKILL
        killed.bind(str(path))
    server = DescriptorServer(str(path), descriptor, tag=b"a" * 16)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AddressInUse, match="another process serves"):
        DescriptorServer(str(path), descriptor, tag=b"b" * 16)
    os.close(receive_descriptor(str(path), tag=b"a" * 16))
    server.close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(descriptor, short_dir):
    path = short_dir / "precious"
    path.write_text("data")
    with pytest.raises(AddressUnavailable, match="not a socket"):
        DescriptorServer(str(path), descriptor, tag=b"a" * 16)
    assert path.read_text() == "data"


def test_a_place_where_no_socket_can_be_is_named(descriptor):
    with pytest.raises(AddressUnavailable, match="cannot hand out the pool at /proc/x/y: No such file or directory"):
        DescriptorServer("/proc/x/y", descriptor, tag=b"a" * 16)
    server = DescriptorServer("@radixpool-test-taken", descriptor, tag=b"a" * 16)
    try:
        with pytest.raises(AddressInUse, match="cannot hand out the pool at @radixpool-test-taken"):
            DescriptorServer("@radixpool-test-taken", descriptor, tag=b"a" * 16)
    finally:
        server.close()


def test_a_socket_path_that_is_too_long_is_named(descriptor):
    with pytest.raises(ValueError, match="at most 107"):
        DescriptorServer("/tmp/" + "x" * 120, descriptor, tag=b"a" * 16)


def test_nobody_at_the_address():
    with pytest.raises(DescriptorRefused, match="@radixpool-nobody"):
        receive_descriptor("@radixpool-nobody", tag=bytes(16))


def test_a_holder_short_of_descriptors_hands_out_again_later(monkeypatch, descriptor):
    """It said nothing and never handed the pool out again."""
    accept, refused = socket.socket.accept, []

    def accept_later(listener):
        if not refused:
            refused.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    server = DescriptorServer("@radixpool-test-short", descriptor, tag=b"a" * 16)
    try:
        os.close(receive_descriptor(server.address, tag=b"a" * 16))
    finally:
        server.close()
    assert refused


def test_a_peer_that_hangs_up_disturbs_nobody(descriptor):
    server = DescriptorServer("@radixpool-test-hangup", descriptor, tag=b"a" * 16)
    try:
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect("\0radixpool-test-hangup")
        os.close(receive_descriptor(server.address, tag=b"a" * 16))
    finally:
        server.close()


def test_the_shape_is_what_the_design_says():
    assert pool_shape(SPEC) == (2, 2, 11, 3, 7, 5)
    assert pool_bytes(SPEC) == 2 * 2 * 11 * 3 * 7 * 5 * 4
    with PoolHolder(SPEC) as holder:
        assert holder.describe().attachment == MemfdAttachment(
            holder.describe().attachment.socket_path, pool_bytes(SPEC)
        )
