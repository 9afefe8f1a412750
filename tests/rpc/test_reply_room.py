"""A small request cannot ask for an answer that is larger than a message may be, and nothing happens when it tries."""

from __future__ import annotations

import pytest

from radixpool.radix import Namespace
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import Client, Step
from radixpool.rpc.errors import LimitExceeded

NUM_BLOCKS = 50_000
PROMPT = list(range(40_000))
VIEW_BYTES = 4 * 40_000 + 4 * 10_000  # the tokens, and the table of 10,000 blocks
FITTING = limits.MAX_MESSAGE_BYTES // VIEW_BYTES


@pytest.fixture
def client(make_server):
    with Client(make_server(num_blocks=NUM_BLOCKS).address) as client:
        yield client


def test_one_sequence_many_times_is_answered_as_far_as_a_message_goes(client):
    """4,096 times 16 bytes asked for 800 MB, built under the manager's lock."""
    with client.acquire(PROMPT) as seq:
        views = client.get_block_tables([seq.handle] * limits.MAX_HANDLES_PER_QUERY).sequences
        fitting = [view for view in views if isinstance(view, ops.SequenceView)]
        assert 0.6 * FITTING < len(fitting) <= FITTING
        assert fitting[-1].block_table.tolist() == seq.block_table.tolist()
        refused = views[len(fitting) :]
        assert {type(error) for error in refused} == {LimitExceeded}
        with pytest.raises(
            LimitExceeded, match=f"the limit is {limits.MAX_MESSAGE_BYTES} bytes.*takes up to {VIEW_BYTES}"
        ):
            raise refused[0]


def test_many_queries_in_one_batch_share_its_reply(client):
    with client.acquire(PROMPT) as seq, client.session() as session:
        query = ops.GetBlockTables((seq.handle,) * 10)
        results = session.batch([query] * 100)
        answered = [view for result in results if isinstance(result, ops.BlockTables) for view in result.sequences]
        assert 0.9 * FITTING < sum(isinstance(view, ops.SequenceView) for view in answered) <= FITTING
        assert session.batch([query])[0].sequences[9].tokens.tolist() == PROMPT, "the next reply has room again"


def test_errors_count_too(client):
    missing = ops.GetBlockTables((b"?" * 16,) * limits.MAX_HANDLES_PER_QUERY)
    results = client.batch([missing] * 50)
    answered = [type(result) for result in results].index(LimitExceeded)
    assert 0 < answered < limits.MAX_MESSAGE_BYTES / (limits.MAX_HANDLES_PER_QUERY * 100)
    assert [type(result) for result in results[answered:]] == [LimitExceeded] * (50 - answered)


def test_forks_whose_tables_do_not_fit_are_refused_as_a_whole(client):
    """They were made, and nobody ever learned their handles."""
    with client.acquire(PROMPT) as seq:
        seq.commit(len(PROMPT))
        held = client.stats().cache
        with pytest.raises(LimitExceeded, match="reply"):
            client.fork(seq.handle, 250)
        assert isinstance(client.batch([ops.Fork(seq.handle, 250)])[0], LimitExceeded)
        assert client.stats().cache == held
        for fork in client.fork(seq.handle, 60).forks:
            client.release(fork.handle)
        assert client.stats().cache.num_sequences == 1


def test_a_reserve_whose_table_does_not_fit_is_refused(make_server, monkeypatch):
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 100_000)
    with Client(make_server(num_blocks=NUM_BLOCKS).address) as client:
        with pytest.raises(LimitExceeded, match="100000"):
            client.acquire([1], reserve=4 * 30_000)
        with client.acquire([1]) as seq:
            with pytest.raises(LimitExceeded, match="100000"):
                seq.reserve(4 * 30_000)
            assert client.stats().cache.held_blocks == 1


def test_a_commit_whose_remaps_do_not_fit_is_refused_before_it_happens(make_server, monkeypatch):
    """Every block may be there already. It was committed, and nobody learned which blocks had taken their place."""
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 100_000)
    with Client(make_server(num_blocks=NUM_BLOCKS).address) as client:
        first, second = client.acquire(PROMPT), client.acquire(PROMPT)
        with pytest.raises(LimitExceeded, match="100000"):
            first.commit(len(PROMPT))
        for sequence in (first, second):
            for upto in range(10_000, len(PROMPT) + 1, 10_000):
                sequence.commit(upto)
        assert second.block_table.tolist() == first.block_table.tolist()
        assert client.batch([ops.Commit(second.handle, len(PROMPT))])[0].committed_tokens == len(PROMPT)
        third = client.acquire(PROMPT, max_hit=0)
        stepped = client.step(Step(handles=[third.handle], commit_upto_tokens=[len(PROMPT)]))
        assert isinstance(stepped.errors[0], LimitExceeded)
        assert stepped.committed_tokens.tolist() == [0]
        stepped = client.step(Step(handles=[third.handle], commit_upto_tokens=[8_000]))
        assert (stepped.errors, stepped.committed_tokens.tolist()) == ({}, [8_000])
        third.release(commit_upto=len(PROMPT))  # its answer has no remaps


def test_a_step_whose_new_blocks_do_not_fit_is_refused_as_a_whole(make_server, monkeypatch):
    """With small blocks the answer is larger than the request; it was run, and its answer never came."""
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 100_000)
    with Client(make_server(num_blocks=NUM_BLOCKS, block_size=1).address) as client, client.session() as session:
        (acquired,) = session.batch([ops.Acquire([1])])
        (refused,) = session.batch([ops.Extend(acquired.handle, [1] * 25_000)])
        assert isinstance(refused, LimitExceeded)
        step = Step(handles=[acquired.handle], tokens=[1] * 12_500, token_counts=[12_500])
        with pytest.raises(LimitExceeded, match="100000"):
            session.step(step)
        assert client.stats().cache.held_blocks == 1
        assert session.step(Step(handles=[acquired.handle], tokens=[1])).num_tokens.tolist() == [2]


def test_a_tree_is_shown_as_far_as_a_message_goes(client, monkeypatch):
    for first in range(4):
        with client.acquire([first, *PROMPT]) as seq:
            seq.commit(len(PROMPT))
    assert len(client.inspect_tree().nodes) == 4
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 100_000)
    view = client.inspect_tree()
    assert (len(view.nodes), view.total_nodes) == (2, 4)


def test_long_namespaces_count_in_a_tree_too(client, monkeypatch):
    for number in range(60):
        namespace = Namespace("m" * 500, "r" * 500, "a" * 500, tenant=f"t{number}")
        with client.acquire(PROMPT[:8], namespace=namespace) as seq:
            seq.commit(8)
    assert len(client.inspect_tree().nodes) == 60
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 50_000)
    view = client.inspect_tree()
    assert 25 < len(view.nodes) < 50_000 / 1500
    assert view.total_nodes == 60
