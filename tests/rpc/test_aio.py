"""The asyncio client: the same behaviour as the blocking one."""

from __future__ import annotations

import asyncio

import pytest

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import NO_RETRY, AsyncClient, ClientOptions
from radixpool.rpc.errors import Fenced, ManagerUnavailable

PROMPT = list(range(10))


async def test_the_life_of_a_request(server):
    async with AsyncClient(server.address) as client:
        async with await client.acquire(PROMPT, reserve=2) as first:
            assert (first.cached_tokens, len(first.block_table)) == (0, 3)
            await first.extend([1, 2, 3])
            await first.reserve(8)
            assert (first.num_tokens, len(first.block_table)) == (13, 6)
            assert (await first.commit(13)).committed_tokens == 13
            (view,) = (await client.get_block_tables([first.handle])).sequences
            assert view.block_table.tolist() == first.block_table.tolist()
        assert (await client.match(PROMPT)).cached_tokens == 8
        assert (await client.info()).block_size == 4
        assert (await client.stats()).cache.num_sequences == 0


async def test_a_release_can_commit_before(server):
    async with AsyncClient(server.address) as client:
        seq = await client.acquire(PROMPT)
        await seq.release(commit_upto=10)
        assert (await client.match(PROMPT)).cached_tokens == 8
        assert (await client.stats()).cache.num_sequences == 0


async def test_refusals_are_raised_as_themselves(server):
    async with AsyncClient(server.address) as client:
        with pytest.raises(PoolExhausted, match="248"):
            await client.acquire(range(992))
        with pytest.raises(UnknownSequence):
            await client.release(b"?" * 16)
        with pytest.raises(ValueError, match="empty"):
            await client.acquire([])


async def test_batches_and_sessions(server):
    async with AsyncClient(server.address) as client:
        acquired, missing = await client.batch([ops.Acquire(PROMPT), ops.Release(b"?" * 16)])
        assert isinstance(missing, UnknownSequence)
        async with await client.session() as session:
            tasks = [session.batch([ops.Match([n]), ops.Commit(acquired.handle, 10)]) for n in range(20)]
            for matched, committed in await asyncio.gather(*tasks):
                assert (matched, committed.committed_tokens) == (ops.Matched(0), 10)
            assert await session.batch([ops.Release(acquired.handle)]) == [ops.Released()]


async def test_a_fenced_client_loses_its_stream(server):
    async with AsyncClient(server.address) as client, await client.session() as session:
        await session.batch([])
        for lease in list(server.engine.leases):
            server.engine.leases.end(lease.client_id)
        for _ in range(2):
            with pytest.raises(Fenced):
                await session.batch([ops.Match([1])])
        async with await client.session() as another:
            assert await another.batch([ops.Match([1])]) == [ops.Matched(0)]


async def test_the_lease_is_kept_by_the_background_task(make_server):
    server = make_server(lease_ttl_ms=3000)
    async with AsyncClient(server.address) as client:
        seq = await client.acquire(PROMPT)
        (lease,) = server.engine.leases
        granted = lease.deadline
        await _until(lambda: lease.deadline > granted)
        await seq.release()
    assert server.engine.expired_leases == 0


async def test_closing_ends_the_lease(server):
    client = AsyncClient(server.address, options=ClientOptions(name="aio"))
    await client.acquire(PROMPT)
    assert [lease.name for lease in server.engine.leases] == ["aio"]
    await client.close()
    await client.close()
    assert len(server.engine.leases) == 0


async def test_nobody_at_the_address(socket_dir):
    async with AsyncClient(f"unix:{socket_dir}/none.sock", options=ClientOptions(retry=NO_RETRY)) as client:
        with pytest.raises(ManagerUnavailable, match=r"none\.sock"):
            await client.acquire(PROMPT)


async def test_what_a_cancelled_acquire_brings_is_released(server):
    async with AsyncClient(server.address) as client:
        seq = await client.acquire(PROMPT)
        await seq.commit(8)
        held_blocks = server.engine.cache.stats().held_blocks
        for change in (lambda: client.acquire(PROMPT), lambda: client.fork(seq.handle, 3), seq.reacquire):
            before = _next_sequence_id(server)
            with server.engine.lock:
                await _cancel(change())
            await _until(lambda: not client._under_way)
            assert len(server.engine.handles) == 1
            assert server.engine.cache.stats().held_blocks == held_blocks
            assert _next_sequence_id(server) > before + 1, "the call was carried out"
        assert (await client.match(PROMPT)).cached_tokens == 8


async def test_a_cancelled_release_is_carried_out(server):
    async with AsyncClient(server.address) as client:
        seq = await client.acquire(PROMPT)
        with server.engine.lock:
            await _cancel(seq.release())
        await _until(lambda: len(server.engine.handles) == 0)


async def test_a_session_goes_on_after_a_cancelled_batch(server):
    options = ClientOptions(retry=NO_RETRY)
    async with AsyncClient(server.address, options=options) as client, await client.session() as session:
        await session.batch([])
        with server.engine.lock:
            await _cancel(session.batch([ops.Match([1]), ops.Match([2])]))
        assert await session.batch([ops.Match([1])]) == [ops.Matched(0)]


async def test_closing_while_calls_are_under_way(server):
    client = AsyncClient(server.address, options=ClientOptions(timeout_s=0.5))
    await client.acquire(PROMPT)
    with server.engine.lock:
        await _cancel(client.acquire(PROMPT))
        await client.close()
    await _until(lambda: len(server.engine.leases) == len(server.engine.handles) == 0)


def _next_sequence_id(server) -> int:
    with server.engine.lock:
        probe = server.engine.cache.acquire(PROMPT)
        server.engine.cache.release(probe)
        return probe.handle


async def _cancel(call) -> None:
    """Cancel a call that has been sent; the server is held up meanwhile."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
