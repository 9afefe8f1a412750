"""Rows of scenarios/control.md where the wire is part of the story: block size 2, letters are tokens."""

from __future__ import annotations

import threading

import pytest

from radixpool.radix import Namespace, PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def connect(make_server):
    clients: list[Client] = []

    def make(num_blocks: int) -> Client:
        clients.append(Client(make_server(num_blocks=num_blocks, block_size=2).address))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def keep(client: Client, text: str, **options) -> None:
    with client.acquire(letters(text), **options) as seq:
        seq.commit(len(text))


def matched(client: Client, text: str, **options) -> int:
    return client.match(letters(text), **options).cached_tokens


def states(client: Client) -> tuple[int, int, int]:
    cache = client.stats().cache
    return cache.free_blocks, cache.cached_blocks, cache.held_blocks


def test_row_01_two_requests_race_for_the_last_blocks(connect):
    client = connect(4)
    for _ in range(10):
        keep(client, "abcd")
        outcomes: dict[str, object] = {}

        def ask(text: str, outcomes: dict[str, object] = outcomes) -> None:
            try:
                outcomes[text] = client.acquire(letters(text), max_hit=4)
            except PoolExhausted as refusal:
                outcomes[text] = refusal

        threads = [threading.Thread(target=ask, args=(text,)) for text in ("abcdefgh", "uvwxyz")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        admitted = [outcome for outcome in outcomes.values() if not isinstance(outcome, PoolExhausted)]
        assert len(admitted) == 1
        assert len(set(admitted[0].block_table.tolist())) == len(admitted[0].block_table)
        admitted[0].release()
        assert client.check().violations == ()


def test_row_02_hit_blocks_do_not_count_as_room_for_their_own_request(connect):
    client = connect(4)
    keep(client, "abcd")
    with pytest.raises(PoolExhausted) as refusal:
        client.acquire(letters("abcdefghij"))
    assert refusal.value.short_blocks == 1
    assert states(client) == (2, 2, 0)
    assert matched(client, "abcd") == 4


def test_row_03_a_refusal_leaves_no_handle_and_no_block(connect):
    client = connect(3)
    with pytest.raises(PoolExhausted):
        client.acquire(letters("abcdefgh"))
    assert states(client) == (3, 0, 0)
    assert client.list_sequences().total_sequences == 0


def test_row_06_nothing_leaks_over_many_lives(connect):
    client = connect(8)
    for _ in range(100):
        keep(client, "abcd")
        assert states(client) == (6, 2, 0)


def test_row_09_nothing_is_findable_before_its_commit(connect):
    client = connect(8)
    with client.acquire(letters("abcd")):
        assert matched(client, "abcd") == 0
    assert matched(client, "abcd") == 0
    assert states(client) == (8, 0, 0)


def test_row_10_an_abort_keeps_what_was_committed(connect):
    client = connect(8)
    with client.acquire(letters("abcdef")) as seq:
        seq.commit(2)
    assert matched(client, "abcdef") == 2
    assert states(client) == (7, 1, 0)


def test_row_13_recomputing_the_last_block_makes_no_second_copy(connect):
    client = connect(8)
    keep(client, "abcd")
    with client.acquire(letters("abcd"), max_hit=3) as seq:
        assert seq.cached_tokens == 2
        assert seq.commit(4).committed_tokens == 4
    assert states(client) == (6, 2, 0)


def test_rows_19_and_20_twins_share_one_copy(connect):
    client = connect(8)
    first, second = client.acquire(letters("abcd")), client.acquire(letters("abcd"))
    first.commit(4)
    assert len(second.commit(4).remaps) == 2
    assert second.block_table.tolist() == first.block_table.tolist()
    first.release()
    second.release()
    assert states(client) == (6, 2, 0)


def test_row_25_a_second_release_changes_nothing(connect):
    client = connect(8)
    seq = client.acquire(letters("abcd"))
    client.release(seq.handle)
    before = client.stats().cache
    with pytest.raises(UnknownSequence):
        client.release(seq.handle)
    assert client.stats().cache == before


def test_row_47_a_salt_is_not_an_adapter(connect):
    client = connect(8)
    keep(client, "ab", namespace=Namespace(adapter="x", adapter_generation=1))
    assert matched(client, "ab", namespace=Namespace(cache_salt="x")) == 0
    assert matched(client, "ab", namespace=Namespace(adapter="x", adapter_generation=2)) == 0
    assert matched(client, "ab", namespace=Namespace(adapter="x", adapter_generation=1)) == 2


def test_row_49_a_release_needs_no_namespace(connect):
    client = connect(8)
    (acquired,) = client.batch([ops.Acquire(letters("abcd"), Namespace(cache_salt="s"))])
    client.release(acquired.handle)
    assert states(client) == (8, 0, 0)
