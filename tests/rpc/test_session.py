"""Streams of batches: order, errors by operation, limits, and how a stream ends."""

from __future__ import annotations

import threading

import pytest

from radixpool.radix import UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.errors import Fenced, LimitExceeded

PROMPT = list(range(10))


def test_many_batches_over_one_stream(client):
    with client.session() as session:
        (acquired,) = session.batch([ops.Acquire(PROMPT, reserve=40)])
        for step in range(40):
            extended, committed = session.batch(
                [ops.Extend(acquired.handle, [step]), ops.Commit(acquired.handle, 10 + step)]
            )
            assert extended.num_tokens == 11 + step
            assert committed.committed_tokens == 10 + step
        assert session.batch([ops.Release(acquired.handle)]) == [ops.Released()]
    assert client.match([*PROMPT, *range(40)]).cached_tokens == 48


def test_an_operation_that_fails_does_not_end_the_stream(client):
    with client.session() as session:
        (error,) = session.batch([ops.Release(b"?" * 16)])
        assert isinstance(error, UnknownSequence)
        assert session.batch([ops.Match(PROMPT)]) == [ops.Matched(0)]
        assert session.batch([]) == []


def test_a_malformed_operation_never_leaves_the_client(client):
    with client.session() as session:
        with pytest.raises(TypeError, match="operations"):
            session.batch(["acquire"])
        assert session.batch([ops.Match(PROMPT)]) == [ops.Matched(0)]


def test_batches_of_many_threads_get_their_own_answers(client):
    with client.session() as session:

        def work(index: int, wrong: list[int]) -> None:
            for length in range(1, 30):
                (result,) = session.batch([ops.Acquire([index] * length)])
                if len(result.block_table) != -(-length // 4):
                    wrong.append(length)
                session.batch([ops.Release(result.handle)])

        wrong: list[int] = []
        threads = [threading.Thread(target=work, args=(index, wrong)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_too_many_operations_end_the_stream_with_the_limit(client):
    with client.session() as session, pytest.raises(ValueError, match=str(limits.MAX_BATCH_OPERATIONS)):
        session.batch([ops.Match([1])] * (limits.MAX_BATCH_OPERATIONS + 1))
    assert client.stats().service.open_sessions == 0


def test_a_fenced_client_loses_its_stream(server, client):
    with client.session() as session:
        session.batch([])
        for lease in list(server.engine.leases):
            server.engine.leases.end(lease.client_id)
        for _ in range(2):
            with pytest.raises(Fenced):
                session.batch([ops.Match([1])])
    with client.session() as another:
        assert another.batch([ops.Match([1])]) == [ops.Matched(0)]


def test_the_number_of_streams_is_limited_and_calls_still_answer(client, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SESSIONS", 3)
    sessions = [client.session() for _ in range(3)]
    for session in sessions:
        session.batch([])
    with client.session() as extra, pytest.raises(LimitExceeded, match="3"):
        extra.batch([])
    assert client.match(PROMPT).cached_tokens == 0
    for session in sessions:
        session.close()


def test_a_closed_stream_frees_its_place(server, client, eventually):
    session = client.session()
    session.batch([])
    assert server.engine.sessions.taken == 1
    session.close()
    eventually(lambda: server.engine.sessions.taken == 0)


def test_an_interrupted_batch_leaves_no_answer_for_the_next_one(client, monkeypatch):
    """Ctrl-C, or a signal handler that raises, between sending a batch and reading its answer."""
    with client.session() as session:
        session.batch([])
        stream = session._stream

        def interrupted():
            stream._replies = replies
            raise KeyboardInterrupt
            yield

        replies, stream._replies = stream._replies, interrupted()
        with pytest.raises(KeyboardInterrupt):
            session.batch([ops.Match([1]), ops.Match([2])])
        assert session.batch([ops.Match([1])]) == [ops.Matched(0)]
