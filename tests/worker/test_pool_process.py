"""The pool holder as a process: it comes after one that was killed, and nothing but another pool ends it."""

from __future__ import annotations

import logging
import tempfile
import threading
import time

import pytest

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.errors import Fenced, LimitExceeded, ManagerUnavailable, PoolMismatch, Unauthenticated
from radixpool.rpc.manager import ManagerOptions, ManagerServer
from radixpool.rpc.pool.holder import PoolHolder
from radixpool.rpc.pool.process import HolderOptions, HolderProcess
from radixpool.rpc.pool_types import KvDtype, PoolLayout, PoolSpec

LEASE_MS = 300


def make_spec(num_blocks: int, block_size: int) -> PoolSpec:
    return PoolSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=KvDtype.FLOAT32,
        layout=PoolLayout.HND,
    )


@pytest.fixture
def server(request):
    lease_ms = getattr(request, "param", LEASE_MS)
    with tempfile.TemporaryDirectory(prefix="rph", dir="/tmp") as folder:
        options = ManagerOptions(listen=f"unix:{folder}/m.sock", num_blocks=16, block_size=4, lease_ttl_ms=lease_ms)
        server = ManagerServer(options)
        server.start()
        yield server
        server.stop(0)


@pytest.fixture
def other(server):
    """A holder that is there already."""
    with (
        Client(server.address, options=ClientOptions(role=ClientRole.POOL_HOLDER)) as client,
        PoolHolder(make_spec(16, 4)) as holder,
    ):
        client.register_pool(holder.describe())
        yield client


def run(server, on_ready):
    """Run a holder until it is ready; return what ended it, None when it was stopped."""
    stop = threading.Event()

    def ready(holder):
        on_ready(holder)
        stop.set()

    try:
        HolderProcess(HolderOptions(manager=server.address), make_spec, stop=stop).run(ready)
    except RadixPoolError as error:
        return error
    return None


def test_a_holder_waits_for_the_lease_of_one_that_was_killed(server, other):
    other._heartbeat.stop()
    found = []
    assert run(server, lambda holder: found.append((holder.describe(), server.engine.pools.pool))) is None
    assert found[0][0].pool_id == found[0][1].pool_id


@pytest.mark.parametrize("server", [1_500], indirect=True)
def test_a_holder_gives_way_to_one_that_lives(server, other):
    error = run(server, lambda _holder: pytest.fail("it is not ready"))
    assert isinstance(error, PoolMismatch)
    assert "another pool is registered and its holder is alive" in str(error)


@pytest.mark.parametrize("server", [60_000], indirect=True)
def test_it_says_what_it_waits_for_and_a_stop_ends_the_wait(server, other, caplog):
    """The other holder lives and will not go, but this one is asked to stop: it ends without an error."""
    stop = threading.Event()
    options = HolderOptions(manager=server.address)
    process = HolderProcess(options, make_spec, stop=stop)
    done = []
    with caplog.at_level(logging.INFO, logger="radixpool.rpc.pool.process"):
        thread = threading.Thread(target=lambda: done.append(process.run(lambda _holder: pytest.fail("not ready"))))
        thread.start()
        deadline = time.monotonic() + 10
        while not caplog.records:
            assert time.monotonic() < deadline, "it says nothing"
            time.sleep(0.01)
        time.sleep(0.3)  # several more looks, without a further word
        stop.set()
        thread.join(10)
    assert done == [None]
    (message,) = caplog.messages
    pool_id = server.engine.pools.pool.pool_id.hex()
    assert message.startswith(f"another pool is registered ({pool_id}): waiting up to 6")


def test_a_stop_ends_the_wait_for_a_manager():
    stop = threading.Event()
    process = HolderProcess(HolderOptions(manager="unix:/nobody/here.sock"), make_spec, stop=stop)
    threading.Timer(0.3, stop.set).start()
    assert process.run(lambda _holder: pytest.fail("it is not ready")) is None


class Refusing:
    """A client whose manager knows no pool and refuses every registration."""

    def __init__(self, error):
        self.error = error

    def get_pool(self):
        return None

    def info(self):
        raise self.error


@pytest.mark.parametrize("kind", [ManagerUnavailable, Fenced, LimitExceeded, Unauthenticated])
def test_a_refusal_does_not_end_the_holder_and_the_pool_with_it(kind):
    process = HolderProcess(HolderOptions(manager="unix:/x"), make_spec, stop=threading.Event())
    with PoolHolder(make_spec(16, 4)) as holder:
        process._keep_registered(Refusing(kind("refused")), holder)
        with pytest.raises(PoolMismatch):
            process._keep_registered(Refusing(PoolMismatch("other sizes")), holder)
