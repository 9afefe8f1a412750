"""The blocking client against a manager behind a real socket."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from radixpool.radix import BlockState, Namespace, PoolExhausted, UnknownSequence
from radixpool.rpc import operations as ops
from radixpool.rpc.client import NO_RETRY, Client, ClientOptions
from radixpool.rpc.errors import ManagerUnavailable

PROMPT = list(range(100, 110))  # two full blocks of four and a tail


def test_a_prefix_that_was_committed_is_found_again(client):
    with client.acquire(PROMPT) as first:
        assert (first.cached_tokens, first.num_tokens, len(first.block_table)) == (0, 10, 3)
        assert client.match(PROMPT).cached_tokens == 0
        assert first.commit(10).committed_tokens == 10
        with client.acquire(PROMPT) as second:
            assert second.cached_tokens == 8
            assert second.block_table[:2].tolist() == first.block_table[:2].tolist()
            assert second.block_table[2] != first.block_table[2]
    assert client.match(PROMPT).cached_tokens == 8
    cache = client.stats().cache
    assert (cache.cached_blocks, cache.held_blocks, cache.num_sequences) == (2, 0, 0)
    assert (cache.queried_tokens, cache.hit_tokens) == (20, 8)


def test_a_release_can_commit_before(client):
    first, second = client.acquire(PROMPT), client.acquire(PROMPT)
    first.release(commit_upto=10)
    assert client.match(PROMPT).cached_tokens == 8
    second.release(commit_upto=10)  # its own copies are given up for the cached ones
    cache = client.stats().cache
    assert (cache.cached_blocks, cache.free_blocks, cache.num_sequences, cache.remapped_blocks) == (2, 62, 0, 2)
    assert (cache.committed_blocks, client.check().violations) == (2, ())


def test_a_release_in_a_batch_can_commit_before(client):
    acquired, other = client.batch([ops.Acquire(PROMPT), ops.Acquire(range(50, 60))])
    ends = [ops.Release(acquired.handle, commit_upto=10), ops.Release(other.handle, commit_upto=4)]
    assert client.batch([*ends, ops.Match(PROMPT)]) == [ops.Released(), ops.Released(), ops.Matched(8)]
    assert client.match(range(50, 60)).cached_tokens == 4


def test_a_release_whose_commit_is_refused_releases_nothing(client):
    seq = client.acquire(PROMPT)
    with pytest.raises(ValueError, match="upto"):
        seq.release(commit_upto=11)
    assert client.stats().cache.num_sequences == 1
    seq.release(commit_upto=10)
    assert client.match(PROMPT).cached_tokens == 8


def test_a_release_of_what_is_gone_commits_nothing_and_is_no_error(client):
    seq = client.acquire(PROMPT)
    client.release(seq.handle)
    seq.release(commit_upto=10)
    assert client.match(PROMPT).cached_tokens == 0


def test_leaving_the_block_with_an_error_releases_too(client):
    with pytest.raises(RuntimeError, match="mine"), client.acquire(PROMPT):
        raise RuntimeError("mine")
    assert client.stats().cache.free_blocks == 64


def test_extend_and_reserve_keep_the_table_in_step(client):
    with client.acquire(PROMPT) as seq:
        assert seq.reserve(7).appended_blocks.tolist() == seq.block_table[3:].tolist()
        assert len(seq.block_table) == 5
        assert seq.extend([1, 2, 3]).appended_blocks.tolist() == []
        seq.extend([4, 5, 6, 7, 8])
        assert (seq.num_tokens, len(seq.block_table)) == (18, 5)
        (view,) = client.get_block_tables([seq.handle]).sequences
        assert view.tokens.tolist() == [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8]
        assert view.block_table.tolist() == seq.block_table.tolist()


def test_committing_what_is_cached_already_remaps_the_table(client):
    with client.acquire(PROMPT) as first, client.acquire(PROMPT) as second:
        first.commit(10)
        own = second.block_table[:2].tolist()
        remaps = second.commit(10).remaps
        assert [(remap.block_index, remap.from_block) for remap in remaps] == [(0, own[0]), (1, own[1])]
        assert second.block_table[:2].tolist() == first.block_table[:2].tolist()
        (view,) = client.get_block_tables([second.handle]).sequences
        assert view.block_table.tolist() == second.block_table.tolist()


def test_a_handle_works_for_whoever_knows_it(make_client):
    frontend, worker = make_client(), make_client()
    with frontend.acquire(PROMPT) as seq:
        worker.commit(seq.handle, 10)
        worker.extend(seq.handle, [1])
        (view,) = worker.get_block_tables([seq.handle]).sequences
        assert (view.committed_tokens, len(view.tokens), view.cached_tokens) == (10, 11, 0)


@pytest.mark.parametrize(
    "tokens",
    [PROMPT, np.array(PROMPT), np.array(PROMPT, dtype=np.uint32), np.array(PROMPT, dtype="<u4").tobytes()],
    ids=["list", "int64", "uint32", "bytes"],
)
def test_tokens_in_every_form(client, tokens):
    with client.acquire(tokens) as seq:
        seq.commit(10)
    assert client.match(PROMPT).cached_tokens == 8


def test_namespaces_do_not_share(client):
    spaces = [Namespace(adapter="x"), Namespace(cache_salt="x"), Namespace(adapter="x", adapter_generation=2)]
    with client.acquire(PROMPT, namespace=spaces[0]) as seq:
        seq.commit(10)
    assert [client.match(PROMPT, namespace=space).cached_tokens for space in spaces] == [8, 0, 0]
    assert client.match(PROMPT).cached_tokens == 0


def test_max_hit_limits_what_is_reused(client):
    with client.acquire(PROMPT) as seq:
        seq.commit(10)
    assert client.acquire(PROMPT[:8]).cached_tokens == 4
    assert client.acquire(PROMPT[:8], max_hit=8).cached_tokens == 8
    assert client.acquire(PROMPT, max_hit=0).cached_tokens == 0


def test_a_batch_answers_each_operation_by_itself(client):
    (acquired,) = client.batch([ops.Acquire(PROMPT, reserve=4)])
    assert isinstance(acquired, ops.Acquired)
    results = client.batch(
        [
            ops.Extend(acquired.handle, [1, 2]),
            ops.Release(b"?" * 16),
            ops.Commit(acquired.handle, 8),
            ops.Acquire(range(1000)),
            ops.Match(PROMPT),
            ops.Reserve(acquired.handle, 4),
            ops.Acquire([]),
            ops.GetBlockTables((acquired.handle, b"!" * 16)),
            ops.Release(acquired.handle),
        ]
    )
    kinds = [type(result) for result in results]
    assert kinds == [
        ops.Extended,
        UnknownSequence,
        ops.Committed,
        PoolExhausted,
        ops.Matched,
        ops.Reserved,
        ValueError,
        ops.BlockTables,
        ops.Released,
    ]
    assert results[4] == ops.Matched(8)
    view, missing = results[7].sequences
    assert view.tokens.tolist() == [*PROMPT, 1, 2]
    assert isinstance(missing, UnknownSequence)


def test_inspection_explains_what_is_there(client):
    namespace = Namespace(model="m", cache_salt="pepper")
    with client.acquire(PROMPT, namespace=namespace) as seq:
        seq.commit(10)
        view = client.inspect_tree()
        (node,) = view.nodes
        assert (view.total_nodes, view.block_size, node.level, node.holders) == (1, 4, 0, 1)
        assert node.block_ids.tolist() == seq.block_table[:2].tolist()
        assert node.state is BlockState.HELD
        assert node.namespace.model == "m"
        assert node.namespace.cache_salt.startswith("hash:")
        info = client.inspect_sequence(seq.handle)
        assert (info.client_name, info.num_tokens, info.committed_tokens) == ("test", 10, 10)
        assert client.inspect_sequence(info.sequence_id).block_table.tolist() == seq.block_table.tolist()
        assert [found.sequence_id for found in client.list_sequences().sequences] == [info.sequence_id]
        block = client.inspect_block(int(seq.block_table[1]))
        assert (block.state, block.findable, block.block_index) == (BlockState.HELD, True, 1)
        assert [holder.sequence_id for holder in block.holders] == [info.sequence_id]
        (registered,) = client.list_clients()
        assert (registered.name, registered.role, registered.num_sequences) == ("test", "frontend", 1)
    free = client.inspect_block(63)
    assert (free.state, free.findable, free.namespace, free.holders) == (BlockState.FREE, False, None, ())


def test_inspecting_one_namespace_and_a_limited_number(client):
    for name in ("a", "b"):
        for first in range(3):
            with client.acquire([first, 1, 2, 3, 4], namespace=Namespace(model=name)) as seq:
                seq.commit(4)
    assert len(client.inspect_tree(namespace=Namespace(model="a")).nodes) == 3
    limited = client.inspect_tree(max_nodes=2)
    assert (len(limited.nodes), limited.total_nodes) == (2, 6)


def test_reading_needs_no_registration(client):
    client.match(PROMPT)
    client.info()
    assert client.stats().service.num_clients == 0


def test_closing_ends_the_lease_and_gives_everything_back(make_client, eventually):
    watcher, client = make_client(), make_client()
    seq = client.acquire(PROMPT)
    seq.commit(10)
    client.close()
    client.close()
    with pytest.raises(UnknownSequence):
        watcher.commit(seq.handle, 10)
    eventually(lambda: watcher.stats().cache.num_sequences == 0)
    assert watcher.match(PROMPT).cached_tokens == 8


def test_one_client_from_many_threads(client):
    def work(index: int) -> None:
        for round_number in range(10):
            with client.acquire([index, round_number, 1, 2, 3]) as seq:
                seq.commit(5)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.check().violations == ()
    assert client.stats().cache.admitted_requests == 60


def test_nobody_at_the_address(socket_dir):
    address, options = f"unix:{socket_dir}/none.sock", ClientOptions(retry=NO_RETRY)
    with Client(address, options=options) as client, pytest.raises(ManagerUnavailable, match=r"none\.sock"):
        client.info()
