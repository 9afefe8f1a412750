"""Clients of a manager that goes away and comes back: with what pauses, and that nothing happens twice."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from radixpool.radix import UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import AsyncClient, Client, ClientOptions
from radixpool.rpc.client.identity import Identity
from radixpool.rpc.client.retry import NO_RETRY, RetryOptions, call_with_retries, pauses, until_room
from radixpool.rpc.errors import Fenced, ManagerUnavailable
from radixpool.rpc.manager.recovery import GRACE_S

PROMPT = list(range(40))
PATIENT = ClientOptions(retry=RetryOptions(total_s=60))
"""A process may take long to start on a busy machine."""
GONE = (Fenced, UnknownSequence)
"""Fenced, or unknown when the heartbeat was first to learn of the new life and a call registered again."""


def test_pauses_grow_to_the_cap_and_spread():
    exact = [round(pause, 3) for pause in itertools.islice(pauses(RetryOptions(), draw=lambda: 0.5), 14)]
    assert exact == [0.1, 0.15, 0.225, 0.338, 0.506, 0.759, 1.139, 1.709, 2.563, 3.844, 5.0, 5.0, 5.0, 5.0]
    assert next(pauses(RetryOptions(), draw=lambda: 0.0)) == pytest.approx(0.08)
    assert next(pauses(RetryOptions(), draw=lambda: 1.0)) == pytest.approx(0.12)


class Time:
    """A clock that only sleeping moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("total_s", "fewest", "most"), [(0.0, 1, 1), (1.0, 4, 6), (10.0, 8, 12)])
def test_the_total_time_is_kept(total_s, fewest, most):
    clock, attempts = Time(), []

    def attempt() -> None:
        attempts.append(clock.now)
        raise ManagerUnavailable("nobody")

    with pytest.raises(ManagerUnavailable):
        call_with_retries(attempt, RetryOptions(total_s=total_s), clock=clock, sleep=clock.sleep)
    assert fewest <= len(attempts) <= most
    assert attempts[-1] <= total_s


def test_only_silence_is_tried_again():
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise UnknownSequence("x")

    with pytest.raises(UnknownSequence):
        call_with_retries(attempt, RetryOptions())
    assert len(attempts) == 1


def test_headers_acknowledge_what_is_answered():
    identity = Identity(ClientOptions(client_id=b"i" * 16))
    first, second = identity.begin(), identity.begin()
    assert (first.request_id, first.acknowledged_request_id) == (1, 0)
    assert (second.request_id, second.acknowledged_request_id) == (2, 0)
    identity.end(second)
    assert identity.begin().acknowledged_request_id == 0
    identity.end(first)
    assert identity.begin().acknowledged_request_id == 2


def test_ending_an_epoch_leaves_a_later_one_alone():
    identity = Identity(ClientOptions())
    identity.start_epoch(5)
    identity.end_epoch(4)
    assert identity.is_registered
    identity.end_epoch(5)
    assert not identity.is_registered


def test_a_client_id_of_the_wrong_length():
    with pytest.raises(ValueError, match="client_id must be 16 bytes, got 3"):
        ClientOptions(client_id=b"abc")


@pytest.fixture
def listen(socket_dir):
    return ("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64")


def test_calls_wait_for_a_manager_that_comes_back(serve, listen):
    first = serve(*listen)
    with Client(first.address, options=PATIENT) as client:
        seq = client.acquire(PROMPT)
        seq.extend([1, 2])
        incarnation = client.info().incarnation
        first.kill()
        starter = threading.Timer(0.5, serve, listen)
        starter.start()
        assert client.info().incarnation > incarnation
        starter.join()
        with pytest.raises(GONE):
            seq.commit(40)
        seq.reacquire()
        assert (seq.num_tokens, seq.cached_tokens, len(seq.block_table)) == (42, 0, 3)
        seq.commit(42)
        assert client.match(PROMPT).cached_tokens == 32
        assert [info.num_tokens for info in client.list_sequences().sequences] == [42]


def test_an_acquire_goes_out_again_in_a_new_epoch(serve, listen):
    first = serve(*listen)
    with Client(first.address, options=PATIENT) as client:
        client.acquire(PROMPT)
        first.kill()
        serve(*listen)
        with client.acquire(PROMPT) as seq:
            assert seq.num_tokens == 40
        assert client.list_sequences().total_sequences == 0


def test_a_session_outlives_a_broken_stream_but_not_its_epoch(serve, listen):
    first = serve(*listen)
    with Client(first.address, options=PATIENT) as client:
        session = client.session()
        (acquired,) = session.batch([ops.Acquire(PROMPT)])
        session._stream._call.cancel()
        (extended,) = session.batch([ops.Extend(acquired.handle, [1])])
        assert extended.num_tokens == 41
        first.kill()
        serve(*listen)
        with pytest.raises(Fenced):
            session.batch([ops.Extend(acquired.handle, [1])])
        session.close()
        with client.session() as another:
            assert another.batch([ops.Match(PROMPT)]) == [ops.Matched(0)]


def test_a_batch_that_was_interrupted_runs_once(serve, listen):
    manager = serve(*listen)
    with Client(manager.address, options=ClientOptions(timeout_s=0.3, retry=RetryOptions(total_s=60))) as client:
        (acquired,) = client.batch([ops.Acquire(PROMPT)])
        for round_number in range(1, 4):
            manager.process.send_signal(signal.SIGSTOP)
            threading.Timer(0.5, manager.process.send_signal, (signal.SIGCONT,)).start()
            (extended,) = client.batch([ops.Extend(acquired.handle, [7])])
            assert extended.num_tokens == 40 + round_number
        (view,) = client.get_block_tables([acquired.handle]).sequences
        assert len(view.tokens) == 43


async def test_the_asyncio_client_waits_and_registers_again(serve, listen):
    first = serve(*listen)
    async with AsyncClient(first.address, options=PATIENT) as client:
        seq = await client.acquire(PROMPT)
        session = await client.session()
        await session.batch([ops.Match(PROMPT)])
        first.kill()
        starter = threading.Timer(0.5, serve, listen)
        starter.start()
        with pytest.raises(Fenced):
            await session.batch([ops.Match(PROMPT)])
        await asyncio.to_thread(starter.join)
        await seq.reacquire()
        assert (await seq.commit(40)).committed_tokens == 40
        async with await client.session() as another:
            assert await another.batch([ops.Match(PROMPT)]) == [ops.Matched(32)]
        await session.close()


def test_a_client_gives_up_after_its_time(socket_dir):
    options = ClientOptions(retry=RetryOptions(total_s=0.5))
    with Client(f"unix:{socket_dir}/none.sock", options=options) as client:
        start = time.monotonic()
        with pytest.raises(ManagerUnavailable):
            client.info()
        assert 0.2 < time.monotonic() - start < 5


def test_the_background_heartbeat_notices_that_it_is_fenced(make_server, eventually):
    server = make_server(lease_ttl_ms=1500)
    with Client(server.address) as client:
        client.acquire(PROMPT)
        with server.engine.lock:
            for lease in list(server.engine.leases):
                server.engine._bury(server.engine.leases.end(lease.client_id))
        eventually(lambda: not client._identity.is_registered)
        client.acquire(PROMPT)
        (lease,) = server.engine.leases
        granted = lease.deadline
        eventually(lambda: lease.deadline > granted)
        assert client._identity.is_registered


def test_connections_under_way_are_looked_at_often():
    """At gRPC's default, every 5 s, a client whose calls fail at once found a restarted manager after as long."""
    name = "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"
    program = f"import os, radixpool.rpc.client; print(os.environ['{name}'])"
    for own, expected in ({}, "200"), ({name: "77"}, "77"):
        environment = {key: value for key, value in os.environ.items() if key != name} | own
        shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert shown.stdout == f"{expected}\n".encode()


def test_by_default_room_is_waited_for_until_a_former_life_is_over():
    """The fence took 12 s, and callers gave their sequences up after 10."""
    assert until_room(RetryOptions()).total_s > limits.DEFAULT_LEASE_TTL_MS / 1000 + GRACE_S
    assert until_room(NO_RETRY).total_s == 0
