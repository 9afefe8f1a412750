"""How a worker finds the pool, and what happens to the cache when the pool's bytes are gone."""

from __future__ import annotations

import dataclasses
import os

import pytest

from radixpool.rpc.client import ClientRole
from radixpool.rpc.errors import Fenced, PoolMismatch, PoolUnavailable
from radixpool.rpc.pool_types import (
    CudaFdAttachment,
    CudaIpcAllocation,
    CudaIpcAttachment,
    KvDtype,
    MemfdAttachment,
    Pool,
    PoolLayout,
    PoolSpec,
)
from radixpool.v1 import pool_pb2

SPEC = PoolSpec(
    model="m",
    revision="r",
    num_layers=2,
    num_kv_heads=3,
    head_dim=8,
    block_size=4,
    num_blocks=64,
    dtype=KvDtype.FLOAT32,
    layout=PoolLayout.HND,
)
MEMFD = MemfdAttachment("/run/pool.sock", 4096)
CUDA = CudaIpcAttachment(b"u" * 16, (CudaIpcAllocation(b"h" * 64, 1 << 21),))
CUDA_FD = CudaFdAttachment(b"u" * 16, "@pool", 1 << 21)


def make_pool(**changes) -> Pool:
    return dataclasses.replace(Pool(os.urandom(16), SPEC, MEMFD), **changes)


@pytest.fixture
def holder(make_client):
    return make_client(name="holder", role=ClientRole.POOL_HOLDER)


@pytest.mark.parametrize("attachment", [MEMFD, CUDA, CUDA_FD], ids=["memfd", "cuda_ipc", "cuda_fd"])
def test_a_worker_gets_what_the_holder_announced(holder, client, attachment):
    assert client.get_pool() is None
    pool = make_pool(attachment=attachment)
    holder.register_pool(pool)
    assert client.get_pool() == pool
    assert client.attach_pool(SPEC) == pool
    assert client.attach_pool(PoolSpec(model="m")) == pool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 16}, "head_dim: the pool has 8, the worker needs 16"),
        ({"model": "other"}, "model: the pool has 'm', the worker needs 'other'"),
        ({"dtype": KvDtype.BFLOAT16}, "dtype: the pool has KV_DTYPE_FLOAT32, the worker needs KV_DTYPE_BFLOAT16"),
    ],
)
def test_a_worker_that_needs_another_pool_is_told_the_field(holder, client, change, message):
    holder.register_pool(make_pool())
    with pytest.raises(PoolMismatch) as refusal:
        client.attach_pool(dataclasses.replace(SPEC, **change))
    assert str(refusal.value) == message


def test_without_a_pool(client):
    with pytest.raises(PoolUnavailable, match="radixpool pool"):
        client.attach_pool(SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "block_size: the pool has 8, the manager serves 4"),
        ({"num_blocks": 65}, "num_blocks: the pool has 65, the manager serves 64"),
    ],
)
def test_a_pool_of_another_size_than_the_manager_is_refused(holder, change, message):
    with pytest.raises(PoolMismatch) as refusal:
        holder.register_pool(make_pool(spec=dataclasses.replace(SPEC, **change)))
    assert str(refusal.value) == message
    assert holder.get_pool() is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pool_id": b"short"}, "pool_id"),
        ({"spec": dataclasses.replace(SPEC, num_layers=0)}, "num_layers"),
        ({"spec": dataclasses.replace(SPEC, dtype=None)}, "dtype"),
        ({"spec": dataclasses.replace(SPEC, layout=None)}, "layout"),
        ({"attachment": MemfdAttachment("", 1)}, "socket_path"),
        ({"attachment": CudaIpcAttachment(b"u" * 16, ())}, "allocations"),
        ({"attachment": CudaIpcAttachment(b"u", CUDA.allocations)}, "device_uuid"),
        ({"attachment": CudaFdAttachment(b"u", "@pool", 1 << 21)}, "cuda_fd.device_uuid"),
        ({"attachment": CudaFdAttachment(b"u" * 16, "", 1 << 21)}, "cuda_fd.socket_path"),
        ({"spec": dataclasses.replace(SPEC, k_scale=1.0)}, "k_scale must be 0 unless dtype is fp8, got 1.0"),
        ({"spec": dataclasses.replace(SPEC, dtype=KvDtype.FLOAT8_E4M3, k_scale=1.0)}, "v_scale must be a positive"),
    ],
)
def test_malformed_pools_name_the_field(holder, change, field):
    with pytest.raises(ValueError, match=field):
        holder.register_pool(make_pool(**change))
    assert holder.get_pool() is None


def test_a_cuda_handle_of_the_wrong_length_is_refused_on_both_sides(holder, server):
    with pytest.raises(ValueError, match="64 bytes"):
        CudaIpcAllocation(b"short", 1)
    request = pool_pb2.RegisterPoolRequest(
        pool=pool_pb2.Pool(
            pool_id=b"p" * 16,
            spec=pool_pb2.PoolSpec(
                num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, num_blocks=64, dtype=1, layout=1
            ),
            attachment=pool_pb2.PoolAttachment(
                cuda_ipc=pool_pb2.CudaIpcAttachment(
                    device_uuid=b"u" * 16, allocations=[pool_pb2.CudaIpcAllocation(handle=b"x" * 65)]
                )
            ),
        )
    )
    holder.acquire([1]).release()  # registers the client
    request.header.CopyFrom(holder._identity.bare_header())
    with pytest.raises(ValueError, match="64 bytes, got 65"):
        server.engine.register_pool(request, pool_pb2.RegisterPoolResponse())


def test_the_pool_is_forgotten_with_its_holder(make_client, client):
    holder = make_client()
    holder.register_pool(make_pool())
    holder.close()
    assert client.get_pool() is None


def test_a_second_pool_beside_a_living_one_is_refused(holder, make_client):
    holder.register_pool(make_pool())
    with pytest.raises(PoolMismatch, match="pool_id"):
        make_client().register_pool(make_pool())


def test_the_same_pool_keeps_the_cache_and_another_one_empties_it(make_client, client):
    pool, prompt = make_pool(), list(range(10))
    first = make_client()
    first.register_pool(pool)
    with client.acquire(prompt) as seq:
        seq.commit(10)
    first.close()
    second = make_client()
    second.register_pool(pool)
    assert client.match(prompt).cached_tokens == 8
    generation = client.info().generation
    held = client.acquire(prompt)
    second.close()

    third = make_client()
    third.register_pool(make_pool())
    assert client.info().generation == generation + 1
    assert client.match(prompt).cached_tokens == 0
    with pytest.raises(Fenced):
        client.commit(held.handle, 10)
    assert third.stats().cache.free_blocks == 64
    third.acquire(prompt).release()
    assert third.check().violations == ()


def test_what_was_committed_before_there_was_a_pool_is_not_in_it(holder, client):
    """A worker would have read blocks that nobody had written."""
    prompt = list(range(10))
    with client.acquire(prompt) as seq:
        seq.commit(10)
    assert client.match(prompt).cached_tokens == 8
    holder.register_pool(make_pool())
    assert client.match(prompt).cached_tokens == 0
    assert client.check().violations == ()


def test_what_was_only_acquired_before_there_was_a_pool_goes_on(holder, client):
    seq = client.acquire(list(range(10)))
    generation = client.info().generation
    holder.register_pool(make_pool())
    seq.commit(10)
    seq.release()
    assert client.match(list(range(10))).cached_tokens == 8
    assert client.info().generation == generation
