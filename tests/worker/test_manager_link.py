"""A worker's link to its manager, while the pool is replaced under it at the worst moments."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.manager import ManagerOptions, ManagerServer
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker import manager_link
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.manager_link import ManagerLink
from radixpool.rpc.worker.model_source import ModelSource, pool_spec_for

SOURCE = ModelSource(
    name="m",
    revision="r",
    directory=Path("/nowhere"),
    gguf_file=None,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    context_tokens=64,
    vocab_size=50,
)
SPEC = pool_spec_for(SOURCE, num_blocks=16, block_size=4, dtype=KvDtype.FLOAT32)


@pytest.fixture
def server():
    with tempfile.TemporaryDirectory(prefix="rpl", dir="/tmp") as folder:
        server = ManagerServer(ManagerOptions(listen=f"unix:{folder}/m.sock", num_blocks=16, block_size=4))
        server.start()
        yield server
        server.stop(0)


@pytest.fixture
def replace_pool(server):
    """Let a new holder take the place of the one before; returns the id of its pool."""
    holders = []

    def replace():
        for client, _ in holders[-1:]:
            client.close()
        client = Client(server.address, options=ClientOptions(role=ClientRole.POOL_HOLDER))
        holder = PoolHolder(SPEC)
        holders.append((client, holder))
        client.register_pool(holder.describe())
        return holder.describe().pool_id

    yield replace
    for client, holder in holders:
        client.close()
        holder.close()


@pytest.fixture
def link(server, replace_pool):
    replace_pool()
    link = ManagerLink(server.address, SOURCE, name="w", stop=threading.Event())
    yield link
    link.close()


def once(action):
    """Return a function that does `action` the first time."""
    done = []

    def act():
        if not done:
            done.append(action())

    return act


def test_a_pool_replaced_before_it_is_mapped_is_never_seen(link, replace_pool, monkeypatch):
    ids = []
    monkeypatch.setattr(manager_link, "_REGISTERED", once(lambda: ids.append(replace_pool())))
    link.connect(5)
    assert link.pool_id == ids[0]


def test_who_has_mapped_a_pool_that_is_replaced_is_fenced(link, replace_pool, monkeypatch):
    """Or it would write to memory that nobody reads, and others would read what nobody wrote."""
    ids = []
    monkeypatch.setattr(manager_link, "_ATTACHED", once(lambda: ids.append(replace_pool())))
    link.connect(5)
    assert link.pool_id != ids[0]
    with pytest.raises(CacheLost):
        link.batch([ops.Acquire([1, 2, 3])], steps=ops.StepReport(0, 1))
    link.connect(5)
    assert link.pool_id == ids[0]
    (acquired,) = link.batch([ops.Acquire([1, 2, 3])], steps=ops.StepReport(0, 1))
    assert isinstance(acquired, ops.Acquired)
