"""Decode steps in columns: what each row does and answers, what is refused as a whole, fences, remaps, retries."""

from __future__ import annotations

from array import array

import grpc
import numpy as np
import pytest

from radixpool.radix import PoolExhausted, UnknownSequence
from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.rpc.client import AsyncClient, ClientRole, Step
from radixpool.rpc.client.stepping import batch_request, step_update, stepped
from radixpool.rpc.errors import Fenced, ProtocolError
from radixpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

PROMPT = list(range(10))  # two full blocks of four and a half one
UNKNOWN = b"?" * limits.HANDLE_BYTES


@pytest.fixture
def session(client):
    with client.session() as session:
        yield session


@pytest.fixture
def worker(make_client):
    return make_client(name="worker", role=ClientRole.WORKER)


def acquire(session, *prompts: list[int], reserve: int = 0) -> list[bytes]:
    return [result.handle for result in session.batch([ops.Acquire(prompt, reserve=reserve) for prompt in prompts])]


def test_rows_are_extended_and_committed(client, session):
    handles = acquire(session, PROMPT, [7] * 11, [8] * 3)
    uptos = np.array([8, 12, 0], np.uint32)
    result = session.step(Step(handles=handles, tokens=np.array([1, 2, 3], np.uint32), commit_upto_tokens=uptos))
    assert result.num_tokens.tolist() == [11, 12, 4]
    assert result.committed_tokens.tolist() == [8, 12, 0]
    assert (len(result.appended_rows), len(result.remap_rows), len(result.invalid_rows)) == (0, 0, 0)
    assert result.errors == {}
    assert client.match([*[7] * 11, 2]).cached_tokens == 12
    assert client.match(PROMPT).cached_tokens == 8

    result = session.step(Step(handles=handles, tokens=[4, 5, 6]))
    assert result.appended_rows.tolist() == [1, 2]
    tables = client.get_block_tables(handles).sequences
    assert result.appended_blocks.tolist() == [tables[1].block_table[-1], tables[2].block_table[-1]]
    assert [view.tokens.tolist()[-2:] for view in tables] == [[1, 4], [2, 5], [3, 6]]
    with pytest.raises(ValueError, match="read-only"):
        result.num_tokens[0] = 1


def test_rows_may_have_any_number_of_tokens(client, session):
    handles = acquire(session, PROMPT, [7], [8], [9])
    step = Step(
        handles=np.frombuffer(b"".join(handles), np.uint8).reshape(-1, limits.HANDLE_BYTES),
        tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        token_counts=[0, 9, 0, 1],
        commit_upto_tokens=[10, 10, 0, 2],
    )
    result = client.step(step)
    assert result.num_tokens.tolist() == [10, 10, 1, 2]
    assert result.committed_tokens.tolist() == [10, 10, 0, 2]
    assert result.appended_rows.tolist() == [1, 1]
    views = client.get_block_tables(handles).sequences
    assert views[1].tokens.tolist() == [7, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert views[3].tokens.tolist() == [9, 10]


def test_a_row_that_fails_disturbs_no_other(client, session):
    handles = acquire(session, PROMPT, [7] * 9)
    handles.insert(1, UNKNOWN)
    result = session.step(Step(handles=handles, tokens=[1, 1, 1], commit_upto_tokens=[12, 4, 10]))
    assert set(result.errors) == {0, 1}
    assert isinstance(result.errors[0], ValueError)
    assert "upto must be an integer from 0 to 11" in str(result.errors[0])
    assert isinstance(result.errors[1], UnknownSequence)
    assert result.num_tokens.tolist() == [11, 0, 10]
    assert result.committed_tokens.tolist() == [0, 0, 10]


def test_a_row_that_gets_no_block_commits_what_it_can(client, session):
    hungry, other = acquire(session, PROMPT, [7] * 9)
    session.step(Step(handles=[hungry], tokens=[1, 1], token_counts=[2]))
    client.acquire(range(100, 100 + 4 * 58))
    result = session.step(Step(handles=[hungry, other], tokens=[1, 2], commit_upto_tokens=[11, 10]))
    error = result.errors[0]
    assert isinstance(error, PoolExhausted)
    assert (error.needed_blocks, error.num_blocks) == (1, 64)
    assert result.num_tokens.tolist() == [12, 10]
    assert result.committed_tokens.tolist() == [11, 10]
    assert client.match(PROMPT).cached_tokens == 8


def test_operations_go_along_after_the_rows(client, session):
    (handle,) = acquire(session, PROMPT)
    step = Step(handles=[handle], commit_upto_tokens=[8])
    result = session.step(step, [ops.Release(handle), ops.Match(PROMPT), ops.Release(handle)])
    assert result.errors == {}
    assert result.results[:2] == (ops.Released(), ops.Matched(8))
    assert isinstance(result.results[2], UnknownSequence)
    assert session.step(Step(handles=[])).results == ()


def test_twins_are_remapped_and_wait_for_the_step_that_may_read_them(client, worker):
    first = client.acquire(PROMPT)
    with worker.session() as session:
        (second,) = acquire(session, PROMPT)
        session.step(Step(handles=[second]), steps=ops.StepReport(0, 2))
        first.commit(10)
        own = worker.get_block_tables([second]).sequences[0].block_table
        result = session.step(Step(handles=[second], tokens=[1], commit_upto_tokens=[11]), steps=ops.StepReport(1, 3))
        assert result.remap_rows.tolist() == [0, 0]
        assert result.remap_block_indices.tolist() == [0, 1]
        assert result.remap_from_blocks.tolist() == own[:2].tolist()
        assert result.remap_to_blocks.tolist() == first.block_table[:2].tolist()
        assert client.stats().cache.quarantined_blocks == 2
        session.batch([], steps=ops.StepReport(2, 3))
        assert client.stats().cache.quarantined_blocks == 0


def test_a_row_names_its_sequence_to_the_fence(client, worker):
    seq = client.acquire(PROMPT)
    with worker.session() as session:
        session.step(Step(handles=[seq.handle]), steps=ops.StepReport(0, 1))
        seq.release()
        assert client.stats().cache.quarantined_blocks == 3
        result = session.step(Step(handles=[seq.handle], tokens=[1]), steps=ops.StepReport(1, 1))
        assert isinstance(result.errors[0], UnknownSequence)
        assert client.stats().cache.quarantined_blocks == 0


def test_rows_say_what_was_declared_bad(client, session):
    good, bad = acquire(session, [7] * 9, PROMPT)
    session.step(Step(handles=[good, bad], commit_upto_tokens=[9, 10]))
    client.invalidate(bad, 1)
    result = session.step(Step(handles=[good, bad], tokens=[1, 1]))
    assert (result.invalid_rows.tolist(), result.invalid_from_blocks.tolist()) == ([1], [1])
    assert result.errors == {}


def packed(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"handles": bytes(17)}, "step_update.handles takes 16 bytes a row, got 17 bytes"),
        ({"handles": bytes(16 * 4097)}, "step_update.handles: the limit is 4096 rows, got 4097"),
        ({"handles": b"ab" * 16, "tokens": packed(1)}, "step_update.tokens holds 1 for 2 rows, without .*token_counts"),
        ({"handles": b"ab" * 16, "tokens": b"12345678X"}, "step_update.tokens takes 4 bytes a token, got 9 bytes"),
        ({"handles": b"ab" * 16, "token_counts": packed(1)}, "step_update.token_counts takes .* 8 in all, got 4 bytes"),
        (
            {"handles": b"ab" * 16, "token_counts": b"1234567"},
            "step_update.token_counts takes .* 8 in all, got 7 bytes",
        ),
        (
            {"handles": b"ab" * 16, "token_counts": packed(1, 2**32 - 1), "tokens": packed(1, 2)},
            "step_update.token_counts adds up to 4294967296, step_update.tokens holds 2",
        ),
        ({"handles": b"ab" * 16, "commit_upto_tokens": packed(1, 2, 3)}, "commit_upto_tokens takes .* got 12 bytes"),
        ({"commit_upto_tokens": packed(1)}, "commit_upto_tokens takes .* 0 in all, got 4 bytes"),
        ({"handles": b"a" * 16 + b"b" * 16 + b"c" * 16 + b"b" * 16}, "step_update.handles: rows 1 and 3 name the same"),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_refuse_the_whole_request(server, raw, columns, message):
    stub, head = raw
    handle = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))).handle
    columns["handles"] = columns.get("handles", b"").replace(b"a" * 16, handle)
    release = cache_pb2.Operation(release=cache_pb2.ReleaseRequest(handle=handle))
    update = cache_pb2.StepUpdate(**columns)
    batch = cache_pb2.BatchRequest(header=head(2), operations=[release], step_update=update)
    with pytest.raises(grpc.RpcError, match=message) as failure:
        stub.Batch(batch)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    session = cache_pb2.SessionRequest(header=head(3), operations=[release], step_update=update)
    with pytest.raises(grpc.RpcError, match=message):
        next(stub.Session(iter([session])))
    (view,) = stub.GetBlockTables(cache_pb2.GetBlockTablesRequest(handles=[handle])).results
    assert len(view.sequence.tokens) == 40


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"handles": [b"short"]}, ValueError, r"handles\[0\] must be 16 bytes, got 5"),
        ({"handles": [bytes(15), bytes(17)]}, ValueError, r"handles\[0\] must be 16 bytes, got 15"),
        ({"handles": ["x" * 16]}, TypeError, "str"),
        ({"handles": np.zeros((2, 8), np.uint8)}, ValueError, r"handles must be uint8 \[S, 16\], got uint8 \[2, 8\]"),
        ({"handles": np.zeros((2, 16), np.int8)}, ValueError, r"got int8 \[2, 16\]"),
        ({"tokens": [1, 2, -3]}, ValueError, r"tokens\[2\] is -3"),
        ({"tokens": np.array([1.0])}, TypeError, "float64"),
        ({"tokens": [1]}, ValueError, "step_update.tokens holds 1 for 2 rows"),
        ({"token_counts": [1, 2], "tokens": [1, 2]}, ValueError, "adds up to 3, step_update.tokens holds 2"),
        ({"token_counts": [], "tokens": [1, 2]}, ValueError, "token_counts must have one entry a row, 2 in all, got 0"),
        ({"token_counts": [1, -1]}, ValueError, r"token_counts\[1\] must be from 0 to 4294967295, got -1"),
        ({"commit_upto_tokens": [1.5, 2.0]}, TypeError, "commit_upto_tokens must be integers, not float64"),
        ({"commit_upto_tokens": [[1, 2]]}, ValueError, r"commit_upto_tokens must be one-dimensional"),
        ({"commit_upto_tokens": np.array([0, 2**32])}, ValueError, r"commit_upto_tokens\[1\] .* got 4294967296"),
    ],
    ids=str,
)
def test_bad_columns_never_leave_the_client(server, client, session, columns, error, message):
    handles = acquire(session, PROMPT, [7])
    with pytest.raises(error, match=message):
        session.step(Step(**{"handles": handles, **columns}))
    with pytest.raises(error, match=message):
        client.step(Step(**{"handles": handles, **columns}))
    assert session.step(Step(handles=handles)).num_tokens.tolist() == [10, 1]


def test_one_sequence_in_two_rows_changes_nothing_and_the_session_goes_on(session):
    (handle,) = acquire(session, PROMPT)
    with pytest.raises(ValueError, match="rows 0 and 2 name the same sequence"):
        session.step(Step(handles=[handle, UNKNOWN, handle], tokens=[1, 2, 3]))
    assert session.step(Step(handles=[handle])).num_tokens.tolist() == [10]


def test_the_limit_of_rows_is_told_and_can_be_used(client, session):
    rows = client.info().max_step_rows
    assert rows == limits.MAX_STEP_ROWS
    handles = [index.to_bytes(limits.HANDLE_BYTES, "little") for index in range(rows + 1)]
    assert len(session.step(Step(handles=handles[:-1])).errors) == rows
    with pytest.raises(ValueError, match="the limit is 4096 rows, got 4097"):
        session.step(Step(handles=handles))


@pytest.fixture
def raw(server):
    client_id = b"r" * limits.CLIENT_ID_BYTES
    with grpc.insecure_channel(server.address) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        epoch = stub.RegisterClient(cache_pb2.RegisterClientRequest(client_id=client_id)).epoch
        yield stub, lambda request_id: common_pb2.RequestHeader(client_id=client_id, epoch=epoch, request_id=request_id)


def test_a_repeated_step_runs_once(raw):
    stub, head = raw
    handle = stub.Acquire(cache_pb2.AcquireRequest(header=head(1), tokens=bytes(40))).handle
    update = step_update(Step(handles=[handle, UNKNOWN], tokens=[1, 2], commit_upto_tokens=[11, 1]))
    batch = cache_pb2.BatchRequest(header=head(2), step_update=update)
    assert stub.Batch(batch) == stub.Batch(batch)
    replies = []
    for _ in range(2):  # a session that broke sends its message again over another stream
        message = cache_pb2.SessionRequest(header=head(3), step_update=update)
        call = stub.Session(iter([message]))
        replies.append(next(call))
        call.cancel()
    assert replies[0] == replies[1]
    result = stepped(replies[0], message)
    assert result.num_tokens.tolist() == [12, 0]
    assert isinstance(result.errors[1], UnknownSequence)
    (view,) = stub.GetBlockTables(cache_pb2.GetBlockTablesRequest(handles=[handle])).results
    assert len(view.sequence.tokens) == 4 * 12


def test_a_step_of_a_client_that_was_fenced(server, client, session):
    session.batch([])
    server.engine.leases.end(next(iter(server.engine.leases)).client_id)
    with pytest.raises(Fenced, match="register again"):
        session.step(Step(handles=[UNKNOWN], tokens=[1]))


def test_answers_that_do_not_fit_are_no_results():
    request = batch_request(cache_pb2.SessionRequest, [], None, step=Step(handles=[UNKNOWN]))
    with pytest.raises(ProtocolError, match="older than this client"):
        stepped(cache_pb2.SessionResponse(), request)
    result = cache_pb2.StepUpdateResult()
    with pytest.raises(ProtocolError, match="0 of 1 rows"):
        stepped(cache_pb2.SessionResponse(step_update=result), request)
    result.num_tokens = result.committed_tokens = packed(1)
    result.appended_rows = packed(0)
    with pytest.raises(ProtocolError, match="appended_rows, appended_blocks differ"):
        stepped(cache_pb2.SessionResponse(step_update=result), request)


async def test_asyncio_clients_step_too(server):
    async with AsyncClient(server.address) as client, await client.session() as session:
        (acquired,) = await session.batch([ops.Acquire(PROMPT)])
        step = Step(handles=[acquired.handle], tokens=[1], commit_upto_tokens=[11])
        result = await session.step(step, [ops.Match(PROMPT)], steps=None)
        assert (result.num_tokens.tolist(), result.results) == ([11], (ops.Matched(8),))
        assert (await client.step(step)).num_tokens.tolist() == [12]
        with pytest.raises(ValueError, match="holds 2 for 1 rows"):
            await session.step(Step(handles=[acquired.handle], tokens=[1, 2]))
