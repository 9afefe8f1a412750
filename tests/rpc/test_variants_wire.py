"""Rewind, fork, invalidate, copy-on-write hits, media and waiting for a producer, over the wire."""

from __future__ import annotations

import threading
import time

import pytest

from radixpool.radix import UnknownSequence
from radixpool.radix.media import MediaSpan
from radixpool.rpc import operations as ops
from radixpool.rpc.client import AsyncClient

PROMPT = list(range(10))


def test_rewind_shortens_tokens_and_table(client):
    with client.acquire(PROMPT) as seq:
        seq.commit(10)
        seq.extend([1, 2, 3, 4, 5])
        seq.rewind(11)
        assert (seq.num_tokens, len(seq.block_table)) == (11, 3)
        (view,) = client.get_block_tables([seq.handle]).sequences
        assert view.tokens.tolist() == [*PROMPT, 1]
        assert view.block_table.tolist() == seq.block_table.tolist()
        with pytest.raises(ValueError, match="8"):
            seq.rewind(7)


def test_row_35_a_fork_shares_full_blocks_and_copies_the_tail(client):
    with client.acquire(PROMPT) as seq:
        seq.commit(10)
        forked = client.fork(seq.handle, 2)
        tables = [fork.block_table.tolist() for fork in forked.forks]
        assert all(table[:2] == seq.block_table[:2].tolist() for table in tables)
        tails = [table[2] for table in tables]
        assert len({*tails, int(seq.block_table[2])}) == 3
        assert [(copy.src, copy.dst, copy.num_tokens) for copy in forked.copies] == [
            (seq.block_table[2], tail, 2) for tail in tails
        ]
        for fork in forked.forks:
            client.extend(fork.handle, [7])
            client.release(fork.handle)
        with pytest.raises(ValueError, match="n"):
            client.fork(seq.handle, 0)
    assert client.stats().cache.num_sequences == 0


def test_forks_belong_to_the_caller(client, make_client, eventually):
    seq = client.acquire(PROMPT)
    other = make_client()
    (fork,) = other.fork(seq.handle).forks
    other.close()
    with pytest.raises(UnknownSequence):
        client.extend(fork.handle, [1])
    eventually(lambda: client.stats().cache.num_sequences == 1)


def test_row_12_bad_data_is_not_findable_and_holders_are_told(client):
    with client.acquire(PROMPT) as first:
        first.commit(10)
        with client.acquire(PROMPT) as second:
            assert client.invalidate(first.handle, 1) == ops.Invalidated(1, 0, 2)
            assert client.match(PROMPT).cached_tokens == 4
            (view,) = client.get_block_tables([second.handle]).sequences
            assert view.invalid_from_block == 1
            assert second.extend([1]).invalid_from_block == 1
            with pytest.raises(ValueError, match="block"):
                client.invalidate(first.handle, 9)
    assert client.stats().cache.cached_blocks == 1


def test_partial_hits_come_with_a_copy_order(client):
    with client.acquire(PROMPT) as seq:
        seq.commit(10)
    with client.acquire([*PROMPT[:6], 99, 98, 97], partial=True) as seq:
        assert seq.cached_tokens == 6
        (copy,) = seq.copies
        assert (copy.dst, copy.num_tokens) == (seq.block_table[1], 2)


def test_media_are_part_of_the_key(client):
    cat, dog = ([MediaSpan(4, 4, digest)] for digest in (b"cat", b"dog"))
    with client.acquire(PROMPT, media=cat) as seq:
        seq.commit(10)
    with client.acquire(PROMPT, media=cat) as same, client.acquire(PROMPT, media=dog) as other:
        assert (same.cached_tokens, other.cached_tokens) == (8, 4)
    with pytest.raises(ValueError, match="media"):
        client.acquire(PROMPT, media=[MediaSpan(8, 4, b"late")])


def test_row_22_a_waiter_holds_nothing_and_hits_when_the_producer_commits(client, make_client):
    producer = client.acquire(PROMPT)
    (pending,) = client.batch([ops.Acquire([*PROMPT, 5, 6], in_flight=ops.InFlight.WAIT)])
    assert pending == ops.Pending(0, 8)
    assert client.stats().cache.num_sequences == 1
    threading.Timer(0.1, producer.commit, (10,)).start()
    with make_client().acquire([*PROMPT, 5, 6], wait_s=10) as waiter:
        assert waiter.cached_tokens == 8
    producer.release()


def test_row_22_a_waiter_becomes_the_producer_when_the_first_one_gives_up(client, make_client):
    producer = client.acquire(PROMPT)
    threading.Timer(0.1, producer.release).start()
    with make_client().acquire([*PROMPT, 5, 6], wait_s=10) as waiter:
        assert waiter.cached_tokens == 0


def test_a_waiter_computes_it_itself_when_the_time_is_over(client):
    with client.acquire(PROMPT):
        start = time.monotonic()
        with client.acquire(PROMPT, wait_s=0.1) as waiter:
            assert waiter.cached_tokens == 0
        assert time.monotonic() - start >= 0.1


async def test_the_asyncio_client_has_them_too(server):
    async with AsyncClient(server.address) as client, await client.acquire(PROMPT) as seq:
        await seq.commit(10)
        await seq.extend([1, 2, 3])
        await seq.rewind(10)
        (fork,) = (await client.fork(seq.handle)).forks
        await client.release(fork.handle)
        assert (await client.invalidate(seq.handle, 0)).removed_blocks == 2
        async with await client.acquire([77, *PROMPT], wait_s=1) as other:
            assert other.cached_tokens == 0
